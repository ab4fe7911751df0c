"""From configuration snapshots to Envoy's files."""
