# SPDX-License-Identifier: Apache-2.0
"""Scrapes the metrics of every engine a few times a second, for the pools.

Each endpoint has its own timer and connection, so an engine that hangs does not delay others. After a failed scrape
the last report stays in use and ages. Whatever fails for one engine, in its answers or in what is made of them, is that
engine's failure: it is logged once, and asked for less and less often.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from extproc.config.validation import parse_address
from extproc.core.peer_events import EngineSaid
from extproc.endpoints.engine_reports import EngineReport
from extproc.endpoints.metric_names import NAMES
from extproc.endpoints.metrics_text import MetricsReader, PageRefused
from extproc.feeds.engine_answers import Unreadable, models_in
from extproc.feeds.http_get import KeptConnection, get_request

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from extproc.core.core import Core
    from extproc.feeds.engine_access import EngineAccess
    from extproc.metrics.registry import Metrics
    from extproc.scheduling.pool import Pool

log = logging.getLogger(__name__)

_MODELS_PATH: Final = "/v1/models"
_TIMEOUT_S: Final = 2.0
_MAX_PAUSE_S: Final = 10.0
# After a page of a MiB, which takes up to 15 ms to read. Ordinary pages, of 200 KB at most, are read at any interval.
_PAUSE_S_PER_BYTE: Final = 1.0 / 2**20
# Intervals of reading the list of models, which changes when adapters are loaded: of engines with adapters, and of
# others.
_MODELS_INTERVAL_S: Final = 1.0
_MODELS_LONG_INTERVAL_S: Final = 5.0
# Scrapes are started in batches: waking up for each engine would cost several times as much as the scrape.
_TICK_S: Final = 0.025


# Pool, address, and what of the pool's specification matters here.
_Key = tuple[str, str, object]


def _key(pool: Pool, address: str) -> _Key:
    spec = pool.spec
    return pool.name, address, (spec.engine, spec.metrics_path, spec.scrape_interval, spec.connection, pool.metrics)


class EngineScraper:
    """Scrapes each endpoint of each pool that has a scrape interval."""

    def __init__(
        self,
        core: Core,
        metrics: Metrics,
        *,
        access: EngineAccess,
        clock: Callable[[], float],
        rng: random.Random,
        deliver: Callable[[EngineSaid], object],
    ) -> None:
        """``access``: TLS and keys of engines. ``deliver``: receives every report."""
        self._access = access
        self._deliver = deliver
        self._core = core
        self._metrics = metrics
        self._clock = clock
        self._rng = rng

    async def run(self) -> None:
        """Scrape the configured endpoints until cancelled, following changes of the configuration."""
        polls: dict[_Key, _Poll] = {}
        seen: object = None
        async with asyncio.TaskGroup() as group:
            try:
                while True:
                    if seen is not self._core.snapshot:
                        seen = self._core.snapshot
                        self._follow(polls, group)
                    now = self._clock()
                    for poll in polls.values():
                        poll.tick(now)
                    await asyncio.sleep(_TICK_S)
            finally:
                for poll in polls.values():
                    poll.stop()

    def _follow(self, polls: dict[_Key, _Poll], group: asyncio.TaskGroup) -> None:
        wanted: dict[_Key, Pool] = {}
        for pool in self._core.pools.values():
            if pool.spec.scrape_interval > 0:
                for address in pool.table.active_addresses:
                    wanted[_key(pool, address)] = pool
        for key in polls.keys() - wanted.keys():
            polls.pop(key).stop()
        for key in wanted.keys() - polls.keys():
            polls[key] = _Poll(
                wanted[key],
                key[1],
                self._metrics,
                group,
                self._access,
                clock=self._clock,
                rng=self._rng,
                deliver=self._deliver,
            )


class _Poll:
    """Scrapes one engine: its metrics, and less often its list of models."""

    def __init__(
        self,
        pool: Pool,
        address: str,
        metrics: Metrics,
        group: asyncio.TaskGroup,
        access: EngineAccess,
        *,
        clock: Callable[[], float],
        rng: random.Random,
        deliver: Callable[[EngineSaid], object],
    ) -> None:
        self._deliver = deliver
        self._pool, self._address = pool, address
        self._metrics, self._group, self._clock, self._rng = metrics, group, clock, rng
        self._host, self._port = parse_address(address)
        self._access = access
        # with the key that engines asked for when the connection was made; who refuses it gets another connection
        self._metrics_request = self._models_request = b""
        names = NAMES[pool.spec.engine]
        self._reader = MetricsReader(names, custom=pool.metrics)
        self._metrics_path = pool.spec.metrics_path or names.path
        # whether it can have adapters, as far as it has said so
        self._has_loras = False
        self._connection: KeptConnection | None = None
        self._reads_models = False
        self._is_scraping = False
        self._asked_at_s = clock()
        # metrics are read before the first list of models
        self._pause_s = self._interval_s = float(pool.spec.scrape_interval)
        self._models_at_s = clock() + self._interval_s
        self._loop = asyncio.get_running_loop()
        # spread the first scrapes over an interval
        self._next_at_s = clock() + self._interval_s * rng.random()
        self._connecting: asyncio.Task[None] | None = None
        # the last warnings, not to be repeated until they change or the engine has answered again
        self._said = self._models_said = ""

    def stop(self) -> None:
        """Stop scraping and close the connection."""
        self._interval_s = 0.0
        if self._connecting is not None:
            self._connecting.cancel()
        if self._connection is not None:
            self._connection.give_up()

    def tick(self, now: float) -> None:
        """Start a scrape if one is due; one that is still running after its timeout has failed."""
        if now < self._next_at_s:
            return
        if self._is_scraping:
            self._time_out()
            return
        self._is_scraping = True
        self._asked_at_s = now
        self._next_at_s = now + _TIMEOUT_S
        try:
            self._start(now)
        except Exception as error:  # noqa: BLE001 - whatever it is, the other engines are scraped
            self._failed(_unforeseen(error), error)

    def _time_out(self) -> None:
        if self._connecting is not None and not self._connecting.done():
            # that has its own timeout
            return
        message = f"no answer within {_TIMEOUT_S:g} s"
        if self._connection is not None and self._connection.is_busy:
            self._connection.give_up(message)
        else:
            self._failed(message)

    def _start(self, now: float) -> None:
        self._reads_models = now >= self._models_at_s
        if self._connection is None or not self._connection.is_open:
            self._connecting = self._group.create_task(self._connect())
            return
        self._connection.ask(self._models_request if self._reads_models else self._metrics_request)

    async def _connect(self) -> None:
        connection = KeptConnection(self._take, self._failed)
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                access = await self._access.of(self._pool.spec, self._address)
                await self._loop.create_connection(
                    lambda: connection,
                    self._host,
                    self._port,
                    ssl=access.tls,
                    server_hostname=access.server_name,
                )
        except (OSError, ValueError) as error:  # includes TimeoutError
            self._engine_failed(f"cannot connect: {str(error) or 'no answer'}")
            return
        except Exception as error:  # noqa: BLE001 - whatever it is, the other engines are scraped
            self._engine_failed(_unforeseen(error), error)
            return
        self._metrics_request = get_request(self._host, self._port, self._metrics_path, access.authorization)
        self._models_request = get_request(self._host, self._port, _MODELS_PATH, access.authorization)
        self._connection = connection
        connection.ask(self._models_request if self._reads_models else self._metrics_request)

    def _failed(self, message: str, unforeseen: Exception | None = None) -> None:
        """``unforeseen``: an error of our own code, whose traceback is logged."""
        if self._reads_models:
            self._models_failed(message, unforeseen)
        else:
            self._engine_failed(message, unforeseen)

    def _engine_failed(self, message: str, unforeseen: Exception | None = None) -> None:
        if not self._interval_s:
            return
        self._pause_s = min(_MAX_PAUSE_S, 2 * self._pause_s)
        self._schedule_next()
        self._metrics.scrape_failed(self._pool.name)
        if message != self._said:
            self._said = message
            what = "cannot scrape engine %s: %s; using our own counts instead"
            log.warning(what, self._address, message, exc_info=unforeseen)

    def _models_failed(self, message: str, unforeseen: Exception | None) -> None:
        """Metrics are read all the same: if the engine is gone, they say so."""
        if not self._interval_s:
            return
        self._schedule_next()
        self._models_at_s = self._clock() + _MODELS_LONG_INTERVAL_S
        if message != self._models_said:
            self._models_said = message
            what = "engine %s shows no list of its models at %s: %s; it counts as having no other adapters than before"
            # without adapters, nobody misses the list
            level = logging.WARNING if self._may_change_models or unforeseen else logging.INFO
            log.log(level, what, self._address, _MODELS_PATH, message, exc_info=unforeseen)

    def _schedule_next(self) -> None:
        self._is_scraping = False
        # counted from the start of the last scrape; ticks are half a tick late on average
        self._next_at_s = self._asked_at_s + self._pause_s * self._rng.uniform(0.9, 1.1) - _TICK_S / 2

    def _resume(self, page_bytes: int = 0) -> None:
        """The engine has answered: scrape it as often as configured, if its pages are not very long."""
        self._pause_s = max(self._interval_s, page_bytes * _PAUSE_S_PER_BYTE)
        self._schedule_next()

    def _take(self, body: bytes) -> None:
        try:
            if self._reads_models:
                self._take_models(body)
            else:
                self._take_metrics(body)
        except (PageRefused, Unreadable) as error:
            self._failed(str(error))
        except Exception as error:  # noqa: BLE001 - whatever it is, this engine and the others are scraped again
            self._failed(_unforeseen(error), error)

    @property
    def _may_change_models(self) -> bool:
        pool = self._pool
        return self._has_loras or bool(pool.adapters) or pool.slots is not None

    def _take_metrics(self, page: bytes) -> None:
        reading = self._reader.read(page)
        if not reading.is_report:
            engine = self._pool.spec.engine
            self._failed(
                f"its page {self._metrics_path} has no metric of {engine}; set 'engine' of its ModelServer to what "
                "runs there, and 'metricsPath' if its page is elsewhere, or let it show its metrics"
            )
            return
        if reading.has_restarted:
            log.info("engine %s has restarted: assuming an empty cache", self._address)
        self._has_loras = self._has_loras or reading.report.loras is not None
        server = self._pool.name
        self._deliver(EngineSaid(server, self._address, reading.report, reading.cache, reading.has_restarted))
        self._metrics.scraped(server)
        self._resume(len(page))
        if self._said:
            log.info("engine %s reports again", self._address)
            self._said = ""

    def _take_models(self, body: bytes) -> None:
        self._deliver(EngineSaid(self._pool.name, self._address, EngineReport(), models=models_in(body)))
        self._models_at_s = self._clock() + (_MODELS_INTERVAL_S if self._may_change_models else _MODELS_LONG_INTERVAL_S)
        self._models_said = ""
        self._resume()


def _unforeseen(error: Exception) -> str:
    return f"our own code fails on what it says: {error!r}"
