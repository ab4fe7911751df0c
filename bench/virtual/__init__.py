# SPDX-License-Identifier: Apache-2.0
"""Extproc and engines in virtual time; knows engine, workload and reporting."""
