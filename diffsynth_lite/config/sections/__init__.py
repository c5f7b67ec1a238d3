"""The sections of the config, one class each; the text under a setting is its documentation."""
