"""What all model families share: their interface, how they are found, and what helps to write one."""
