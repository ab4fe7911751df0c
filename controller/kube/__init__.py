# SPDX-License-Identifier: Apache-2.0
"""Kubernetes as the controller sees it: client, informers, queue, lease, plans, statuses, events; and kopf."""
