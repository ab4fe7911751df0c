# SPDX-License-Identifier: Apache-2.0
"""Puts the parts of one process together, and runs them until a signal."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import math
import os
import random
import secrets
import signal
import socket
import time
from datetime import UTC, datetime
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
from prometheus_client import disable_created_metrics

from extproc.api.addresses import join_host_port
from extproc.api.config_loader import ConfigSource
from extproc.api.config_snapshot import file_descriptor_warnings, max_idle_connections, missing_redis_warnings
from extproc.api.gateway_config import why_extproc_unreachable
from extproc.api.tracing import Tracing
from extproc.core.breakers import server_breaker_problems
from extproc.core.core import Core
from extproc.core.effects import AbortDecode, CancelPrefill, LoadAdapter, LogUsage, Prefill
from extproc.core.limit_accounting import NO_OTHERS, MachineGrantLedger
from extproc.feeds.config_directory import DirectoryFeed
from extproc.feeds.engine_http import EngineCredentials
from extproc.feeds.engine_scraper import EngineScraper
from extproc.feeds.guard_client import GuardClient
from extproc.feeds.kv_events import KvEventFeed
from extproc.feeds.loaded_models import ModelRepositoryReader
from extproc.feeds.payload_exporter import PayloadExporter
from extproc.feeds.redis_limits import RedisLimits
from extproc.feeds.saved_limits import SavedLimits
from extproc.feeds.saved_slo_counts import SavedSloCounts
from extproc.feeds.shared_limit_grants import MmapGrantLedger
from extproc.feeds.state_lock import StateLock
from extproc.feeds.tokenizers import Tokenizers
from extproc.feeds.trace_exporter import TraceExporter
from extproc.feeds.usage_log_writer import UsageLogWriter
from extproc.feeds.usage_rollup_client import UsageRollupClient
from extproc.line_writer import LineWriter, make_threadsafe_callback
from extproc.listen_sockets import listen
from extproc.llmd.picker_builder import PickerFactory
from extproc.metrics.decision_log import DecisionLog
from extproc.metrics.request_metrics import Metrics, TlsMetrics
from extproc.replication.buses import RedisBus, UnixSocketBus
from extproc.replication.peer_event_exchange import Bus, PeerEventExchange
from extproc.runtime.demand_watch import DemandWatchServer
from extproc.runtime.effect_performer import Performer, PreDecisionServices
from extproc.runtime.worker_settings import WorkerSettings
from extproc.scheduling.model_check import model_problems
from extproc.sd_notify import ALIVE, READY, STOPPING, notify, watchdog_s
from extproc.streams.duplex import DuplexExchange
from extproc.streams.exchange import Exchange
from extproc.streams.health import HealthPort
from extproc.streams.server import GrpcServer
from extproc.streams.stream_dependencies import GatewayOptions, StreamContext
from extproc.streams.tls import ReloadingCertificate, TlsFiles, TlsRequirements
from extproc.task_supervisor import Supervisor

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from aiohttp import web

    from extproc.admission.token_buckets import BucketLevel
    from extproc.api.config_snapshot import Snapshot
    from extproc.api.status_page_contents import ConfigReport
    from extproc.core.effects import Work
    from extproc.core.peer_events import PeerEvent
    from extproc.feeds.adapter_loader import AdapterLoader
    from extproc.feeds.prefill_client import PrefillClient
    from extproc.line_writer import LineResult

log = logging.getLogger(__name__)
# How long a worker that starts waits for another one's levels; they answer within some 0.1 s.
_LONGEST_ASK_S: Final = 0.6
_ASK_PAUSE_S: Final = 0.01
PATIENCE_S: Final = 30.0
_POLL_S: Final = 1.0
# Of reports to a supervisor that the process is alive, unless it asks for more.
_REPORT_S: Final = 0.5
# After a successor has taken over the pages.
_LAST_PAGE_S: Final = 0.5
_TRIM_EACH_S: Final = 60.0
_SHADOW_REPORT_S: Final = 60.0


class GrpcTls(msgspec.Struct, frozen=True):
    """The gRPC port has TLS. ``files``: of the certificate; None: a self-signed one."""

    files: TlsFiles | None = None
    limits: TlsRequirements = TlsRequirements()


class Settings(msgspec.Struct, frozen=True):
    """``listen``: ``ip:port`` or ``unix:path``. ``metrics``: host and port of /metrics and /readyz, or the path of a
    socket, or None. ``files``: what names of files in documents are relative to; None: the directory.
    ``grace_s``: how long requests are still taken after SIGTERM; ``drain_s``: how long they may then take to end.
    """

    config: ConfigSource
    listen: str
    metrics: tuple[str, int] | Path | None
    grace_s: float
    drain_s: float
    settle_s: float
    gateway: GatewayOptions = GatewayOptions()
    # where a share of decisions is written down, if anywhere
    decision_log: Path | None = None
    decision_share: float = 0.01
    # serve /debug/explain; it reveals which prompts of others are cached: for operators only
    shows_reasons: bool = False
    worker: WorkerSettings | None = None
    # where all processes of this machine listen; empty if their caller is not ours to configure
    listens: tuple[str, ...] = ()
    redis: str | None = None
    redis_channel: str = "attache"
    # where the levels of local limits outlive the process, if anywhere
    state: Path | None = None
    # where gRPC's health service listens beside the port of the streams, if anywhere
    health: str | None = None
    tls: GrpcTls | None = None
    # where the usage process answers, if there is one
    usage_api: str | None = None
    # where the manager's pages are, for the console
    manager: str | None = None
    # has the token that the console asks for, if it asks for one
    console_token: Path | None = None
    # metrics under the names of llm-d's picker, too
    has_llm_d_names: bool = False
    files: Path | None = None
    # where spans go; None: where the GatewayConfig says
    otlp: Tracing | None = None
    # how many file descriptors the process may have
    descriptors: float = math.inf


async def serve(settings: Settings, snapshot: Snapshot) -> None:
    """Run one process, beginning with ``snapshot``, until a termination signal."""
    await App(settings, snapshot).run()


class App:
    """One extproc process, made inside the event loop. Clocks and random numbers are chosen here, nowhere else."""

    def __init__(self, settings: Settings, snapshot: Snapshot) -> None:
        self._settings = settings
        clock = self._clock = time.monotonic  # noqa: TID251 - the edge
        wall_clock = self._wall_clock = time.time  # noqa: TID251 - the edge
        self._is_ready = self._is_draining = False
        self._has_pool = asyncio.Event()
        origin = secrets.token_hex(6)
        self._neighbours = None if settings.worker is None else UnixSocketBus(Path(settings.worker.directory), origin)
        buses = self._buses()
        # workers of one start have their sockets in one directory
        machine = origin if settings.worker is None else settings.worker.directory
        core = self._core = Core(
            snapshot,
            rng=random.Random(),
            ticket_prefix=origin,
            make_picker=PickerFactory(),
            machine=machine if buses else None,
            recent=self._recent_grants(origin),
            has_readers=self._has_readers,
        )
        core.align_with_wall_clock(wall_clock(), clock())
        self._log_file = self._open_decision_log()
        metrics = self._metrics = self._make_metrics(self._log_file)
        access = self._access = EngineCredentials(os.environ, clock, settings.files or settings.config.path)
        self._tokenizers, source = Tokenizers(metrics, access), f"urn:attache:{socket.gethostname()}"
        self._guards = GuardClient(access, clock=clock, source=source)
        self._limits: RedisLimits | None = None
        if settings.redis is not None:
            self._limits = RedisLimits(settings.redis, settings.redis_channel, metrics, clock, process=origin)
        number = 0 if settings.worker is None else settings.worker.number
        self._owner = None if settings.state is None else StateLock(settings.state, number)
        self._saved = self._load_saved(number)
        demand = self._demand = DemandWatchServer(core, clock)
        self._supervisor = Supervisor(metrics.count_feed_failure)
        self._peers = PeerEventExchange(buses, metrics, origin=origin)
        performer = self._performer = Performer(
            core,
            metrics,
            clock=clock,
            services=PreDecisionServices(self._tokenizers, self._guards, self._limits),
            publish=self._publish,
            begin=self._begin,
            done=demand.notify_followers,
        )
        self._loader: AdapterLoader | None = None
        self._prefills: PrefillClient | None = None
        self._rollups = None if settings.usage_api is None else self._usage_rollups(settings.usage_api)
        self._feed = DirectoryFeed(
            settings.config, core, metrics, settle_s=settings.settle_s, apply=self._apply, clock=clock
        )
        self._feed.set_initial_snapshot(snapshot)
        self._missed, self._warnings = "", list[str]()
        self._after_load(snapshot)
        self._certificate: ReloadingCertificate | None = None
        if settings.tls is not None:
            tls_metrics = TlsMetrics(metrics.registry)
            tls, now = settings.tls, lambda: datetime.now(UTC)
            self._certificate = ReloadingCertificate(tls.files, tls_metrics, now, tls.limits)
        self._kv_events = KvEventFeed(core, metrics, self._supervisor)
        self._scraper = EngineScraper(
            core,
            metrics,
            access=access,
            clock=clock,
            rng=random.Random(),
            deliver=performer.on_engine_report,
            most_connections=max_idle_connections(settings.descriptors),
        )
        traces = self._traces = TraceExporter(
            lambda: settings.otlp or core.snapshot.gateway.tracing,
            metrics.count_traces,
            clock=clock,
            wall_clock=wall_clock,
            process=origin,
            files=settings.files or settings.config.path,
        )
        payloads = self._payloads = PayloadExporter(
            lambda: core.snapshot.gateway.payload_log,
            lambda: core.payload_logs,
            metrics.registry,
            clock=clock,
            wall_clock=wall_clock,
            source=source,
        )
        streams = StreamContext(
            core,
            metrics,
            clock,
            performer.perform,
            int(wall_clock()),
            settings.gateway,
            traces=traces,
            payloads=payloads,
        )
        self._server = GrpcServer(
            streams,
            new_exchange=lambda of_stream, is_trusted, origin: Exchange(
                of_stream, DuplexExchange, is_trusted=is_trusted, origin=origin
            ),
            answer_to=performer.wait_for_answer,
            before_each=demand.yield_to_followers,
        )
        self._health_port = HealthPort(self._server.health)

    @cached_property
    def _usage_lines(self) -> UsageLogWriter:
        return UsageLogWriter(lambda: self._core.snapshot.gateway.usage_log, self._metrics.registry)

    def _recent_grants(self, origin: str) -> MachineGrantLedger:
        worker = self._settings.worker
        if worker is None:
            return NO_OTHERS
        try:
            return MmapGrantLedger(Path(worker.directory), origin, self._clock)
        except OSError as error:
            log.warning("workers share limits by messages alone, some milliseconds late: %s", error)
            return NO_OTHERS

    def _buses(self) -> list[Bus]:
        settings = self._settings
        buses: list[Bus] = [] if self._neighbours is None else [self._neighbours]
        if settings.redis is not None:
            buses.append(RedisBus(settings.redis, settings.redis_channel))
        return buses

    def _make_metrics(self, log_file: LineWriter | None) -> Metrics:
        core, settings = self._core, self._settings
        decision_log = None
        if log_file is not None:
            decision_log = DecisionLog(
                log_file.enqueue,
                share=settings.decision_share,
                rng=random.Random(),
                wall_clock=self._wall_clock,
                explains_all=settings.gateway.emits_scores,
            )
        made = Metrics(
            lambda: list(core.pools.values()),
            self._wall_clock,
            self._clock,
            lambda: core.admission.gates,
            core.meter.waiting_in,
            budget_levels=self._budget_levels,
            has_llm_d_names=settings.has_llm_d_names,
            decision_log=decision_log,
        )
        made.objectives.set_source(core.objective_classes)
        made.caches.set_store(core.stored_answers)
        made.registry.names.set_source(core.configured_names)
        return made

    def _open_decision_log(self) -> LineWriter | None:
        settings = self._settings
        if settings.decision_log is None:
            return None

        def count(result: LineResult, lines: int) -> None:
            self._metrics.count_log_lines(result, lines)

        return LineWriter(settings.decision_log, make_threadsafe_callback(asyncio.get_running_loop(), count))

    def _load_saved(self, number: int) -> dict[str, SavedLimits | SavedSloCounts]:
        """What outlives the process and was saved, by the name of its feed; raises OSError if there can be no
        directory.
        """
        directory, owner, limits = self._settings.state, self._owner, self._core.admission.limits
        if directory is None or owner is None:
            return {}
        saved: dict[str, SavedLimits | SavedSloCounts] = {
            "saved_levels": SavedLimits(
                limits,
                directory,
                pools=lambda: self._core.pools,
                number=number,
                clock=self._clock,
                wall_clock=self._wall_clock,
                owns=owner.try_acquire,
            ),
            "saved_objectives": SavedSloCounts(
                self._metrics.objectives, directory, number=number, owns=owner.try_acquire
            ),
        }
        for one in saved.values():
            one.load()
        return saved

    def _usage_rollups(self, url: str) -> UsageRollupClient:
        return UsageRollupClient(
            url,
            self._core,
            self._limits,
            clock=self._clock,
            wall_clock=self._wall_clock,
            perform=self._performer.perform,
        )

    def _begin(self, ask: Work) -> None:
        """Have an engine load an adapter, or prefill, or write a line; the HTTP client comes with the first of them."""
        match ask:
            case LoadAdapter():
                self._loads().start_load(ask)
            case Prefill():
                self._legs().start_prefill(ask)
            case CancelPrefill():
                self._legs().cancel_prefill(ask.ticket, after_s=ask.after_s)
            case AbortDecode():
                self._legs().abort_decode(ask)
            case LogUsage():
                self._usage_lines.add(ask.line)

    def _loads(self) -> AdapterLoader:
        if self._loader is None:
            from extproc.feeds.adapter_loader import AdapterLoader  # noqa: PLC0415 - as the pages' HTTP library

            self._loader = AdapterLoader(
                self._core, self._access, clock=self._clock, deliver=self._performer.on_work_result
            )
        return self._loader

    def _legs(self) -> PrefillClient:
        if self._prefills is None:
            from extproc.feeds.prefill_client import PrefillClient  # noqa: PLC0415 - likewise

            self._prefills = PrefillClient(
                self._core, self._access, clock=self._clock, deliver=self._performer.on_work_result
            )
        return self._prefills

    def _apply(self, snapshot: Snapshot) -> None:
        self._performer.apply(snapshot)
        self._after_load(snapshot)

    def _after_load(self, snapshot: Snapshot) -> None:
        """Called when a configuration has been put into use."""
        self._access.retain_only(self._core.pools.values(), snapshot.gateway.guards)
        pool = self._settings.gateway.pool
        if pool is None or any(server.metadata.key == pool for server in snapshot.servers):
            self._has_pool.set()
        self._check_listener(snapshot)
        if self._rollups is not None:
            self._rollups.on_config()
        worker = self._settings.worker
        if worker is not None and worker.number:
            return
        warnings = [*file_descriptor_warnings(snapshot, self._settings.descriptors)]
        if self._settings.redis is None:
            warnings += missing_redis_warnings(snapshot)
        for warning in warnings:
            if warning not in self._warnings:
                log.warning("%s", warning)
        self._warnings = warnings

    def _check_listener(self, snapshot: Snapshot) -> None:
        """Log if Envoy is configured to call another address: once, by the first of several workers, and again when it
        changes.
        """
        missed = why_extproc_unreachable(snapshot.gateway, self._settings.listens) if self._settings.listens else ""
        self._metrics.set_listener_reachable(is_reachable=not missed)
        worker = self._settings.worker
        if missed and missed != self._missed and (worker is None or not worker.number):
            log.warning("%s", missed)
        self._missed = missed

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT, then drain. A second signal ends the drain. SIGUSR1: a successor takes new
        requests from now on.
        """
        signals = _Signals()
        reporting = asyncio.create_task(self._keep_reporting())
        try:
            await self._run(signals)
        finally:
            reporting.cancel()

    async def _run(self, signals: _Signals) -> None:
        sharing = asyncio.create_task(self._supervisor.run("peers", self._share))
        try:
            await self._ask_others()
            if self._rollups is not None:
                await self._rollups.load()
            await self._listen()
        except BaseException:
            sharing.cancel()
            raise
        pages = await self._serve_pages()
        # a third of all series, and never scraped
        disable_created_metrics()  # type: ignore[no-untyped-call]  # the library leaves its annotation out
        _spare_the_collector()
        log.info("listening on %s", self._settings.listen)
        try:
            async with asyncio.TaskGroup() as tasks:
                supervised = [self._supervisor.run(name, feed) for name, feed in self._feeds().items()]
                beside = [_until_done(sharing), self._hand_over(signals.succeeded, pages)]
                feeds = [tasks.create_task(one) for one in [*supervised, *beside]]
                await _first_of(signals.stop, signals.succeeded)
                self._is_ready, self._is_draining = False, True
                await self._drain(signals)
                for feed in feeds:
                    feed.cancel()
        finally:
            for saved in self._saved.values():
                # the loop stands still while files are written: each has all the time that a supervisor gives
                notify(ALIVE, os.environ)
                saved.save()
            await self._traces.close()
            await self._payloads.close()
            await self._usage_lines.close()
            await self._tokenizers.close()
            await self._guards.close()
            for begun in (self._loader, self._prefills):
                if begun is not None:
                    await begun.close()
            if self._log_file is not None:
                await asyncio.to_thread(self._log_file.close)
            await self._health_port.stop()
            if pages is not None:
                await pages.cleanup()

    async def _listen(self) -> None:
        tls = None if self._certificate is None else self._certificate.context
        settings, worker = self._settings, self._settings.worker
        await self._server.start(_listening(settings.listen, None if worker is None else worker.listen), tls)
        if settings.health is not None:
            await self._health_port.start(_listening(settings.health, None if worker is None else worker.health))
        if self._has_pool.is_set():
            await self._be_ready()

    async def _be_ready(self) -> None:
        """Take requests, once there is the ModelServer of --pool."""
        if not self._has_pool.is_set():
            log.info("not ready before the directory has the ModelServer %s", self._settings.gateway.pool)
            await self._has_pool.wait()
        if not self._is_draining and not self._is_ready:
            self._is_ready = True
            self._server.health.set_ready(is_ready=True)
            # what is ready is watched, though the loop may not have had a turn to report in
            notify(b"\n".join((ALIVE, READY)), os.environ)

    def _feeds(self) -> dict[str, Callable[[], Awaitable[None]]]:
        """Tasks that run next to the server, by name. Of several workers the first scrapes engines, for all."""
        feeds: dict[str, Callable[[], Awaitable[None]]] = {
            "directory": self._feed.watch,
            "kv_events": self._kv_events.run,
            "readiness": self._be_ready,
            "heap": _keep_heap_trimmed,
            "wall_clock": self._follow_wall_clock,
            "traces": self._traces.run,
            "payloads": self._payloads.run,
        }
        if self._certificate is not None:
            feeds["certificate"] = self._certificate.watch_files
        if self._settings.listens:
            feeds["contact"] = partial(watch_envoy_contact, self._settings.listen, self._metrics, self._clock)
        if self._limits is not None:
            feeds["redis_limits"] = self._limits.run
        feeds |= {name: one.run for name, one in self._saved.items()}
        if self._rollups is not None:
            feeds["usage_rollups"] = self._rollups.run
        if self._settings.gateway.shadows:
            feeds["shadow"] = self._report_shadow
        worker = self._settings.worker
        if worker is None or not worker.number:
            feeds["engines"] = self._scraper.run
            feeds["repositories"] = ModelRepositoryReader(
                self._core, self._access, deliver=self._performer.on_engine_report
            ).run
        return feeds

    async def _follow_wall_clock(self) -> None:
        """Once a second, until cancelled: clocks may be set, and windows of budgets end."""
        while True:
            self._core.align_with_wall_clock(self._wall_clock(), self._clock())
            await asyncio.sleep(_POLL_S)

    def _budget_levels(self) -> Iterator[BucketLevel]:
        """Of this machine's budgets, and of those that machines share as last known."""
        yield from self._core.admission.limits.budget_levels()
        if self._limits is not None:
            yield from self._limits.budget_levels()

    async def _report_shadow(self) -> None:
        """Log once a minute how often the other picker's choice is ours, and once more at the end."""
        try:
            while True:
                await asyncio.sleep(_SHADOW_REPORT_S)
                self._log_shadow()
        finally:
            self._log_shadow()

    def _log_shadow(self) -> None:
        if line := self._metrics.shadow.report():
            log.info("%s", line)

    async def _keep_reporting(self) -> None:
        """Report that the event loop runs, if that is asked for, until cancelled."""
        due_s = watchdog_s(os.environ)
        while due_s is not None:
            notify(ALIVE, os.environ)
            await asyncio.sleep(min(_REPORT_S, due_s / 2))

    async def _hand_over(self, succeeded: asyncio.Event, pages: web.AppRunner | None) -> None:
        """Leave the successor what one process alone can have: files, the pages and the health port."""
        await succeeded.wait()
        for saved in self._saved.values():
            saved.hand_over()
        if self._owner is not None:
            self._owner.release()
        await self._health_port.stop()
        if pages is not None:
            for site in pages.sites:
                await site.stop()
            # who has connected already has not sent the request yet
            await asyncio.sleep(_LAST_PAGE_S)
            await pages.cleanup()

    def _publish(self, event: PeerEvent) -> None:
        """Send it to the other processes, if there are any."""
        if self._has_readers():
            self._peers.publish(event)

    def _has_readers(self) -> bool:
        return self._settings.redis is not None or (self._neighbours is not None and self._neighbours.has_readers)

    async def _share(self) -> None:
        await self._peers.run(on_batch=self._performer.on_peer_batch, heartbeat=self._performer.heartbeat)

    async def _ask_others(self) -> None:
        """A process with others beside it does not serve before one has sent the levels of limits, if one can."""
        others, waited_s = self._neighbours, 0.0
        while (
            others is not None and others.peer_files() and not self._core.levels.is_told and waited_s < _LONGEST_ASK_S
        ):
            await asyncio.sleep(_ASK_PAUSE_S)
            waited_s += _ASK_PAUSE_S

    async def _drain(self, signals: _Signals) -> None:
        drain_s, succeeded = self._settings.drain_s, signals.succeeded
        grace_s = 0.0 if succeeded.is_set() else self._settings.grace_s
        taken = f"requests are taken for {grace_s:g} s more, then " if grace_s else ""
        log.info("draining: %srunning streams may take up to %g s", taken, drain_s)
        notify(STOPPING, os.environ)
        if not succeeded.is_set():
            # gateways notice, and send new streams elsewhere
            self._server.health.set_ready(is_ready=False)
            await _first_of(signals.hurry, succeeded, within_s=grace_s)
        await self._server.stop(drain_s=drain_s, hurry=signals.hurry)
        log.info("drained")

    def _report(self) -> ConfigReport:
        wrong_models = model_problems(self._core.pools.values())
        breakers = server_breaker_problems(self._core.pools.values(), self._clock())
        return msgspec.structs.replace(
            self._feed.report,
            wrong_models=wrong_models,
            open_breakers=breakers,
            warming=self._feed.warming_servers,
        )

    async def _serve_pages(self) -> web.AppRunner | None:
        settings, worker, address = self._settings, self._settings.worker, self._settings.metrics
        if address is None:
            return None
        # the HTTP library takes as long to load as all else, and requests need not wait for it
        from extproc.console.pages import ConsolePages, ConsoleWorkerInfo  # noqa: PLC0415
        from extproc.console.token_auth import token_auth_middleware  # noqa: PLC0415
        from extproc.runtime.admin_pages import ExplainPage, breaker_reset_page, objectives_page, serve_pages  # noqa: PLC0415

        explain = ExplainPage(
            self._core, self._tokenizers.tokens_of, self._clock, settings.gateway, guard_says=self._guards.ask_guard
        )
        console = ConsolePages(
            self._core,
            self._metrics,
            clock=self._clock,
            wall_clock=self._wall_clock,
            is_ready=lambda: self._is_ready,
            report=self._report,
            place=ConsoleWorkerInfo(
                address,
                *((0, 1) if worker is None else (worker.number, worker.workers)),
                has_explain=settings.shows_reasons,
                usage_api=settings.usage_api,
                manager=settings.manager,
            ),
        )
        where = f"unix:{address}" if isinstance(address, Path) else join_host_port(*address)
        return await serve_pages(
            _listening(where, None if worker is None else worker.metrics),
            self._metrics.registry,
            is_ready=lambda: self._is_ready,
            report=self._report,
            loads=self._core.engine_loads_by_pool,
            demand=self._demand,
            explain=explain if settings.shows_reasons else None,
            others=[
                *console.routes(),
                objectives_page(self._metrics.objectives.report),
                breaker_reset_page(self._core, self._clock, self._performer.perform),
            ],
            guard=None if settings.console_token is None else token_auth_middleware(settings.console_token),
        )


async def _until_done(task: asyncio.Task[None]) -> None:
    """Await a task that was started earlier, as a member of a task group."""
    await task


def _listening(address: str, inherited: int | None) -> socket.socket:
    return listen(address) if inherited is None else socket.socket(fileno=inherited)


def _spare_the_collector() -> None:
    """Freeze start-up objects: requests make no cycles, so the collector need not scan them.

    gRPC makes one for each call. Those that outlive a young collection go with the next one of the middle generation.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 4, 100)


async def _keep_heap_trimmed() -> None:
    """Trim the heap once a minute until cancelled, in a thread: it takes 1 to 2 ms."""
    while True:
        await asyncio.sleep(_TRIM_EACH_S)
        await asyncio.to_thread(trim_heap)


def trim_heap() -> None:
    """Return pages of freed memory to the system, where the C library can (glibc).

    Each change of a large configuration is decoded into new objects, and the pages between those that stay would be
    kept: with 1,000 models and a change a second, some 10 MiB an hour.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class _Signals:
    """``stop``: the process is to end. ``hurry``: a second time, so its requests are not waited for. ``succeeded``: a
    successor takes new requests.
    """

    def __init__(self) -> None:
        self.stop, self.hurry, self.succeeded = asyncio.Event(), asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._end)
        loop.add_signal_handler(signal.SIGUSR1, self.succeeded.set)

    def _end(self) -> None:
        (self.hurry if self.stop.is_set() else self.stop).set()


async def _first_of(*events: asyncio.Event, within_s: float | None = None) -> None:
    """Until one of the events is set."""
    waiting = [asyncio.create_task(event.wait()) for event in events]
    await asyncio.wait(waiting, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
    for one in waiting:
        one.cancel()


class EnvoySilenceDetector:
    """Detects that neither streams nor health checks of Envoy arrive."""

    def __init__(self, *, started_at_s: float) -> None:
        self._started_at_s = started_at_s
        self._is_missed = False

    def update(self, now: float, *, last_stream_at_s: float, last_check_at_s: float) -> bool | None:
        """Whether Envoy is missed, if that has changed. Instants are 0 if there was none.

        A gateway that sends health checks is missed when they stop. From another one, requests may stay away for hours.
        """
        last_at_s = max(last_stream_at_s, last_check_at_s)
        is_silent = now - max(self._started_at_s, last_at_s) >= PATIENCE_S
        is_missed = is_silent and bool(last_check_at_s or not last_at_s)
        if is_missed == self._is_missed:
            return None
        self._is_missed = is_missed
        return is_missed


async def watch_envoy_contact(listen: str, metrics: Metrics, clock: Callable[[], float]) -> None:
    """Log when Envoy's streams stay away, until cancelled. ``listen``: where Envoy should call."""
    contact = EnvoySilenceDetector(started_at_s=clock())
    while True:
        await asyncio.sleep(_POLL_S)
        is_missed = contact.update(
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
