"""What a run leaves in its output folder for people to read: status, progress, metrics."""
