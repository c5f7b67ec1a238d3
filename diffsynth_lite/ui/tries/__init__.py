"""Generating with the LoRA of a run: one process that keeps the model, its requests, and the results."""
