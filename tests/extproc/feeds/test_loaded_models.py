# SPDX-License-Identifier: Apache-2.0
"""Lists of V2 servers' models: whose agents are read, and what comes of agents that hang, lie or are away."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import pytest
from aiohttp import web

from bench.stack.processes import free_ports
from extproc.core.core import Core
from extproc.feeds.engine_http import EngineCredentials
from extproc.feeds.loaded_models import ModelRepositoryReader
from tests.extproc.scenes import configuration, endpoints
from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from extproc.core.peer_events import EngineReported

HOSTS = ("127.0.0.2", "127.0.0.3", "127.0.0.4")


class Agents:
    """Agents of one port. ``bodies`` and ``statuses``: what each answers; None: it hangs."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.bodies: dict[str, bytes | None] = dict.fromkeys(HOSTS, b'{"data": []}')
        self.statuses = dict.fromkeys(HOSTS, 200)
        self.asked: list[str] = []

    async def answer(self, http: web.Request) -> web.Response:
        host = http.host.partition(":")[0]
        self.asked.append(http.path)
        body = self.bodies[host]
        if body is None:
            await asyncio.Event().wait()
        return web.Response(body=body, status=self.statuses[host])


@pytest.fixture
async def agents() -> AsyncIterator[Agents]:
    found = Agents(free_ports(1)[0])
    app = web.Application()
    app.router.add_get("/{path:.*}", found.answer)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    for host in HOSTS:
        await web.TCPSite(runner, host, found.port).start()
    yield found
    await runner.cleanup()


@pytest.fixture
async def said(agents: Agents) -> AsyncIterator[dict[str, frozenset[str] | None]]:
    """The last list of each address."""
    loading = f"adapterLoading: {{port: {agents.port}, adapters: [{{name: a, source: s3://a}}]}}"
    addresses = endpoints(*(f"{host}:80" for host in HOSTS))
    servers = {
        "trees": f"model: none\nprotocol: V2\n{loading}\n{addresses}",
        # engines of OpenAI's API are read with their metrics, and others load nothing
        "llama": f"model: m\nscrapeInterval: 0s\n{loading}\n{endpoints('127.0.0.5:80')}",
        "fixed": f"model: m\nprotocol: V2\n{endpoints('127.0.0.6:80')}",
    }
    route = "loraAdapters: [a]\nrules: [{targetModels: [{modelServerName: trees}]}]"
    core = Core(configuration(servers=servers, routes={"trees": route}), rng=random.Random(0), ticket_prefix="t")
    found: dict[str, frozenset[str] | None] = {}

    def deliver(report: EngineReported) -> None:
        assert report.server == "default/trees"
        found[report.address.partition(":")[0]] = report.models

    clock = asyncio.get_running_loop().time
    task = asyncio.create_task(ModelRepositoryReader(core, EngineCredentials({}, clock), deliver=deliver).run())
    yield found
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_each_agent_is_read_and_one_that_hangs_or_lies_delays_no_other(
    agents: Agents, said: dict[str, frozenset[str] | None], caplog: pytest.LogCaptureFixture
) -> None:
    first, second, third = HOSTS
    agents.bodies = {
        first: b'{"data": [{"id": "a", "state": "loaded"}, {"id": "b", "state": "unloading"}]}',
        second: None,
        third: b'{"data": [' + b"[" * 100_000,
    }
    await eventually(lambda: said == {first: {"a"}})
    agents.bodies[first] = b'{"data": []}'
    await eventually(lambda: said == {first: frozenset()})
    assert set(agents.asked) == {"/v1/adapters"}
    # what is wrong is told once
    agents.bodies[second] = agents.bodies[third] = agents.bodies[first]
    await eventually(lambda: said == dict.fromkeys(HOSTS, frozenset()))
    assert len([line for line in caplog.messages if third in line]) == 1


async def test_a_server_that_does_not_answer_holds_nothing_and_of_an_agent_that_fails_the_last_list_stays(
    agents: Agents, said: dict[str, frozenset[str] | None]
) -> None:
    first, second, _ = HOSTS
    agents.bodies = dict.fromkeys(HOSTS, b'{"data": [{"id": "a", "state": "loaded"}]}')
    await eventually(lambda: said == {key: {"a"} for key in HOSTS})
    agents.statuses |= {first: 503, second: 500}
    await eventually(lambda: said[first] == frozenset())
    assert said[second] == {"a"}
