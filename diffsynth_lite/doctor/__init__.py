"""What is wrong with a data set and a machine, found before any model is loaded."""
