"""Which step of a run is best: scores of images, where they are kept, and what follows from them."""
