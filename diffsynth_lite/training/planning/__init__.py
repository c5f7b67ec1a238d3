"""The device memory, host memory and time of a run, estimated before anything is loaded."""
