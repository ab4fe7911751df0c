# SPDX-License-Identifier: Apache-2.0
"""Gateways are followed over real HTTP: hung ones, broken ones, restarted ones, and many."""

from __future__ import annotations

import asyncio
import contextlib
import time
from random import Random
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry

from bench.stack.processes import free_ports
from controller.kube import gateway_reports as demand
from controller.kube.gateway_reports import DemandFeed, DemandStreamMerger
from controller.kube.metrics_and_health import serve_pages
from extproc.api.status_page_contents import DEMAND_PATH, LOADS_LABEL, ProcessDemand, ServerDemand, apply_demand_delta
from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    Speak = Callable[[web.StreamResponse], Awaitable[None]]


@pytest.fixture(autouse=True)
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demand, "IDLE_S", 0.5)
    monkeypatch.setattr(demand, "_LONGEST_WAIT_S", 0.2)


def line(instance: str, sequence: int, **servers: ServerDemand) -> bytes:
    return msgspec.json.encode(ProcessDemand(instance, sequence, 1.0, servers)) + b"\n"


@contextlib.asynccontextmanager
async def speaking(speak: Speak, port: int | None = None, status: int = 200) -> AsyncIterator[str]:
    """An extproc whose stream is what ``speak`` writes; gives its address."""
    streams: set[asyncio.Task[Any]] = set()

    async def show(_: web.Request) -> web.StreamResponse:
        task = asyncio.current_task()
        assert task is not None
        streams.add(task)
        answer = web.StreamResponse(status=status)
        await answer.prepare(_)
        with contextlib.suppress(ConnectionError):
            await speak(answer)
        return answer

    app = web.Application()
    app.add_routes([web.get(DEMAND_PATH, show)])
    runner, port = web.AppRunner(app, shutdown_timeout=0.1), port or free_ports(1)[0]
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        for stream in streams:
            stream.cancel()
        await runner.cleanup()


def telling(instance: str) -> Speak:
    async def speak(answer: web.StreamResponse) -> None:
        for sequence in range(1, 1000):
            await answer.write(line(instance, sequence))
            await asyncio.sleep(0.05)

    return speak


def gateway(address: str, **status: object) -> dict[str, Any]:
    ip, _, port = address.partition(":")
    return {"metadata": {"labels": {LOADS_LABEL: port}}, "status": {"podIP": ip, "phase": "Running", **status}}


class Stand:
    """``heard``: messages by gateway."""

    def __init__(self, trusted: tuple[str, ...] = ()) -> None:
        self.pods: dict[str, dict[str, Any]] = {}
        self.heard: dict[str, list[ProcessDemand]] = {}
        self.feed = DemandFeed(
            lambda: self.pods,
            self.hear,
            clock=time.monotonic,  # noqa: TID251 - real streams
            rng=Random(0),
            trusted=trusted,
        )

    def hear(self, key: str, message: ProcessDemand, at_s: float) -> None:
        assert at_s <= time.monotonic()  # noqa: TID251 - real streams
        self.heard.setdefault(key, []).append(message)

    def set(self, **pods: dict[str, Any]) -> None:
        self.pods = {f"default/{name}": pod for name, pod in pods.items()}
        self.feed.on_gateways_changed()

    def names(self, key: str) -> set[str]:
        return {one.instance for one in self.heard.get(f"default/{key}", [])}


@contextlib.asynccontextmanager
async def following(trusted: tuple[str, ...] = ()) -> AsyncIterator[Stand]:
    stand = Stand(trusted)
    task = asyncio.create_task(stand.feed.run())
    try:
        yield stand
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_messages_are_heard_as_they_come_while_the_pod_is_there() -> None:
    async with speaking(telling("a")) as address, following() as stand:
        stand.set(g=gateway(address), pending=gateway(address, phase="Pending"))
        await eventually(lambda: len(stand.heard.get("default/g", [])) >= 3)
        assert [one.sequence for one in stand.heard["default/g"][:3]] == [1, 2, 3]
        assert stand.feed.gateway_addresses() == {"default/g": address}
        stand.set()
        await asyncio.sleep(0.1)
        count = len(stand.heard["default/g"])
        await asyncio.sleep(0.2)
        assert len(stand.heard["default/g"]) == count
        assert set(stand.heard) == {"default/g"}


async def hang(_: web.StreamResponse) -> None:
    await asyncio.sleep(60)


async def half(answer: web.StreamResponse) -> None:
    await answer.write(line("half", 1)[:-5])


async def trickle(answer: web.StreamResponse) -> None:
    while True:
        await answer.write(b" ")
        await asyncio.sleep(0.05)


async def giant(answer: web.StreamResponse) -> None:
    while True:
        await answer.write(b"[" * 1_000_000)


async def garbage(answer: web.StreamResponse) -> None:
    await answer.write(b"<html>\n" * 10)


async def twice_then_hang(answer: web.StreamResponse) -> None:
    await answer.write(line("hangs", 1)[:7])
    await asyncio.sleep(0.05)
    await answer.write(line("hangs", 1)[7:] + line("hangs", 2) + b'{"inst')
    await asyncio.sleep(60)


async def nested(answer: web.StreamResponse) -> None:
    await answer.write(b'{"unknown":' + b"[" * 100_000 + b"]" * 100_000 + b"}\n")


@pytest.mark.parametrize("speak", [hang, half, trickle, giant, garbage, nested])
async def test_a_stream_that_is_none_is_opened_again_and_again_and_harms_no_other(
    speak: Speak,
) -> None:
    opened = 0

    async def counted(answer: web.StreamResponse) -> None:
        nonlocal opened
        opened += 1
        await speak(answer)

    async with speaking(counted) as bad, speaking(telling("fine")) as fine, following() as stand:
        stand.set(bad=gateway(bad), fine=gateway(fine))
        await eventually(lambda: opened >= 3 and len(stand.heard.get("default/fine", [])) > 10)
    assert "default/bad" not in stand.heard


async def test_what_a_broken_stream_said_before_is_heard() -> None:
    async with speaking(twice_then_hang) as address, following() as stand:
        stand.set(g=gateway(address))
        await eventually(lambda: len(stand.heard.get("default/g", [])) >= 4)
        assert [one.sequence for one in stand.heard["default/g"][:4]] == [1, 2, 1, 2]


async def test_errors_and_places_where_nobody_listens_are_asked_again() -> None:
    port = free_ports(1)[0]
    async with speaking(telling("a"), status=404) as refusing, following() as stand:
        stand.set(refusing=gateway(refusing), later=gateway(f"127.0.0.1:{port}"))
        await asyncio.sleep(0.3)
        assert stand.heard == {}
        async with speaking(telling("one"), port):
            await eventually(lambda: stand.names("later") == {"one"})
        async with speaking(telling("two"), port):
            await eventually(lambda: stand.names("later") == {"one", "two"})


async def test_a_gateway_that_moves_is_followed_where_it_is() -> None:
    async with speaking(telling("here")) as here, speaking(telling("there")) as there, following() as stand:
        stand.set(g=gateway(here))
        await eventually(lambda: stand.names("g") == {"here"})
        stand.set(g=gateway(there))
        await eventually(lambda: stand.names("g") == {"here", "there"})
        stand.heard.clear()
        await eventually(lambda: bool(stand.heard))
        assert stand.names("g") == {"there"}


async def test_fifty_gateways_are_followed_and_of_those_nobody_vouches_for_a_few() -> None:
    async with contextlib.AsyncExitStack() as stack:
        addresses = [await stack.enter_async_context(speaking(telling(f"g{number}"))) for number in range(50)]
        pods = {f"g{number}": gateway(address) for number, address in enumerate(addresses)}
        async with following(trusted=("default",)) as stand:
            stand.set(**pods)
            await eventually(lambda: len(stand.heard) == 50)
        async with following() as stand:
            stand.set(**pods)
            await eventually(lambda: len(stand.heard) == 32)
            assert len(stand.feed.gateway_addresses()) == 50


def waiting(requests: int) -> ServerDemand:
    return ServerDemand(model="m", queued=requests)


async def changes_then_a_gap(answer: web.StreamResponse) -> None:
    await answer.write(line("x", 1, a=waiting(1), b=waiting(2)))
    for said in (ProcessDemand("x", 2, 1.0, {"b": waiting(3)}, since=1), ProcessDemand("x", 4, 1.0, since=3)):
        await answer.write(msgspec.json.encode(said) + b"\n")
    await asyncio.sleep(10)


async def test_lines_that_name_changed_servers_alone_are_heard_as_whole_ones() -> None:
    async with speaking(changes_then_a_gap) as address, following(trusted=("default",)) as stand:
        stand.set(g=gateway(address))
        # what does not go on from the line before ends the stream, and the next one begins with all
        await eventually(lambda: len(stand.heard.get("default/g", ())) >= 3)
    first, second, again = stand.heard["default/g"][:3]
    assert [first.sequence, second.sequence, again.sequence] == [1, 2, 1]
    assert second.servers == {"a": waiting(1), "b": waiting(3)}
    assert second.servers["a"] is first.servers["a"]


async def test_a_pod_tells_its_followers_changes_if_they_ask_for_these() -> None:
    async def speak(answer: web.StreamResponse) -> None:
        await answer.write(line("x", 1, a=waiting(1), b=waiting(2)))
        for sequence in range(2, 10_000):
            said = ProcessDemand("x", sequence, 1.0, {"b": waiting(sequence)}, since=sequence - 1)
            await answer.write(msgspec.json.encode(said) + b"\n")
            await asyncio.sleep(0.02)

    address = f"127.0.0.1:{free_ports(1)[0]}"
    async with (
        speaking(speak) as process,
        serve_pages(address, CollectorRegistry(), lambda: True, extprocs=[process]),
        aiohttp.ClientSession() as http,
    ):
        lines: dict[str, list[ProcessDemand]] = {}
        for query in ("watch", "watch=changes"):
            async with http.get(f"http://{address}{DEMAND_PATH}?{query}") as answer:
                lines[query] = [
                    msgspec.json.decode(await answer.content.readline(), type=ProcessDemand) for _ in range(5)
                ]
    assert all(one.servers.keys() == {"a", "b"} and not one.since for one in lines["watch"])
    known: ProcessDemand | None = None
    for said in lines["watch=changes"]:
        is_first, known = known is None, apply_demand_delta(said, known)
        assert known is not None
        assert known.servers == {"a": waiting(1), "b": waiting(known.servers["b"].queued)}
        assert is_first or list(said.servers) == ["b"]


async def test_a_pod_tells_what_each_of_its_processes_says_and_which_say_nothing() -> None:
    nowhere = f"127.0.0.1:{free_ports(1)[0]}"
    async with speaking(telling("a")) as first, speaking(telling("b")) as second, following() as stand:
        address = f"127.0.0.1:{free_ports(1)[0]}"
        extprocs = [first, second, nowhere]
        async with (
            serve_pages(address, CollectorRegistry(), lambda: True, extprocs=extprocs),
            aiohttp.ClientSession() as http,
        ):
            stand.set(g=gateway(address))
            await eventually(lambda: stand.names("g") == {"a", "b", ""})
            slots = {(one.slot, one.instance) for one in stand.heard["default/g"]}
            assert slots == {(first, "a"), (second, "b"), (nowhere, "")}
            async with http.get(f"http://{address}{DEMAND_PATH}") as answer:
                once = [msgspec.json.decode(one, type=ProcessDemand) for one in (await answer.read()).splitlines()]
            assert [(one.slot, one.instance) for one in once] == [(first, "a"), (second, "b"), (nowhere, "")]
            # its end is not held up by who follows: the server would wait a minute for them
            began_s = time.monotonic()  # noqa: TID251 - a real server
        assert time.monotonic() - began_s < 40  # noqa: TID251 - a real server


def bulky(slot: int, sequence: int = 1) -> bytes:
    """A line of a process, of some 200 kB."""
    server = ServerDemand(model="m" * 200_000)
    return msgspec.json.encode(ProcessDemand(f"p{slot}", sequence, 1.0, {"default/a": server}, slot=f"s{slot}")) + b"\n"


@pytest.mark.parametrize(("trusted", "heard"), [((), 4), (("default",), 10)])
async def test_a_gateway_that_nobody_vouches_for_fills_no_memory_by_many_processes(
    trusted: tuple[str, ...], heard: int
) -> None:
    async def speak(answer: web.StreamResponse) -> None:
        for slot in range(10):
            await answer.write(bulky(slot))
        await asyncio.sleep(10)

    async with speaking(speak) as address, following(trusted) as stand:
        stand.set(g=gateway(address))
        await eventually(lambda: len(stand.heard.get("default/g", ())) >= heard)
        await asyncio.sleep(0.1)
        assert len(stand.names("g")) == heard


async def test_a_gateway_that_nobody_vouches_for_is_read_slowly_however_fast_it_speaks() -> None:
    async def speak(answer: web.StreamResponse) -> None:
        for first in range(1, 100_000, 50):
            await answer.write(b"".join(line("flood", first + more) for more in range(50)))
            # it shares its event loop with those who read
            await asyncio.sleep(0.01)

    async with speaking(speak) as address, following() as stand:
        stand.set(g=gateway(address))
        await eventually(lambda: len(stand.heard.get("default/g", ())) >= 5)
        before, began_s = len(stand.heard["default/g"]), time.monotonic()  # noqa: TID251 - a real stream
        await asyncio.sleep(0.5)
        took_s = time.monotonic() - began_s  # noqa: TID251 - a real stream
        assert len(stand.heard["default/g"]) - before <= took_s / demand._SHORTEST_OWN_S + 1


async def test_a_relay_ends_even_if_something_is_said_at_that_instant() -> None:
    async with aiohttp.ClientSession() as http:
        relay = DemandStreamMerger(http, ())
        reading = asyncio.create_task(anext(relay.lines()))
        await asyncio.sleep(0.01)
        relay._news.set()
        await asyncio.sleep(0)
        reading.cancel()
        ended, _ = await asyncio.wait([reading], timeout=120)
        assert ended
        assert reading.cancelled()
