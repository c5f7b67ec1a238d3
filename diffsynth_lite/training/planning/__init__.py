"""What a run takes of the device, of host memory and of time, counted before anything is loaded."""
