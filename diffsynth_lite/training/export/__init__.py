"""The metadata and the model card of the LoRA file."""
