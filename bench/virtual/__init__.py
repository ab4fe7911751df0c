"""Extproc and engines in virtual time; knows engine, workload and reporting."""
