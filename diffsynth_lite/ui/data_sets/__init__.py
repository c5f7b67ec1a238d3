"""The screen of a data set: its images and clips with their captions."""
