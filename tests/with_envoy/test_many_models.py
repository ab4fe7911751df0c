# SPDX-License-Identifier: Apache-2.0
"""200 models on two servers of ten places each, through Envoy: the servers are doubles, the agents beside them ours."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import quote

import httpx
import pytest
import pytest_asyncio
import yaml

from bench.engine.mlserver import FakeMlServer
from bench.stack.loopback_stack import EngineFlags, running_stack
from bench.stack.processes import free_ports
from controller.agents.runtime.agent import EngineAgent
from controller.agents.runtime.declared_adapters import SourcePolicy
from controller.agents.runtime.drain import DrainSettings
from controller.agents.runtime.engine_client import EngineClient
from controller.agents.runtime.server import AgentServer, serve_agent
from controller.agents.runtime.settings import AdapterSettings, AgentSettings
from extproc.api.spec import API_VERSION
from extproc.engines.dialects import DIALECTS
from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from bench.stack.loopback_stack import Stack

pytestmark = pytest.mark.asyncio(loop_scope="module")

HOSTS: Final = ("127.0.0.2", "127.0.0.3")
PLACES: Final = 10
NAMES: Final = [f"model-{number:03}" for number in range(197)]
# names that a path must have encoded, and names that are words of it
ODD: Final = ["a+b@c:d", "load", "versions"]
BROKEN: Final = "broken"
BODY: Final = {"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [1.0]}]}


class Server(NamedTuple):
    """A server of ten places."""

    double: FakeMlServer
    host: str
    port: int

    async def start(self) -> None:
        await self.double.start(self.host, self.port, self.port)


class Fleet:
    """Both servers with their agents, and the gateway to them."""

    def __init__(self, stack: Stack, http: httpx.AsyncClient, servers: list[Server]) -> None:
        self.stack, self.http, self.servers = stack, http, servers
        self.doubles = [one.double for one in servers]

    async def infer(self, name: str) -> httpx.Response:
        return await self.http.post(f"{self.stack.url}/v2/models/{quote(name, safe='')}/infer", json=BODY)

    async def ask(self, names: list[str], *, clients: int) -> Counter[int]:
        """The statuses of requests for ``names``, in turn by several clients."""

        async def client(own: list[str]) -> list[int]:
            statuses = []
            for name in own:
                answer = await self.infer(name)
                statuses.append(answer.status_code)
                assert answer.status_code != 200 or answer.json()["model_name"] == name
            return statuses

        rows = await asyncio.gather(*(client(names[part::clients]) for part in range(clients)))
        return Counter(status for row in rows for status in row)


@contextlib.asynccontextmanager
async def agent_beside(server: Server, port: int, directory: Path, file: Path) -> AsyncIterator[None]:
    url = f"http://{server.host}:{server.port}"
    adapters = AdapterSettings(
        file=file,
        memory=PLACES,
        keep_s=0.0,
        policy=SourcePolicy((file.parent,), declared_only=True),
        cache=directory / "cache",
        links=server.double.repository,
    )
    dialect = DIALECTS["MLServer"]
    drain = DrainSettings(settle_s=0.0)
    settings = AgentSettings(url, dialect, f"{url}/metrics", drain=drain, adapters=adapters, probe_interval_s=0.1)
    clock, unix_clock = asyncio.get_running_loop().time, time.time  # noqa: TID251 - the edge
    async with EngineClient(url, dialect) as client:
        agent = EngineAgent(settings, client, _NoDownloads(), clock=clock, unix_clock=unix_clock, follow_s=0.5)
        async with serve_agent(AgentServer(agent, clock), server.host, port):
            task = asyncio.create_task(agent.run())
            try:
                yield
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)


class _NoDownloads:
    async def fetch(self, uri: str, link: Path) -> None:
        raise AssertionError(f"{uri} is a local file, not to be fetched to {link}")


@pytest_asyncio.fixture(loop_scope="module")
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    weights = tmp_path / "weights" / "one"
    weights.mkdir(parents=True)
    broken = weights.with_name(BROKEN)
    broken.mkdir()
    (broken / "broken").touch()
    declared = {
        name: {"uri": f"file://{broken if name == BROKEN else weights}", "memory": 1, "format": "sklearn"}
        for name in (*NAMES, *ODD, BROKEN)
    }
    file = tmp_path / "weights" / "declared.json"
    file.write_text(json.dumps(declared))
    port, agent_port = free_ports(2)
    async with contextlib.AsyncExitStack() as stack:
        servers = []
        for host in HOSTS:
            double = FakeMlServer(tmp_path / host / "repository", load_s=0.02, infer_s=0.01)
            server = Server(double, host, port)
            await server.start()
            stack.push_async_callback(double.stop)
            await stack.enter_async_context(agent_beside(server, agent_port, tmp_path / host, file))
            servers.append(server)
        running = await stack.enter_async_context(running_stack(tmp_path / "stack", EngineFlags(count=1), watch=True))
        add(running, objects([f"{one.host}:{one.port}" for one in servers], agent_port, declared))
        http = await stack.enter_async_context(httpx.AsyncClient(timeout=90))
        found = Fleet(running, http, servers)

        async def is_served() -> bool:
            return (await found.infer(NAMES[0])).status_code == 200

        await eventually(is_served)
        yield found


def objects(addresses: list[str], port: int, declared: dict[str, Any]) -> list[dict[str, object]]:
    adapters = [{"name": name, "source": one["uri"], "memory": 1} for name, one in declared.items()]
    server = {
        "model": "many/*",
        "protocol": "V2",
        "endpoints": [{"address": one} for one in addresses],
        "adapterLoading": {"port": port, "memory": PLACES, "adapters": adapters},
    }
    route = {"loraAdapters": list(declared), "rules": [{"targetModels": [{"modelServerName": "many"}]}]}
    return [
        {"apiVersion": API_VERSION, "kind": kind, "metadata": {"name": "many"}, "spec": spec}
        for kind, spec in (("ModelServer", server), ("ModelRoute", route))
    ]


def add(stack: Stack, documents: list[dict[str, object]]) -> None:
    file = stack.config / "many.yaml"
    new = file.with_suffix(".new")
    new.write_text(yaml.safe_dump_all(documents))
    new.replace(file)


async def test_each_of_200_models_answers_and_none_is_unloaded_while_it_has_requests(fleet: Fleet) -> None:
    names = [*NAMES, *ODD] * 2
    random.Random(7).shuffle(names)
    assert await fleet.ask(names, clients=12) == {200: 400}
    for server in fleet.doubles:
        assert server.most == PLACES
        assert server.cut == 0
        # both take part
        assert sum(server.loads.values()) > 400 / 4
    # ten of them in constant demand are loaded once, and stay
    few = NAMES[:10]
    await fleet.ask(few, clients=1)
    before = sum(sum(one.loads.values()) for one in fleet.doubles)
    assert await fleet.ask(few * 20, clients=4) == {200: 200}
    assert sum(sum(one.loads.values()) for one in fleet.doubles) == before


async def test_a_broken_model_is_tried_at_two_servers_and_costs_no_other_request(fleet: Fleet) -> None:
    broken, others = await asyncio.gather(
        fleet.ask([BROKEN] * 40, clients=4), fleet.ask([*NAMES[:40], *NAMES[:40]], clients=4)
    )
    assert broken == {502: 40}
    assert others == {200: 80}
    assert [one.loads[BROKEN] for one in fleet.doubles] == [1, 1]


async def test_what_a_killed_server_had_is_loaded_at_the_other_and_a_new_one_gets_its_share(fleet: Fleet) -> None:
    few = NAMES[:16]
    assert await fleet.ask(few, clients=4) == {200: 16}
    first, second = fleet.doubles
    assert first.ready
    assert second.ready
    await first.stop()

    async def all_answer() -> bool:
        return await fleet.ask(few, clients=2) == {200: 16}

    await eventually(all_answer)
    assert not first.ready
    await fleet.servers[0].start()
    before = sum(first.loads.values())

    # Until its agent is asked again, extproc has the list of the server before it; a 404 tells it of one model.
    async def has_share() -> bool:
        return await fleet.ask(few * 3, clients=4) == {200: 48} and sum(first.loads.values()) > before

    await eventually(has_share)
