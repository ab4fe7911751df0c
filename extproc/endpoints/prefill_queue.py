"""Requests that were sent to one engine and, as far as is known, have no first token yet.

Engines begin requests in the order in which they come, so whoever has a first token leaves nobody before it without one; and if an engine says
that three wait, these are the last three that came. That is much more than a number: of two queues of three, one may be a hundred times as
long as the other.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator

# From a pick to the engine's queue: vLLM's API server takes some 15 ms.
_ON_THE_WAY_S: Final = 0.03
# Prompts as short as this are computed in one step with others: vLLM's usual budget of tokens.
_STEP_TOKENS: Final = 8192.0


class QueuedPrefill(msgspec.Struct, frozen=True):
    """``number``: the how manieth of this engine. ``work``: tokens of prefill, attention counted."""

    number: int
    work: float
    sent_at_s: float


class Bounds(msgspec.Struct, frozen=True):
    """Work that is left, in tokens, at least and at most, and how many of the requests that wait are known here."""

    least: float
    most: float
    known: int


class PrefillQueue:
    """First come, first served. Not bounded: no longer than the requests in flight.

    Engines also count first tokens; each stands for the first of the queue. Requests that were found out to be done before the
    engine's count said so are ``_ahead`` of it, and will not be taken off twice.
    """

    def __init__(self) -> None:
        self._queue: deque[QueuedPrefill] = deque()
        self._numbers = 0
        self._ahead = 0.0
        self.work = 0.0

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[QueuedPrefill]:
        return iter(self._queue)

    def add(self, work: float, now: float) -> int:
        """One more is sent; its number."""
        if not self._queue:
            self.work = self._ahead = 0.0
        self._numbers += 1
        self._queue.append(QueuedPrefill(self._numbers, work, now))
        self.work += work
        return self._numbers

    def remove(self, number: int) -> None:
        """That one is over, with or without a first token."""
        for one in self._queue:
            if one.number >= number:
                if one.number == number:
                    self._queue.remove(one)
                    self.work -= one.work
                    self._ahead += 1
                return

    def first_token(self, number: int) -> None:
        """That one has had its first token: so have all before it."""
        while self._queue and self._queue[0].number <= number:
            self._take()
            self._ahead += 1

    def reconcile(self, waiting: int, now: float, first_tokens: float | None = None) -> Bounds:
        """The engine says that so many wait: those before them are done, but for what may be computed just now."""
        on_the_way = self._on_the_way(now)
        known = min(waiting, len(self._queue) - on_the_way)
        rest = on_the_way + known
        for _ in range(min(self._newly_done(first_tokens or 0.0), len(self._queue) - rest)):
            self._take()
        computed = self._computed_now(rest)
        while len(self._queue) > rest + computed:
            self._take()
            self._ahead += 1
        least = sum(self._queue[-index].work for index in range(1, rest + 1))
        return Bounds(least, self.work if computed else least, known)

    def _newly_done(self, first_tokens: float) -> int:
        done = max(0.0, first_tokens - self._ahead)
        self._ahead = max(0.0, self._ahead - first_tokens)
        return int(done)

    def _take(self) -> None:
        self.work -= self._queue.popleft().work

    def _on_the_way(self, now: float) -> int:
        count = 0
        for one in reversed(self._queue):
            if one.sent_at_s <= now - _ON_THE_WAY_S:
                break
            count += 1
        return count

    def _computed_now(self, rest: int) -> int:
        """How many before the last ``rest`` one step may still be computing."""
        count, work = 0, 0.0
        for index in range(rest + 1, len(self._queue) + 1):
            work += self._queue[-index].work
            if count and work > _STEP_TOKENS:
                break
            count += 1
        return count
