"""Runs that wait for a device: files in folders named after their state, and the worker that starts them."""
