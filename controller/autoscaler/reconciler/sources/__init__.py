# SPDX-License-Identifier: Apache-2.0
"""Metrics of policies that others know: Prometheus, the engines' own pages, and Kubernetes' resource metrics."""
