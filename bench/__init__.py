# SPDX-License-Identifier: Apache-2.0
"""Benchmarks: engines, load, workloads and policies; knows extproc and the controller."""
