# SPDX-License-Identifier: Apache-2.0
"""What processes of one machine tell each other about the local limits that they share.

They tell what they spend, so each knows the buckets of all. One that starts would find them full, and a worker that is
restarted again and again would be a way round every limit. So it asks, and another tells it how full they are. It takes
the lower of two levels: what it has granted itself may not have been heard of yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from extproc.core.effects import Effect, Tell
from extproc.core.peers import AskLevels, Levels, Spent

if TYPE_CHECKING:
    from extproc.admission.limits import LocalLimits

# Questions, one with each of the first heartbeats; nobody answers a process that is alone.
_MOST_QUESTIONS: Final = 20


class LevelExchange:
    """Speaks and listens for one process. ``origin``: its name among the others. ``machine``: None if it is alone."""

    def __init__(self, limits: LocalLimits, *, machine: str | None, origin: str) -> None:
        self._limits = limits
        self._machine = machine
        self._origin = origin
        self._questions = 0
        # whether another process has told what there was before
        self.is_told = False

    def ask(self, out: list[Effect]) -> None:
        """With a heartbeat."""
        if self._machine is not None and not self.is_told and self._questions < _MOST_QUESTIONS:
            self._questions += 1
            out.append(Tell(AskLevels(self._machine)))

    def hear(self, event: Spent | AskLevels | Levels, origin: str, now: float, out: list[Effect]) -> None:
        """The process ``origin`` has said this; only what is about this machine matters."""
        match event:
            case Spent() if event.machine == self._machine:
                self._limits.spent_elsewhere(event.key, event.limit, event.amount, now)
            case AskLevels() if event.machine == self._machine:
                out.append(Tell(Levels(origin, self._limits.levels(now))))
            case Levels() if event.asker == self._origin:
                self._limits.lower(event.levels, now)
                self.is_told = True
