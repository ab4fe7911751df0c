# SPDX-License-Identifier: Apache-2.0
"""Virtual time of a cluster: what is due when, and RFC 3339."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from bench.virtual.event_queue import EventQueue

if TYPE_CHECKING:
    from collections.abc import Callable

BEGIN_S: Final = 1_800_000_000.0
"""When virtual time begins, in seconds since the epoch."""


class Clock:
    """``now_s``: seconds since the epoch. Actions may plan more actions, never before now."""

    def __init__(self) -> None:
        self.now_s = BEGIN_S
        self._queue = EventQueue()

    def after(self, delay_s: float, act: Callable[[], None]) -> None:
        """Call ``act`` so much later."""
        self._queue.schedule_at(self.now_s + max(delay_s, 0.0), lambda at_s: self._run(at_s, act))

    def step(self, until_s: float) -> bool:
        """Run the next action that is due by then; False, and it is that instant, if there is none."""
        at_s = self._queue.next_at_s
        if at_s is None or at_s > until_s:
            self.now_s = max(self.now_s, until_s)
            return False
        self._queue.step()
        return True

    def wall(self) -> datetime:
        """The time as the API server has it."""
        return datetime.fromtimestamp(self.now_s, UTC)

    def _run(self, at_s: float, act: Callable[[], None]) -> None:
        self.now_s = at_s
        act()


def rfc3339(at_s: float) -> str:
    """An instant as objects have it: whole seconds."""
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def seconds(text: str) -> float:
    """Seconds since the epoch of what ``rfc3339`` wrote."""
    return datetime.fromisoformat(text).timestamp()
