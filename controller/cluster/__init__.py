# SPDX-License-Identifier: Apache-2.0
"""Kubernetes as the controller sees it: a client, copies of its objects, leadership."""
