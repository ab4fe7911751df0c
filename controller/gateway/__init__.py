"""Routing snapshots to what Envoy reads."""
