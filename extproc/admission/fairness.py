"""Policies of fairness between flows, by the names of the configuration; see ``policy.py`` for what they are asked."""

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
    """The flow with the least service goes first; one that comes back is lifted to the least of those that wait.

    VTC (Sheng et al., OSDI 2024, algorithm 2): without the lift, who was away could claim all that others had meanwhile. Two
    flows that both wait all the time never differ by more than twice the largest request or batch (theorem 4.4).
    """

    def __init__(self) -> None:
        self.counters: Floats = np.zeros(0)
        self._last_left = 0.0

    def grow(self, rows: int) -> None:
        """More counters."""
        self.counters = grown(self.counters, rows)

    def activate(self, row: int, waiting: Bools) -> None:
        """The lift; where nobody waits, to the counter of the flow that was served last."""
        candidates = self.counters[waiting]
        floor = float(candidates.min()) if candidates.size else self._last_left
        self.counters[row] = max(float(self.counters[row]), floor)

    def choose(self, candidates: Bools, heads: FlowHeads, now: float) -> int:
        """The least counter."""
        return _least(self.counters, candidates)

    def charge(self, row: int, service: float, now: float) -> None:
        """Count it."""
        self._last_left = float(self.counters[row])
        self.counters[row] += service

    def settle(self, row: int, service: float, now: float) -> None:
        """Count what it really was."""
        self.counters[row] += service

    def forget(self, row: int) -> None:
        """A newcomer begins at 0 and is lifted."""
        self.counters[row] = 0.0

    def debt(self, row: int) -> float:
        """The counter."""
        return float(self.counters[row])


class SlidingWindow:
    """The flow that was given least within the last ``window_s`` goes first (Kthena's fairness)."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self.used: Floats = np.zeros(0)
        self._epochs: Ints = np.zeros(0, np.int64)
        # services in the order in which they leave the window
        self._recent: deque[tuple[float, int, int, float]] = deque()

    def grow(self, rows: int) -> None:
        """More sums."""
        self.used = grown(self.used, rows)
        self._epochs = np.pad(self._epochs, (0, rows - self._epochs.size))

    def activate(self, row: int, waiting: Bools) -> None:
        """The window forgets by itself."""

    def choose(self, candidates: Bools, heads: FlowHeads, now: float) -> int:
        """The least sum."""
        self._expire(now)
        return _least(self.used, candidates)

    def charge(self, row: int, service: float, now: float) -> None:
        """Count it until the window has passed."""
        self._expire(now)
        self.used[row] += service
        self._recent.append((now, row, int(self._epochs[row]), service))

    def settle(self, row: int, service: float, now: float) -> None:
        """Count the difference from now on."""
        self.charge(row, service, now)

    def forget(self, row: int) -> None:
        """What leaves the window later is not the new flow's."""
        self.used[row] = 0.0
        self._epochs[row] += 1

    def debt(self, row: int) -> float:
        """The sum."""
        return float(self.used[row])

    def _expire(self, now: float) -> None:
        while self._recent and self._recent[0][0] <= now - self._window_s:
            _, row, epoch, service = self._recent.popleft()
            if epoch == self._epochs[row]:
                self.used[row] -= service


class RoundRobin:
    """A turn each, whatever it costs."""

    def __init__(self) -> None:
        self._turns: Floats = np.zeros(0)
        self._turn = 0

    def grow(self, rows: int) -> None:
        """More turns."""
        self._turns = grown(self._turns, rows)

    def activate(self, row: int, waiting: Bools) -> None:
        """Who comes back waits for its turn."""

    def choose(self, candidates: Bools, heads: FlowHeads, now: float) -> int:
        """Whose last turn is longest ago."""
        return _least(self._turns, candidates)

    def charge(self, row: int, service: float, now: float) -> None:
        """It has had its turn."""
        self._turn += 1
        self._turns[row] = self._turn

    def settle(self, row: int, service: float, now: float) -> None:
        """Turns cost nothing."""

    def forget(self, row: int) -> None:
        """As one who never had a turn."""
        self._turns[row] = 0.0

    def debt(self, row: int) -> float:
        """The last turn."""
        return float(self._turns[row])


class GlobalStrict:
    """No fairness: the order inside a flow is that of all requests."""

    def grow(self, rows: int) -> None:
        """Nothing to keep."""

    def activate(self, row: int, waiting: Bools) -> None:
        """Nothing to keep."""

    def choose(self, candidates: Bools, heads: FlowHeads, now: float) -> int:
        """The first of all heads."""
        return _least(heads.keys, candidates)

    def charge(self, row: int, service: float, now: float) -> None:
        """Nothing to keep."""

    def settle(self, row: int, service: float, now: float) -> None:
        """Nothing to keep."""

    def forget(self, row: int) -> None:
        """Nothing to keep."""

    def debt(self, row: int) -> float:
        """Nobody has any."""
        return 0.0


_NOT_AMONG: Final = np.inf


def _least(values: Floats, candidates: Bools) -> int:
    return int(np.where(candidates, values, _NOT_AMONG).argmin())


class BandShares:
    """Between a few bands: a virtual token counter whose weights are the bands' shares, without columns."""

    def __init__(self, shares: Sequence[float]) -> None:
        self._shares = shares
        self._counters = [0.0] * len(shares)
        self._last = 0.0

    def activate(self, band: int, waiting: Iterable[int]) -> None:
        """The lift; ``waiting``: the other bands in which somebody waits."""
        floor = min((self._counters[other] for other in waiting), default=self._last)
        self._counters[band] = max(self._counters[band], floor)

    def order(self, candidates: Iterable[int]) -> list[int]:
        """Who has had least of its share first."""
        return sorted(candidates, key=self._counters.__getitem__)

    def charge(self, band: int, service: float) -> None:
        """Count it."""
        self._last = self._counters[band]
        self.settle(band, service)

    def settle(self, band: int, service: float) -> None:
        """Count what it really was."""
        self._counters[band] += service / self._shares[band]


def make_policy(name: str, *, quantum: float, window_s: float) -> FairnessPolicy:
    """The policy of that name in the configuration."""
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
