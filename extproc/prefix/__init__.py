"""Which endpoint has which prefix cached: an approximate and a precise index."""
