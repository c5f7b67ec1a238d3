"""What a run's scores are made of: prompts, the images for them, and when they are generated."""
