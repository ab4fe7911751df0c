"""What the request path costs beside baselines of the same run, and its parts alone."""
