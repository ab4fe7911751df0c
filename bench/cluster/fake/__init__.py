# SPDX-License-Identifier: Apache-2.0
"""A small Kubernetes API server in this process.

For tests without Go, and for faults that a real one does not have on demand.
"""
