"""Endpoint picking: which endpoint takes a request."""
