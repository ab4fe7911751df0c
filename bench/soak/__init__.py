# SPDX-License-Identifier: Apache-2.0
"""The soak: an hour of load, of changes every second and of hostile engines, in front of many models."""
