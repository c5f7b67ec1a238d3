"""The scores of a run between its steps, and after it."""
