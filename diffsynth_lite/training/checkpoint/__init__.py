"""What a run saves and continues from: checkpoints, and the LoRA file."""
