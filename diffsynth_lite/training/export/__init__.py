"""What comes with the LoRA file: its metadata and its model card; and the disk space that a run needs."""
