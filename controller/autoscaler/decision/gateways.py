# SPDX-License-Identifier: Apache-2.0
"""Which extproc processes of which gateways speak, since when, and which of them have been replaced by others."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import msgspec

from controller.autoscaler.decision.heard import Heard, bounded

if TYPE_CHECKING:
    from collections.abc import Iterator

    from extproc.api.status_pages import Demand

# They say something once a second.
SILENT_AFTER_S: Final = 3.0
# Processes of a gateway that are remembered, those that have ended included.
_MOST_PROCESSES: Final = 64
_LONGEST_SLOT: Final = 100
_LONGEST_INSTANCE: Final = 400


class Process(msgspec.Struct):
    """``heard_at_s``: when it spoke last. ``whole_since_s``: since when it has been heard without a gap; minus
    infinity: since it began. ``servers``: what it said of each.
    """

    name: str
    slot: str
    born_at_s: float
    heard_at_s: float
    sequence: int
    whole_since_s: float
    servers: dict[str, Heard] = {}

    def is_silent(self, now: float) -> bool:
        """Whether it has not spoken for longer than it should."""
        return now - self.heard_at_s > SILENT_AFTER_S


class Gateway(msgspec.Struct):
    """A pod, or another place where processes run. ``seen_at_s``: since when it is known. ``processes``: by name, all
    that spoke. ``slots``: when each was heard or heard of. ``gap_at_s``: the end of the last time in which a process
    may have counted what nobody heard.
    """

    seen_at_s: float
    processes: dict[str, Process] = {}
    slots: dict[str, float] = {}
    gap_at_s: float = -math.inf

    def hear(self, said: Demand, now: float, *, follows_since_s: float) -> tuple[Process, float] | None:
        """The process that speaks, and until when it was heard before (or when it was born); None if this is no news.

        ``follows_since_s``: a process that was born later is known from its beginning.
        """
        if said.slot not in self.slots and (len(self.slots) >= _MOST_PROCESSES or len(said.slot) > _LONGEST_SLOT):
            return None
        self.slots.setdefault(said.slot, now)
        if not said.instance or len(said.instance) > _LONGEST_INSTANCE:
            return None
        known = self.processes.get(said.instance)
        if known is None:
            return self._meet(said, now, follows_since_s)
        if said.sequence <= known.sequence:
            return None
        before_s = known.heard_at_s
        if known.is_silent(now):
            known.whole_since_s = now
        known.sequence, known.heard_at_s, known.slot = said.sequence, now, said.slot
        return known, before_s

    def expects(self, said: Demand) -> bool:
        """Whether its process is known, in the same place."""
        known = self.processes.get(said.instance)
        return known is not None and known.slot == said.slot

    def steady(self, now: float) -> list[Process] | None:
        """Those that run, if each place of one has spoken lately; None otherwise."""
        found: list[Process] = []
        for slot in self.slots:
            here = self._of_slot(slot, now)
            if not here or any(one.is_silent(now) for one in here):
                return None
            found += here
        return found or None

    def living(self, now: float) -> list[Process]:
        """Those that run, or may: all but those that another one has replaced."""
        found: list[Process] = []
        for slot in self.slots:
            found += self._of_slot(slot, now)
        return found

    def silent(self, now: float) -> Iterator[str]:
        """Slots of which nothing is heard, or not of every process."""
        if not self.slots and now - self.seen_at_s > SILENT_AFTER_S:
            yield ""
        for slot, since_s in self.slots.items():
            here = self._of_slot(slot, now)
            if any(one.is_silent(now) for one in here) or (not here and now - since_s > SILENT_AFTER_S):
                yield slot

    def is_unheard(self) -> bool:
        """Whether it has not said anything yet."""
        return not self.processes

    def whole_since_s(self, now: float) -> float:
        """Since when nothing can be missing of what it counted."""
        if self.is_unheard():
            return now
        return max([self.gap_at_s, *(one.whole_since_s for one in self.living(now))])

    def _meet(self, said: Demand, now: float, follows_since_s: float) -> tuple[Process, float]:
        """A process speaks for the first time."""
        born_at_s = now - bounded(said.age_s)
        begins = born_at_s >= follows_since_s and now - born_at_s <= SILENT_AFTER_S
        if any(
            one.slot == said.slot and born_at_s - one.heard_at_s > SILENT_AFTER_S for one in self.processes.values()
        ):
            # what ended was silent before
            self.gap_at_s = max(self.gap_at_s, born_at_s)
        met = Process(said.instance, said.slot, born_at_s, now, said.sequence, -math.inf if begins else now)
        self.processes[met.name] = met
        self._forget(now)
        return met, born_at_s

    def _of_slot(self, slot: str, now: float) -> list[Process]:
        """A slot with a name has one process at a time. Else each process that begins replaces one that was silent
        then.
        """
        here = [one for one in self.processes.values() if one.slot == slot]
        if len(here) <= 1:
            return here
        here.sort(key=lambda one: one.born_at_s)
        if slot:
            return here[-1:]
        living = [one for one in here if not one.is_silent(now)]
        gone = [one for one in here if one.is_silent(now)]
        for one in living:
            replaced = next((other for other in gone if other.heard_at_s <= one.born_at_s), None)
            if replaced is not None:
                gone.remove(replaced)
        return [*gone, *living]

    def _forget(self, now: float) -> None:
        """Those that ended first, if there were very many."""
        if len(self.processes) > _MOST_PROCESSES:
            living = {one.name for one in self.living(now)}
            ended = [one for one in self.processes.values() if one.name not in living]
            oldest = min(ended or self.processes.values(), key=lambda one: one.heard_at_s)
            del self.processes[oldest.name]
