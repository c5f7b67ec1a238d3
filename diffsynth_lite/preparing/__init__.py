"""This folder makes training data of raw files: scenes and frames of clips, smaller images, no black bars."""
