"""Checkpoints that a run resumes from, and the LoRA file that is saved with each."""
