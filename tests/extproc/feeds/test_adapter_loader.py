# SPDX-License-Identifier: Apache-2.0
"""Loads by HTTP: who is asked, in which order, and what comes of answers that do not come."""

from __future__ import annotations

import asyncio
import json
import random
from typing import TYPE_CHECKING

import pytest
from aiohttp import web

from bench.stack.processes import free_ports
from extproc.api.config_loader import load_snapshot
from extproc.core.core import Core
from extproc.core.effects import LoadAdapter
from extproc.engines.engine_responses import AdapterLoadProblem
from extproc.feeds.adapter_loader import AdapterLoader
from extproc.feeds.engine_http import EngineCredentials

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from extproc.core.request_record import AdapterLoadResult

SERVER = "default/llama"


class Agent:
    """Answers loads and unloads, and notes who asked for what at the same time."""

    def __init__(self, port: int, engine: str) -> None:
        self.port, self.engine = port, engine
        self.asked: list[tuple[str, str]] = []
        self.at_once = self.most_at_once = 0
        self.status = 200
        self.takes_s = 0.0
        self.location = ""
        self.is_endless = False
        self.results: asyncio.Queue[AdapterLoadResult] = asyncio.Queue()

    async def answer(self, http: web.Request) -> web.StreamResponse:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        self.asked.append((http.path, json.loads(await http.read())["lora_name"]))
        try:
            await asyncio.sleep(self.takes_s)
        finally:
            self.at_once -= 1
        if self.is_endless:
            endless = web.StreamResponse()
            await endless.prepare(http)
            while True:
                await endless.write(b"x" * 65536)
        headers = {"location": self.location} if self.location else {}
        return web.json_response({"error": {"message": "said so"}}, status=self.status, headers=headers)


@pytest.fixture
async def agent() -> AsyncIterator[Agent]:
    port, engine = free_ports(2)
    one = Agent(port, f"127.0.0.1:{engine}")
    app = web.Application()
    app.add_routes([web.post("/v1/{call}", one.answer)])
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    yield one
    await runner.cleanup()


@pytest.fixture
async def loader(agent: Agent) -> AsyncIterator[AdapterLoader]:
    config = f"""
apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {{name: llama}}
spec:
  model: m
  endpoints: [{{address: "{agent.engine}"}}]
  adapterLoading: {{port: {agent.port}, adapters: [{{name: sql, source: /sql}}]}}
"""
    core = Core(load_snapshot({"a.yaml": config.encode()}), rng=random.Random(0), ticket_prefix="t")
    clock = asyncio.get_running_loop().time
    one = AdapterLoader(core, EngineCredentials({}, clock), clock=clock, deliver=agent.results.put_nowait)
    yield one
    await one.close()


def ask(agent: Agent, adapter: str, *, unload: tuple[str, ...] = (), timeout_s: float = 20.0) -> LoadAdapter:
    return LoadAdapter(SERVER, agent.engine, adapter, f"/{adapter}", unload, timeout_s)


async def test_the_agent_is_asked_to_make_room_and_then_to_load(loader: AdapterLoader, agent: Agent) -> None:
    loader.start_load(ask(agent, "sql", unload=("law",)))
    result = await agent.results.get()
    assert (result.problem, result.unloaded) == (None, ("law",))
    assert agent.asked == [("/v1/unload_lora_adapter", "law"), ("/v1/load_lora_adapter", "sql")]


async def test_loads_at_one_engine_follow_each_other(loader: AdapterLoader, agent: Agent) -> None:
    agent.takes_s = 0.02
    for name in ("sql", "law", "art"):
        loader.start_load(ask(agent, name))
    assert {(await agent.results.get()).adapter for _ in range(3)} == {"sql", "law", "art"}
    assert agent.most_at_once == 1


async def test_an_adapter_that_cannot_be_unloaded_stays_and_nothing_is_loaded(
    loader: AdapterLoader, agent: Agent
) -> None:
    agent.status = 409
    loader.start_load(ask(agent, "sql", unload=("law",)))
    result = await agent.results.get()
    assert (result.problem, result.unloaded) == (AdapterLoadProblem.BUSY, ())
    assert agent.asked == [("/v1/unload_lora_adapter", "law")]


async def test_an_answer_that_does_not_come_in_time_ends_the_load(loader: AdapterLoader, agent: Agent) -> None:
    agent.takes_s = 30.0
    loader.start_load(ask(agent, "sql", timeout_s=0.1))
    result = await agent.results.get()
    assert (result.problem, result.message) == (AdapterLoadProblem.UNREACHABLE, "no answer within 0.1 s")


async def test_nobody_there_is_a_result_too(loader: AdapterLoader, agent: Agent) -> None:
    (agent.port,) = free_ports(1)
    pool = loader._core.pools[SERVER]
    text = f"""
apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {{name: llama}}
spec:
  model: m
  endpoints: [{{address: "{agent.engine}"}}]
  adapterLoading: {{adapters: [{{name: sql, source: /sql}}]}}
"""
    pool.update(load_snapshot({"a.yaml": text.encode()}).servers[0].spec, pool.picker)
    loader.start_load(ask(agent, "sql"))
    assert (await agent.results.get()).problem is AdapterLoadProblem.UNREACHABLE


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_a_redirect_is_no_load_and_nobody_else_is_asked(loader: AdapterLoader, agent: Agent, status: int) -> None:
    trapped = asyncio.Event()
    server = await asyncio.start_server(lambda *_: trapped.set(), "127.0.0.1", 0)
    agent.status, agent.location = status, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/latest/meta-data/"
    async with server:
        loader.start_load(ask(agent, "sql"))
        result = await agent.results.get()
    assert result.problem is AdapterLoadProblem.UNREACHABLE
    assert "redirects" in result.message
    assert not trapped.is_set()


async def test_an_answer_without_an_end_is_not_read_to_its_end(loader: AdapterLoader, agent: Agent) -> None:
    agent.is_endless = True
    loader.start_load(ask(agent, "sql", timeout_s=600.0))
    result = await agent.results.get()
    assert (result.problem, "more than 65536 bytes" in result.message) == (AdapterLoadProblem.UNREACHABLE, True)


async def test_an_error_of_our_own_is_a_result_too_and_logged_once_with_its_traceback(
    loader: AdapterLoader, agent: Agent, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def exhausted(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(EngineCredentials, "settings_for_engine", exhausted)
    for name in ("sql", "law"):
        loader.start_load(ask(agent, name))
        async with asyncio.timeout(5.0):
            result = await agent.results.get()
        assert (result.adapter, result.problem) == (name, AdapterLoadProblem.UNREACHABLE)
        assert "can't start new thread" in result.message
    assert caplog.text.count("Traceback") == 1


async def test_an_engine_is_remembered_only_while_it_loads(loader: AdapterLoader, agent: Agent) -> None:
    agent.takes_s = 0.02
    for number in range(3):
        loader.start_load(ask(agent, f"a{number}"))
    loader.start_load(ask(agent, "sql", timeout_s=0.01))
    for _ in range(4):
        await agent.results.get()
    await asyncio.gather(*loader._tasks)
    assert not loader._engines
