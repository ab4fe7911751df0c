"""The client: sends a workload through Envoy and measures what users would see."""
