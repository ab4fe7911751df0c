# SPDX-License-Identifier: Apache-2.0
"""Puts the parts of one process together, and runs them until a signal."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import random
import secrets
import signal
import time
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Final

from prometheus_client import disable_created_metrics

from extproc.api.gateway_config import unreachable_listener
from extproc.api.snapshot import kept_connections, limits_without_redis, missing_descriptors
from extproc.core.core import Core
from extproc.failures import Supervisor
from extproc.feeds.directory import DirectoryFeed
from extproc.feeds.engine_access import EngineAccess
from extproc.feeds.engines import EngineScraper
from extproc.feeds.kv_events import KvEventFeed
from extproc.feeds.redis_limits import RedisLimits
from extproc.feeds.saved_levels import SavedLevels
from extproc.feeds.tokens import Tokenizers
from extproc.metrics.decision_log import DecisionLog
from extproc.metrics.registry import Metrics, TlsMetrics
from extproc.replication.buses import LocalBus, RedisBus
from extproc.replication.peers import Bus, Peers
from extproc.runtime.demand_watch import DemandWatch
from extproc.runtime.performer import Performer
from extproc.streams.context import StreamContext
from extproc.streams.duplex import Duplex
from extproc.streams.exchange import Exchange
from extproc.streams.server import GrpcServer, HealthPort
from extproc.streams.tls import FollowedCertificate

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from aiohttp import web

    from extproc.api.snapshot import Snapshot
    from extproc.core.effects import LoadAdapter
    from extproc.feeds.adapters import AdapterLoader
    from extproc.runtime.settings import Settings

log = logging.getLogger(__name__)
# How long a worker that starts waits for another one's word; they answer within some 0.1 s.
_LONGEST_ASK_S: Final = 0.6
_ASK_PAUSE_S: Final = 0.01
PATIENCE_S: Final = 30.0
_POLL_S: Final = 1.0


async def serve(settings: Settings, snapshot: Snapshot) -> None:
    """Run one process, beginning with ``snapshot``, until it is told to stop."""
    await App(settings, snapshot).run()


class App:
    """One extproc process, made inside the event loop. Clocks and random numbers are chosen here, nowhere else."""

    def __init__(self, settings: Settings, snapshot: Snapshot) -> None:
        self._settings = settings
        clock = self._clock = time.monotonic  # noqa: TID251 - the edge
        wall_clock = time.time  # noqa: TID251 - the edge
        self._is_ready = self._is_draining = False
        self._has_pool = asyncio.Event()
        origin, buses = secrets.token_hex(6), _buses(settings)
        # workers of one start have their sockets in one directory
        machine = origin if settings.worker is None else str(settings.worker.directory)
        core = self._core = Core(
            snapshot, rng=random.Random(), ticket_prefix=origin, machine=machine if buses else None
        )
        self._log_file = None if settings.decision_log is None else settings.decision_log.open("a")
        decisions = None
        if self._log_file is not None:
            decisions = DecisionLog(
                self._log_file, share=settings.decision_share, rng=random.Random(), wall_clock=wall_clock
            )
        metrics = self._metrics = Metrics(
            lambda: list(core.pools.values()), wall_clock, clock, decisions, lambda: core.admission.gates, core.at_zero
        )
        access = EngineAccess(os.environ, clock, settings.config.path)
        self._tokenizers = Tokenizers(metrics, access)
        self._limits: RedisLimits | None = None
        if settings.redis is not None:
            self._limits = RedisLimits(settings.redis, settings.redis_channel, metrics, clock, process=origin)
        self._saved: SavedLevels | None = None
        if settings.state is not None:
            number, limits = 0 if settings.worker is None else settings.worker.number, core.admission.limits
            self._saved = SavedLevels(limits, settings.state, number=number, clock=clock, wall_clock=wall_clock)
            self._saved.load()
        demand = self._demand = DemandWatch(core, clock)
        self._supervisor = Supervisor(metrics.feed_failed)
        self._peers = Peers(buses, metrics, origin=origin)
        performer = self._performer = Performer(
            core,
            metrics,
            clock=clock,
            tokenizers=self._tokenizers,
            limits=self._limits,
            tell=self._peers.tell,
            load=self._load,
            done=demand.look,
        )
        self._loader: AdapterLoader | None = None
        self._access = access
        self._feed = DirectoryFeed(
            settings.config, core, metrics, settle_s=settings.settle_s, apply=self._apply, clock=clock
        )
        self._feed.started_with(snapshot)
        self._missed = ""
        self._warnings: list[str] = []
        self._look_at(snapshot)
        self._certificate: FollowedCertificate | None = None
        if settings.tls is not None:
            tls_metrics = TlsMetrics(metrics.registry)
            self._certificate = FollowedCertificate(settings.tls.files, tls_metrics, lambda: datetime.now(UTC))
        self._kv_events = KvEventFeed(core, metrics, self._supervisor)
        self._scraper = EngineScraper(
            core,
            metrics,
            access=access,
            clock=clock,
            rng=random.Random(),
            deliver=performer.take_report,
            most_connections=kept_connections(settings.descriptors),
        )
        streams = StreamContext(core, metrics, clock, performer.perform, int(wall_clock()), settings.gateway)
        self._server = GrpcServer(
            streams,
            new_exchange=lambda is_trusted, origin: Exchange(streams, Duplex, is_trusted=is_trusted, origin=origin),
            answer_to=performer.answer_to,
            before_each=demand.let_go_first,
        )
        self._health_port = HealthPort(self._server.health)

    def _load(self, ask: LoadAdapter) -> None:
        """Have an engine load an adapter; the HTTP client comes with the first of them."""
        if self._loader is None:
            from extproc.feeds.adapters import AdapterLoader  # noqa: PLC0415 - as the pages' HTTP library

            self._loader = AdapterLoader(self._core, self._access, clock=self._clock, deliver=self._performer.take_load)
        self._loader.start(ask)

    def _apply(self, snapshot: Snapshot) -> None:
        self._performer.apply(snapshot)
        self._look_at(snapshot)

    def _look_at(self, snapshot: Snapshot) -> None:
        """What follows from a configuration that is in use from now on."""
        pool = self._settings.gateway.pool
        if pool is None or any(server.metadata.key == pool for server in snapshot.servers):
            self._has_pool.set()
        self._look_for_envoy(snapshot)
        worker = self._settings.worker
        if worker is not None and worker.number:
            return
        warnings = [*missing_descriptors(snapshot, self._settings.descriptors)]
        if self._settings.redis is None:
            warnings += limits_without_redis(snapshot)
        for warning in warnings:
            if warning not in self._warnings:
                log.warning("%s", warning)
        self._warnings = warnings

    def _look_for_envoy(self, snapshot: Snapshot) -> None:
        """Say if Envoy will call elsewhere: once, by the first of several workers, and again when it changes."""
        missed = unreachable_listener(snapshot.gateway, self._settings.listens) if self._settings.listens else ""
        self._metrics.meets_envoy(is_met=not missed)
        worker = self._settings.worker
        if missed and missed != self._missed and (worker is None or not worker.number):
            log.warning("%s", missed)
        self._missed = missed

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT, then drain. A second signal ends the drain."""
        stop = _on_signals()
        sharing = asyncio.create_task(self._supervisor.run("peers", self._share))
        try:
            await self._ask_others()
            await self._listen()
        except BaseException:
            sharing.cancel()
            raise
        pages = await self._serve_pages()
        # a third of all series, and nobody asks for them
        disable_created_metrics()  # type: ignore[no-untyped-call]  # the library leaves its annotation out
        _spare_the_collector()
        log.info("listening on %s", self._settings.listen)
        try:
            async with asyncio.TaskGroup() as tasks:
                supervised = [self._supervisor.run(name, feed) for name, feed in self._feeds().items()]
                feeds = [tasks.create_task(one) for one in [*supervised, _until_done(sharing)]]
                await stop.wait()
                self._is_ready, self._is_draining = False, True
                await self._drain(stop)
                for feed in feeds:
                    feed.cancel()
        finally:
            if self._saved is not None:
                self._saved.save()
            await self._tokenizers.close()
            if self._loader is not None:
                await self._loader.close()
            if self._log_file is not None:
                self._log_file.close()
            await self._health_port.stop()
            if pages is not None:
                await pages.cleanup()

    async def _listen(self) -> None:
        credentials = None if self._certificate is None else self._certificate.credentials
        await self._server.start(self._settings.listen, credentials)
        if self._settings.health is not None:
            await self._health_port.start(self._settings.health)
        if self._has_pool.is_set():
            await self._be_ready()

    async def _be_ready(self) -> None:
        """Take requests, once there is the ModelServer of --pool."""
        if not self._has_pool.is_set():
            log.info("not ready before the directory has the ModelServer %s", self._settings.gateway.pool)
            await self._has_pool.wait()
        if not self._is_draining and not self._is_ready:
            self._is_ready = True
            await self._server.health.be_ready(is_ready=True)

    def _feeds(self) -> dict[str, Callable[[], Awaitable[None]]]:
        """What runs beside the server, by name. Of several workers the first asks the engines, for all."""
        feeds: dict[str, Callable[[], Awaitable[None]]] = {
            "directory": self._feed.watch,
            "kv_events": self._kv_events.run,
            "readiness": self._be_ready,
        }
        if self._certificate is not None:
            feeds["certificate"] = self._certificate.follow
        if self._settings.listens:
            feeds["contact"] = partial(watch_contact, self._settings.listen, self._metrics, self._clock)
        if self._limits is not None:
            feeds["redis_limits"] = self._limits.run
        if self._saved is not None:
            feeds["saved_levels"] = self._saved.run
        worker = self._settings.worker
        if worker is None or not worker.number:
            feeds["engines"] = self._scraper.run
        return feeds

    async def _share(self) -> None:
        await self._peers.run(hear=self._performer.hear, beat=self._performer.beat)

    async def _ask_others(self) -> None:
        """A worker among several does not serve before another has told it what limits have granted, if one can."""
        worker, waited_s = self._settings.worker, 0.0
        while worker is not None and worker.workers > 1 and not self._core.levels.is_told and waited_s < _LONGEST_ASK_S:
            await asyncio.sleep(_ASK_PAUSE_S)
            waited_s += _ASK_PAUSE_S

    async def _drain(self, stop: asyncio.Event) -> None:
        log.info("draining: running streams may take up to %g s", self._settings.drain_s)
        stop.clear()
        await self._server.stop(self._settings.drain_s, hurry=stop)
        log.info("drained")

    async def _serve_pages(self) -> web.AppRunner | None:
        if self._settings.metrics is None:
            return None
        # the HTTP library takes as long to load as all else, and requests need not wait for it
        from extproc.runtime.pages import ExplainPage, serve_pages  # noqa: PLC0415

        explain = ExplainPage(self._core, self._tokenizers.tokens_of, self._clock, self._settings.gateway)
        return await serve_pages(
            self._settings.metrics,
            self._metrics.registry,
            is_ready=lambda: self._is_ready,
            report=lambda: self._feed.report,
            loads=self._core.loads_in_parts,
            demand=self._demand,
            explain=explain if self._settings.shows_reasons else None,
        )


async def _until_done(task: asyncio.Task[None]) -> None:
    """A task that was started earlier, as one of a group."""
    await task


def _buses(settings: Settings) -> list[Bus]:
    buses: list[Bus] = []
    if settings.worker is not None:
        buses.append(LocalBus(settings.worker.directory, settings.worker.number, settings.worker.workers))
    if settings.redis is not None:
        buses.append(RedisBus(settings.redis, settings.redis_channel))
    return buses


def _spare_the_collector() -> None:
    """Freeze start-up objects: requests make no cycles, so the collector need not scan them."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def _on_signals() -> asyncio.Event:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop


class Contact:
    """Whether Envoy is missed: it has not come for a while, or stays away."""

    def __init__(self, *, started_at_s: float) -> None:
        self._started_at_s = started_at_s
        self._is_missed = False

    def look(self, now: float, *, last_stream_at_s: float, last_check_at_s: float) -> bool | None:
        """Whether Envoy is missed, if that has changed. Instants are 0 if there was none.

        A gateway that asks for health is missed when it asks no more. From another one, requests may stay away for
        hours.
        """
        last_at_s = max(last_stream_at_s, last_check_at_s)
        is_silent = now - max(self._started_at_s, last_at_s) >= PATIENCE_S
        is_missed = is_silent and bool(last_check_at_s or not last_at_s)
        if is_missed == self._is_missed:
            return None
        self._is_missed = is_missed
        return is_missed


async def watch_contact(listen: str, metrics: Metrics, clock: Callable[[], float]) -> None:
    """Until cancelled. ``listen``: where Envoy should call."""
    contact = Contact(started_at_s=clock())
    while True:
        await asyncio.sleep(_POLL_S)
        is_missed = contact.look(
            clock(), last_stream_at_s=metrics.last_stream_at_s, last_check_at_s=metrics.last_check_at_s
        )
        if is_missed:
            log.warning(
                "no Envoy has called %s for %g s; see that Envoy runs with the bundle of this directory, that 'extproc'"
                " in its GatewayConfig is this address, and that no firewall is between them",
                listen,
                PATIENCE_S,
            )
        elif is_missed is not None:
            log.info("Envoy has called %s again", listen)
