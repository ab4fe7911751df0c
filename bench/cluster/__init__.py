# SPDX-License-Identifier: Apache-2.0
"""A Kubernetes cluster on one machine: a real API server, a node whose pods are processes."""
