"""The page of a run, made from its folder: one HTML file."""
