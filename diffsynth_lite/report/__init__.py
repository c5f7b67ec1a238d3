"""The page of a run: what its folder says, as one file to look at."""
