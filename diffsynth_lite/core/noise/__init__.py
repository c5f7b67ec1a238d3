"""Which noise levels are trained, how they are reached, the targets there, and how much each counts."""
