# SPDX-License-Identifier: Apache-2.0
"""Labels, annotations and names of what a ModelInfer owns, by which nothing is made twice."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from extproc.wire_names import REVISION_LABEL

if TYPE_CHECKING:
    from collections.abc import Mapping

PREFIX: Final = "attache.dev/"
MODEL_INFER: Final = PREFIX + "model-infer"
# The group's ordinal.
GROUP: Final = PREFIX + "group"
# Both, as 0-5f1c09aa3e: a prefill and a decode engine with the same value make a pair, so never of two revisions.
GROUP_REVISION: Final = PREFIX + "group-revision"
ROLE: Final = PREFIX + "role"
ROLE_REPLICA: Final = PREFIX + "role-replica"
# 0 is the entry pod.
WORKER_INDEX: Final = PREFIX + "worker-index"
# "true" on entry pods, which requests are sent to.
ENTRY: Final = PREFIX + "entry"
# Of the whole template, and of the pod's role alone.
REVISION: Final = REVISION_LABEL
ROLE_REVISION: Final = PREFIX + "role-revision"
# "true" on one pod of each group: the scale subresource counts them.
SCALE_UNIT: Final = PREFIX + "scale-unit"
# Annotations of ControllerRevisions, RFC 3339: when the rollout began, if not with the object; when it was given up;
# when all groups at or above the partition had become ready with it.
ROLLED_OUT_SINCE: Final = PREFIX + "rolled-out-since"
FAILED: Final = PREFIX + "failed"
REACHED: Final = PREFIX + "reached"
# Annotation of a ModelInferRole: the replicas of the template when it was last written.
TEMPLATE_REPLICAS: Final = PREFIX + "template-replicas"


class PodPosition(msgspec.Struct, frozen=True, order=True):
    """Where a pod stands. ``group``: ordinal. ``role`` and ``replica``: of the group. ``index``: 0 is the entry pod."""

    group: int
    role: str
    replica: int
    index: int = 0

    @property
    def labels(self) -> dict[str, str]:
        """What a pod at this place is found by."""
        found = {
            GROUP: str(self.group),
            ROLE: self.role,
            ROLE_REPLICA: str(self.replica),
            WORKER_INDEX: str(self.index),
        }
        return {**found, ENTRY: "true"} if self.index == 0 else found


def position_from_labels(found: Mapping[str, str]) -> PodPosition | None:
    """The place that a pod's labels name, None if they name none."""
    try:
        numbers = [int(found[one]) for one in (GROUP, ROLE_REPLICA, WORKER_INDEX)]
        role = found[ROLE]
    except (KeyError, ValueError):
        return None
    return PodPosition(numbers[0], role, numbers[1], numbers[2])


def pod_name(owner: str, place: PodPosition) -> str:
    """``llama-0-decode-1-0``."""
    return f"{service_name(owner, place)}-{place.index}"


def service_name(owner: str, place: PodPosition) -> str:
    """``llama-0-decode-1``: the Service in which the pods of one replica of a role find each other."""
    return f"{owner}-{place.group}-{place.role}-{place.replica}"


def group_revision_label(group: int, revision: str) -> str:
    """``0-5f1c09aa3e``: the value of the label ``GROUP_REVISION``."""
    return f"{group}-{revision}"


def pod_group_name(owner: str, group: int) -> str:
    """``llama-0``."""
    return f"{owner}-{group}"


def revision_name(owner: str, revision: str) -> str:
    """``llama-5f1c09aa3e``: of the ControllerRevision."""
    return f"{owner}-{revision}"


def role_scale_name(owner: str, role: str) -> str:
    """``llama-decode``: of the ModelInferRole."""
    return f"{owner}-{role}"


def label_selector(owner: str, **more: str) -> str:
    """A label selector as text. ``more``: values by names of constants above."""
    wanted = {MODEL_INFER: owner, **{globals()[name]: value for name, value in more.items()}}
    return ",".join(f"{name}={value}" for name, value in wanted.items())
