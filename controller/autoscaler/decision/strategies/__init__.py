# SPDX-License-Identifier: Apache-2.0
"""Scaling laws, each a pure function of a situation: how many replicas it asks for, and why."""
