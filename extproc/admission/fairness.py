# SPDX-License-Identifier: Apache-2.0
"""Fairness policies between flows, by their names in the configuration.

``policy.py`` has their protocol. Each class documents only what is particular to it.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

import numpy as np

from extproc.admission.deficit_locality import DeficitLocality
from extproc.admission.policy import FairnessPolicy, FlowHeads, grown

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from extproc.endpoints.table import Bools, Floats, Ints


class VirtualTokenCounter:
    """The flow that has received the least service goes first.

    This is VTC (Sheng et al., OSDI 2024, algorithm 2). A flow that becomes active again is lifted to the smallest
    counter of the waiting flows; otherwise it could claim all the service that others received while it was idle. The
    counters of two flows that both wait all the time differ by at most twice the largest request or batch (theorem
    4.4).
    """

    def __init__(self) -> None:
        self.counters: Floats = np.zeros(0)
        self._last_served = 0.0

    def grow(self, rows: int) -> None:
        """Add counters at 0."""
        self.counters = grown(self.counters, rows)

    def activate(self, row: int, waiting: Bools) -> None:
        """Lift the counter; if no flow waits, to that of the flow that was served last."""
        others = self.counters[waiting]
        floor = float(others.min()) if others.size else self._last_served
        self.counters[row] = max(float(self.counters[row]), floor)

    def choose(self, candidates: Bools, heads: FlowHeads, now: float) -> int:
        """The smallest counter."""
        return _least(self.counters, candidates)

    def charge(self, row: int, service: float, now: float) -> None:
        """Add the expected service."""
        self._last_served = float(self.counters[row])
        self.counters[row] += service

    def settle(self, row: int, service: float, now: float) -> None:
        """Add the difference to the actual service."""
        self.counters[row] += service

    def forget(self, row: int) -> None:
        """Reset the row; its next flow is lifted when it becomes active."""
        self.counters[row] = 0.0

    def debt(self, row: int) -> float:
        """The flow's counter."""
        return float(self.counters[row])


class SlidingWindow:
    """The flow with the least service in the last ``window_s`` seconds goes first (Kthena's fairness)."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self.used: Floats = np.zeros(0)
        self._epochs: Ints = np.zeros(0, np.int64)
        # (time, row, epoch of the row, service), oldest first.
        self._recent: deque[tuple[float, int, int, float]] = deque()

    def grow(self, rows: int) -> None:
        """Add sums at 0."""
        self.used = grown(self.used, rows)
        self._epochs = np.pad(self._epochs, (0, rows - self._epochs.size))

    def activate(self, row: int, waiting: Bools) -> None:
        """Nothing to do: old service leaves the window by itself."""

    def choose(self, candidates: Bools, heads: FlowHeads, now: float) -> int:
        """The smallest sum."""
        self._expire(now)
        return _least(self.used, candidates)

    def charge(self, row: int, service: float, now: float) -> None:
        """Add the expected service for the length of the window."""
        self._expire(now)
        self.used[row] += service
        self._recent.append((now, row, int(self._epochs[row]), service))

    def settle(self, row: int, service: float, now: float) -> None:
        """Add the difference to the actual service, from now on."""
        self.charge(row, service, now)

    def forget(self, row: int) -> None:
        """Reset the row; service still in the window will not be subtracted from its next flow."""
        self.used[row] = 0.0
        self._epochs[row] += 1

    def debt(self, row: int) -> float:
        """The service within the window."""
        return float(self.used[row])

    def _expire(self, now: float) -> None:
        while self._recent and self._recent[0][0] <= now - self._window_s:
            _, row, epoch, service = self._recent.popleft()
            if epoch == self._epochs[row]:
                self.used[row] -= service


class RoundRobin:
    """Flows take turns, whatever their requests cost."""

    def __init__(self) -> None:
        self._turns: Floats = np.zeros(0)
        self._turn = 0

    def grow(self, rows: int) -> None:
        """Add flows that have had no turn."""
        self._turns = grown(self._turns, rows)

    def activate(self, row: int, waiting: Bools) -> None:
        """Nothing to do: the flow keeps the time of its last turn."""

    def choose(self, candidates: Bools, heads: FlowHeads, now: float) -> int:
        """The flow whose last turn is longest ago."""
        return _least(self._turns, candidates)

    def charge(self, row: int, service: float, now: float) -> None:
        """Record the turn."""
        self._turn += 1
        self._turns[row] = self._turn

    def settle(self, row: int, service: float, now: float) -> None:
        """Nothing to do: service does not count."""

    def forget(self, row: int) -> None:
        """Reset the row to a flow that has had no turn."""
        self._turns[row] = 0.0

    def debt(self, row: int) -> float:
        """The number of the flow's last turn."""
        return float(self._turns[row])


class GlobalStrict:
    """No fairness: all requests are ordered as if they were one flow."""

    def grow(self, rows: int) -> None:
        """Nothing to do: no state."""

    def activate(self, row: int, waiting: Bools) -> None:
        """Nothing to do: no state."""

    def choose(self, candidates: Bools, heads: FlowHeads, now: float) -> int:
        """The head with the smallest order key."""
        return _least(heads.keys, candidates)

    def charge(self, row: int, service: float, now: float) -> None:
        """Nothing to do: no state."""

    def settle(self, row: int, service: float, now: float) -> None:
        """Nothing to do: no state."""

    def forget(self, row: int) -> None:
        """Nothing to do: no state."""

    def debt(self, row: int) -> float:
        """Always 0."""
        return 0.0


_EXCLUDED: Final = np.inf


def _least(values: Floats, candidates: Bools) -> int:
    return int(np.where(candidates, values, _EXCLUDED).argmin())


class BandShares:
    """Shares between priority bands: a virtual token counter, weighted by each band's configured share."""

    def __init__(self, shares: Sequence[float]) -> None:
        self._shares = shares
        self._counters = [0.0] * len(shares)
        self._last_served = 0.0

    def activate(self, band: int, waiting: Iterable[int]) -> None:
        """Lift the counter of a band that had no waiting request; ``waiting``: the bands that have."""
        floor = min((self._counters[other] for other in waiting), default=self._last_served)
        self._counters[band] = max(self._counters[band], floor)

    def order(self, candidates: Iterable[int]) -> list[int]:
        """``candidates``, the band furthest below its share first."""
        return sorted(candidates, key=self._counters.__getitem__)

    def charge(self, band: int, service: float) -> None:
        """Add the expected service of a request of ``band``."""
        self._last_served = self._counters[band]
        self.settle(band, service)

    def settle(self, band: int, service: float) -> None:
        """Add the difference to the actual service."""
        self._counters[band] += service / self._shares[band]


def make_policy(name: str, *, quantum: float, window_s: float) -> FairnessPolicy:
    """The policy with this name in the configuration.

    ``quantum``: tokens a round, for DeficitLocality. ``window_s``: for SlidingWindow.
    """
    match name:
        case "DeficitLocality":
            return DeficitLocality(quantum)
        case "SlidingWindow":
            return SlidingWindow(window_s)
        case "RoundRobin":
            return RoundRobin()
        case "GlobalStrict":
            return GlobalStrict()
        case _:
            return VirtualTokenCounter()
