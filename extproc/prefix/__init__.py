"""Which engine holds which prefix."""
