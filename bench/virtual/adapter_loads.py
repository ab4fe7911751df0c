# SPDX-License-Identifier: Apache-2.0
"""Loads of adapters in virtual time: an engine forgets one at once, and has the other after a while"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from extproc.core.record import LoadResult

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from bench.virtual.engines import VirtualEngine
    from bench.virtual.event_queue import EventQueue
    from extproc.core.effects import LoadAdapter


class VirtualLoads:
    """Performs LoadAdapter effects. ``loads``: by what came of them; ``unloads``: how many."""

    def __init__(
        self,
        engines: Mapping[str, VirtualEngine],
        events: EventQueue,
        load_s: float,
        deliver: Callable[[LoadResult, float], None],
    ) -> None:
        """``load_s``: what a load takes. ``deliver``: gets every result, and its instant."""
        self.loads: Counter[str] = Counter()
        self.unloads = 0
        self._engines = engines
        self._events = events
        self._load_s = load_s
        self._deliver = deliver

    def begin(self, ask: LoadAdapter, now: float) -> None:
        """The engine begins to load."""
        adapters = self._engines[ask.address].adapters
        unloaded = () if ask.unload is None else (ask.unload,)
        self.unloads += len(adapters.intersection(unloaded))
        adapters.difference_update(unloaded)

        def ended(later: float) -> None:
            self.loads["was there" if ask.adapter in adapters else "loaded"] += 1
            adapters.add(ask.adapter)
            result = LoadResult(ask.server, ask.address, ask.adapter, unloaded=unloaded, duration_s=later - now)
            self._deliver(result, later)

        self._events.at(now + self._load_s, ended)
