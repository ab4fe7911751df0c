"""Turns configuration into what Envoy reads; knows extproc's configuration and its names on the wire."""
