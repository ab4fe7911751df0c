"""Writes extproc's Envoy messages from envoy-data-plane: ``make generate``."""
