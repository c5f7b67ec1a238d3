"""Finds problems of a data set and a machine before any model is loaded."""
