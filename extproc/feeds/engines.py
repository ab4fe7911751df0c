"""Asks every engine how it is, a few times a second, and tells the pools.

Each endpoint has a timer and a connection of its own, so an engine that hangs delays nobody. A failure changes nothing but
the age of what is known.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Final

import msgspec

from extproc.config.validation import parse_address
from extproc.core.peer_events import EngineSaid
from extproc.endpoints.engine_reports import EngineState
from extproc.endpoints.metrics_text import NAMES, MetricsReader
from extproc.feeds.http_get import KeptConnection, get_request

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from extproc.core.core import Core
    from extproc.metrics.registry import Metrics
    from extproc.scheduling.pool import Pool

log = logging.getLogger(__name__)

_METRICS_PATH: Final = "/metrics"
_MODELS_PATH: Final = "/v1/models"
_TIMEOUT_S: Final = 2.0
_LONGEST_PAUSE_S: Final = 10.0
# The list of models changes when an adapter is loaded or unloaded.
_MODELS_EVERY_S: Final = 1.0
_MODELS_RARELY_S: Final = 5.0
# Engines are asked in small batches: waking up for each of them costs several times what the asking does.
_TICK_S: Final = 0.025


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


_models_decoder: Final = msgspec.json.Decoder(_Models)


class EngineScraper:
    """Owns what asks each endpoint of each pool that wants to know."""

    def __init__(
        self,
        core: Core,
        metrics: Metrics,
        *,
        clock: Callable[[], float],
        rng: random.Random,
        said: Callable[[EngineSaid], object],
    ) -> None:
        """``said``: takes what every engine reports."""
        self._said = said
        self._core = core
        self._metrics = metrics
        self._clock = clock
        self._rng = rng

    async def run(self) -> None:
        """Until cancelled, follow the configuration: begin with what comes, end with what goes."""
        polls: dict[tuple[str, str, str, str], _Poll] = {}
        seen: object = None
        async with asyncio.TaskGroup() as group:
            try:
                while True:
                    if seen is not self._core.snapshot:
                        seen = self._core.snapshot
                        self._follow(polls, group)
                    now = self._clock()
                    for poll in polls.values():
                        poll.look_at_the_clock(now)
                    await asyncio.sleep(_TICK_S)
            finally:
                for poll in polls.values():
                    poll.stop()

    def _follow(self, polls: dict[tuple[str, str, str, str], _Poll], group: asyncio.TaskGroup) -> None:
        queued = {}
        for pool in self._core.pools.values():
            if pool.spec.scrape_interval_s > 0:
                for address in pool.table.active_addresses:
                    queued[pool.name, address, pool.spec.engine, pool.spec.scrape_interval] = pool
        for key in polls.keys() - queued.keys():
            polls.pop(key).stop()
        for key in queued.keys() - polls.keys():
            polls[key] = _Poll(
                queued[key], key[1], self._metrics, group, clock=self._clock, rng=self._rng, said=self._said
            )


class _Poll:
    """Asks one engine, again and again: the metrics, and now and then the models, oftener if adapters are routed."""

    def __init__(
        self,
        pool: Pool,
        address: str,
        metrics: Metrics,
        group: asyncio.TaskGroup,
        *,
        clock: Callable[[], float],
        rng: random.Random,
        said: Callable[[EngineSaid], object],
    ) -> None:
        self._said = said
        self._pool, self._address = pool, address
        self._metrics, self._group, self._clock, self._rng = metrics, group, clock, rng
        self._host, self._port = parse_address(address)
        self._ask_metrics = get_request(self._host, self._port, _METRICS_PATH)
        self._ask_models = get_request(self._host, self._port, _MODELS_PATH)
        self._reader = MetricsReader(NAMES[pool.spec.engine], with_loras=bool(pool.adapters))
        self._connection: KeptConnection | None = None
        self._asks_models = False
        self._is_asking = False
        self._asked_at = clock()
        # the metrics first
        self._models_due_s = clock() + pool.spec.scrape_interval_s
        self._pause_s = self._interval_s = pool.spec.scrape_interval_s
        self._loop = asyncio.get_running_loop()
        # not all at once
        self._due_s = clock() + self._interval_s * rng.random()
        self._connecting: asyncio.Task[None] | None = None

    def stop(self) -> None:
        """Ask no more."""
        self._interval_s = 0.0
        if self._connecting is not None:
            self._connecting.cancel()
        if self._connection is not None:
            self._connection.give_up()

    def look_at_the_clock(self, now: float) -> None:
        """Ask when it is time; an answer that does not come is a failure."""
        if now < self._due_s:
            return
        if self._is_asking:
            if self._connection is not None:
                self._connection.give_up(f"no answer within {_TIMEOUT_S:g} s")
            return
        self._is_asking = True
        self._asked_at = now
        self._due_s = now + _TIMEOUT_S
        self._ask(now)

    def _ask(self, now: float) -> None:
        self._asks_models = now >= self._models_due_s
        if self._connection is None or not self._connection.is_open:
            self._connecting = self._group.create_task(self._connect())
            return
        self._connection.ask(self._ask_models if self._asks_models else self._ask_metrics)

    async def _connect(self) -> None:
        connection = KeptConnection(self._take, self._failed)
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                await self._loop.create_connection(lambda: connection, self._host, self._port)
        except OSError as error:  # a TimeoutError among them
            self._failed(f"cannot connect: {str(error) or 'no answer'}")
            return
        self._connection = connection
        connection.ask(self._ask_models if self._asks_models else self._ask_metrics)

    def _failed(self, message: str) -> None:
        if not self._interval_s:
            return
        self._metrics.scrape_failed(self._pool.name)
        if self._pause_s == self._interval_s:
            log.warning("engine %s does not say how it is: %s; our own counts serve", self._address, message)
        self._pause_s = min(_LONGEST_PAUSE_S, 2 * self._pause_s)
        self._rest()

    def _rest(self) -> None:
        self._is_asking = False
        # counted from the question; ticks come half a tick late in the mean
        self._due_s = self._asked_at + self._pause_s * self._rng.uniform(0.9, 1.1) - _TICK_S / 2

    def _take(self, body: bytes) -> None:
        self._pause_s = self._interval_s
        self._rest()
        if self._asks_models:
            self._models_due_s = self._clock() + (_MODELS_EVERY_S if self._pool.adapters else _MODELS_RARELY_S)
            self._take_models(body)
        else:
            self._take_metrics(body)

    def _take_metrics(self, page: bytes) -> None:
        reading = self._reader.read(page)
        if reading.has_restarted:
            log.info("engine %s has restarted: its cache is taken to be empty", self._address)
        server = self._pool.name
        self._said(EngineSaid(server, self._address, reading.state, reading.cache, reading.has_restarted))
        self._metrics.scraped(server)

    def _take_models(self, body: bytes) -> None:
        with contextlib.suppress(msgspec.DecodeError):  # not OpenAI's list: the engine does not say
            models = frozenset(model.id for model in _models_decoder.decode(body).data)
            self._said(EngineSaid(self._pool.name, self._address, EngineState(), models=models))
