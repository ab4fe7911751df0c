# SPDX-License-Identifier: Apache-2.0
"""Labels and annotations by which a ModelInfer, the gateways and people know its pods."""

from __future__ import annotations

from typing import Final

PREFIX: Final = "attache.dev/"
MODEL_INFER: Final = PREFIX + "model-infer"
# The group's ordinal; a prefill and a decode engine of the same group make a pair.
GROUP: Final = PREFIX + "group"
ROLE: Final = PREFIX + "role"
ROLE_REPLICA: Final = PREFIX + "role-replica"
# 0 is the entry pod.
WORKER_INDEX: Final = PREFIX + "worker-index"
# "true" on entry pods, which requests are sent to.
ENTRY: Final = PREFIX + "entry"
# Of the whole template, and of the pod's role alone.
REVISION: Final = PREFIX + "revision"
ROLE_REVISION: Final = PREFIX + "role-revision"
# "true" on one pod of each group: the scale subresource counts them.
SCALE_UNIT: Final = PREFIX + "scale-unit"
# Annotation, RFC 3339: since when a pod gets no new requests, because it is going to be deleted.
DRAINING: Final = PREFIX + "draining"
# Annotations of ControllerRevisions, RFC 3339: when the rollout began, if not with the object; when it was given up;
# when all groups at or above the partition had become ready with it.
ROLLED_OUT_SINCE: Final = PREFIX + "rolled-out-since"
FAILED: Final = PREFIX + "failed"
REACHED: Final = PREFIX + "reached"
# Annotation of a ModelInferRole: the replicas that the template last asked for.
TEMPLATE_REPLICAS: Final = PREFIX + "template-replicas"
