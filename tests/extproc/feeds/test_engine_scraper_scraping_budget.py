# SPDX-License-Identifier: Apache-2.0
"""Many engines: reading them takes a bounded share of the process, of its descriptors and of its log."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from bench.stack.processes import free_ports
from extproc.api import config_snapshot as scrapes
from extproc.api.config_loader import load_snapshot
from extproc.api.config_snapshot import (
    file_descriptor_warnings,
    max_idle_connections,
    scrape_interval_factor,
    scrape_interval_warnings,
)
from extproc.cli.top_view import EngineState
from extproc.core.core import Core
from extproc.core.explanation import silent_endpoints
from extproc.endpoints.engine_reports import apply_report, report_trust
from extproc.engines.metrics import EngineReport
from extproc.feeds import engine_scraper as engines
from extproc.feeds.engine_http import EngineCredentials
from extproc.feeds.engine_scraper import EngineScraper
from extproc.metrics.request_metrics import Metrics
from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    import pytest

    from extproc.api.config_snapshot import Snapshot

PAGE = b"vllm:num_requests_waiting 1\nvllm:num_requests_running 1\nvllm:kv_cache_usage_perc 0.5\n"


def server(name: str, addresses: list[str], interval: str = "200ms", more: str = "") -> str:
    endpoints = ", ".join(f'{{address: "{one}"}}' for one in addresses)
    return f"""
apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {{name: {name}}}
spec: {{model: m, scrapeInterval: {interval}, endpoints: [{endpoints}]{more}}}
"""


def addresses(count: int, port: int = 80) -> list[str]:
    return [f"127.1.{number // 250}.{1 + number % 250}:{port}" for number in range(count)]


def snapshot_of(*servers: str) -> Snapshot:
    return load_snapshot({"a.yaml": "---".join(servers).encode()})


class Engine(asyncio.Protocol):
    """All engines: what was asked, on how many connections."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._engines.open.add(transport)

    def connection_lost(self, _: Exception | None) -> None:
        self._engines.open.discard(self._transport)

    def data_received(self, data: bytes) -> None:
        path = data.split()[1].decode()
        self._engines.asked.append(path)
        body = PAGE if path == "/metrics" else b'{"data": []}'
        self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))


class Engines:
    def __init__(self) -> None:
        self.asked: list[str] = []
        self.open: set[asyncio.Transport] = set()


@asynccontextmanager
async def all_engines() -> AsyncIterator[tuple[Engines, int]]:
    """What they were asked, and their port."""
    found, port = Engines(), free_ports(1)[0]
    listening = await asyncio.get_running_loop().create_server(lambda: Engine(found), "0.0.0.0", port, backlog=1000)  # noqa: S104
    try:
        yield found, port
    finally:
        listening.close()
        for transport in found.open:
            transport.abort()


async def scrape(snapshot: Snapshot, until: Callable[[Core, Metrics], bool], **more: float) -> Core:
    """Until that holds."""
    core, clock = Core(snapshot, rng=random.Random(0), ticket_prefix="t"), asyncio.get_running_loop().time
    metrics = Metrics(core.pools.values, lambda: 0.0, clock)
    scraper = EngineScraper(
        core,
        metrics,
        access=EngineCredentials({}, clock),
        clock=clock,
        rng=random.Random(0),
        deliver=lambda event: core.on_engine_report(event, clock()),
        **more,
    )
    task = asyncio.create_task(scraper.run())
    try:
        await eventually(lambda: until(core, metrics))
    finally:
        task.cancel()
        await asyncio.wait([task])
    return core


def test_all_intervals_are_stretched_alike_when_they_ask_for_more_than_the_budget() -> None:
    small = snapshot_of(server("a", addresses(400)), server("b", addresses(5), interval="0s"))
    assert scrape_interval_factor(small.servers) == 1
    assert not list(scrape_interval_warnings(small))
    big = snapshot_of(server("a", addresses(2_000)), server("b", addresses(2_500), interval="1s"))
    assert scrape_interval_factor(big.servers) == 5
    core = Core(big, rng=random.Random(0), ticket_prefix="t")
    assert {pool.report_interval_s for pool in core.pools.values()} == {1.0, 5.0}
    (note,) = scrape_interval_warnings(big)
    assert "4500 endpoints" in note
    assert "all intervals are 5 times as long as written (0.2 s is 1 s)" in note


async def test_engines_are_asked_as_often_as_the_budget_allows_and_all_alike(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with all_engines() as (found, port):
        monkeypatch.setattr(scrapes, "MOST_SCRAPES_PER_S", 200.0)
        caplog.set_level(logging.WARNING, "extproc.feeds.engine_scraper")
        # 1,500 a second as configured
        snapshot = snapshot_of(server("a", addresses(300, port)))
        began_s = asyncio.get_running_loop().time()
        core = await scrape(
            snapshot, lambda core, _: bool((core.pools["default/a"].table.reported_at_s > 0).sum() == 300)
        )
        took_s = asyncio.get_running_loop().time() - began_s
        # an interval is 1.5 s: nearly all have been asked once when the last one has
        assert len(found.asked) <= 200 * took_s * 1.5 + 100
        assert sum("7.5 times as long" in one.message for one in caplog.records) == 1
        assert core.pools["default/a"].report_interval_s == 1.5


async def test_metrics_are_read_again_and_again_however_long_the_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """The list of models is due at each read if its interval is the shorter one."""
    monkeypatch.setattr(engines, "_MODELS_INTERVAL_S", 0.2)
    async with all_engines() as (found, port):
        route = """
apiVersion: attache.dev/v1alpha1
kind: ModelRoute
metadata: {name: chat}
spec: {modelName: chat, loraAdapters: [sql], rules: [{targetModels: [{modelServerName: a}]}]}
"""
        snapshot = snapshot_of(server("a", addresses(1, port), interval="210ms"), route)
        await scrape(snapshot, lambda _, __: found.asked.count("/v1/models") >= 3)
        # how many reads come before the first list is a matter of time
        assert found.asked.count("/metrics") >= 2


async def test_connections_beyond_the_descriptors_are_not_kept() -> None:
    async with all_engines() as (found, port):
        snapshot = snapshot_of(server("a", addresses(50, port), interval="100ms"))
        await scrape(snapshot, lambda _, __: len(found.asked) > 200 and len(found.open) <= 20, most_connections=10)
        assert max_idle_connections(1_024) == 0
        assert max_idle_connections(20_000) == 17_500
        (missing,) = file_descriptor_warnings(snapshot_of(server("a", addresses(2_000))), 2_048)
        assert "the engines want 2000 file descriptors" in missing
        events = snapshot_of(server("a", addresses(250), more=", kvEvents: {port: 5557}"))
        assert list(file_descriptor_warnings(events, 2_048))
        assert not list(file_descriptor_warnings(events, 4_096))


class Pages:
    """Connections of an engine that answers at once. ``sizes``: of its pages, in turns. ``read``: bytes by page."""

    is_open, is_busy = True, False

    def __init__(self, poll: engines._Poll, *sizes: int) -> None:
        self._poll = poll
        self._sizes = itertools.cycle(sizes)
        self.read: list[int] = []

    def send_request(self, _: bytes) -> None:
        page = b'{"data": []}' if self._poll._reads_models else PAGE.ljust(next(self._sizes), b"\n")
        self.read.append(len(page))
        self._poll._take(page)


async def read_for(seconds: int, sizes: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """In virtual time, the lengths of the pages that were read of engines with pages of these sizes."""
    now = 0.0
    core = Core(snapshot_of(server("a", addresses(len(sizes)))), rng=random.Random(0), ticket_prefix="t")
    scraper = EngineScraper(
        core,
        Metrics(core.pools.values, lambda: now, lambda: now),
        access=EngineCredentials({}, lambda: now),
        clock=lambda: now,
        rng=random.Random(0),
        deliver=lambda _: None,
    )
    monkeypatch.setattr(engines._Poll, "stop", lambda _: None)
    async with asyncio.TaskGroup() as group:
        scraper._follow()
        scraper._follow_some(group)
        polls = scraper._followed["default/a"].polls.values()
        answers = [Pages(poll, *own) for poll, own in zip(polls, sizes, strict=True)]
        for poll, one in zip(polls, answers, strict=True):
            poll._connection = one  # type: ignore[assignment]
        for tick in range(seconds * 40):
            now = tick * 0.025
            scraper._start_due(now)
    return [one.read for one in answers]


async def test_long_pages_take_a_bounded_share_and_hold_up_no_ordinary_one(monkeypatch: pytest.MonkeyPatch) -> None:
    liars, honest = 90, 10
    read = await read_for(60, [(4 << 20,)] * liars + [(50_000,)] * honest, monkeypatch)
    # the first page of each is a surprise, and a second's budget is saved up
    assert sum(map(sum, read)) <= (liars * 4 + 16 * 61) << 20
    assert min(len(one) for one in read[liars:]) >= 60 * 4.5
    assert min(len(one) for one in read[:liars]) >= 2, "each has its turn"


async def test_long_pages_between_short_ones_are_bounded_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    read = await read_for(30, [(4 << 20, 1_000)] * 90, monkeypatch)
    assert sum(map(sum, read)) <= (90 * 4 + 16 * 31) << 20


async def test_a_few_long_pages_are_read_as_often_as_their_length_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    (read,) = await read_for(60, [(4 << 20,)], monkeypatch)
    assert 12 <= len(read) <= 40


async def test_thousands_of_engines_that_fail_are_a_few_lines_of_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engines, "_LOG_PERIOD_S", 1.0)
    caplog.set_level(logging.INFO, "extproc.feeds.engine_scraper")
    snapshot = snapshot_of(server("a", addresses(200, free_ports(1)[0])))
    await scrape(snapshot, lambda _, __: any("more engines cannot be scraped" in one.message for one in caplog.records))
    said = [one.message for one in caplog.records]
    assert sum(one.startswith("cannot scrape engine 127.1.0.") for one in said) == 5
    assert "195 more engines cannot be scraped; attache top names them" in said


async def test_a_change_of_one_server_looks_at_its_endpoints_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async with all_engines() as (_, port):
        servers = [server(f"s{number}", addresses(5, port)) for number in range(20)]
        looked = []
        follow = EngineScraper._follow_endpoints

        def counted(self: EngineScraper, known: engines._Followed, group: asyncio.TaskGroup) -> None:
            looked.append(known.pool.name)
            follow(self, known, group)

        monkeypatch.setattr(EngineScraper, "_follow_endpoints", counted)
        reader = engines_loader()
        changed = [*servers[:7], server("s7", addresses(6, port)), *servers[8:]]
        first, second = reader(servers), reader(changed)

        def until(core: Core, _: Metrics) -> bool:
            if len(looked) == 20 and core.snapshot is first:
                looked.clear()
                core.apply(second, 1.0)
            return core.snapshot is second and bool(looked)

        await scrape(first, until)
        assert looked == ["default/s7"]


def engines_loader() -> Callable[[list[str]], Snapshot]:
    from extproc.api.config_loader import SnapshotLoader  # noqa: PLC0415

    loader = SnapshotLoader()
    return lambda servers: loader.load({"a.yaml": "---".join(servers).encode()})


def test_a_report_is_trusted_until_the_next_one_is_overdue() -> None:
    core = Core(snapshot_of(server("a", addresses(4_000))), rng=random.Random(0), ticket_prefix="t")
    (pool,) = core.pools.values()
    # 0.2 s are 1.6 s
    assert pool.report_interval_s == 1.6
    for row in pool.table.active_rows:
        apply_report(pool.table, row, EngineReport(waiting=1), 10.0)
    assert report_trust(pool.table, 13.9)[0] == 1
    assert report_trust(pool.table, 8 + 10.0)[0] < 0.5
    slow = Core(snapshot_of(server("a", addresses(2), interval="10s")), rng=random.Random(0), ticket_prefix="t")
    (pool,) = slow.pools.values()
    apply_report(pool.table, 0, EngineReport(waiting=1), 10.0)
    apply_report(pool.table, 1, EngineReport(waiting=1), 20.0)
    # nobody is favoured by when it was asked
    assert report_trust(pool.table, 21.0)[:2].tolist() == [1.0, 1.0]
    assert silent_endpoints(pool, 21.0) == ()
    assert silent_endpoints(pool, 41.0) == ("127.1.0.1:80",)
    assert not EngineState("a", "b", report_age_s=11.0, interval_s=10.0).is_silent
    assert EngineState("a", "b", report_age_s=11.0, interval_s=0.2).is_silent
