# SPDX-License-Identifier: Apache-2.0
"""How long a target's replicas take from their creation until they serve, as measured."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from controller.autoscaler.decision.situation import Target

# Starts that are remembered.
MOST_STARTS: Final = 32
_LEAST_S: Final = 1.0


class Start(msgspec.Struct, frozen=True):
    """One start. ``engine``: its name."""

    engine: str
    took_s: float


class StartTimes(msgspec.Struct, frozen=True, dict=True):
    """``starts``: the newest last."""

    starts: tuple[Start, ...] = ()

    def percentile(self, percent: float) -> float | None:
        """By the nearest rank; None without any."""
        ordered = self._ordered
        return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))] if ordered else None

    @cached_property
    def _ordered(self) -> list[float]:
        return sorted([one.took_s for one in self.starts])

    @cached_property
    def _engines(self) -> frozenset[str]:
        return frozenset([one.engine for one in self.starts])

    def seen(self, target: Target) -> StartTimes:
        """With the engines of ``target`` that serve and are not known yet."""
        known = self._engines
        new = [
            Start(one.name, max(_LEAST_S, one.ready_at_s - one.created_at_s))
            for one in target.engines
            if one.ready_at_s is not None and one.name not in known
        ]
        return StartTimes((*self.starts, *new)[-MOST_STARTS:]) if new else self


def expected_start_s(times: StartTimes | None, otherwise_s: float) -> float:
    """Nine of ten starts take at most so long; ``otherwise_s`` before any was seen."""
    measured = times.percentile(90) if times is not None else None
    return measured if measured is not None else otherwise_s
