# SPDX-License-Identifier: Apache-2.0
"""Fairness that keeps cache locality: within a bound, the longest match goes first."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from extproc.admission.policy import grown

if TYPE_CHECKING:
    from extproc.admission.policy import FlowHeads
    from extproc.endpoints.table import Bools, Floats, Ints


class DeficitLocality:
    """Of the flows with a positive deficit, choose the one whose head has the longest prefix match.

    This is DLPM (Cao et al., arXiv 2501.14312). Each flow receives ``quantum`` tokens a round and spends them on
    uncached input and on output. A new round begins when no waiting flow has tokens left, so a flow is never ahead of
    another by more than one quantum and one request.
    """

    def __init__(self, quantum: float) -> None:
        self._quantum = quantum
        self._round = 0
        self.deficits: Floats = np.zeros(0)
        self._rounds: Ints = np.zeros(0, np.int64)

    def grow(self, rows: int) -> None:
        """See ``FairnessPolicy.grow``; a new flow has not taken part in any round."""
        more = rows - self._rounds.size
        self.deficits = grown(self.deficits, rows)
        self._rounds = np.pad(self._rounds, (0, more), constant_values=-1)

    def activate(self, row: int, waiting: Bools) -> None:
        """Give the flow its quantum for this round, once. Tokens left from earlier rounds do not accumulate."""
        if self._rounds[row] != self._round:
            self.deficits[row] = min(float(self.deficits[row]) + self._quantum, self._quantum)
            self._rounds[row] = self._round

    def choose(self, candidates: Bools, heads: FlowHeads, now: float) -> int:
        """Of the flows that can pay, the one with the longest match; ties go to the smallest order key."""
        return self.longest_match(self.able_to_pay(candidates, heads), heads)

    def longest_match(self, payable: Bools, heads: FlowHeads) -> int:
        """Of the flows in ``payable``, the one whose head has the longest match; ties go to the smallest order key."""
        rows = payable.nonzero()[0]
        cached = heads.cached[rows]
        longest = rows[cached >= cached.max()]
        return int(longest[heads.keys[longest].argmin()])

    def able_to_pay(self, candidates: Bools, heads: FlowHeads) -> Bools:
        """The flows in ``candidates`` with tokens to spend; starts as many rounds as it takes to have one."""
        best = float(np.where(candidates, self.deficits, -np.inf).max())
        if best <= 0:
            rounds = math.floor(-best / self._quantum) + 1
            self.deficits[heads.waiting] += rounds * self._quantum
            self._round += rounds
            self._rounds[heads.waiting] = self._round
        return candidates & (self.deficits > 0)

    def charge(self, row: int, service: float, now: float) -> None:
        """Spend the expected service."""
        self.deficits[row] -= service

    def settle(self, row: int, service: float, now: float) -> None:
        """Spend or refund the difference to the actual service."""
        self.deficits[row] -= service

    def forget(self, row: int) -> None:
        """Reset the row for another flow."""
        self.deficits[row] = 0.0
        self._rounds[row] = -1

    def debt(self, row: int) -> float:
        """Tokens overdrawn; negative if some are left."""
        return -float(self.deficits[row])
