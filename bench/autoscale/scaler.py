# SPDX-License-Identifier: Apache-2.0
"""What decides how many replicas a fleet has: the live autoscaler, a peer's algorithm, a fixed number, the oracle."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from bench.autoscale.loads import Load
from bench.workload.sessions import Workload
from controller.api.autoscaling import LatencyObjective
from extproc.api.quantities import Duration

if TYPE_CHECKING:
    from controller.autoscaler.decision.situation import Situation


class Scaler(Protocol):
    """Asked once a period. It may remember what it has seen."""

    def decide(self, situation: Situation) -> Mapping[str, int]:
        """Replicas by target; targets that are left out stay as they are."""
        ...


class Setup(msgspec.Struct, frozen=True):
    """What a scaler is made for. ``knob``: the value of the policy's knob. ``workload``: for the oracle alone, because
    nobody else knows what will come. ``min_replicas``: of the first target; the others may have none. ``initial``:
    replicas of the first target that there are at first.
    """

    load: Load
    workload: Workload
    knob: float
    period_s: float
    min_replicas: int = 1
    initial: int = 1


# Which percentile of latencies policies are told to keep.
PERCENTILE: Final = 90.0


def told_objective(setup: Setup, share: float = 1.0) -> LatencyObjective:
    """The load's objective as a policy has it, or a share of its latencies."""
    asked = setup.load.objective
    return LatencyObjective(
        ttft=_duration(asked.ttft_s * share), tpot=_duration(asked.tpot_s * share), percentile=PERCENTILE
    )


def _duration(value_s: float) -> Duration:
    return Duration(f"{value_s * 1000:.0f}ms")


class Policy(msgspec.Struct, frozen=True):
    """A scaler by name. ``knob``: what is varied, in words; ``grid``: the values to try, which are tuned on.
    ``native_period_s``: how often its own program decides. ``has_zero``: it can do without any replica, and is asked at
    once when a request then comes. ``kind``: which of a load's variants its fleet begins with, and is the first for it.
    """

    name: str
    make: Callable[[Setup], Scaler]
    knob: str
    grid: tuple[float, ...]
    native_period_s: float
    has_zero: bool = False
    kind: int = 0
