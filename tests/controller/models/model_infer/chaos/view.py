# SPDX-License-Identifier: Apache-2.0
"""Groups and replicas as their pods show them; written without a line of the code under test."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import msgspec

from controller.kube.api_resources import Object, key_of
from tests.virtual_cluster.requests import is_ready

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from tests.controller.models.model_infer.chaos.specs import Spec

P = "attache.dev/"
DRAINING = P + "draining"


class Seat(msgspec.Struct, frozen=True):
    """Where a pod sits. ``index``: 0 is the entry pod."""

    group: int
    role: str
    replica: int
    index: int


def seat_of(pod: Object) -> Seat:
    """From its labels."""
    found = pod["metadata"]["labels"]
    return Seat(
        int(found[P + "group"]), found[P + "role"], int(found[P + "role-replica"]), int(found[P + "worker-index"])
    )


def is_leaving(pod: Object) -> bool:
    """Whether it has been told to go."""
    metadata = pod["metadata"]
    return "deletionTimestamp" in metadata or DRAINING in (metadata.get("annotations") or {})


def size_of(pod: Object) -> int:
    """Pods of its replica."""
    env = {one["name"]: one.get("value") for one in pod["spec"]["containers"][0].get("env") or ()}
    return int(env["GROUP_SIZE"])


def replicas_ready(
    pods: Iterable[Object], withdrawn: Collection[str], lost_nodes: Collection[str]
) -> dict[int, dict[str, int]]:
    """How many replicas serve, by group and role: all their pods are ready, none is leaving, nor one of
    ``withdrawn``.
    """
    replicas: defaultdict[tuple[int, str, int], list[Object]] = defaultdict(list)
    for pod in pods:
        seat = seat_of(pod)
        replicas[seat.group, seat.role, seat.replica].append(pod)
    found: dict[int, dict[str, int]] = {}
    for (group, name, _), members in replicas.items():
        count = found.setdefault(group, {}).setdefault(name, 0)
        sizes = {size_of(one) for one in members}
        whole = len(sizes) == 1 and len(members) == max(sizes)
        serves = all(
            is_ready(one)
            and not is_leaving(one)
            and one["metadata"]["uid"] not in withdrawn
            and one["spec"].get("nodeName") not in lost_nodes
            for one in members
        )
        found[group][name] = count + (whole and serves)
    return found


def ready_groups(ready: dict[int, dict[str, int]], spec: Spec) -> set[int]:
    """Groups with all replicas of all roles of the spec."""
    roles = {one["name"]: one.get("replicas", 1) for one in spec["template"]["roles"]}
    return {
        group for group, found in ready.items() if all(found.get(name, 0) >= count for name, count in roles.items())
    }


def serving_groups(ready: dict[int, dict[str, int]], spec: Spec) -> set[int]:
    """Groups with a replica of each role that they have and should have."""
    roles = {one["name"]: one.get("replicas", 1) for one in spec["template"]["roles"]}
    return {
        group
        for group, found in ready.items()
        if found and all(count > 0 for name, count in found.items() if roles.get(name, 1))
    }


def named(pod: Object) -> str:
    """For messages."""
    return key_of(pod).partition("/")[2]
