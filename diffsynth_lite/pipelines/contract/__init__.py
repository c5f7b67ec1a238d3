"""What a model family has to offer, how it is found, and where its weights come from."""
