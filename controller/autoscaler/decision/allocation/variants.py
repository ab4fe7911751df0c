# SPDX-License-Identifier: Apache-2.0
"""What an allocation is made from, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from controller.api.accelerators import is_of_kind
from controller.autoscaler.decision.situation import EngineState, Target

Mode = Literal["Cheapest", "Priority", "Weights", "Expansion"]


class Variant(msgspec.Struct, frozen=True, kw_only=True):
    """One way to run the model. ``capacity``: work that a replica does, in units. ``cost``: of a replica and hour.
    ``least`` and ``most``: bounds of its replicas. ``running``: replicas that serve or will soon. ``start_s``: how long
    one takes to start. ``room``: further replicas for which nodes have accelerators; None if unknown. ``blocked``: why
    no more can be had; empty if they can. ``accelerators``: of a replica, of the kind ``accelerator``. ``pools``: those
    of ``Rules.free`` that they are taken from; None: the one that is named as their kind.
    """

    name: str
    most: int
    least: int = 0
    capacity: float = 1.0
    cost: float = 1.0
    running: int = 0
    start_s: float = 60.0
    room: int | None = None
    blocked: str = ""
    priority: int = 0
    weight: int = 1
    spot: bool = False
    accelerator: str | None = None
    accelerators: int = 1
    pools: tuple[str, ...] | None = None

    def is_of(self, kind: str) -> bool:
        """Whether a budget for this kind is for it, however it is spelled."""
        return self.accelerator is not None and is_of_kind(self.accelerator, kind)

    def takes_from(self, pool: str) -> bool:
        """Whether replicas that do not run yet need accelerators of this pool."""
        return pool == self.accelerator if self.pools is None else pool in self.pools

    @property
    def attainable(self) -> int:
        """Replicas of it that there could be now."""
        if self.blocked:
            return min(self.most, self.running)
        return self.most if self.room is None else min(self.most, self.running + self.room)


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """How work is shared out. ``expansion_rate_percent``: of the mode Expansion. ``min_on_demand``: the share of
    capacity that must not be spot. ``cost_per_hour``: of all replicas together; None: any. ``accelerators``: how many
    there may be, by kind. ``free``: how many nodes have left, by pool; kinds without one are not limited.
    ``payback_s``: a running replica is replaced only if what that saves in so long is more than what the start of
    another costs.
    """

    mode: Mode = "Cheapest"
    expansion_rate_percent: int = 200
    min_on_demand: float = 0.0
    cost_per_hour: float | None = None
    accelerators: Mapping[str, int] = {}
    free: Mapping[str, int] = {}
    payback_s: float = 3600.0


class Allocation(msgspec.Struct, frozen=True, kw_only=True):
    """``replicas`` and ``reasons``: by the variant's name. ``capacity``: units that they carry, as far as they can be
    had. ``missing``: units that nothing carries. ``problems``: what stood in the way, for people. ``is_proven``: False
    if a slightly cheaper answer may exist: the search ended early, or stages with a common limit were served in turn.
    """

    replicas: Mapping[str, int]
    reasons: Mapping[str, str]
    capacity: float
    missing: float = 0.0
    problems: tuple[str, ...] = ()
    is_proven: bool = True


def variant_of(target: Target) -> Variant:
    """The target of a binding. Replicas of a blocked one that find no node, or do not start, do not count as
    running.
    """
    spec, running = target.spec, target.current or 0
    if target.blocked:
        running = max(0, running - len(target.having(EngineState.UNSCHEDULABLE, EngineState.FAILING)))
    return Variant(
        name=spec.name,
        most=spec.max_replicas,
        least=spec.min_replicas,
        capacity=target.capacity,
        cost=spec.cost,
        running=running,
        start_s=target.start_s,
        room=target.room,
        blocked=target.blocked,
        priority=spec.priority,
        weight=spec.weight,
        spot=spec.spot,
        accelerator=spec.accelerator,
        accelerators=spec.accelerators,
        pools=target.pools,
    )
