# SPDX-License-Identifier: Apache-2.0
"""Names of what a ModelInfer owns, by which nothing is made twice."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

from controller.models.model_infer import labels

LONGEST_HOST_NAME: Final = 63


class Place(msgspec.Struct, frozen=True, order=True):
    """Where a pod stands. ``group``: ordinal. ``role`` and ``replica``: of the group. ``index``: 0 is the entry pod."""

    group: int
    role: str
    replica: int
    index: int = 0

    @property
    def labels(self) -> dict[str, str]:
        """What a pod at this place is found by."""
        found = {
            labels.GROUP: str(self.group),
            labels.ROLE: self.role,
            labels.ROLE_REPLICA: str(self.replica),
            labels.WORKER_INDEX: str(self.index),
        }
        return {**found, labels.ENTRY: "true"} if self.index == 0 else found


def place_of(found: Mapping[str, str]) -> Place | None:
    """The place that a pod's labels name, None if they name none."""
    try:
        numbers = [int(found[one]) for one in (labels.GROUP, labels.ROLE_REPLICA, labels.WORKER_INDEX)]
        role = found[labels.ROLE]
    except (KeyError, ValueError):
        return None
    return Place(numbers[0], role, numbers[1], numbers[2])


def pod_name(owner: str, place: Place) -> str:
    """``llama-0-decode-1-0``."""
    return f"{service_name(owner, place)}-{place.index}"


def service_name(owner: str, place: Place) -> str:
    """``llama-0-decode-1``: the Service in which the pods of one replica of a role find each other."""
    return f"{owner}-{place.group}-{place.role}-{place.replica}"


def pod_group_name(owner: str, group: int) -> str:
    """``llama-0``."""
    return f"{owner}-{group}"


def revision_name(owner: str, revision: str) -> str:
    """``llama-5f1c09aa3e``: of the ControllerRevision."""
    return f"{owner}-{revision}"


def role_scale_name(owner: str, role: str) -> str:
    """``llama-decode``: of the ModelInferRole."""
    return f"{owner}-{role}"


def selector(owner: str, **more: str) -> str:
    """A label selector as text. ``more``: values by constants' names of ``labels``."""
    wanted = {labels.MODEL_INFER: owner, **{getattr(labels, name): value for name, value in more.items()}}
    return ",".join(f"{name}={value}" for name, value in wanted.items())
