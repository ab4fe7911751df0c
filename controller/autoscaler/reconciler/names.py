# SPDX-License-Identifier: Apache-2.0
"""Names by which scaling marks objects."""

from __future__ import annotations

from typing import Final

PREFIX: Final = "attache.dev/"
# Who writes replicas, in managedFields.
SCALER: Final = "attache-autoscaler"
# Annotation of a target: the binding that scales it, ``namespace/name/uid``.
SCALED_BY: Final = PREFIX + "scaled-by"
# Annotation of a target: the replicas that it had when we took it over, or that we last wrote.
SCALED_TO: Final = PREFIX + "scaled-to"
# Annotation of a binding: what was learned of its targets, JSON.
LEARNED: Final = PREFIX + "learned"
# Annotation of a pod, RFC 3339: since when it gets no new requests, because it is going to be deleted.
DRAINING: Final = PREFIX + "draining"
# The same, written by people.
DRAIN: Final = PREFIX + "drain"
# A Deployment deletes pods with a lower cost first.
DELETION_COST: Final = "controller.kubernetes.io/pod-deletion-cost"
