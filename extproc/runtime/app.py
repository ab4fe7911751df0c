"""Puts the parts together and runs them until a signal: pipeline, gRPC server, directory feed, metrics page."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import secrets
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web
from prometheus_client import disable_created_metrics, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from extproc.config.directory import ConfigDirectory
from extproc.core.pipeline import Pipeline
from extproc.core.types import Held
from extproc.feeds.directory import DirectoryFeed
from extproc.feeds.engines import EngineScraper
from extproc.feeds.kv_events import KvEventFeed
from extproc.feeds.redis_limits import RedisLimits
from extproc.feeds.tokens import Tokenizers
from extproc.metrics.decision_log import DecisionLog
from extproc.metrics.registry import Metrics
from extproc.replication.local_bus import LocalBus
from extproc.replication.peers import Bus, Peers
from extproc.replication.redis_bus import RedisBus
from extproc.runtime.explain_page import ExplainPage
from extproc.streams.duplex import Duplex
from extproc.streams.entry import GrantWanted, TokensWanted
from extproc.streams.exchange import Desk, Exchange, GatewayOptions
from extproc.streams.server import GrpcServer
from extproc.streams.waiting_room import WaitingRoom

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from extproc.admission.limits import Ask, Grant, Usage
    from extproc.config.types import Snapshot
    from extproc.core.types import Released
    from extproc.replication.messages import EngineSaid
    from extproc.streams.entry import Answer, Pending

log = logging.getLogger(__name__)


class Worker(msgspec.Struct, frozen=True):
    """One of several processes on this machine; ``directory`` holds the sockets between them."""

    number: int
    workers: int
    directory: Path


class Settings(msgspec.Struct, frozen=True):
    """``listen``: ``ip:port`` or ``unix:path``. ``metrics``: host and port of /metrics and /readyz, or None."""

    config: ConfigDirectory
    listen: str
    metrics: tuple[str, int] | None
    drain_s: float
    settle_s: float
    gateway: GatewayOptions = GatewayOptions()
    # where a share of decisions is written down, if anywhere
    decision_log: Path | None = None
    decision_share: float = 0.01
    # /debug/explain: it shows who has asked what, so it is not for everybody
    shows_reasons: bool = False
    worker: Worker | None = None
    redis: str | None = None
    redis_channel: str = "attache"


async def serve(settings: Settings, snapshot: Snapshot) -> None:
    """Run one process, beginning with ``snapshot``, until it is told to stop."""
    await App(settings, snapshot).run()


class App:
    """One extproc process, made inside the event loop. The edges (clocks, randomness) are chosen here, nowhere else."""

    def __init__(self, settings: Settings, snapshot: Snapshot) -> None:
        self._settings = settings
        clock = self._clock = time.monotonic  # noqa: TID251 - the edge
        wall_clock = time.time  # noqa: TID251 - the edge
        self._is_ready = False
        origin = secrets.token_hex(6)
        self._pipeline = Pipeline(snapshot, rng=random.Random(), ticket_prefix=origin, elsewhere=self)
        self._log_file = None if settings.decision_log is None else settings.decision_log.open("a")
        decisions = DecisionLog(
            self._log_file, share=settings.decision_share, rng=random.Random(), wall_clock=wall_clock
        )
        self._metrics = Metrics(
            lambda: list(self._pipeline.pools.values()),
            wall_clock,
            clock,
            decisions,
            lambda: self._pipeline.admission.gates,
        )
        self._room = WaitingRoom(self._pipeline, clock, self._released)
        changed = self._room.notify
        self._feed = DirectoryFeed(
            settings.config, self._pipeline, self._metrics, settle_s=settings.settle_s, changed=changed
        )
        self._feed.started_with(snapshot)
        self._kv_events = KvEventFeed(self._pipeline, self._metrics)
        self._tokenizers = Tokenizers(self._metrics)
        self._limits: RedisLimits | None = None
        if settings.redis is not None:
            self._limits = RedisLimits(settings.redis, settings.redis_channel, self._metrics, clock)
        # workers of one start have their sockets in one directory
        machine = origin if settings.worker is None else str(settings.worker.directory)
        self._peers = Peers(
            self._pipeline,
            self._metrics,
            _buses(settings),
            origin=origin,
            clock=clock,
            machine=machine,
            changed=changed,
        )
        self._scraper = EngineScraper(
            self._pipeline, self._metrics, clock=clock, rng=random.Random(), share=self._engine_said
        )
        desk = self._desk = Desk(
            self._pipeline, self._metrics, clock, int(wall_clock()), settings.gateway, self._peers, changed
        )
        self._server = GrpcServer(
            desk,
            new_exchange=lambda is_trusted: Exchange(desk, Duplex, is_trusted=is_trusted),
            answer_to=self._answer_to,
        )

    def settle(self, grant: Grant, used: Usage | None) -> None:
        """To the store of global limits."""
        if self._limits is not None:
            self._limits.settle(grant, used)

    def spent(self, ask: Ask, amount: float) -> None:
        """To the other workers."""
        self._peers.spent(ask, amount)

    async def _answer_to(self, pending: Pending) -> Answer:
        """What a request waits for."""
        match pending:
            case TokensWanted():
                return await self._tokenizers.tokens_of(pending.arrival)
            case GrantWanted():
                return None if self._limits is None else await self._limits.reserve(pending.asks)
            case Held():
                return await self._room.wait(pending)

    def _released(self, one: Released) -> None:
        self._desk.released(one)

    def _engine_said(self, event: EngineSaid) -> None:
        self._peers.tell(event)
        self._room.notify()

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT, then drain. A second signal ends the drain."""
        stop = _on_signals()
        pages = await self._serve_pages()
        await self._server.start(self._settings.listen)
        self._is_ready = True
        # a third of all series, and nobody asks for them
        disable_created_metrics()  # type: ignore[no-untyped-call]  # the library leaves its annotation out
        _spare_the_collector()
        log.info("listening on %s", self._settings.listen)
        try:
            async with asyncio.TaskGroup() as tasks:
                feeds = [tasks.create_task(one) for one in self._feeds()]
                await stop.wait()
                self._is_ready = False
                await self._drain(stop)
                for feed in feeds:
                    feed.cancel()
        finally:
            await self._tokenizers.close()
            if self._log_file is not None:
                self._log_file.close()
            if pages is not None:
                await pages.cleanup()

    def _feeds(self) -> list[Coroutine[None, None, None]]:
        """What runs beside the server. Of several workers the first asks the engines, for all."""
        feeds = [self._feed.watch(), self._kv_events.run(), self._peers.run()]
        if self._limits is not None:
            feeds.append(self._limits.run())
        worker = self._settings.worker
        return feeds if worker is not None and worker.number else [*feeds, self._scraper.run()]

    async def _drain(self, stop: asyncio.Event) -> None:
        log.info("draining: running streams may take up to %g s", self._settings.drain_s)
        stop.clear()
        await self._server.stop(self._settings.drain_s, hurry=stop)
        log.info("drained")

    async def _serve_pages(self) -> web.AppRunner | None:
        if self._settings.metrics is None:
            return None
        app = web.Application()
        app.add_routes([web.get("/metrics", self._show_metrics), web.get("/readyz", self._show_readiness)])
        if self._settings.shows_reasons:
            page = ExplainPage(self._pipeline, self._tokenizers.tokens_of, self._clock)
            app.add_routes([web.post("/debug/explain/{path:.*}", page.show)])
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        host, port = self._settings.metrics
        await web.TCPSite(runner, host, port).start()
        return runner

    async def _show_metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _show_readiness(self, _: web.Request) -> web.Response:
        return web.Response(text="ready\n") if self._is_ready else web.Response(text="not ready\n", status=503)


def _buses(settings: Settings) -> list[Bus]:
    buses: list[Bus] = []
    if settings.worker is not None:
        buses.append(LocalBus(settings.worker.directory, settings.worker.number, settings.worker.workers))
    if settings.redis is not None:
        buses.append(RedisBus(settings.redis, settings.redis_channel))
    return buses


def _spare_the_collector() -> None:
    """What is here now stays for ever, and requests leave no cycles: looking through all of it again and again is waste."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def _on_signals() -> asyncio.Event:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop
