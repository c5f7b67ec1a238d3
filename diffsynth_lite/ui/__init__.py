"""The screen: a browser's view of a folder and of the processes that train in it; it imports no torch."""
