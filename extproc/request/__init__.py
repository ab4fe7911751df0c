"""Requests of the APIs that are served."""
