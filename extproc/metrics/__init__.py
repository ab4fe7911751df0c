"""Decisions, outcomes and state as Prometheus metrics and a log; knows the core."""
