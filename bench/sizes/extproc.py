# SPDX-License-Identifier: Apache-2.0
"""extproc alone at a size: its start, memory, processor time, pages, a change of one route, and decisions.

One process answers for all engines, with a page of vLLM's as recorded. How long the event loop of extproc stands still
is measured from outside: the longest answer of /readyz, which needs nothing but a turn of the loop.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

import msgspec
import uvloop

from bench.micro.scraping import recorded_page
from bench.processes import Processes
from bench.sizes.configuration import Gateway, Sizes, configuration, model_route
from extproc.config.load import load
from extproc.core.core import Core
from extproc.core.effects import Decision
from extproc.core.types import Head
from extproc.request.model import Api

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


HOST: Final = "127.0.0.1"
_PAGES: Final = ("/metrics", "/loads", "/demand")
# From readiness on: connections are made, and whoever is asked for the first time has answered.
_SETTLE_S: Final = 12.0
_IDLE_S: Final = 5.0
_PROBE_S: Final = 0.002
_LONGEST_S: Final = 60.0
_DECISIONS: Final = 2_000


class Page(msgspec.Struct, frozen=True):
    """``lag_ms``: the longest time that the event loop stood still meanwhile."""

    seconds: float
    mib: float
    lag_ms: float


class Figures(msgspec.Struct, frozen=True):
    """``ready_s``: from exec. ``rss_mib``, ``descriptors``: when all engines have been asked. ``core_share``: of
    one core, with no request. ``scrapes_per_s``: that the engines were asked. ``change_s``: from a rename of one file
    to its use. ``*lag_ms``: the longest time that the event loop stood still.
    """

    ready_s: float
    rss_mib: float
    descriptors: int
    core_share: float
    scrapes_per_s: float
    idle_lag_ms: float
    change_s: float
    change_lag_ms: float
    log_lines: int
    pages: dict[str, Page]


async def measure(sizes: Sizes, directory: Path, *, first_port: int) -> Figures:
    """Run extproc and its engines on three ports from ``first_port`` on; ``directory`` is for files and logs."""
    metrics, engines = first_port + 1, first_port + 2
    gateway = Gateway(f"{HOST}:{first_port + 3}", f"{HOST}:{first_port + 4}", f"{HOST}:{first_port}", engines)
    config = directory / "config"
    config.mkdir(parents=True)
    for name, content in configuration(sizes, gateway, "Close").items():
        (config / name).write_bytes(content)
    async with Processes(directory) as processes:
        await processes.start("engines", [sys.executable, "-m", "bench.sizes.extproc", str(engines)])
        words = ["--config", str(config), "--listen", gateway.extproc, "--metrics", f"{HOST}:{metrics}"]
        started_s = time.perf_counter()
        pid = await processes.start("extproc", [sys.executable, "-m", "extproc", *words])
        await processes.wait_ready("extproc", lambda: _is_ready(metrics))
        ready_s = time.perf_counter() - started_s
        await asyncio.sleep(_SETTLE_S)
        spent_s, asked, (_, idle_lag_ms) = _spent_s(pid), await _asked(engines), await _lag_of(metrics, _idle)
        core_share = (_spent_s(pid) - spent_s) / _IDLE_S
        scrapes_per_s = (await _asked(engines) - asked) / _IDLE_S
        rss_mib, descriptors = _rss_mib(pid), _descriptors(pid)
        pages = {path: await _page(metrics, path) for path in _PAGES}
        change_s, change_lag_ms = await _change(sizes, config, metrics)
        log_lines = (directory / "extproc.log").read_bytes().count(b"\n")
    return Figures(
        ready_s,
        rss_mib,
        descriptors,
        core_share,
        scrapes_per_s,
        idle_lag_ms,
        change_s,
        change_lag_ms,
        log_lines,
        pages,
    )


def decision_us(sizes: Sizes) -> float:
    """The median time of a whole decision, of requests for all models and adapters by all keys in turn."""
    files = configuration(sizes, Gateway("127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3", 4), "Close")
    core = Core(load(files), rng=random.Random(0), ticket_prefix="t")
    drawn, spent = random.Random(1), []
    for number in range(_DECISIONS):
        model = f"model-{drawn.randrange(sizes.model_routes)}"
        if number % 2:
            model = f"adapter-{drawn.randrange(sizes.adapters)}"
        body = msgspec.json.encode({"model": model, "messages": [{"role": "user", "content": f"Hello {number} " * 40}]})
        key = drawn.randrange(sizes.keys)
        headers = {"x-attache-api-key": f"key-{key}", "x-attache-tenant": f"tenant-{key % sizes.tenants}"}
        head = Head("POST", "/v1/chat/completions", headers, has_body=True, is_trusted=True)
        before = time.perf_counter()
        own, _ = core.arrive(core.intake.receive(Api.CHAT, head, body), number / 100)
        core.finish(own.ticket, number / 100)
        spent.append(time.perf_counter() - before)
        assert isinstance(own, Decision), own
    return statistics.median(spent) * 1e6


async def _idle() -> None:
    await asyncio.sleep(_IDLE_S)


async def _change(sizes: Sizes, config: Path, port: int) -> tuple[float, float]:
    """One route gets another name."""
    path = config / "routes-0.json"
    documents = msgspec.json.decode(path.read_bytes())
    documents[0] = model_route(sizes, 0, limited=True, name="model-renamed")

    async def follow() -> None:
        before = msgspec.json.decode(await _get(port, "/config"))["files"][path.name]
        fresh = path.with_suffix(".new")
        fresh.write_bytes(msgspec.json.encode(documents))
        fresh.rename(path)
        async with asyncio.timeout(_LONGEST_S):
            while msgspec.json.decode(await _get(port, "/config"))["files"][path.name] == before:  # noqa: ASYNC110 - elsewhere
                await asyncio.sleep(0.01)

    return await _lag_of(port, follow)


async def _page(port: int, path: str) -> Page:
    size = 0

    async def read() -> None:
        nonlocal size
        size = len(await _get(port, path))

    seconds, lag_ms = await _lag_of(port, read)
    return Page(seconds, size / 2**20, lag_ms)


async def _lag_of(port: int, work: Callable[[], Awaitable[None]]) -> tuple[float, float]:
    """Seconds of ``work``, and the longest answer of /readyz meanwhile in milliseconds."""
    longest_s = 0.0

    async def probe() -> None:
        nonlocal longest_s
        reader, writer = await asyncio.open_connection(HOST, port)
        try:
            while True:
                before = time.perf_counter()
                writer.write(b"GET /readyz HTTP/1.1\r\nhost: x\r\n\r\n")
                await reader.readuntil(b"ready\n")
                longest_s = max(longest_s, time.perf_counter() - before)
                await asyncio.sleep(_PROBE_S)
        finally:
            writer.close()

    probing = asyncio.create_task(probe())
    await asyncio.sleep(0.1)
    longest_s = 0.0
    before = time.perf_counter()
    await work()
    seconds = time.perf_counter() - before
    await asyncio.sleep(0.1)
    probing.cancel()
    return seconds, longest_s * 1e3


async def _get(port: int, path: str) -> bytes:
    reader, writer = await asyncio.open_connection(HOST, port, limit=2**20)
    try:
        writer.write(f"GET {path} HTTP/1.0\r\nhost: x\r\n\r\n".encode())
        return (await reader.read()).partition(b"\r\n\r\n")[2]
    finally:
        writer.close()


async def _is_ready(port: int) -> bool:
    try:
        return await _get(port, "/readyz") == b"ready\n"
    except OSError:
        return False


async def _asked(port: int) -> int:
    return int(await _get(port, "/asked"))


def _spent_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def _rss_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


class _Engine(asyncio.Protocol):
    """Answers for every engine."""

    page = b""
    models = b""
    asked = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if data.startswith(b"GET /asked"):
            self._transport.write(_answer(str(_Engine.asked).encode()))
            self._transport.close()
            return
        _Engine.asked += 1
        self._transport.write(_Engine.page if data.startswith(b"GET /metrics") else _Engine.models)


def _answer(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: %d\r\n\r\n" % len(body) + body


async def _serve(port: int) -> None:
    _Engine.page, _Engine.models = _answer(recorded_page()), _answer(b'{"data":[{"id":"model"}]}')
    server = await asyncio.get_running_loop().create_server(_Engine, "0.0.0.0", port, backlog=4096)  # noqa: S104
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(_serve(int(sys.argv[1])))
