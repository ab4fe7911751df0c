# SPDX-License-Identifier: Apache-2.0
"""Benchmarks: engines, load, workloads and policies. It imports extproc and the controller."""
