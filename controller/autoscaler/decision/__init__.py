# SPDX-License-Identifier: Apache-2.0
"""Autoscaling, pure: from samples and the time to decisions with their reasons; nothing here does anything."""
