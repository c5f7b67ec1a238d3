"""The encoding of a run's data before it trains: all at once, or by parts."""
