# SPDX-License-Identifier: Apache-2.0
"""Extproc and engines in virtual time; depends on engine, workload and reporting."""
