# SPDX-License-Identifier: Apache-2.0
"""A Kubernetes node whose pods are processes of this machine."""
