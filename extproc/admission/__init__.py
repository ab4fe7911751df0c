"""Rate limits and fair queueing: whether a request may go, and when."""
