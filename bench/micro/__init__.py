"""What the request path costs: extproc against a server that does nothing, and its parts by themselves."""
