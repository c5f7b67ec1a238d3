"""What training takes, counted on the meta device: nothing is loaded and nothing computed."""
