# SPDX-License-Identifier: Apache-2.0
"""The page /demand over real HTTP: once, or line by line."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING

import aiohttp
import msgspec
import pytest

from bench.stack.processes import free_ports
from extproc.api.status_page_contents import DEMAND_PATH, ConfigReport, ProcessDemand, apply_demand_delta
from extproc.listen_sockets import listen
from extproc.metrics.exposition import Registry
from extproc.runtime import demand_watch
from extproc.runtime.admin_pages import serve_pages
from extproc.runtime.demand_watch import MOST_WATCHERS, DemandWatchServer
from tests.extproc.scenes import core_of, request
from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from aiohttp import web

    from extproc.core.core import Core

SERVER = "default/llama"


class Page:
    """``url``: of the page; ``runner``: serves it."""

    def __init__(self, url: str, core: Core, watch: DemandWatchServer, runner: web.AppRunner) -> None:
        self.url = url
        self.core = core
        self.watch = watch
        self.runner = runner

    def arrive(self) -> str:
        own, _ = self.core.arrive(request(self.core), time.monotonic())  # noqa: TID251 - a real clock for a real page
        self.watch.notify_followers()
        return own.ticket


@contextlib.asynccontextmanager
async def page(endpoints: str = "") -> AsyncIterator[Page]:
    core = core_of(servers={"llama": f"flowControl: {{}}\nendpoints: [{endpoints}]"})
    watch = DemandWatchServer(core, time.monotonic)  # noqa: TID251 - a real clock for a real page
    port = free_ports(1)[0]
    runner = await serve_pages(
        listen(f"127.0.0.1:{port}"),
        Registry(),
        is_ready=lambda: True,
        report=ConfigReport,
        loads=core.engine_loads_by_pool,
        demand=watch,
        explain=None,
    )
    try:
        yield Page(f"http://127.0.0.1:{port}{DEMAND_PATH}", core, watch, runner)
    finally:
        await runner.cleanup()


async def next_line(answer: aiohttp.ClientResponse) -> ProcessDemand:
    line = await asyncio.wait_for(answer.content.readline(), 120)
    return msgspec.json.decode(line, type=ProcessDemand)


async def test_the_first_page_lists_the_others() -> None:
    async with page() as stand, aiohttp.ClientSession() as http:
        index = stand.url.removesuffix(DEMAND_PATH)
        async with http.get(f"{index}/") as answer:
            lines = (await answer.text()).splitlines()
        found = {line.split()[0]: line for line in lines}
        assert "only with the option --debug" in found.pop("/debug/explain/PATH")
        assert list(found) == ["/metrics", "/readyz", "/config", "/loads", "/demand"]
        for path in found:
            async with http.get(index + path) as answer:
                assert answer.status == 200


async def test_the_page_is_one_object_and_followed_it_is_a_line_a_second() -> None:
    async with page() as stand, aiohttp.ClientSession() as http:
        async with http.get(stand.url) as answer:
            once = msgspec.json.decode(await answer.read(), type=ProcessDemand)
        assert (once.instance, once.sequence, list(once.servers)) == ("t", 1, [SERVER])
        async with http.get(f"{stand.url}?watch") as answer:
            lines = [await next_line(answer) for _ in range(2)]
    assert [one.sequence for one in lines] == [2, 3]
    assert lines[1].age_s - lines[0].age_s > 0.9


async def test_the_first_request_that_waits_for_engines_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # so long that no machine takes it for "at once"
    monkeypatch.setattr(demand_watch, "_EVERY_S", 5.0)
    async with page() as stand, aiohttp.ClientSession() as http, http.get(f"{stand.url}?watch") as answer:
        first = await next_line(answer)
        stand.arrive()
        second = await next_line(answer)
        assert second.servers[SERVER].at_zero == 1
        assert second.age_s - first.age_s < 4.5
        # who joins it is told with the next line of its own
        stand.arrive()
        third = await next_line(answer)
        assert third.servers[SERVER].at_zero == 2
        assert third.age_s - second.age_s > 4.5


@pytest.fixture
def unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first one, lines come for news alone."""
    monkeypatch.setattr(demand_watch, "_EVERY_S", 1000.0)


@pytest.mark.usefixtures("unasked")
async def test_a_burst_is_told_at_once() -> None:
    one = "{address: '10.0.0.1:8000'}"
    async with page(one) as stand, aiohttp.ClientSession() as http, http.get(f"{stand.url}?watch") as answer:
        await next_line(answer)
        for _ in range(20):
            stand.arrive()
        second = await next_line(answer)
    assert second.servers[SERVER].engines["10.0.0.1:8000"].in_flight == 20


@pytest.mark.usefixtures("unasked")
async def test_a_burst_is_told_at_once_whoever_else_looks_meanwhile() -> None:
    one = "{address: '10.0.0.1:8000'}"
    async with page(one) as stand, aiohttp.ClientSession() as http, http.get(f"{stand.url}?watch=changes") as answer:
        await next_line(answer)
        # a stranger asks for the page while the burst comes, and another one follows it
        for _ in range(2):
            for _ in range(7):
                stand.arrive()
            async with http.get(stand.url) as asked:
                await asked.read()
            async with http.get(f"{stand.url}?watch") as other:
                await next_line(other)
        second = await next_line(answer)
    assert second.servers[SERVER].engines["10.0.0.1:8000"].in_flight in (9, 14)


@pytest.mark.usefixtures("unasked")
async def test_each_follower_is_woken_by_what_is_news_to_it_alone() -> None:
    async with page("{address: '10.0.0.1:8000'}") as stand:
        early = stand.watch.stream_lines()
        await anext(early)
        for _ in range(7):
            stand.arrive()
        late = stand.watch.stream_lines()
        await anext(late)
        before = asyncio.create_task(anext(early))
        after = asyncio.create_task(anext(late))
        # both wait for their next line
        await asyncio.sleep(0.2)
        for _ in range(2):
            stand.arrive()
        async with asyncio.timeout(120):
            line = msgspec.json.decode(await before, type=ProcessDemand)
        assert line.servers[SERVER].engines["10.0.0.1:8000"].in_flight == 9
        assert not after.done()
        # these two were no news to the late one, and what is news to it is not forgotten
        for _ in range(7):
            stand.arrive()
        async with asyncio.timeout(120):
            line = msgspec.json.decode(await after, type=ProcessDemand)
        assert line.servers[SERVER].engines["10.0.0.1:8000"].in_flight == 16
        for one in (early, late):
            await one.aclose()


async def test_a_page_asked_for_once_changes_nothing_for_those_who_follow() -> None:
    async with page() as stand, aiohttp.ClientSession() as http, http.get(f"{stand.url}?watch=changes") as answer:
        await next_line(answer)
        async with http.get(stand.url) as asked:
            await asked.read()
        # nothing has changed, so nothing is told
        assert list((await next_line(answer)).servers) == []


async def test_a_burst_is_told_before_all_of_it_has_been_read(monkeypatch: pytest.MonkeyPatch) -> None:
    # on a busy machine the follower's turn may come late
    monkeypatch.setattr(demand_watch, "_URGENT_S", 60.0)
    one = "{address: '10.0.0.1:8000'}"
    async with page(one) as stand, aiohttp.ClientSession() as http, http.get(f"{stand.url}?watch") as answer:
        await next_line(answer)
        # the follower has to wait no longer after the line before
        await asyncio.sleep(0.1)

        async def ask() -> None:
            await stand.watch.yield_to_followers()
            stand.arrive()

        await asyncio.gather(*(ask() for _ in range(200)))
        second = await next_line(answer)
    assert second.servers[SERVER].engines["10.0.0.1:8000"].in_flight < 50


async def test_nobody_waits_for_a_follower_that_takes_nothing() -> None:
    async with page() as stand:
        lines = stand.watch.stream_lines()
        await anext(lines)
        stand.arrive()
        async with asyncio.timeout(120):
            for _ in range(1000):
                await stand.watch.yield_to_followers()
        await lines.aclose()


async def test_followers_are_few_and_make_room_when_they_leave() -> None:
    async with page() as stand, aiohttp.ClientSession() as http, contextlib.AsyncExitStack() as stack:
        url = f"{stand.url}?watch"
        answers = [await stack.enter_async_context(http.get(url)) for _ in range(MOST_WATCHERS)]
        assert {one.status for one in answers} == {200}
        async with http.get(url) as refused:
            assert refused.status == 503
        answers[0].close()
        await eventually(lambda: stand.watch.may_accept_follower)
        async with http.get(url) as welcome:
            assert welcome.status == 200


async def test_the_end_of_the_process_ends_the_streams() -> None:
    async with page() as stand, aiohttp.ClientSession() as http, http.get(f"{stand.url}?watch") as answer:
        await next_line(answer)
        # the server itself ends them after 60 s
        async with asyncio.timeout(50):
            await stand.runner.cleanup()
        assert await asyncio.wait_for(answer.content.read(), 120) == b""


async def test_who_asks_for_changes_is_told_of_a_server_when_it_does_something() -> None:
    async with page() as stand, aiohttp.ClientSession() as http, http.get(f"{stand.url}?watch=changes") as answer:
        first, quiet = await next_line(answer), await next_line(answer)
        assert (list(first.servers), first.since) == ([SERVER], 0)
        assert (list(quiet.servers), quiet.since) == ([], first.sequence)
        stand.arrive()
        busy, still_busy = await next_line(answer), await next_line(answer)
        assert (busy.servers[SERVER].at_zero, busy.since) == (1, quiet.sequence)
        # it waits, and for longer
        assert still_busy.servers[SERVER].oldest_wait_s > busy.servers[SERVER].oldest_wait_s


async def test_what_changes_say_is_what_whole_lines_say() -> None:
    async with page() as stand, aiohttp.ClientSession() as http:
        async with http.get(f"{stand.url}?watch=changes") as answer:
            known: ProcessDemand | None = None
            for at in range(4):
                known = apply_demand_delta(await next_line(answer), known)
                assert known is not None
                if at == 1:
                    stand.core.on_disconnect(stand.arrive(), time.monotonic())  # noqa: TID251 - a real clock
        async with http.get(stand.url) as answer:
            whole = msgspec.json.decode(await answer.read(), type=ProcessDemand)
    assert known.servers == whole.servers
    assert whole.servers[SERVER].counted["m"].arrivals == 1
