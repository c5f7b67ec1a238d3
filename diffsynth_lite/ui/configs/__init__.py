"""New run and the config screen: a config is its file, and the form is a view of the file's text."""
