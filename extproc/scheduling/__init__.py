"""Which endpoint takes a request."""
