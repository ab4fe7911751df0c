# SPDX-License-Identifier: Apache-2.0
"""A small Kubernetes API server in this process: for tests without Go, and for faults that a real one has not on
demand.
"""
