"""Records, media, the plan of a data set, its encoding and the cache, and the sample schedule."""
