"""Home: what runs, the other runs, the data sets and the configs of a workspace."""
