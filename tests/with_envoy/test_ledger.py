# SPDX-License-Identifier: Apache-2.0
"""Rows equal what engines have answered, request by request, though all that keeps count is killed again and again.

``ATTACHE_LEDGER_KILLS``: how often.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import sqlite3
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import msgspec
from aiohttp import web

from bench.stack.loopback_stack import ALIAS, documents
from bench.stack.processes import Processes, free_ports, workers_of
from tests.examples import IS_SLOW
from tests.redis_server import running_redis
from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from tests.redis_server import Redis

__all__ = ["running_redis"]

KILLS: Final = int(os.environ.get("ATTACHE_LEDGER_KILLS", "100" if IS_SLOW else "6"))
CLIENTS: Final = 6
KILLED: Final = ("usage", "extproc", "redis")
BUDGET: Final = {"name": "all", "per": "Route", "window": "Month", "max": {"tokens": 1_000_000_000}, "scope": "Global"}


class Used(msgspec.Struct, frozen=True):
    """Tokens of a request, by the engine's count or by its row."""

    request_id: str
    input: int
    output: int


class Engine:
    """``answered``: all requests in order. ``decided``: of streams, whether extproc had a part in them."""

    def __init__(self) -> None:
        self.address = ""
        self.answered: list[Used] = []
        self.decided: dict[str, bool] = {}

    async def answer(self, request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        tokens = asked["max_tokens"]
        prompt = len(asked["messages"][0]["content"])
        request_id = request.headers["x-request-id"]
        self.answered.append(Used(request_id, prompt, tokens))
        usage = {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}
        if not asked["stream"]:
            await asyncio.sleep(0.02)
            choice = {"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}
            return web.json_response({"choices": [choice], "usage": usage})
        # which clients here do not ask for, and extproc does
        self.decided[request_id] = "stream_options" in asked
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for number in range(tokens):
            end = "stop" if number == tokens - 1 else None
            await response.write(event(choices=[{"index": 0, "delta": {"content": "hi"}, "finish_reason": end}]))
            await asyncio.sleep(0.02)
        await response.write(event(choices=[], usage=usage) + b"data: [DONE]\n\n")
        return response


def event(**data: object) -> bytes:
    return b"data: %s\n\n" % json.dumps(data).encode()


@contextlib.asynccontextmanager
async def running_engine() -> AsyncIterator[Engine]:
    engine = Engine()
    app = web.Application()
    app.add_routes([web.post("/{path:.*}", engine.answer)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    engine.address = f"127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield engine
    finally:
        await runner.cleanup()


class Clients:
    """They ask until told to stop. ``statuses``: of answers."""

    def __init__(self, url: str) -> None:
        self._url = f"{url}/v1/chat/completions"
        self._stopped = asyncio.Event()
        self._numbers: Iterator[int] = itertools.count()
        self.statuses: Counter[int] = Counter()

    @contextlib.asynccontextmanager
    async def asking(self) -> AsyncIterator[None]:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as http:
            tasks = [asyncio.create_task(self._ask_again(http)) for _ in range(CLIENTS)]
            try:
                yield
            finally:
                self._stopped.set()
                await asyncio.gather(*tasks)

    async def more(self, count: int) -> None:
        target = self.statuses.total() + count
        await eventually(lambda: self.statuses.total() >= target)

    async def _ask_again(self, http: aiohttp.ClientSession) -> None:
        while not self._stopped.is_set():
            number = next(self._numbers)
            body: dict[str, Any] = {
                "model": ALIAS,
                "messages": [{"role": "user", "content": "x" * (number % 89 + 1)}],
                "max_tokens": number % 13 + 1,
                "stream": bool(number % 3),
            }
            async with http.post(self._url, json=body) as answer:
                await answer.read()
                self.statuses[answer.status] += 1
            await asyncio.sleep(0.01)


def child(serve: int, word: str) -> int | None:
    """The process id of the child that has ``word`` among its arguments; None while there is none."""
    for pid in Path(f"/proc/{serve}/task/{serve}/children").read_text().split():
        with contextlib.suppress(FileNotFoundError):
            if word in Path(f"/proc/{pid}/cmdline").read_text().split("\0"):
                return int(pid)
    return None


class Kept(msgspec.Struct, frozen=True):
    """What the store has. ``rows``: of requests that reached an engine; ``degraded``: their ids. ``others``: tokens of
    each other request. ``sums``: requests, input and output, over all hours and over all days.
    """

    rows: list[Used]
    degraded: set[str]
    others: list[int]
    sums: list[tuple[int, int, int]]


def kept(file: Path) -> Kept:
    query = "SELECT request_id, input, output, is_degraded, endpoint FROM requests"
    with contextlib.closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as database:
        found = database.execute(query).fetchall()
        total = "SELECT SUM(requests), SUM(input), SUM(output) FROM rollups_"
        sums = [database.execute(total + unit).fetchone() for unit in ("hour", "day")]
    served_by_one = [one for one in found if one[4]]
    return Kept(
        [Used(*one[:3]) for one in served_by_one],
        {one[0] for one in served_by_one if one[3]},
        [one[1] + one[2] for one in found if not one[4]],
        sums,
    )


@contextlib.asynccontextmanager
async def served(directory: Path, envoy: str, engine: Engine, redis: Redis) -> AsyncIterator[tuple[str, int]]:
    """``attache serve``: its URL and process id."""
    listen, admin, extproc, metrics, usage, rows = free_ports(6)
    config = directory / "config"
    config.mkdir()
    gateway = {
        "listen": f"127.0.0.1:{listen}",
        "admin": f"127.0.0.1:{admin}",
        "extproc": f"127.0.0.1:{extproc}",
        "failureMode": "Open",
        "usageLog": {"path": str(directory / "usage.log")},
    }
    text = documents([engine.address], gateway=gateway, more={"scrapeInterval": "0s"}, route={"budgets": [BUDGET]})
    (config / "attache.yaml").write_text(text)
    command = (
        *("env", f"ENVOY={envoy}", sys.executable, "-m", "attache", "serve", "--config", str(config)),
        *("--metrics", f"127.0.0.1:{metrics}", "--usage-metrics", f"127.0.0.1:{rows}"),
        *("--usage-admin", f"127.0.0.1:{usage}", "--usage-store", f"sqlite:///{directory}/usage.db"),
        *("--", "--redis", redis.url),
    )
    log = ServeLog(directory / "serve.log")
    async with Processes(directory) as processes:
        pid = await processes.start("serve", command)
        await processes.wait_ready("serve", log.is_up)
        # env becomes the command
        yield f"http://127.0.0.1:{listen}", pid


class ServeLog:
    """What ``attache serve`` and its children have written."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def count(self, words: str) -> int:
        return self._file.read_text().count(words)

    async def is_up(self) -> bool:
        return self.count("ready: clients connect to") > 0

    async def has_more(self, words: str, before: int) -> None:
        await eventually(lambda: self.count(words) > before)


async def kill(name: str, serve: int, log: ServeLog, *, waits: bool) -> None:
    """SIGKILL to a child, or to extproc's worker. ``waits``: until its successor is ready; else that may be killed
    while it starts.
    """
    pids: list[int] = []

    def runs() -> bool:
        found = child(serve, name)
        if found is not None:
            pids.extend(workers_of(found) if name == "extproc" else [found])
        return bool(pids)

    await eventually(runs)
    again = f"{'worker-0' if name == 'extproc' else name} is ready again"
    before = log.count(again)
    os.kill(pids[-1], signal.SIGKILL)
    if waits:
        await log.has_more(again, before)


async def test_rows_equal_what_engines_answered_whatever_is_killed(tmp_path: Path, envoy: str, redis: Redis) -> None:
    seed = random.randrange(2**32)
    chosen = random.Random(seed)
    log = ServeLog(tmp_path / "serve.log")
    kills: Counter[str] = Counter()
    found = Kept([], set(), [], [])
    async with running_engine() as engine, served(tmp_path, envoy, engine, redis) as (url, serve):
        clients = Clients(url)
        async with clients.asking():
            await clients.more(CLIENTS)
            while kills.total() < KILLS:
                # each at least once
                name = chosen.choice([one for one in KILLED if not kills[one]] or KILLED)
                if name == "redis":
                    await asyncio.to_thread(redis.stop)
                    await clients.more(chosen.randrange(20))
                    await asyncio.to_thread(redis.start)
                else:
                    await kill(name, serve, log, waits=chosen.randrange(4) > 0)
                kills[name] += 1
                await clients.more(chosen.randrange(1, 30))

        def are_all_there() -> bool:
            nonlocal found
            found = kept(tmp_path / "usage.db")
            return len(found.rows) + len(found.others) >= clients.statuses.total()

        # what is missing is shown below
        with contextlib.suppress(TimeoutError):
            await eventually(are_all_there)
    told = {
        "seed": seed,
        "kills": dict(kills),
        "statuses": dict(clients.statuses),
        "rows": len(found.rows),
        "degraded": len(found.degraded),
    }
    (tmp_path / "told.json").write_text(json.dumps(told))
    rows, answers = Counter(found.rows), Counter(engine.answered)
    assert (rows - answers, answers - rows) == (Counter(), Counter()), told
    # none twice, and no engine was asked twice
    assert len({one.request_id for one in found.rows}) == len(found.rows), told
    assert found.degraded & engine.decided.keys() == {one for one, is_so in engine.decided.items() if not is_so}, told
    # what reached no engine
    assert len(found.others) == sum(count for status, count in clients.statuses.items() if status != 200), told
    assert set(found.others) <= {0}
    tokens = sum(one.input for one in found.rows), sum(one.output for one in found.rows)
    whole = (clients.statuses.total(), *tokens)
    assert found.sums == [whole, whole], told
