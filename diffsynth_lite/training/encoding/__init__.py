"""What a run encodes before it trains, and how: all at once, or by parts."""
