# SPDX-License-Identifier: Apache-2.0
"""Ordering policies within a flow: the waiting request with the smallest key goes first.

A key is an instant, computed once on arrival: the arrival time plus a delay that the policy chooses, at most the
ageing bound. So a request is never overtaken by one that arrived more than the ageing bound later.
"""

from __future__ import annotations

from collections import OrderedDict
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from extproc.admission.queued_request import QueuedRequest

# Sessions and programs remembered.
_MAX_SESSIONS: Final = 4096
# Delay for each uncached prompt token: a prompt of 10,000 tokens yields to requests that arrive within 10 s.
_SECONDS_A_TOKEN: Final = 1e-3
# Delay for each token of service that a program has received.
_SECONDS_A_SERVED_TOKEN: Final = 1e-4


class OrderingPolicy(Protocol):
    """Orders the waiting requests of a flow. ``ageing_s`` of each policy bounds the delay that it adds."""

    def key(self, queued: QueuedRequest) -> float:
        """The request's key; the smallest goes first."""
        ...

    def served(self, queued: QueuedRequest, tokens: float, now: float) -> None:
        """A request has ended. ``tokens``: of its prompt and answer."""
        ...


class FirstCome:
    """First come, first served."""

    def __init__(self, ageing_s: float) -> None:
        """``ageing_s`` is not used: there is no delay to bound."""

    def key(self, queued: QueuedRequest) -> float:
        """The arrival time."""
        return queued.arrived_at_s

    def served(self, queued: QueuedRequest, tokens: float, now: float) -> None:
        """Nothing to record."""


class Deadline:
    """Earliest deadline first (Liu and Layland, 1973).

    A request without a deadline, or with one beyond the ageing bound, is due at the ageing bound.
    """

    def __init__(self, ageing_s: float) -> None:
        self._ageing_s = ageing_s

    def key(self, queued: QueuedRequest) -> float:
        """The time at which the first token is due."""
        return min(queued.deadline_at_s, queued.arrived_at_s + self._ageing_s)

    def served(self, queued: QueuedRequest, tokens: float, now: float) -> None:
        """Nothing to record."""


class ShortestFirst:
    """Shortest job first, by uncached prompt tokens, with ageing.

    Shortest job first minimizes the mean wait (Smith, 1956).
    """

    def __init__(self, ageing_s: float) -> None:
        self._ageing_s = ageing_s

    def key(self, queued: QueuedRequest) -> float:
        """1 ms of delay for each uncached token."""
        return queued.arrived_at_s + min(self._ageing_s, _SECONDS_A_TOKEN * queued.uncached_tokens)

    def served(self, queued: QueuedRequest, tokens: float, now: float) -> None:
        """Nothing to record."""


class SessionBoost:
    """The session whose last request ended most recently goes first: its prefix is still in a cache (after Kthena)."""

    def __init__(self, ageing_s: float) -> None:
        self._ageing_s = ageing_s
        self._ended_at_s: OrderedDict[str, float] = OrderedDict()

    def key(self, queued: QueuedRequest) -> float:
        """The delay grows with the session's silence before the request, up to the ageing bound."""
        ended_at_s = self._ended_at_s.get(queued.session)
        silent_s = self._ageing_s if ended_at_s is None else max(0.0, queued.arrived_at_s - ended_at_s)
        return queued.arrived_at_s + min(self._ageing_s, silent_s)

    def served(self, queued: QueuedRequest, tokens: float, now: float) -> None:
        """Record when the session's request ended."""
        if queued.session:
            self._ended_at_s[queued.session] = now
            _bound(self._ended_at_s, queued.session)


class LeastAttained:
    """The program that has received the least service goes first (Autellix, arXiv 2502.13965).

    All requests of one session, for example the calls of an agent, are one program.
    """

    def __init__(self, ageing_s: float) -> None:
        self._ageing_s = ageing_s
        self._attained: OrderedDict[str, float] = OrderedDict()

    def key(self, queued: QueuedRequest) -> float:
        """0.1 ms of delay for each token that the program has received."""
        attained = self._attained.get(queued.session, 0.0)
        return queued.arrived_at_s + min(self._ageing_s, _SECONDS_A_SERVED_TOKEN * attained)

    def served(self, queued: QueuedRequest, tokens: float, now: float) -> None:
        """Add the tokens to the program's service."""
        if queued.session:
            self._attained[queued.session] = self._attained.get(queued.session, 0.0) + tokens
            _bound(self._attained, queued.session)


def _bound(remembered: OrderedDict[str, float], latest: str) -> None:
    remembered.move_to_end(latest)
    if len(remembered) > _MAX_SESSIONS:
        remembered.popitem(last=False)


ORDERS: Final[Mapping[str, Callable[[float], OrderingPolicy]]] = MappingProxyType(
    {one.__name__: one for one in (FirstCome, Deadline, ShortestFirst, SessionBoost, LeastAttained)}
)
