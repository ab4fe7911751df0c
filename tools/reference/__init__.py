"""Writes the reference pages under docs/reference from the code: make generate."""
