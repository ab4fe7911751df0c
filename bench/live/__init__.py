"""Benchmarks behind a real Envoy on loopback; knows stack, load and reporting."""
