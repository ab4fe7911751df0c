# SPDX-License-Identifier: Apache-2.0
"""Decisions, outcomes and state as Prometheus metrics and a log; depends on the core."""
