# SPDX-License-Identifier: Apache-2.0
"""Pages of thousands of endpoints over real HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from typing import TYPE_CHECKING

import aiohttp
import msgspec
from aiohttp import web

from bench.sizes.config_generator import GatewayPorts, ObjectCounts, configuration
from bench.stack.processes import free_ports
from extproc.api.config_loader import load_snapshot
from extproc.api.status_page_contents import ConfigReport, EndpointLoad
from extproc.core.core import Core
from extproc.listen_sockets import listen
from extproc.metrics.request_metrics import Metrics
from extproc.runtime import admin_pages
from extproc.runtime.admin_pages import serve_pages
from extproc.runtime.demand_watch import DemandWatchServer
from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    import pytest

SIZES = ObjectCounts(models=100, routes=100, hosts=1, adapters=1, endpoints=5_000)


@contextlib.asynccontextmanager
async def served(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[int, list[int], Core]]:
    """The port, the lengths of the pieces of /metrics, and the core."""
    files = configuration(SIZES, GatewayPorts("127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3", 80), "Open")
    core = Core(load_snapshot(files), rng=random.Random(0), ticket_prefix="t")
    clock = asyncio.get_running_loop().time
    metrics = Metrics(core.pools.values, lambda: 0.0, clock)
    whole, written = metrics.registry.exposition_chunks, list[int]()

    def pieces() -> Iterator[str]:
        for piece in whole():
            written.append(len(piece))
            yield piece

    monkeypatch.setattr(metrics.registry, "exposition_chunks", pieces)
    port = free_ports(1)[0]
    listener = listen(f"127.0.0.1:{port}")
    # the kernel would take a whole page now and then
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
    runner = await serve_pages(
        listener,
        metrics.registry,
        is_ready=lambda: True,
        report=ConfigReport,
        loads=core.engine_loads_by_pool,
        demand=DemandWatchServer(core, clock),
        explain=None,
    )
    try:
        yield port, written, core
    finally:
        await runner.cleanup()


async def test_the_event_loop_turns_between_two_pieces_of_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    turns, seen = 0, set[int]()
    async with served(monkeypatch) as (port, written, core), aiohttp.ClientSession() as client:

        async def other_work() -> None:
            nonlocal turns
            while True:
                turns += 1
                seen.add(len(written))
                await asyncio.sleep(0)

        working = asyncio.create_task(other_work())
        async with client.get(f"http://127.0.0.1:{port}/metrics") as answer:
            page = await answer.text()
        # other work had a turn after each piece
        assert len(written) > 50
        assert len(seen) > 0.9 * len(written)
        assert page.count("\nattache_in_flight{") == SIZES.endpoints
        turns = 0
        async with client.get(f"http://127.0.0.1:{port}/loads") as answer:
            loads = msgspec.json.decode(await answer.read(), type=dict[str, EndpointLoad])
        assert turns >= SIZES.models / 20
        assert loads == core.engine_loads()
        assert len(loads) == SIZES.endpoints
        working.cancel()


async def test_web_pages_cannot_read_the_pages_of_a_developers_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(monkeypatch) as (port, _, _), aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client:
        for headers, expected in (({}, 200), ({"host": "rebound.example"}, 421), ({"origin": "http://e.example"}, 403)):
            async with client.get("/readyz", headers=headers) as answer:
                assert answer.status == expected


async def test_a_head_request_gets_no_page_behind_its_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(monkeypatch) as (port, _, _):
        for path in ("/metrics", "/demand?watch=changes"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for method in ("HEAD", "HEAD"):
                writer.write(f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n".encode())
                assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
            writer.write(b"GET /readyz HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n")
            assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
            writer.close()


async def test_nothing_is_written_for_a_reader_that_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("extproc.runtime.admin_pages._SLOWEST_S", 0.2)
    is_taken, write = list[bool](), admin_pages._written

    async def note(request: web.Request, answer: web.StreamResponse, content: bytes) -> bool:
        is_taken.append(await write(request, answer, content))
        return is_taken[-1]

    monkeypatch.setattr(admin_pages, "_written", note)
    async with served(monkeypatch) as (port, written, _):
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(slow, ("127.0.0.1", port))
        await loop.sock_sendall(slow, b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n")
        # it is let go
        await eventually(lambda: is_taken[-1:] == [False])
        so_far = sum(written)
        with contextlib.suppress(ConnectionResetError):
            while await loop.sock_recv(slow, 65536):
                pass
        assert sum(written) == so_far
        async with aiohttp.ClientSession() as client, client.get(f"http://127.0.0.1:{port}/metrics") as answer:
            whole = len(await answer.read())
        # what the kernel takes, and no more
        assert so_far < whole
        slow.close()
