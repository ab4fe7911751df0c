# SPDX-License-Identifier: Apache-2.0
"""``attache agent`` with a batcher, as a process: what it holds is bounded, and it drains."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import TYPE_CHECKING

import httpx
import pytest

from bench.stack.processes import Processes, free_ports
from tests.controller.agents.runtime.batching.double import PREDICT, ModelServer, start_agent
from tests.controller.agents.runtime.pods import resident_kib
from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

BODY = b'{"instances":[' + b",".join(b"0.123456" for _ in range(27_000)) + b"]}"
# 32 MiB of bodies, each of them twice while its batch is under way, and the process itself.
MOST_KIB = 256 * 1024


@pytest.fixture
async def engine() -> AsyncIterator[ModelServer]:
    one = ModelServer()
    await one.start()
    yield one
    await one.stop()


async def test_before_an_engine_that_hangs_memory_is_bounded(tmp_path: Path, engine: ModelServer) -> None:
    engine.gate.clear()
    async with Processes(tmp_path) as processes:
        agent = await start_agent(processes, "agent", engine.url, "--batch-size", "4096000")
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=f"http://{agent.batcher}", timeout=300, limits=limits) as http:
            headers = {"content-type": "application/json"}
            calls = [asyncio.create_task(http.post(PREDICT, content=BODY, headers=headers)) for _ in range(400)]
            # all others are refused, some of them before they have sent all
            fit = 32 * 1024 * 1024 // len(BODY)
            await eventually(lambda: sum(one.done() for one in calls) == len(calls) - fit)
            refused = [one for one in calls if one.done()]
            answered = [one.result().status_code for one in refused if one.exception() is None]
            assert {*answered} == {503}
            assert all(isinstance(one.exception(), httpx.TransportError | None) for one in refused)
            assert resident_kib(processes.pid("agent")) < MOST_KIB
            for one in calls:
                one.cancel()
            engine.gate.set()

            async def is_served() -> bool:
                return (await http.post(PREDICT, json={"instances": [1]})).json() == {"predictions": [2]}

            await eventually(is_served)


async def test_a_drain_waits_for_requests_that_the_engine_does_not_count(tmp_path: Path, engine: ModelServer) -> None:
    async with Processes(tmp_path) as processes:
        agent = await start_agent(processes, "agent", engine.url, "--drain-timeout", "600")
        async with httpx.AsyncClient(timeout=300) as http:
            engine.gate.clear()
            call = asyncio.create_task(http.post(f"http://{agent.batcher}{PREDICT}", json={"instances": [1]}))
            await eventually(lambda: bool(engine.rows))
            os.kill(processes.pid("agent"), signal.SIGTERM)
            drain = asyncio.create_task(http.post(f"{agent.pages}/drain"))

            async def is_draining() -> bool:
                return "attache_agent_draining 1" in (await http.get(f"{agent.pages}/metrics")).text

            await eventually(is_draining)
            assert not drain.done()
            engine.gate.set()
            assert (await call).json() == {"predictions": [2]}
            assert (await drain).json()["outcome"] == "idle"


async def test_a_port_that_is_taken_is_named(tmp_path: Path, engine: ModelServer) -> None:
    async with Processes(tmp_path) as processes:
        pages, batcher = f"127.0.0.1:{free_ports(1)[0]}", f"127.0.0.1:{engine.port}"
        words = ["--listen", pages, "--batch-listen", batcher]
        await processes.start("agent", [sys.executable, "-m", "attache", "agent", *words])
        assert await processes.wait_for_exit("agent") == 2
        assert f"{pages} or {batcher} cannot be listened on" in (tmp_path / "agent.log").read_text()
