"""The metadata and the model card of the LoRA file, and the disk space that a run needs."""
