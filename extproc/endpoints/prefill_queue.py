# SPDX-License-Identifier: Apache-2.0
"""Requests sent to one engine of which no first token has been observed.

Engines start requests in order of arrival. So if a request has its first token, all before it have theirs; and if an
engine reports three waiting requests, these are the last three that were sent. The work of these requests is more
precise than their number: of two queues with three requests, one may hold a hundred times as much work as the other.
"""

from __future__ import annotations

from typing import Final

import msgspec

# From the pick to the engine's queue: vLLM's API server takes about 15 ms.
_ON_THE_WAY_S: Final = 0.03
# Prompts that fit together are computed in one step: vLLM's usual token budget.
_STEP_TOKENS: Final = 8192.0


class QueuedPrefill(msgspec.Struct, frozen=True):
    """``number``: 1-based position in sending order. ``work``: prefill tokens, attention included."""

    number: int
    work: float
    sent_at_s: float


class PrefillBounds(msgspec.Struct, frozen=True):
    """Bounds on the remaining prefill work.

    ``least``, ``most``: in tokens. ``known``: how many of the waiting requests are in this queue.
    """

    least: float
    most: float
    known: int


class PrefillQueue:
    """A first-in, first-out queue of ``requests``, which are never more than those in flight. ``work``: of all, in
    tokens.

    Engines also count first tokens; each one removes the head of the queue. Requests that were found to be done
    before the engine counted them are ``_ahead`` of its count, and are not removed twice.
    """

    def __init__(self) -> None:
        # an empty deque takes 600 bytes, at every endpoint; a list of those in flight is as fast
        self.requests: list[QueuedPrefill] = []
        self._sent = 0
        self._ahead = 0.0
        self.work = 0.0

    def add(self, work: float, now: float) -> int:
        """Append a request; returns its number."""
        if not self.requests:
            self.work = self._ahead = 0.0
        self._sent += 1
        self.requests.append(QueuedPrefill(self._sent, work, now))
        self.work += work
        return self._sent

    def remove(self, number: int) -> None:
        """Remove a request that has ended, with or without a first token."""
        for at, one in enumerate(self.requests):
            if one.number >= number:
                if one.number == number:
                    del self.requests[at]
                    self.work -= one.work
                    self._ahead += 1
                return

    def on_first_token(self, number: int) -> None:
        """Remove a request that has received its first token, and all before it."""
        while self.requests and self.requests[0].number <= number:
            self._take()
            self._ahead += 1

    def reconcile(self, waiting: int, now: float, first_tokens: float | None = None) -> PrefillBounds:
        """Reconcile with the engine's queue length; returns bounds on the remaining prefill work.

        ``waiting``: requests in its queue. ``first_tokens``: first tokens since the last call, None if unknown.
        Requests before those that wait or are on their way are done, except for those that may be in computation.
        """
        on_the_way = self._on_the_way(now)
        known = min(waiting, len(self.requests) - on_the_way)
        rest = on_the_way + known
        for _ in range(min(self._newly_done(first_tokens or 0.0), len(self.requests) - rest)):
            self._take()
        computing = self._in_computation(rest)
        while len(self.requests) > rest + computing:
            self._take()
            self._ahead += 1
        least = sum(self.requests[-index].work for index in range(1, rest + 1))
        return PrefillBounds(least, self.work if computing else least, known)

    def _newly_done(self, first_tokens: float) -> int:
        done = max(0.0, first_tokens - self._ahead)
        self._ahead = max(0.0, self._ahead - first_tokens)
        return int(done)

    def _take(self) -> None:
        self.work -= self.requests.pop(0).work

    def _on_the_way(self, now: float) -> int:
        count = 0
        for one in reversed(self.requests):
            if one.sent_at_s <= now - _ON_THE_WAY_S:
                break
            count += 1
        return count

    def _in_computation(self, rest: int) -> int:
        """How many requests before the last ``rest`` the current step may be computing."""
        count, work = 0, 0.0
        for index in range(rest + 1, len(self.requests) + 1):
            work += self.requests[-index].work
            if count and work > _STEP_TOKENS:
                break
            count += 1
        return count
