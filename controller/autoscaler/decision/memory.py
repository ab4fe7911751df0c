# SPDX-License-Identifier: Apache-2.0
"""What is remembered of a binding between two decisions.

All of it may be lost: nothing is scaled in because of that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import msgspec

from controller.api.autoscaling import Schedule
from controller.api.autoscaling_policy import STRATEGIES
from controller.autoscaler.decision.allocation.blocked import Blockage
from controller.autoscaler.decision.allocation.variants import Allocation, Rules, Variant
from controller.autoscaler.decision.behavior import Bounds, PanicState, Past
from controller.autoscaler.decision.situation import Speed
from controller.autoscaler.decision.speeds import MOST_STARTS, StartTimes

if TYPE_CHECKING:
    from controller.api.strategies import Kept

# Growth after a small scale-in is remembered for so long, and so many times of it at most.
TURNS_COUNT_S: Final = 1800.0
MOST_TURNS: Final = 3
# Of what can be measured: speeds, seconds, requests a second.
_LEAST: Final = 1e-15
_MOST: Final = 1e15


class StageMemory(msgspec.Struct, frozen=True, kw_only=True):
    """``began_at_s``: since when strategies have known something without a gap. ``strategies``: what each remembers, by
    its name. ``past``: for the behaviour block. ``panic``: None if there is none. ``current``: as seen last.
    ``speeds``: smoothed, ``starts``: measured, and ``blockages``: why one is left out, by target. ``arrivals``: counted
    so far. ``active_at_s``: when something was last asked for or done. ``woken_at_s``: when the stage last left zero;
    None: not yet, or requests have been served since. ``fell_from``: how many there were before they last became fewer;
    None: they grew since. ``turned_at_s``: when they grew again although few had gone, lately.
    """

    began_at_s: float
    decided_at_s: float
    strategies: Mapping[str, object] = {}
    past: Past = Past()
    panic: PanicState | None = None
    current: float | None = None
    speeds: Mapping[str, Speed] = {}
    starts: Mapping[str, StartTimes] = {}
    blockages: Mapping[str, Blockage] = {}
    arrivals: float = 0.0
    finished: float = 0.0
    active_at_s: float = 0.0
    woken_at_s: float | None = None
    fell_from: float | None = None
    turned_at_s: tuple[float, ...] = ()


class Shared(msgspec.Struct, frozen=True):
    """A question to the allocation, and its answer, by stage."""

    needs: Mapping[str, float]
    variants: Mapping[str, tuple[Variant, ...]]
    rules: Rules
    found: Mapping[str, Allocation]


class Memory(msgspec.Struct, frozen=True):
    """``stages``: by name. ``schedules`` and ``bounds``: the bounds of these schedules until their own end. ``shared``:
    the last question about sharing out among targets, with its answer.
    """

    stages: Mapping[str, StageMemory] = {}
    schedules: tuple[Schedule, ...] = ()
    bounds: Bounds = Bounds()
    shared: Shared | None = None


class _Stored(msgspec.Struct, frozen=True, kw_only=True):
    """What is worth keeping over a restart: what took long to learn."""

    speeds: Mapping[str, Speed] = {}
    starts: Mapping[str, StartTimes] = {}
    strategies: Mapping[str, msgspec.Raw] = {}


def encoded(memory: Memory) -> bytes:
    """JSON of what is slow to learn: speeds, start times, seasons and the load of the last hour. The rest is about the
    last minutes and known again soon.
    """
    # durations that were declared are floats with a text
    return msgspec.json.encode({name: _stored(stage) for name, stage in memory.stages.items()}, enc_hook=float)


def _stored(stage: StageMemory) -> _Stored:
    found = {}
    for name, memory in stage.strategies.items():
        kept = _kept(name)
        what = None if kept is None else kept.keep(memory)
        if what is not None:
            found[name] = msgspec.Raw(msgspec.json.encode(what))
    return _Stored(speeds=stage.speeds, starts=stage.starts, strategies=found)


def _kept(name: str) -> Kept | None:
    type_ = STRATEGIES.get(name)
    return None if type_ is None else type_.kept


def decoded(text: bytes, now_s: float) -> Memory:
    """As after a restart, with what ``encoded`` kept. Raises ValueError.

    Whoever may write a binding may write this, too: what cannot have been measured is left out.
    """
    try:
        stored = msgspec.json.decode(text, type=dict[str, _Stored])
    except RecursionError as error:
        raise ValueError(str(error)) from None
    return Memory(
        {
            name: StageMemory(
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


def _is_speed(speed: Speed) -> bool:
    values = (speed.prefill_tokens_per_s, speed.step_s, speed.step_s_per_token, speed.kv_tokens)
    return 0 <= speed.followed_s <= _MOST and all(one is None or _LEAST <= one <= _MOST for one in values)


def _are_starts(starts: StartTimes) -> bool:
    return len(starts.starts) <= MOST_STARTS and all(0 < one.took_s <= _MOST for one in starts.starts)
