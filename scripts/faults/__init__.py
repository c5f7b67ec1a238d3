"""What a run must survive: each fault is an item that provokes it and checks what is left."""
