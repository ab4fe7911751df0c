"""Connections to the outside: configuration, engines, KV events, tokenizers, Redis."""
