# SPDX-License-Identifier: Apache-2.0
"""Scaling strategies, each a pure function of a situation: how many replicas it asks for, and why."""
