"""Fairness that keeps locality: within a bound, who has most of its prompt in a cache goes first."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from extproc.admission.policy import grown

if TYPE_CHECKING:
    from extproc.admission.policy import FlowHeads
    from extproc.endpoints.table import Bools, Floats, Ints


class DeficitLocality:
    """Of the flows that still have a deficit to spend, the one whose head has most of its prompt in a cache.

    DLPM (Cao et al., arXiv 2501.14312): every flow gets ``quantum`` tokens a round, spends them on uncached input and on output,
    and a new round begins when none of those that wait has any left. So a flow is ahead by no more than a quantum and a request.
    """

    def __init__(self, quantum: float) -> None:
        self._quantum = quantum
        self._round = 0
        self.deficits: Floats = np.zeros(0)
        self._rounds: Ints = np.zeros(0, np.int64)

    def grow(self, rows: int) -> None:
        """Newcomers have had no part in any round."""
        more = rows - self._rounds.size
        self.deficits = grown(self.deficits, rows)
        self._rounds = np.pad(self._rounds, (0, more), constant_values=-1)

    def activate(self, row: int, waiting: Bools) -> None:
        """Its part in this round, if it has not had it; what it did not spend in rounds long past is lost."""
        if self._rounds[row] != self._round:
            self.deficits[row] = min(float(self.deficits[row]) + self._quantum, self._quantum)
            self._rounds[row] = self._round

    def choose(self, candidates: Bools, heads: FlowHeads, now: float) -> int:
        """The longest match of those that can pay, then who came first."""
        return self.longest_match(self.able_to_pay(candidates, heads), heads)

    def longest_match(self, able: Bools, heads: FlowHeads) -> int:
        """The longest match of those that are ``able``, then who came first."""
        rows = able.nonzero()[0]
        cached = heads.cached[rows]
        longest = rows[cached >= cached.max()]
        return int(longest[heads.keys[longest].argmin()])

    def able_to_pay(self, candidates: Bools, heads: FlowHeads) -> Bools:
        """Those that can pay, after as many new rounds as it takes until somebody can."""
        best = float(np.where(candidates, self.deficits, -np.inf).max())
        if best <= 0:
            rounds = math.floor(-best / self._quantum) + 1
            self.deficits[heads.waiting] += rounds * self._quantum
            self._round += rounds
            self._rounds[heads.waiting] = self._round
        return candidates & (self.deficits > 0)

    def charge(self, row: int, service: float, now: float) -> None:
        """Spend it."""
        self.deficits[row] -= service

    def settle(self, row: int, service: float, now: float) -> None:
        """Spend the rest, or get it back."""
        self.deficits[row] -= service

    def forget(self, row: int) -> None:
        """A newcomer owes nothing."""
        self.deficits[row] = 0.0
        self._rounds[row] = -1

    def debt(self, row: int) -> float:
        """What it has overdrawn."""
        return -float(self.deficits[row])
