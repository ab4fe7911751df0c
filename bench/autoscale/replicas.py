# SPDX-License-Identifier: Apache-2.0
"""Replicas from order to end, and what they cost: the books of a fleet, without engines."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_HOUR_S = 3600.0


class Replica(msgspec.Struct):
    """One replica. ``target``: of which variant. ``cost``: of an hour. ``created_at_s``: when it was ordered; from then
    on it costs. ``ready_at_s``: its first instant of service. ``draining_at_s``: since when it gets nothing new.
    ``gone_at_s``: the last instant that it costs. None: not yet.
    """

    name: str
    target: str
    address: str
    cost: float
    accelerators: int
    created_at_s: float
    ready_at_s: float | None = None
    draining_at_s: float | None = None
    gone_at_s: float | None = None

    @property
    def is_ready(self) -> bool:
        """It gets requests."""
        return self.ready_at_s is not None and self.draining_at_s is None and self.gone_at_s is None

    @property
    def is_starting(self) -> bool:
        """It will get requests."""
        return self.ready_at_s is None and self.gone_at_s is None

    @property
    def is_wanted(self) -> bool:
        """It counts against what was ordered: a draining one cannot be had back."""
        return self.is_ready or self.is_starting

    def paid_s(self, since_s: float, until_s: float) -> float:
        """How long it has cost in a time."""
        end = until_s if self.gone_at_s is None else min(self.gone_at_s, until_s)
        return max(0.0, end - max(since_s, self.created_at_s))

    def serving_s(self, since_s: float, until_s: float) -> float:
        """How long it could take requests in a time."""
        if self.ready_at_s is None:
            return 0.0
        ends = [one for one in (self.draining_at_s, self.gone_at_s, until_s) if one is not None]
        return max(0.0, min(ends) - max(since_s, self.ready_at_s))


class Bill(msgspec.Struct, frozen=True):
    """What a fleet has used. ``replica_hours``: paid for. ``cost``: by the variants' costs. ``wasted_gpu_s``:
    GPU-seconds of replicas that were starting or draining.
    """

    replica_hours: float
    cost: float
    wasted_gpu_s: float


def bill(replicas: Iterable[Replica], since_s: float, until_s: float) -> Bill:
    """Of all replicas, from one instant to another."""
    hours = cost = wasted_s = 0.0
    for one in replicas:
        paid_s = one.paid_s(since_s, until_s)
        hours += paid_s / _HOUR_S
        cost += one.cost * paid_s / _HOUR_S
        wasted_s += one.accelerators * (paid_s - one.serving_s(since_s, until_s))
    return Bill(hours, cost, wasted_s)


def victims(replicas: Sequence[Replica], count: int, in_flight: dict[str, int]) -> list[Replica]:
    """Which of a target's replicas go: those that are starting, the newest first; then those with the least to do.

    ``in_flight``: requests by address.
    """
    starting = sorted((one for one in replicas if one.is_starting), key=lambda one: -one.created_at_s)
    ready = [one for one in replicas if one.is_ready]
    ready.sort(key=lambda one: (in_flight.get(one.address, 0), -one.created_at_s))
    return [*starting, *ready][:count]
