# SPDX-License-Identifier: Apache-2.0
"""Which requests the other processes run, and when each process was last heard of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from extproc.core.peer_events import SILENCE_S

if TYPE_CHECKING:
    from collections.abc import Collection


class Mirror:
    """Bookkeeping alone: the core ends the requests. Bounded by what the others run."""

    def __init__(self) -> None:
        self._running: dict[str, set[str]] = {}
        self._heard_at_s: dict[str, float] = {}

    @property
    def peers(self) -> int:
        """How many other processes were heard of within the last seconds."""
        return len(self._heard_at_s)

    def heard_of(self, origin: str, now: float) -> None:
        """The process ``origin`` has said something."""
        self._heard_at_s[origin] = now
        self._running.setdefault(origin, set())

    def started(self, origin: str, ticket: str) -> None:
        """It runs this request."""
        self._running[origin].add(ticket)

    def ended(self, origin: str, ticket: str) -> bool:
        """The request has ended; returns whether ``origin`` ran it."""
        running = self._running.get(origin)
        if running is None or ticket not in running:
            return False
        running.remove(ticket)
        return True

    def lost(self, origin: str, running: Collection[str]) -> list[str]:
        """Remove and return its requests that are not in ``running``, the list that it sent: their ends were lost."""
        gone = sorted(self._running[origin].difference(running))
        self._running[origin].difference_update(gone)
        return gone

    def silent(self, now: float) -> list[str]:
        """Remove the processes that have gone silent; returns their requests."""
        gone: list[str] = []
        for origin in [one for one, at_s in self._heard_at_s.items() if now - at_s > SILENCE_S]:
            del self._heard_at_s[origin]
            gone += sorted(self._running.pop(origin))
        return gone
