# SPDX-License-Identifier: Apache-2.0
"""Converts objects of other autoscalers to ours, without I/O. Each field that cannot be converted causes a warning."""
