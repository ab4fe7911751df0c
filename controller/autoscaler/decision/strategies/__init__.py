# SPDX-License-Identifier: Apache-2.0
"""Scaling strategies, each a pure function of a situation: the recommended replicas and the reason."""
