"""The order inside a flow: each policy gives a request a key when it comes, and the least key goes first.

A key is a time: that of arrival, and what the policy adds to it, which is never more than the ageing bound. So nobody is
overtaken by who came later than that, and keys never have to be computed anew while requests grow old.
"""

from __future__ import annotations

from collections import OrderedDict
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from extproc.admission.queued_request import QueuedRequest

# Sessions and programs that are remembered.
_MOST_SESSIONS: Final = 4096
# How much overtaking a token of uncached prompt costs: a prompt of 10,000 tokens lets pass what comes within 10 s.
_SECONDS_A_TOKEN: Final = 1e-3
# The same for tokens of service that a program has had.
_SECONDS_A_SERVED_TOKEN: Final = 1e-4


class OrderingPolicy(Protocol):
    """Says which request of a flow goes first."""

    def key(self, queued: QueuedRequest) -> float:
        """The least goes first."""
        ...

    def served(self, queued: QueuedRequest, tokens: float, now: float) -> None:
        """A request has ended, after so many tokens of service."""
        ...


class FirstCome:
    """First come, first served."""

    def __init__(self, ageing_s: float) -> None:
        """It has nothing to bound."""

    def key(self, queued: QueuedRequest) -> float:
        """When it came."""
        return queued.arrived_at_s

    def served(self, queued: QueuedRequest, tokens: float, now: float) -> None:
        """Nothing to learn."""


class Deadline:
    """Earliest deadline first (Liu and Layland, 1973); what has none, or a late one, is due after the ageing bound."""

    def __init__(self, ageing_s: float) -> None:
        self._ageing_s = ageing_s

    def key(self, queued: QueuedRequest) -> float:
        """When the first token is due."""
        return min(queued.deadline_at_s, queued.arrived_at_s + self._ageing_s)

    def served(self, queued: QueuedRequest, tokens: float, now: float) -> None:
        """Nothing to learn."""


class ShortestFirst:
    """Shortest job first, by the prompt's tokens that no engine has cached: the least mean wait (Smith, 1956), with ageing."""

    def __init__(self, ageing_s: float) -> None:
        self._ageing_s = ageing_s

    def key(self, queued: QueuedRequest) -> float:
        """1 ms of patience a token."""
        return queued.arrived_at_s + min(self._ageing_s, _SECONDS_A_TOKEN * queued.uncached_tokens)

    def served(self, queued: QueuedRequest, tokens: float, now: float) -> None:
        """Nothing to learn."""


class SessionBoost:
    """The session whose last request ended most recently goes first: its prefix is still in a cache (after Kthena)."""

    def __init__(self, ageing_s: float) -> None:
        self._ageing_s = ageing_s
        self._ended_at_s: OrderedDict[str, float] = OrderedDict()

    def key(self, queued: QueuedRequest) -> float:
        """A boost that is gone once the session has been silent for the ageing bound."""
        ended_at_s = self._ended_at_s.get(queued.session)
        silent_s = self._ageing_s if ended_at_s is None else max(0.0, queued.arrived_at_s - ended_at_s)
        return queued.arrived_at_s + min(self._ageing_s, silent_s)

    def served(self, queued: QueuedRequest, tokens: float, now: float) -> None:
        """Remember when."""
        if queued.session:
            self._ended_at_s[queued.session] = now
            _bound(self._ended_at_s, queued.session)


class LeastAttained:
    """Programs that have had little service go first: an agent's calls count together (Autellix, arXiv 2502.13965)."""

    def __init__(self, ageing_s: float) -> None:
        self._ageing_s = ageing_s
        self._attained: OrderedDict[str, float] = OrderedDict()

    def key(self, queued: QueuedRequest) -> float:
        """0.1 ms of patience for each token that the program has had."""
        attained = self._attained.get(queued.session, 0.0)
        return queued.arrived_at_s + min(self._ageing_s, _SECONDS_A_SERVED_TOKEN * attained)

    def served(self, queued: QueuedRequest, tokens: float, now: float) -> None:
        """Add to the program's account."""
        if queued.session:
            self._attained[queued.session] = self._attained.get(queued.session, 0.0) + tokens
            _bound(self._attained, queued.session)


def _bound(remembered: OrderedDict[str, float], latest: str) -> None:
    remembered.move_to_end(latest)
    if len(remembered) > _MOST_SESSIONS:
        remembered.popitem(last=False)


ORDERS: Final[Mapping[str, Callable[[float], OrderingPolicy]]] = MappingProxyType(
    {one.__name__: one for one in (FirstCome, Deadline, ShortestFirst, SessionBoost, LeastAttained)}
)
