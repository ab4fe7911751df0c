# SPDX-License-Identifier: Apache-2.0
"""What one extproc process has said of one ModelServer: how much more it counted, with its absurd values left out."""

from __future__ import annotations

import math
from operator import add, sub
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from controller.autoscaler.decision.history import MOST_COUNTED, NONE_OF_TPOT, NONE_OF_TTFT, Sums
from extproc.api.status_pages import EngineDemand, ServerDemand

if TYPE_CHECKING:
    from collections.abc import Mapping

# No process counts as much, nor does an engine have as many; and no server has as many engines or models.
MOST: Final = 1e15
MOST_ENGINES: Final = 4096
MOST_MODELS: Final = 1000
_LONGEST_ADDRESS: Final = 100
_ROLES: Final = frozenset({"prefill", "decode"})
_GOOD_ROLES: Final = _ROLES | {""}

Value = TypeVar("Value")


class Heard(msgspec.Struct):
    """``server``: what was said last, as it was said; None if the process does not know the server any more.
    ``calm_since_s``: no report of an engine is older; minus infinity where something goes on. ``highest``: the most
    that each counter had, so that one which falls and rises again adds nothing.
    """

    server: ServerDemand | None = None
    calm_since_s: float = -math.inf
    highest: Sums = msgspec.field(default_factory=Sums)

    def hear(self, said: ServerDemand, now: float) -> tuple[Sums | None, bool]:
        """Remember it; returns what ``take`` does, and whether nothing goes on and nothing has changed but reports."""
        before = self.server
        more = self.take(said)
        age_s = None if before is None or more is not None else _calm_age_s(before, said)
        self.calm_since_s = -math.inf if age_s is None else now - age_s
        return more, age_s is not None

    def take(self, said: ServerDemand) -> Sums | None:
        """Remember it; returns what it has counted since the last time, None if nothing."""
        before, self.server = self.server, said
        if before is said:
            return None
        if before is not None and (before.counted, before.ttft, before.tpot) == (said.counted, said.ttft, said.tpot):
            return None
        highest, counters = self.highest, _counters(said)
        return Sums(
            _grown(highest.counters, counters),
            NONE_OF_TTFT if before is not None and before.ttft == said.ttft else _rise(highest.ttft, said.ttft),
            NONE_OF_TPOT if before is not None and before.tpot == said.tpot else _rise(highest.tpot, said.tpot),
        )


def cleaned(said: ServerDemand) -> ServerDemand:
    """With gauges that can be reckoned with."""
    return ServerDemand(
        model=said.model,
        counted=said.counted,
        ttft=said.ttft,
        tpot=said.tpot,
        queued=int(bounded(said.queued)),
        queued_tokens=bounded(said.queued_tokens),
        oldest_wait_s=bounded(said.oldest_wait_s),
        at_zero=int(bounded(said.at_zero)),
        engines={
            address: _engine(one)
            for address, one in _first(said.engines, MOST_ENGINES).items()
            if len(address) <= _LONGEST_ADDRESS
        },
    )


def bounded(value: float) -> float:
    """A count or an amount: from 0 to ``MOST``; 0 for what is no number."""
    if 0 <= value <= MOST:
        return value
    return MOST if value > MOST else 0.0


def _calm_age_s(before: ServerDemand, said: ServerDemand) -> float | None:
    """How old the oldest report of an engine is, if nothing waits or runs and the engines are the same with as much
    known of their speeds; None otherwise.
    """
    if said.queued or said.queued_tokens or said.at_zero or said.engines.keys() != before.engines.keys():
        return None
    oldest_s = 0.0
    for address, one in said.engines.items():
        if one.in_flight or one.waiting or one.running or not _is_good(one):
            return None
        if _unknown(one) != _unknown(before.engines[address]):
            return None
        oldest_s = max(oldest_s, one.report_age_s or 0.0)
    return oldest_s


def _unknown(one: EngineDemand) -> tuple[bool, bool, bool]:
    return one.prefill_tokens_per_s is None, one.step_s is None, one.step_s_per_token is None


def _engine(said: EngineDemand) -> EngineDemand:
    if said.role in _GOOD_ROLES and _is_good(said):
        return said
    return EngineDemand(
        role=said.role if said.role in _ROLES else "",
        in_flight=int(bounded(said.in_flight)),
        in_flight_tokens=bounded(said.in_flight_tokens),
        waiting=_known(said.waiting),
        running=_known(said.running),
        kv_usage=None if said.kv_usage is None else min(1.0, bounded(said.kv_usage)),
        report_age_s=_known(said.report_age_s),
        kv_capacity_tokens=bounded(said.kv_capacity_tokens),
        prefill_tokens_per_s=_speed(said.prefill_tokens_per_s),
        step_s=_known(said.step_s),
        step_s_per_token=_known(said.step_s_per_token),
    )


def _is_good(said: EngineDemand) -> bool:
    """Whether nothing is to be corrected, as usual."""
    return (
        0 <= said.in_flight <= MOST
        and 0 <= said.in_flight_tokens <= MOST
        and 0 <= said.kv_capacity_tokens <= MOST
        and (said.waiting is None or 0 <= said.waiting <= MOST)
        and (said.running is None or 0 <= said.running <= MOST)
        and (said.kv_usage is None or 0 <= said.kv_usage <= 1)
        and (said.report_age_s is None or 0 <= said.report_age_s <= MOST)
        and (said.prefill_tokens_per_s is None or 0 < said.prefill_tokens_per_s <= MOST)
        and (said.step_s is None or 0 <= said.step_s <= MOST)
        and (said.step_s_per_token is None or 0 <= said.step_s_per_token <= MOST)
    )


def _known(value: float | None) -> float | None:
    return None if value is None else bounded(value)


def _speed(value: float | None) -> float | None:
    return value if value is not None and 0 < value <= MOST else None


def _counters(said: ServerDemand) -> list[float]:
    """Of all models, in the order of ``Totals``."""
    found = [0.0] * 7
    for one in _first(said.counted, MOST_MODELS).values():
        values: tuple[float, ...] = (
            one.arrivals,
            one.refused,
            one.finished,
            one.prompt_tokens,
            one.cached_tokens,
            one.output_tokens,
            one.prefill_work,
        )
        # what is no number makes the sum none; whole numbers may be too large for one
        if not (min(values) >= 0 and max(values) <= MOST and sum(values) >= 0):
            values = tuple(map(bounded, values))
        found = list(map(add, found, values))
    return found


def _grown(highest: list[float], said: list[float]) -> list[float]:
    """By how much the counters have grown; ``highest`` grows with them."""
    more = list(map(sub, said, highest))
    if min(more) >= 0:
        highest[:] = said
        return more
    for at, value in enumerate(more):
        if value > 0:
            highest[at] = said[at]
        else:
            more[at] = 0.0
    return more


def _rise(highest: list[int], said: tuple[int, ...]) -> list[int]:
    """By how much the buckets have grown; ``highest`` grows with them."""
    if len(said) == len(highest):
        more = list(map(sub, said, highest))
        # what no number is makes the sum none
        if min(more) >= 0 and sum(more) <= MOST_COUNTED and max(said) <= MOST_COUNTED:
            highest[:] = said
            return more
    more = [0] * len(highest)
    for at, count in enumerate(said[: len(highest)]):
        if highest[at] < count:
            value = min(MOST_COUNTED, count)
            more[at], highest[at] = value - highest[at], value
    return more


def _first(said: Mapping[str, Value], most: int) -> Mapping[str, Value]:
    return said if len(said) <= most else dict(list(said.items())[:most])
