"""From a request to the ModelServer that serves it."""
