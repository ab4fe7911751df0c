# SPDX-License-Identifier: Apache-2.0
"""Budgets are rebuilt from the usage process's rows, as soon as these are whole, and a start never fails by it."""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import TYPE_CHECKING

import msgspec
import pytest
from aiohttp import web

from bench.stack.processes import free_ports
from extproc.core.effects import Decision
from extproc.feeds import usage_rollup_client
from extproc.feeds.usage_rollup_client import RollupTiming, UsageRollupClient
from tests.extproc.core.test_limit_accounting_budgets import Process
from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

BEGAN_S = datetime.fromisoformat("2026-11-15T12:00:00+00:00").timestamp()
BUDGETS = (
    "{name: month, window: Month, max: {requests: 5}},"
    "{name: day, window: Day, timeZone: Europe/Berlin, max: {money: '0.01'}}"
)
ROWS: dict[str, object] = {
    "data": [
        {"tenant": "a", "route": "default/chat", "requests": 4,
         "input_tokens": 10, "output_tokens": 20, "cost_micros": {"USD": 100}, "a_field_of_later": [1]},
        {"route": "default/chat", "requests": "1"},
    ],
    "next_page": None,
    "until_s": BEGAN_S,
}  # fmt: skip
# long enough for a busy machine
PATIENT = RollupTiming(start_s=60.0, retry_s=0.01, page_s=60.0, pause_s=0.01, lost_s=0.01)


class Usage:
    """The admin listener of a usage process."""

    def __init__(self) -> None:
        self.asked: list[dict[str, str]] = []
        self.status, self.hangs = 200, False
        self.page: Mapping[str, object] = ROWS
        # further ones, by what asks for them
        self.pages: dict[str, dict[str, object]] = {}
        self.ends = asyncio.Event()

    async def answer(self, request: web.Request) -> web.Response:
        self.asked.append(dict(request.query))
        if self.hangs:
            await self.ends.wait()
        return web.json_response(self.pages.get(request.query.get("page", ""), self.page), status=self.status)


@pytest.fixture
async def usage() -> AsyncIterator[tuple[Usage, str]]:
    """With its URL."""
    found, app = Usage(), web.Application()
    app.add_routes([web.get("/v1/usage", found.answer)])
    runner = web.AppRunner(app, shutdown_timeout=0.0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0]
    yield found, f"http://{host}:{port}"
    found.ends.set()
    await runner.cleanup()


class Feed:
    """A process's, with a wall clock of its own."""

    def __init__(self, process: Process, url: str, times: RollupTiming = PATIENT) -> None:
        self.wall_s = BEGAN_S
        self.rollups = UsageRollupClient(
            url,
            process.core,
            None,
            clock=lambda: 0.0,
            wall_clock=lambda: self.wall_s,
            perform=list,
            times=times,
        )


def granted(process: Process, most: int, tenant: str = "a") -> int:
    return sum(isinstance(process.ask(0.0, tenant), Decision) for _ in range(most))


def rows(*data: dict[str, object], next_page: str | None = None, until_s: float | None = BEGAN_S) -> dict[str, object]:
    return {"data": list(data), "next_page": next_page, "until_s": until_s}


async def test_all_pages_count_and_a_row_that_moved_to_the_next_page_counts_once(usage: tuple[Usage, str]) -> None:
    server, url = usage
    row = {"tenant": "a", "requests": 2, "route": "default/chat"}
    server.page = rows({**row, "tenant": "A"}, row, next_page="1000")
    # a caller that came meanwhile has moved all others
    server.pages["1000"] = rows(row, {**row, "route": "default/other"}, {**row, "tenant": "b", "requests": 5})
    process = Process("{name: month, window: Month, max: {requests: 6}}")
    await Feed(process, url).rollups.load()
    assert (granted(process, 6), granted(process, 6, "b")) == (4, 1)


async def test_pages_without_end_are_a_failure(usage: tuple[Usage, str], monkeypatch: pytest.MonkeyPatch) -> None:
    server, url = usage
    monkeypatch.setattr(usage_rollup_client, "_MOST_PAGES", 7)
    server.page = rows(next_page="again")
    await Feed(Process(BUDGETS), url).rollups.load()
    assert len(server.asked) == 7


async def test_each_open_window_is_asked_for_what_its_budgets_need(usage: tuple[Usage, str]) -> None:
    server, url = usage
    process = Process(BUDGETS)
    await Feed(process, url + "/").rollups.load()
    starts = {datetime.fromtimestamp(int(one["start"])).astimezone().timestamp() for one in server.asked}
    assert starts == {
        datetime.fromisoformat(one).timestamp() for one in ("2026-11-01T00:00+00:00", "2026-11-15T00:00+01:00")
    }
    assert {one["group_by"] for one in server.asked} == {"route,tenant"}
    assert {one["end"] for one in server.asked} == {str(int(BEGAN_S) + 1)}
    assert granted(process, 2) == 1
    # the row without a tenant is that of anonymous callers
    assert granted(process, 5, "anonymous") == 4


@pytest.mark.parametrize("fault", ["status", "page", "nothing", "hangs"])
async def test_a_start_goes_on_and_asks_again_and_says_so_once(
    usage: tuple[Usage, str], fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    server, url = usage
    process = Process("{name: month, window: Month, max: {requests: 5}}")
    (closed,) = free_ports(1)
    short = RollupTiming(start_s=0.05, retry_s=0.01, page_s=60.0, pause_s=0.01)
    times = short if fault in {"hangs", "nothing"} else PATIENT
    feed = Feed(process, f"http://127.0.0.1:{closed}" if fault == "nothing" else url, times).rollups
    server.status = 503 if fault == "status" else 200
    server.page = {"data": [{"requests": "many"}]} if fault == "page" else ROWS
    server.hangs = fault == "hangs"
    await feed.load()
    assert "until http://127.0.0.1:" in caplog.text
    task = asyncio.create_task(feed.run())
    if fault in {"status", "page"}:
        await eventually(lambda: len(server.asked) > 5)
        assert sum("until http" in one.message for one in caplog.records) == 1
    server.status, server.page, server.hangs = 200, ROWS, False
    server.ends.set()
    if fault != "nothing":
        await eventually(lambda: process.left(0.0) == 1.0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_rows_that_lag_behind_count_and_are_asked_for_until_they_are_whole(usage: tuple[Usage, str]) -> None:
    server, url = usage
    process = Process("{name: month, window: Month, max: {requests: 5}}")
    row = {"tenant": "a", "requests": 1, "route": "default/chat"}
    server.page = rows(row, until_s=BEGAN_S - 3600.0)
    feed = Feed(process, url, RollupTiming(start_s=0.05, retry_s=0.01, page_s=60.0, pause_s=0.01, lost_s=0.01))
    await feed.rollups.load()
    task = asyncio.create_task(feed.rollups.run())
    await eventually(lambda: process.left(0.0) == 4.0)
    # it has caught up with the start, and not yet with what came since
    feed.wall_s = BEGAN_S + 3600.0
    server.page = rows({**row, "requests": 3}, until_s=BEGAN_S + 1.0)
    await eventually(lambda: process.left(0.0) == 2.0)
    server.page = rows({**row, "requests": 4}, until_s=BEGAN_S + 3599.0)
    await eventually(lambda: process.left(0.0) == 1.0)
    await eventually(lambda: not feed.rollups._wanted.is_set())
    asked = len(server.asked)
    await asyncio.sleep(0.05)
    assert len(server.asked) == asked
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_start_does_not_wait_for_the_last_seconds_before_it(usage: tuple[Usage, str]) -> None:
    server, url = usage
    process = Process("{name: month, window: Month, max: {requests: 5}}")
    server.page = {**ROWS, "until_s": BEGAN_S - 2.0}
    feed = Feed(process, url).rollups
    await feed.load()
    assert len(server.asked) == 1
    # they are asked for afterwards
    task = asyncio.create_task(feed.run())
    await eventually(lambda: len(server.asked) > 3)
    server.page = ROWS
    await eventually(lambda: not feed._wanted.is_set())
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_rows_are_asked_for_again_for_what_nobody_was_told(usage: tuple[Usage, str]) -> None:
    server, url = usage
    process = Process("{name: month, window: Month, max: {requests: 5}}")
    row = {"tenant": "a", "requests": 1, "route": "default/chat"}
    server.page = rows(row)
    feed = Feed(process, url, msgspec.structs.replace(PATIENT, again_s=0.01)).rollups
    await feed.load()
    task = asyncio.create_task(feed.run())
    await eventually(lambda: process.left(0.0) == 4.0)
    # of a process that was killed
    server.page = rows({**row, "requests": 2})
    await eventually(lambda: process.left(0.0) == 3.0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_budget_that_a_reload_adds_does_not_begin_full(usage: tuple[Usage, str]) -> None:
    server, url = usage
    process = Process("{name: month, window: Month, max: {requests: 5}}")
    server.page = rows({"tenant": "a", "requests": 1, "route": "default/chat"})
    # no pause of it ends in time
    feed = Feed(process, url, msgspec.structs.replace(PATIENT, pause_s=0.0, lost_s=1e6, again_s=1e6)).rollups
    await feed.load()
    task = asyncio.create_task(feed.run())
    feed.on_config()
    added = Process("{name: more, window: Month, max: {requests: 3}}")
    process.core.apply(added.snapshot, 0.0)
    feed.on_config()
    await eventually(lambda: process.left(0.0) == 2.0)
    # nothing is added, nothing is asked
    asked = len(server.asked)
    process.core.apply(added.snapshot, 0.0)
    feed.on_config()
    assert not feed._wanted.is_set()
    assert len(server.asked) == asked
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_without_sums_there_is_one_line_and_nothing_is_asked_again(
    usage: tuple[Usage, str], caplog: pytest.LogCaptureFixture
) -> None:
    server, url = usage
    server.status = 501
    feed = Feed(Process(BUDGETS), url).rollups
    await feed.load()
    await feed.run()
    assert len(server.asked) == 1
    assert [one.message for one in caplog.records if "has no sums" in one.message]
