# SPDX-License-Identifier: Apache-2.0
"""Scrapes the metrics of every engine a few times a second, for the pools; and the load of providers that report it.

Each endpoint has its own timer and connection, so an engine that hangs does not delay others. After a failed scrape the
last report stays in use and ages. An error in one engine's answers, or in their processing, counts as that engine's
failure: it is logged once, and the engine is read at growing intervals.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import math
from collections import deque
from typing import TYPE_CHECKING, Final

from extproc.api.addresses import parse_address
from extproc.api.config_snapshot import scrape_interval_factor, scrape_interval_warnings
from extproc.core.peer_events import EngineReported
from extproc.engines.engine_responses import UnreadableResponse, parse_gateway_load, parse_model_list
from extproc.engines.metrics import EngineMetrics, EngineReport, MetricsReader
from extproc.engines.prometheus_text import MetricsPageRefused
from extproc.feeds.http_get import PersistentConnection, encode_get_request

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterable

    from extproc.api.config_snapshot import Snapshot
    from extproc.core.core import Core
    from extproc.engines.dialects import Dialect
    from extproc.feeds.engine_http import EngineCredentials
    from extproc.metrics.request_metrics import Metrics
    from extproc.scheduling.pool import Pool

log = logging.getLogger(__name__)

_MODELS_PATH: Final = "/v1/models"
_TIMEOUT_S: Final = 2.0
# Between two tries of an engine that fails: so long at most an engine that is back goes unnoticed.
_MAX_PAUSE_S: Final = 2.0
# After a page of a MiB, which takes up to 15 ms to read. Ordinary pages, of 200 KB at most, are read at any interval.
_PAUSE_S_PER_BYTE: Final = 1.0 / 2**20
# Of all engines together, which takes up to a quarter of a core. Engines with ordinary pages do not wait for it.
_BYTES_PER_S: Final = 16 << 20
_ORDINARY_BYTES: Final = 256 << 10
# What is expected of an engine's next page falls to no less than this share. After one of 4 MiB, that is more than an
# ordinary page for 276 pages, nearly a minute.
_REMEMBERED: Final = 0.99
# Intervals of reading the list of models, which changes when adapters are loaded: of engines with adapters, and of
# others.
_MODELS_INTERVAL_S: Final = 1.0
_MODELS_LONG_INTERVAL_S: Final = 5.0
# A list of models is read in place of metrics, every fourth time at most.
_READS_A_LIST: Final = 4
# Scrapes are started in batches: waking up for each engine would cost several times as much as the scrape.
_TICK_S: Final = 0.025
# In a batch. Their answers come together, and at 60 us each they hold up requests for a few milliseconds. Four thousand
# a second are more than the intervals ever require.
_MOST_AT_ONCE: Final = 100
# New endpoints that are prepared in a batch, at some 15 us each.
_MOST_FOLLOWED: Final = 300
# Of engines that fail or are back, so many are named in the log in each period, and the others are counted.
_MOST_NAMED: Final = 5
_LOG_PERIOD_S: Final = 10.0


class _Followed:
    """The endpoints of one pool, by address. ``basis``: the pool's inputs that they were made from. ``spec``: the
    pool's when its endpoints were last updated.
    """

    def __init__(self, pool: Pool, basis: object) -> None:
        self.pool = pool
        self.spec = pool.spec
        self.basis = basis
        self.polls: dict[str, _Poll] = {}


def _basis(pool: Pool) -> object:
    spec = pool.spec
    return spec.engine, spec.provider, pool.scrape_config, spec.connection, pool.metrics


class ScrapeByteBucket:
    """A token bucket of the bytes of pages, for a second at most. It may be overdrawn."""

    def __init__(self, now: float) -> None:
        self._left = float(_BYTES_PER_S)
        self._at_s = now

    def is_empty(self, now: float) -> bool:
        """Whether more was taken than there was."""
        self._left = min(_BYTES_PER_S, self._left + (now - self._at_s) * _BYTES_PER_S)
        self._at_s = now
        return self._left <= 0

    def spend(self, size: float) -> None:
        """Of a page that is asked for or has come; negative: of one that was shorter than expected."""
        self._left -= size


class EngineScraper:
    """Scrapes each endpoint of each pool that has a scrape interval.

    All intervals together cause no more reads than ``scrape_interval_factor`` allows. Endpoints that are due wait for
    each other, the longest due first. Those with long pages also wait for the budget of bytes; ``budget``: what is
    left.
    """

    def __init__(
        self,
        core: Core,
        metrics: Metrics,
        *,
        access: EngineCredentials,
        clock: Callable[[], float],
        rng: random.Random,
        deliver: Callable[[EngineReported], object],
        most_connections: float = math.inf,
    ) -> None:
        """``access``: TLS and keys of engines. ``deliver``: receives every report. ``most_connections``: that are kept
        between two scrapes; further engines get one for each.
        """
        self._access = access
        self.deliver = deliver
        self._core = core
        self._metrics = metrics
        self._clock = clock
        self._rng = rng
        self._followed: dict[str, _Followed] = {}
        # pools whose endpoints have yet to be scheduled
        self._changed: dict[str, _Followed] = {}
        # by the time at which each is due; an entry whose engine has another time by now is void
        self._due: list[tuple[float, int, _Poll]] = []
        self._numbers = itertools.count()
        self.budget = ScrapeByteBucket(clock())
        # engines with long pages that are due, with the time at which each was
        self._held: deque[tuple[float, _Poll]] = deque()
        self._most_connections = most_connections
        self._kept: set[_Poll] = set()
        self._stretch = 1.0
        self.log = _BoundedLog(clock)

    async def run(self) -> None:
        """Scrape the configured endpoints until cancelled, following changes of the configuration."""
        seen: object = None
        async with asyncio.TaskGroup() as group:
            try:
                while True:
                    if seen is not self._core.snapshot:
                        seen = self._core.snapshot
                        self._follow()
                        self._report_stretch(self._core.snapshot)
                    self._follow_some(group)
                    self._start_due(self._clock())
                    self.log.tick()
                    await asyncio.sleep(_TICK_S)
            finally:
                for followed in self._followed.values():
                    for poll in followed.polls.values():
                        poll.stop()

    def schedule_poll(self, at_s: float, poll: _Poll) -> None:
        """The engine is due then, and not before."""
        poll.next_at_s = at_s
        heapq.heappush(self._due, (at_s, next(self._numbers), poll))

    def try_keep_open(self, poll: _Poll) -> bool:
        """Whether the engine's connection may stay open: descriptors are left for Envoy's."""
        if poll not in self._kept and len(self._kept) < self._most_connections:
            self._kept.add(poll)
        return poll in self._kept

    def _start_due(self, now: float) -> None:
        due, held, started = self._due, self._held, 0
        while held and started < _MOST_AT_ONCE and not self.budget.is_empty(now):
            at_s, poll = held.popleft()
            if poll.next_at_s == at_s:
                poll.tick(now)
                started += 1
        while due and due[0][0] <= now and started < _MOST_AT_ONCE:
            at_s, _, poll = heapq.heappop(due)
            if poll.next_at_s != at_s:
                continue
            if poll.has_long_pages and (held or self.budget.is_empty(now)):
                held.append((at_s, poll))
                continue
            poll.tick(now)
            started += 1

    def _report_stretch(self, snapshot: Snapshot) -> None:
        """Once, until it is another one by a quarter or more."""
        stretch, before = scrape_interval_factor(snapshot.servers), self._stretch
        self._metrics.set_scrape_interval_factor(stretch)
        if max(stretch, before) >= 1.25 * min(stretch, before):
            self._stretch = stretch
            for note in scrape_interval_warnings(snapshot):
                log.warning("%s", note)

    def _follow(self) -> None:
        """Compare each pool with its last state; changed ones are updated in ``_follow_some``."""
        pools = self._core.pools
        for name in self._followed.keys() - pools.keys():
            self._stop(self._followed.pop(name).polls.values())
        for name, pool in pools.items():
            known, basis = self._followed.get(name), _basis(pool)
            if known is not None and known.pool is pool and known.spec is pool.spec and known.basis == basis:
                continue
            if known is None or known.pool is not pool or known.basis != basis:
                if known is not None:
                    self._stop(known.polls.values())
                known = self._followed[name] = _Followed(pool, basis)
            known.spec = pool.spec
            self._changed[name] = known

    def _follow_some(self, group: asyncio.TaskGroup) -> None:
        """Endpoints of pools that have changed: all of one, and of more while that is quick."""
        seen = 0
        while self._changed and seen < _MOST_FOLLOWED:
            name = next(iter(self._changed))
            known = self._changed.pop(name)
            if self._followed.get(name) is known:
                seen += len(known.pool.table)
                self._follow_endpoints(known, group)

    def _follow_endpoints(self, known: _Followed, group: asyncio.TaskGroup) -> None:
        pool, polls = known.pool, known.polls
        wanted: dict[str, Dialect] = {}
        if pool.report_interval_s > 0:
            wanted = {address: pool.dialect_of(address) for address in pool.table.active_addresses}
        left = [address for address, poll in polls.items() if wanted.get(address) is not poll.dialect]
        self._stop([polls.pop(address) for address in left])
        for address in wanted:
            if address not in polls:
                polls[address] = _Poll(
                    pool,
                    address,
                    self._metrics,
                    group,
                    self._access,
                    clock=self._clock,
                    rng=self._rng,
                    scraper=self,
                )

    def _stop(self, polls: Iterable[_Poll]) -> None:
        for poll in polls:
            poll.stop()
            self._kept.discard(poll)


class _BoundedLog:
    """Lines of many engines at once: of each kind the first few of a period are named, and the others counted."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._counts: dict[tuple[int, str], int] = {}
        self._ends_at_s = 0.0

    def note(self, level: int, line: str, others: str, error: Exception | None = None) -> None:
        """``others``: logged in place of further lines, after their number. ``error``: logged with its traceback."""
        if not self._counts:
            self._ends_at_s = self._clock() + _LOG_PERIOD_S
        count = self._counts[level, others] = self._counts.get((level, others), 0) + 1
        if count <= _MOST_NAMED:
            log.log(level, "%s", line, exc_info=error)

    def tick(self) -> None:
        """Log the counted lines and begin a new period, if the period is over."""
        if self._counts and self._clock() >= self._ends_at_s:
            for (level, others), count in self._counts.items():
                if count > _MOST_NAMED:
                    log.log(level, "%d %s", count - _MOST_NAMED, others)
            self._counts.clear()


class _Poll:
    """Scrapes one engine: its metrics, and less often its list of models."""

    def __init__(
        self,
        pool: Pool,
        address: str,
        metrics: Metrics,
        group: asyncio.TaskGroup,
        access: EngineCredentials,
        *,
        clock: Callable[[], float],
        rng: random.Random,
        scraper: EngineScraper,
    ) -> None:
        self._deliver = scraper.deliver
        self._scraper = scraper
        self._pool, self._address = pool, address
        self._metrics, self._group, self._clock, self._rng = metrics, group, clock, rng
        self._host, self._port = parse_address(address)
        self._access = access
        # with the key at the time of the connection; after a refusal, a new connection is made
        self._metrics_request = self._models_request = b""
        dialect = self.dialect = pool.dialect_of(address)
        self._reader = MetricsReader(dialect, custom=pool.metrics)
        scrape = pool.scrape_config
        self._metrics_path = scrape.path or dialect.metrics_path
        self._metrics_port = scrape.port or dialect.metrics_port or self._port
        # the list of models is on the endpoint's own port, over a connection for each list
        self._is_apart = self._metrics_port != self._port or scrape.connection != pool.spec.connection
        # whether it can have adapters, as far as it has reported
        self._has_loras = False
        self._connection: PersistentConnection | None = None
        self._models_connection: PersistentConnection | None = None
        self._reads_models = False
        self._is_scraping = False
        # bytes, as much as was taken from the budget when it was asked
        self._expected = 0.0
        self._asked_at_s = clock()
        provider = pool.spec.provider
        # what it is called, if its load is read and nothing else
        self._authority = "" if provider is None else provider.authority
        # metrics are read before the first list of models
        self._pause_s = pool.report_interval_s
        self._models_at_s = clock() + self._pause_s if provider is None else math.inf
        self._is_stopped = False
        self._loop = asyncio.get_running_loop()
        # spread the first scrapes over an interval
        self.next_at_s = math.inf
        scraper.schedule_poll(clock() + self._pause_s * rng.random(), self)
        self._connecting: asyncio.Task[None] | None = None
        # the last warnings, not to be repeated until they change or the engine has answered again
        self._said = self._models_said = ""

    def stop(self) -> None:
        """Stop scraping and close the connection."""
        self._is_stopped, self.next_at_s = True, math.inf
        if self._connecting is not None:
            self._connecting.cancel()
        for connection in (self._connection, self._models_connection):
            if connection is not None:
                connection.abort()
        # they refer to this poll: with its buffers it would wait for the collector
        self._connecting = self._connection = self._models_connection = None

    @property
    def has_long_pages(self) -> bool:
        """Whether the next scrape waits for the budget; one that is running does not."""
        return self._expected > _ORDINARY_BYTES and not self._is_scraping

    def tick(self, now: float) -> None:
        """Start a scrape; one that is still running after its timeout has failed."""
        if self._is_scraping:
            self._time_out(now)
            return
        self._is_scraping = True
        self._asked_at_s = now
        self._scraper.budget.spend(self._expected)
        self._scraper.schedule_poll(now + _TIMEOUT_S, self)
        try:
            self._start(now)
        except Exception as error:  # noqa: BLE001 - whatever it is, the other engines are scraped
            self._failed(_unforeseen(error), error)

    def _time_out(self, now: float) -> None:
        if self._connecting is not None and not self._connecting.done():
            # that has its own timeout
            self._scraper.schedule_poll(now + _TICK_S, self)
            return
        message = f"no answer within {_TIMEOUT_S:g} s"
        connection = self._models_connection if self._is_apart and self._reads_models else self._connection
        if connection is not None and connection.is_busy:
            connection.abort(message)
        else:
            self._failed(message)

    def _start(self, now: float) -> None:
        self._reads_models = now >= self._models_at_s
        is_other = self._is_apart and self._reads_models
        if is_other or self._connection is None or not self._connection.is_open:
            self._connecting = self._group.create_task(self._connect())
            return
        self._connection.send_request(self._models_request if self._reads_models else self._metrics_request)

    async def _connect(self) -> None:
        connection = PersistentConnection(self._take, self._failed)
        spec, is_other = self._pool.spec, self._is_apart and self._reads_models
        port = self._port if is_other else self._metrics_port
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                towards = spec.connection if is_other else self._pool.scrape_config.connection
                access = await self._access.settings_for_engine(spec, self._address, towards)
                await self._loop.create_connection(
                    lambda: connection,
                    self._host,
                    port,
                    ssl=access.tls,
                    server_hostname=access.server_name,
                )
        except (OSError, ValueError) as error:  # includes TimeoutError
            self._reads_models = False
            self._failed(f"cannot connect: {str(error) or 'no answer'}")
            return
        except Exception as error:  # noqa: BLE001 - whatever it is, the other engines are scraped
            self._reads_models = False
            self._failed(_unforeseen(error), error)
            return
        models_request = encode_get_request(self._host, port, _MODELS_PATH, access.authorization)
        if is_other:
            self._models_connection = connection
            connection.send_request(models_request)
            return
        self._metrics_request = encode_get_request(
            self._host, port, self._metrics_path, access.authorization, authority=self._authority
        )
        self._models_request = models_request
        self._connection = connection
        connection.send_request(models_request if self._reads_models else self._metrics_request)

    def _failed(self, message: str, unforeseen: Exception | None = None) -> None:
        """``unforeseen``: an error of our own code, whose traceback is logged."""
        if self._is_stopped:
            return
        if self._reads_models:
            self._models_failed(message, unforeseen)
        else:
            self._engine_failed(message, unforeseen)

    def _engine_failed(self, message: str, unforeseen: Exception | None = None) -> None:
        self._pause_s = back_off_s(self._pause_s, self._pool.report_interval_s)
        self._schedule_next()
        self._metrics.count_scrape_failure(self._pool.name)
        if message != self._said:
            self._said = message
            self._scraper.log.note(
                logging.WARNING,
                f"cannot scrape engine {self._address}: {message}; using our own counts instead",
                "more engines cannot be scraped; attache top names them",
                unforeseen,
            )

    def _models_failed(self, message: str, unforeseen: Exception | None) -> None:
        """The list of models failed. Metrics are read all the same: they fail, too, if the engine is gone."""
        self._schedule_next()
        self._models_at_s = self._clock() + self._models_pause_s(_MODELS_LONG_INTERVAL_S)
        if message != self._models_said:
            self._models_said = message
            # without adapters the list is not needed
            self._scraper.log.note(
                logging.WARNING if self._may_change_models or unforeseen else logging.INFO,
                f"engine {self._address} shows no list of its models at {_MODELS_PATH}: {message}; "
                "it counts as having no other adapters than before",
                "more engines show no list of their models",
                unforeseen,
            )

    def _schedule_next(self) -> None:
        self._is_scraping = False
        # counted from the start of the last scrape; ticks are half a tick late on average
        pause_s = self._pause_s * self._rng.uniform(0.9, 1.1) - _TICK_S / 2
        self._scraper.schedule_poll(self._asked_at_s + pause_s, self)
        if self._connection is not None and not self._scraper.try_keep_open(self):
            self._connection.abort()

    def _resume(self, page_bytes: int = 0) -> None:
        """The engine has answered: scrape it as often as configured, if its pages are not very long."""
        self._pause_s = max(self._pool.report_interval_s, page_bytes * _PAUSE_S_PER_BYTE)
        self._schedule_next()

    def _take(self, body: bytes) -> None:
        self._scraper.budget.spend(len(body) - self._expected)
        self._expected = max(len(body), _REMEMBERED * self._expected)
        try:
            if self._reads_models:
                self._take_models(body)
            elif self._authority:
                self._take_report(
                    EngineMetrics(EngineReport(load=parse_gateway_load(body)), None, has_restarted=False), body
                )
            else:
                self._take_metrics(body)
        except (MetricsPageRefused, UnreadableResponse) as error:
            self._failed(str(error))
        except Exception as error:  # noqa: BLE001 - whatever it is, this engine and the others are scraped again
            self._failed(_unforeseen(error), error)

    def _models_pause_s(self, interval_s: float) -> float:
        return max(interval_s, (_READS_A_LIST - 0.5) * self._pause_s)

    @property
    def _may_change_models(self) -> bool:
        pool = self._pool
        return self._has_loras or bool(pool.adapters) or pool.slots is not None

    def _take_metrics(self, page: bytes) -> None:
        reading = self._reader.read(page)
        if not reading.has_load_metrics:
            self._failed(
                f"its page {self._metrics_path} has no metric of {self.dialect.name}; set 'engine' of its ModelServer "
                "to what runs there, and 'metricsPath' or 'metricsPort' if its page is elsewhere, or let it show its "
                "metrics"
            )
            return
        self._take_report(reading, page)

    def _take_report(self, reading: EngineMetrics, page: bytes) -> None:
        if reading.has_restarted:
            self._scraper.log.note(
                logging.INFO,
                f"engine {self._address} has restarted: assuming an empty cache",
                "more engines have restarted",
            )
        self._has_loras = self._has_loras or reading.report.loras is not None
        server = self._pool.name
        self._deliver(EngineReported(server, self._address, reading.report, reading.cache, reading.has_restarted))
        self._metrics.observe_scrape(server)
        self._resume(len(page))
        if self._said:
            self._scraper.log.note(logging.INFO, f"engine {self._address} reports again", "more engines report again")
            self._said = ""

    def _take_models(self, body: bytes) -> None:
        listed, server = parse_model_list(body), self._pool.name
        self._deliver(
            EngineReported(
                server,
                self._address,
                EngineReport(),
                models=listed.names,
                base_models=listed.base,
                context_tokens=listed.context_tokens,
            )
        )
        interval_s = _MODELS_INTERVAL_S if self._may_change_models else _MODELS_LONG_INTERVAL_S
        self._models_at_s = self._clock() + self._models_pause_s(interval_s)
        self._models_said = ""
        if self._models_connection is not None:
            self._models_connection.abort()
            self._models_connection = None
        self._resume()


def back_off_s(pause_s: float, interval_s: float) -> float:
    """The pause after one more failure. ``pause_s``: the last one. ``interval_s``: of engines that answer, which are
    read no less often.
    """
    return max(interval_s, min(_MAX_PAUSE_S, 2 * pause_s))


def _unforeseen(error: Exception) -> str:
    return f"our own code fails on what it says: {error!r}"
