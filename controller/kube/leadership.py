# SPDX-License-Identifier: Apache-2.0
"""Who leads, decided from a Lease object. No network, no clock.

A holder writes its Lease again and again. Others take it once they have seen it unchanged for its whole duration *by
their own clock*: times written by another machine are never compared with ours.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import msgspec

from controller.kube.resources import LEASES, Object

if TYPE_CHECKING:
    from datetime import datetime


class LeaseTiming(msgspec.Struct, frozen=True):
    """As client-go has them.

    ``duration_s``: others wait so long before they take over. ``renew_deadline_s``: a leader that cannot write for so
    long gives up, before others may begin. ``retry_s``: between attempts.
    """

    duration_s: float = 15.0
    renew_deadline_s: float = 10.0
    retry_s: float = 2.0

    def __post_init__(self) -> None:
        if not self.duration_s > self.renew_deadline_s > self.retry_s > 0:
            raise ValueError("a lease needs duration_s > renew_deadline_s > retry_s > 0")


class Sight(msgspec.Struct, frozen=True):
    """A Lease as it was first seen with this content, at ``seen_at_s`` of our monotonic clock."""

    lease: Object
    seen_at_s: float


def seen(before: Sight | None, lease: Object, now_s: float) -> Sight:
    """The sight after reading ``lease``: an unchanged one keeps its time."""
    if before is not None and _version(before.lease) == _version(lease):
        return before
    return Sight(lease, now_s)


def may_lead(sight: Sight, identity: str, now_s: float) -> bool:
    """Whether ``identity`` may write itself into the Lease: it is ours, nobody's, or its holder is silent."""
    spec = sight.lease.get("spec") or {}
    holder = spec.get("holderIdentity")
    return not holder or holder == identity or now_s >= sight.seen_at_s + float(spec.get("leaseDurationSeconds") or 0)


def taken(lease: Object, identity: str, timing: LeaseTiming, wall: datetime) -> Object:
    """The Lease to write in order to lead, or to go on leading. Its version makes the write fail if somebody was
    faster.
    """
    new = copy.deepcopy(lease)
    spec = new.setdefault("spec", {})
    if spec.get("holderIdentity") != identity:
        spec["leaseTransitions"] = int(spec.get("leaseTransitions") or 0) + 1
        spec["acquireTime"] = _micro_time(wall)
    spec["holderIdentity"] = identity
    spec["leaseDurationSeconds"] = max(1, round(timing.duration_s))
    spec["renewTime"] = _micro_time(wall)
    return new


def released(lease: Object, wall: datetime) -> Object:
    """The Lease to write when leaving: nobody holds it, so the next one need not wait."""
    new = copy.deepcopy(lease)
    new["spec"].update(holderIdentity="", leaseDurationSeconds=1, renewTime=_micro_time(wall))
    return new


def new_lease(name: str, namespace: str, identity: str, timing: LeaseTiming, wall: datetime) -> Object:
    """The first Lease of this name, held by ``identity``."""
    empty: dict[str, Any] = {
        "apiVersion": LEASES.api_version,
        "kind": LEASES.kind,
        "metadata": {"name": name, "namespace": namespace},
    }
    lease = taken(empty, identity, timing, wall)
    lease["spec"]["leaseTransitions"] = 0
    return lease


def _version(lease: Object) -> Any:  # noqa: ANN401 - opaque, compared for equality only
    return lease["metadata"].get("resourceVersion")


def _micro_time(wall: datetime) -> str:
    return wall.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
