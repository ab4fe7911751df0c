# SPDX-License-Identifier: Apache-2.0
"""What scraping 100 engines five times a second costs: our client against aiohttp's.

Both use the same reader. The pages are vLLM's own, recorded from version 0.32 (49 KB). A second process serves them
on 100 ports; only the processor time of the process that asks is counted.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import time
from importlib.resources import files
from typing import TYPE_CHECKING, Final

import aiohttp
import msgspec
import uvloop

from bench.stack import documents
from extproc.api.load import load
from extproc.core.core import Core
from extproc.endpoints.metric_names import NAMES
from extproc.endpoints.metrics_text import MetricsReader
from extproc.feeds.engine_access import EngineAccess
from extproc.feeds.engines import EngineScraper
from extproc.metrics.registry import Metrics

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from multiprocessing.connection import Connection

ENGINES: Final = 100
HERTZ: Final = 5
SECONDS: Final = 10.0


class Cost(msgspec.Struct, frozen=True):
    """Pages a second, and the share of one core that reading them took."""

    pages_per_s: float
    core_share: float


def recorded_page() -> bytes:
    """A whole metrics page of vLLM, as recorded."""
    return (files("bench.micro") / "vllm_metrics.txt").read_bytes()


def measure(seconds: float = SECONDS) -> dict[str, Cost]:
    """Measure both clients, one after the other."""
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=_serve, args=(theirs,), daemon=True)
    server.start()
    try:
        ports: list[int] = ours.recv()
        return {
            "Attaché": uvloop.run(_cost_of(_ask_with_ours(ports, seconds), seconds)),
            "aiohttp": uvloop.run(_cost_of(_ask_with_aiohttp(ports, seconds), seconds)),
        }
    finally:
        server.terminate()
        server.join()


async def _cost_of(asking: Coroutine[None, None, int], seconds: float) -> Cost:
    began = time.process_time()
    pages = await asking
    return Cost(pages / seconds, (time.process_time() - began) / seconds)


async def _ask_with_ours(ports: list[int], seconds: float) -> int:
    more = {"scrapeInterval": f"{1000 // HERTZ}ms"}
    text = documents([f"127.0.0.1:{port}" for port in ports], gateway={}, more=more)
    core = Core(load({"all.yaml": text.encode()}), rng=random.Random(0), ticket_prefix="t")
    clock = asyncio.get_running_loop().time
    metrics = Metrics(core.pools.values, lambda: 0.0, clock)
    scraper = EngineScraper(
        core,
        metrics,
        access=EngineAccess({}, clock),
        clock=clock,
        rng=random.Random(0),
        deliver=lambda event: core.take_report(event, clock()),
    )
    task = asyncio.create_task(scraper.run())
    await asyncio.sleep(seconds)
    task.cancel()
    await asyncio.wait([task])
    read = metrics.registry.get_sample_value(
        "attache_engine_reports_total", {"server": "default/llama", "result": "read"}
    )
    return int(read or 0)


async def _ask_with_aiohttp(ports: list[int], seconds: float) -> int:
    read = 0

    async def poll(http: aiohttp.ClientSession, port: int) -> None:
        nonlocal read
        reader, rng = MetricsReader(NAMES["vLLM"]), random.Random(port)
        while True:
            await asyncio.sleep(rng.uniform(0.9, 1.1) / HERTZ)
            async with http.get(f"http://127.0.0.1:{port}/metrics") as answer:
                reader.read(await answer.read())
            read += 1

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        tasks = [asyncio.create_task(poll(http, port)) for port in ports]
        await asyncio.sleep(seconds)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    return read


def _serve(pipe: Connection) -> None:
    uvloop.run(_serve_pages(pipe))


async def _serve_pages(pipe: Connection) -> None:
    page = _answer("text/plain", recorded_page())
    models = _answer("application/json", b'{"object":"list","data":[{"id":"llama"}]}')

    class Pages(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self.transport = transport

        def data_received(self, data: bytes) -> None:
            answer = models if data.startswith(b"GET /v1/models") else page
            self.transport.write(answer)  # type: ignore[attr-defined]  # uvloop's transports do not say what they are

    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(Pages, "127.0.0.1", 0) for _ in range(ENGINES)]
    pipe.send([server.sockets[0].getsockname()[1] for server in servers])
    await asyncio.Event().wait()


def _answer(kind: str, body: bytes) -> bytes:
    head = f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def main() -> None:
    """Measure and print both."""
    for name, cost in measure().items():
        print(f"{name}: {cost.pages_per_s:.0f} pages/s, {cost.core_share:.1%} of one core")


if __name__ == "__main__":
    main()
