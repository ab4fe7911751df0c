"""Benchmarks: engines, load, workloads and policies; knows extproc and the controller."""
