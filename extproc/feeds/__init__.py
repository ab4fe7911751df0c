"""What is learned from outside beside the requests: configuration, engines, KV events, tokens, shared limits."""
