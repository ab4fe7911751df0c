# SPDX-License-Identifier: Apache-2.0
"""The service that tenants are given, and the largest gap between two that wait."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from extproc.core.effects import Decision

INPUT_WEIGHT: Final = 1.0
OUTPUT_WEIGHT: Final = 2.0
# As by default: cached tokens cost the engine next to nothing.
CACHED_WEIGHT: Final = 0.1


class _Pair(msgspec.Struct):
    """The least and the most difference between two tenants' service while both wait."""

    least: float = 0.0
    most: float = 0.0
    is_open: bool = False


class ServiceObserver:
    """A TokenObserver. Service is counted when it is given: input when the request is sent, output token by token.

    ``served``: weighted tokens by tenant. ``widest``: the largest change of the difference between two tenants while
    both waited. ``history``: of each tenant, instants and totals, if it is kept.
    """

    def __init__(self, *, with_history: bool = False) -> None:
        self.served: dict[str, float] = {}
        self.history: dict[str, list[tuple[float, float]]] = {}
        self.longest_input = 0
        self.most_tokens_running = 0
        self.widest = 0.0
        self._with_history = with_history
        self._waiting: dict[str, set[str]] = {}
        self._pairs: dict[tuple[str, str], _Pair] = {}
        self._running = 0

    @property
    def bound(self) -> float:
        """Theorem 4.4 of VTC: ``2 max(w_p L_input, w_q M)``, of the run's largest input and batch."""
        return 2 * max(INPUT_WEIGHT * self.longest_input, OUTPUT_WEIGHT * self.most_tokens_running)

    def served_at(self, label: str, at_s: float) -> float:
        """The service given to a tenant until ``at_s``; needs ``with_history``."""
        history = self.history.get(label, [])
        index = bisect_right(history, at_s, key=lambda one: one[0])
        return history[index - 1][1] if index else 0.0

    def held(self, label: str, ticket: str, now: float) -> None:
        """The tenant waits."""
        self._waiting.setdefault(label, set()).add(ticket)
        self._update_gaps(label)

    def sent(self, label: str, decision: Decision, input_tokens: int, now: float) -> None:
        """The input is served."""
        self.longest_input = max(self.longest_input, input_tokens)
        self._running += input_tokens
        cached = min(input_tokens, decision.assignment.cached_tokens)
        self._serve(label, INPUT_WEIGHT * (input_tokens - cached) + CACHED_WEIGHT * cached, now)
        self._waiting.get(label, set()).discard(decision.ticket)
        self._update_gaps(label)

    def token(self, label: str, now: float) -> None:
        """A token of output is served."""
        self._running += 1
        self.most_tokens_running = max(self.most_tokens_running, self._running)
        self._serve(label, OUTPUT_WEIGHT, now)
        self._update_gaps(label)

    def ended(self, label: str, tokens: int, now: float) -> None:
        """A request has left its engine."""
        self._running -= tokens

    def _serve(self, label: str, service: float, now: float) -> None:
        self.served[label] = self.served.get(label, 0.0) + service
        if self._with_history:
            self.history.setdefault(label, []).append((now, self.served[label]))

    def _update_gaps(self, label: str) -> None:
        for other in self._waiting:
            if other != label:
                self._compare(*sorted((label, other)))

    def _compare(self, one: str, other: str) -> None:
        pair = self._pairs.setdefault((one, other), _Pair())
        service_gap = self.served.get(one, 0.0) - self.served.get(other, 0.0)
        if not (self._waiting.get(one) and self._waiting.get(other)):
            pair.is_open = False
            return
        if not pair.is_open:
            pair.least = pair.most = service_gap
            pair.is_open = True
        pair.least, pair.most = min(pair.least, service_gap), max(pair.most, service_gap)
        self.widest = max(self.widest, pair.most - pair.least)
