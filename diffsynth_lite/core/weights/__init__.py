"""How frozen weights are kept, the layers that compute with them, how both are filled, and streaming."""
