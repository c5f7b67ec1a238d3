"""Copies between a device and host memory, shared by all that leaves the device for a while."""
