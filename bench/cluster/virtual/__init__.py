# SPDX-License-Identifier: Apache-2.0
"""A Kubernetes cluster in virtual time: what the manager meets, in one process and without sleeping."""
