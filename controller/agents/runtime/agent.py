# SPDX-License-Identifier: Apache-2.0
"""The agent's parts joined: probes, metrics, drain and adapters, until its termination."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Final

from controller.agents.runtime.adapter_files import AdapterFiles
from controller.agents.runtime.adapter_loader import AdapterLoader, LoadRefused
from controller.agents.runtime.declared_adapters import DeclaredAdaptersFile
from controller.agents.runtime.drain import Drainer, EngineLoad
from controller.agents.runtime.engine_watch import EngineWatch
from controller.agents.runtime.metrics import AgentCounters, AgentState, BatchCounters, render_agent_metrics

if TYPE_CHECKING:
    from collections.abc import Callable

    from controller.agents.runtime.adapter_files import Downloader
    from controller.agents.runtime.batcher import Batcher
    from controller.agents.runtime.engine_client import EngineClient
    from controller.agents.runtime.settings import AgentSettings

# Of the engine's metrics on a page of ours.
_PAGE_AGE_S: Final = 1.0

log = logging.getLogger(__name__)


class EngineAgent:
    """``clock``: monotonic seconds; ``unix_clock``: that of engines' timestamps. ``follow_s``: seconds between two
    reads of adapters. ``batcher``: through which all requests of the engine come, once it runs.
    """

    def __init__(
        self,
        settings: AgentSettings,
        engine: EngineClient,
        downloads: Downloader,
        *,
        clock: Callable[[], float],
        unix_clock: Callable[[], float],
        follow_s: float = 2.0,
    ) -> None:
        self.settings = settings
        dialect = settings.dialect
        self.batcher: Batcher | None = None
        self.batches = BatchCounters()
        self._counters = AgentCounters(batches=None if settings.batcher is None else self.batches)
        self._clock = clock
        self._follow_s = follow_s
        self.watch = EngineWatch(settings, engine, self._counters, clock=clock, unix_clock=unix_clock)
        self.drainer = Drainer(settings.drain, self._load, finishes_requests=dialect.finishes_requests, clock=clock)
        adapters = settings.adapters
        # of the file, since the engine started
        self._has_pinned = adapters.file is None
        self.file = DeclaredAdaptersFile(adapters.file, adapters.policy, is_directory=dialect.adapters == "repository")
        self.loader = AdapterLoader(
            adapters,
            dialect,
            engine=engine,
            files=AdapterFiles(adapters, downloads, dialect),
            file=self.file,
            counters=self._counters,
            page=self.watch.metrics_page,
            clock=clock,
        )

    @property
    def is_draining(self) -> bool:
        """From the begin of a drain until it is taken back."""
        return self.drainer.drain is not None

    def why_not_ready(self) -> str:
        """Empty if the engine should get requests. Pinned adapters are loaded first; one that fails delays readiness
        for a limited time.
        """
        why = self.watch.why_not_ready(is_draining=self.is_draining)
        if not why and self.settings.dialect.adapters and not self._has_pinned:
            return "pinned adapters are being loaded"
        return why

    async def run(self) -> None:
        """Serve until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.watch.probe_forever())
                tasks.create_task(self.watch.poll_metrics_forever())
                tasks.create_task(self.drainer.run())
                if self.settings.dialect.adapters:
                    tasks.create_task(self._follow_adapters())
        finally:
            await self.loader.aclose()

    async def run_until(self, ending: asyncio.Event) -> None:
        """Until ``ending`` is set, and then until the engine is drained: the agent must not go before the engine."""
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(self.run())
            await ending.wait()
            await self.drainer.start_drain()
            await self.drainer.wait_until_drained()
            running.cancel()

    async def metrics_page(self) -> str:
        """Prometheus' text format."""
        page = await self.watch.metrics_page(_PAGE_AGE_S)
        drain, slots = self.drainer.drain, 0
        if page is not None and page.adapters is not None:
            slots = page.adapters.slots
        state = AgentState(
            dialect=self.settings.dialect.name,
            is_ready=not self.why_not_ready(),
            is_alive=not self.watch.why_not_alive(),
            has_answered=self.watch.health.phase != "starting",
            drain_s=None if drain is None else (drain.ended_at_s or self._clock()) - drain.began_at_s,
            file_is_good=not self.file.problem,
            coming=len(self.loader.adapters_being_loaded),
            limit=self.loader.limit or slots,
        )
        return render_agent_metrics(page, state, self._counters)

    async def _load(self) -> EngineLoad:
        load = await self.watch.engine_load()
        if self.batcher is None:
            return load
        return EngineLoad(running=max(load.running or 0, self.batcher.in_flight), waiting=load.waiting or 0)

    async def _follow_adapters(self) -> None:
        was_starting = True
        while True:
            is_starting = self.watch.health.phase == "starting"
            if is_starting and not was_starting:
                self.loader.on_engine_restart()
                self._has_pinned = self.settings.adapters.file is None
            was_starting = is_starting
            if is_starting and self.settings.dialect.adapters != "repository":
                # a mistake in it is reported early
                self.file.poll()
            elif not self.is_draining:
                # a V2 server answers for its models only once they are loaded
                with contextlib.suppress(LoadRefused):  # the engine cannot report now: it is queried again
                    self._has_pinned = await self.loader.apply_declared_file() or self._has_pinned
            await asyncio.sleep(self._follow_s)
