"""Engines, load, workloads and policies to measure extproc with; knows extproc and the controller."""
