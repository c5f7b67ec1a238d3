"""From a checked config to a trained LoRA."""
