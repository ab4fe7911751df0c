# SPDX-License-Identifier: Apache-2.0
"""The state of a binding between two decisions.

All of it may be lost: nothing is scaled in because of that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import msgspec

from controller.api.autoscaling import Schedule
from controller.api.autoscaling_policy import STRATEGIES
from controller.autoscaler.decision.allocation.target_backoff import TargetBackoff
from controller.autoscaler.decision.allocation.variants import Allocation, AllocationRules, Variant
from controller.autoscaler.decision.behavior import PanicState, ReplicaBounds, ScalingHistory
from controller.autoscaler.decision.replica_performance import MOST_STARTS, StartDurations
from controller.autoscaler.decision.situation import ReplicaSpeed

if TYPE_CHECKING:
    from controller.api.strategies import LearnedState

# Seconds for which growth after a small scale-in is kept, and the most such times.
TURNS_COUNT_S: Final = 1800.0
MOST_TURNS: Final = 3
# Of what can be measured: speeds, seconds, requests a second.
_LEAST: Final = 1e-15
_MOST: Final = 1e15


class ServingStageMemory(msgspec.Struct, frozen=True, kw_only=True):
    """``began_at_s``: since when strategies have had data without a gap. ``strategies``: the memory of each, by its
    name. ``past``: for the behaviour block. ``panic``: None if there is none. ``current``: as observed last.
    ``speeds``: smoothed, ``starts``: measured, and ``blockages``: why one is left out, by target. ``arrivals``: counted
    so far. ``active_at_s``: when requests last arrived or were in progress. ``woken_at_s``: when the stage last left
    zero; None: not yet, or requests have been served since. ``fell_from``: replicas before the last scale-in; None:
    they grew since. ``turned_at_s``: times of recent growth after a small scale-in.
    """

    began_at_s: float
    decided_at_s: float
    strategies: Mapping[str, object] = {}
    past: ScalingHistory = ScalingHistory()
    panic: PanicState | None = None
    current: float | None = None
    speeds: Mapping[str, ReplicaSpeed] = {}
    starts: Mapping[str, StartDurations] = {}
    blockages: Mapping[str, TargetBackoff] = {}
    arrivals: float = 0.0
    finished: float = 0.0
    active_at_s: float = 0.0
    woken_at_s: float | None = None
    fell_from: float | None = None
    turned_at_s: tuple[float, ...] = ()


class CachedAllocation(msgspec.Struct, frozen=True):
    """The inputs of the last allocation, and its result by stage."""

    needs: Mapping[str, float]
    variants: Mapping[str, tuple[Variant, ...]]
    rules: AllocationRules
    found: Mapping[str, Allocation]


class BindingMemory(msgspec.Struct, frozen=True):
    """``stages``: by name. ``schedules`` and ``bounds``: the bounds of these schedules until their own end. ``shared``:
    the last allocation over targets, with its inputs.
    """

    stages: Mapping[str, ServingStageMemory] = {}
    schedules: tuple[Schedule, ...] = ()
    bounds: ReplicaBounds = ReplicaBounds()
    shared: CachedAllocation | None = None


class _Stored(msgspec.Struct, frozen=True, kw_only=True):
    """The part that is slow to learn, and so is kept over a restart."""

    speeds: Mapping[str, ReplicaSpeed] = {}
    starts: Mapping[str, StartDurations] = {}
    strategies: Mapping[str, msgspec.Raw] = {}


def encode_memory(memory: BindingMemory) -> bytes:
    """JSON of the values that are slow to learn: speeds, start times, seasons and the load of the last hour. The others
    cover minutes and are measured again after a restart.
    """
    # durations that were declared are floats with a text
    return msgspec.json.encode({name: _stored(stage) for name, stage in memory.stages.items()}, enc_hook=float)


def _stored(stage: ServingStageMemory) -> _Stored:
    found = {}
    for name, memory in stage.strategies.items():
        kept = _kept(name)
        what = None if kept is None else kept.keep(memory)
        if what is not None:
            found[name] = msgspec.Raw(msgspec.json.encode(what))
    return _Stored(speeds=stage.speeds, starts=stage.starts, strategies=found)


def _kept(name: str) -> LearnedState | None:
    type_ = STRATEGIES.get(name)
    return None if type_ is None else type_.kept


def decode_memory(text: bytes, now_s: float) -> BindingMemory:
    """The memory after a restart, from the text of ``encode_memory``. Raises ValueError.

    Any user who may write a binding may write this text, too: implausible values are left out.
    """
    try:
        stored = msgspec.json.decode(text, type=dict[str, _Stored])
    except RecursionError as error:
        raise ValueError(str(error)) from None
    return BindingMemory(
        {
            name: ServingStageMemory(
                began_at_s=now_s,
                decided_at_s=now_s,
                active_at_s=now_s,
                strategies=_restored(one, now_s),
                speeds={target: speed for target, speed in one.speeds.items() if _is_speed(speed)},
                starts={target: starts for target, starts in one.starts.items() if _are_starts(starts)},
            )
            for name, one in stored.items()
        }
    )


def _restored(stored: _Stored, now_s: float) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, raw in stored.strategies.items():
        kept = _kept(name)
        memory = None if kept is None else kept.restore(msgspec.json.decode(raw, type=kept.kind), now_s)
        if memory is not None:
            found[name] = memory
    return found


def _is_speed(speed: ReplicaSpeed) -> bool:
    values = (speed.prefill_tokens_per_s, speed.step_s, speed.step_s_per_token, speed.kv_tokens)
    return 0 <= speed.followed_s <= _MOST and all(one is None or _LEAST <= one <= _MOST for one in values)


def _are_starts(starts: StartDurations) -> bool:
    return len(starts.starts) <= MOST_STARTS and all(0 < one.took_s <= _MOST for one in starts.starts)
