# SPDX-License-Identifier: Apache-2.0
"""Breakers behind a real Envoy, of engines and of their ModelServer, over two workers."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING

import httpx
import pytest
import pytest_asyncio

from bench.stack.loopback_stack import ALIAS, EngineFlags, running_stack
from extproc.__main__ import main
from tests.waiting import eventually
from tests.with_envoy.test_workers import Workers

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from bench.stack.loopback_stack import Stack

pytestmark = pytest.mark.asyncio(loop_scope="module")

NO_RETRIES = {"trafficPolicy": {"retry": {"attempts": 0}}}
SERVER = "default/llama"
MANY = 1_000_000


class Clients:
    """Short requests, each with another prompt."""

    def __init__(self, stack: Stack, http: httpx.AsyncClient) -> None:
        self.stack = stack
        self.http = http
        self.number = 0

    async def ask(self, count: int, *, at_once: int = 4) -> Counter[str]:
        """What clients got, by status; "refused" by the breaker of the ModelServer."""
        gate = asyncio.Semaphore(at_once)

        async def one(number: int) -> str:
            body = {"model": ALIAS, "messages": [{"role": "user", "content": f"{number} is a number"}], "max_tokens": 2}
            async with gate:
                answer = await self.http.post(f"{self.stack.url}/v1/chat/completions", json=body)
            is_ours = answer.status_code == 503 and answer.json()["error"]["code"] == "server_failing"
            return "refused" if is_ours else str(answer.status_code)

        self.number += count
        return Counter(await asyncio.gather(*[one(number) for number in range(self.number - count, self.number)]))

    async def ill(self, engine: int, **fault: object) -> None:
        await self.http.post(f"{self.stack.engines[engine]}/faults", json={"fault": "unavailable", **fault})

    async def tries(self, engine: int) -> int:
        """Requests that Envoy has sent to an engine."""
        address = self.stack.engines[engine].removeprefix("http://")
        text = (await self.http.get(f"{self.stack.admin}/clusters")).text
        return sum(int(line.rpartition("::")[2]) for line in text.splitlines() if f"::{address}::rq_total::" in line)


@pytest_asyncio.fixture(loop_scope="module")
async def clients(tmp_path: Path) -> AsyncIterator[Clients]:
    """Two engines, two workers, and an Envoy that tries nothing again: clients see what engines answer."""
    flags = EngineFlags(count=2, speed=20.0)
    async with (
        running_stack(tmp_path / "stack", flags, workers=2, more=NO_RETRIES) as stack,
        httpx.AsyncClient(timeout=30) as http,
    ):
        yield Clients(stack, http)


def breaker(endpoint: str) -> str:
    return f'attache_breaker_state{{endpoint="{endpoint}",server="{SERVER}"}}'


async def test_two_workers_share_a_trip_and_a_probe(clients: Clients) -> None:
    workers = Workers(clients.stack, clients.http)
    address = clients.stack.engines[0].removeprefix("http://")
    await clients.ask(20)
    await clients.ill(0, times=MANY)

    async def both_know() -> bool:
        await clients.ask(4)
        return all(value > 0 for value in await workers.values(breaker(address)))

    await eventually(both_know)
    before = await clients.tries(0)
    found = Counter[str]()
    for _ in range(10):
        found += await clients.ask(30)
        await asyncio.sleep(0.2)
    probes = await clients.tries(0) - before
    assert probes <= 6, "with pauses of 1, 2 and 4 s, whichever workers had the 300 requests"
    assert found["503"] <= 6
    assert found["200"] >= 294
    await clients.ill(0, times=0)

    async def both_close() -> bool:
        await clients.ask(4)
        return await workers.values(breaker(address)) == [0, 0]

    await eventually(both_close)
    before = await clients.tries(0)
    await clients.ask(100)
    assert await clients.tries(0) > before


async def test_engines_that_cannot_be_reached_open_their_breakers(clients: Clients) -> None:
    workers = Workers(clients.stack, clients.http)
    await clients.ask(8)
    await clients.stack.processes.end("engines")

    async def all_open() -> bool:
        await clients.ask(4)
        addresses = [one.removeprefix("http://") for one in clients.stack.engines]
        found = [await workers.values(breaker(one)) for one in addresses]
        return all(value > 0 for values in found for value in values)

    # Envoy's own answers have `retry-after`, too
    await eventually(all_open)


async def test_an_engine_that_fails_one_request_in_five_keeps_four_in_five(clients: Clients) -> None:
    for engine in range(2):
        await clients.ill(engine, times=MANY, every=5, status=500)
    found = await clients.ask(400)
    assert set(found) == {"200", "500"}, "nobody is shut out"
    assert found["200"] >= 0.78 * 400


async def test_a_model_server_that_fails_is_left_alone_until_it_is_reset(
    clients: Clients, capsys: pytest.CaptureFixture[str]
) -> None:
    workers = Workers(clients.stack, clients.http)
    await clients.ask(8)
    for engine in range(2):
        await clients.ill(engine, times=MANY, status=500)

    async def both_refuse() -> bool:
        found = await clients.ask(20)
        return found["refused"] >= 10 and all(value > 0 for value in await workers.values(breaker("")))

    await eventually(both_refuse)
    for engine in range(2):
        await clients.ill(engine, times=0)
    metrics = clients.stack.metrics.removeprefix("http://")
    assert await asyncio.to_thread(main, ["reset", SERVER, "--metrics", metrics]) == 0
    assert capsys.readouterr().out.startswith("closed: the ModelServer default/llama")

    async def both_serve() -> bool:
        return await clients.ask(20) == {"200": 20}

    await eventually(both_serve)
