# SPDX-License-Identifier: Apache-2.0
"""Requests that agents join before model servers: clients of Envoy get the answers that they would get without."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx
import pytest_asyncio
import yaml

from bench.stack.loopback_stack import EngineFlags, running_stack
from bench.stack.processes import Processes
from extproc.api.spec import API_VERSION
from tests.controller.agents.runtime.batching.double import ModelServer, start_agent
from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    import pytest

    from bench.stack.loopback_stack import Stack


class Served:
    """Two servers behind agents. ``http``: a client of Envoy."""

    def __init__(self, stack: Stack, servers: list[ModelServer], http: httpx.AsyncClient) -> None:
        self.stack = stack
        self.servers = servers
        self.http = http

    @property
    def rows(self) -> list[int]:
        return [one for each in self.servers for one in each.rows]

    async def predict(self, *numbers: float, **more: Any) -> httpx.Response:  # noqa: ANN401 - httpx's arguments
        return await self.http.post("/v1/models/m:predict", json={"instances": [[one] for one in numbers]}, **more)

    async def infer(self, number: float) -> httpx.Response:
        tensor = {"name": "x", "datatype": "FP64", "shape": [1, 1], "data": [number]}
        return await self.http.post("/v2/models/m2/infer", json={"id": str(number), "inputs": [tensor]})

    async def active(self) -> int:
        """Requests that Envoy has sent to batchers and that have no answer yet."""
        async with httpx.AsyncClient(timeout=60) as http:
            lines = (await http.get(f"{self.stack.admin}/clusters")).text.splitlines()
        return sum(int(line.rpartition("::")[2]) for line in lines if "/v1::" in line and "::rq_active::" in line)


def document(kind: str, name: str, **spec: object) -> dict[str, object]:
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": {"name": name}, "spec": spec}


def models(batchers: list[str]) -> list[dict[str, object]]:
    return [
        one
        for name, model, protocol in (("v1", "m", "V1"), ("v2", "m2", "V2"))
        for one in (
            document(
                "ModelServer", name, model=model, protocol=protocol, endpoints=[{"address": one} for one in batchers]
            ),
            document(
                "ModelRoute", f"{name}-route", modelName=model, rules=[{"targetModels": [{"modelServerName": name}]}]
            ),
        )
    ]


@asynccontextmanager
async def agents(directory: Path, servers: list[ModelServer]) -> AsyncIterator[list[str]]:
    """The addresses of their batchers."""
    async with Processes(directory) as processes:
        yield [
            # long enough for clients of a busy machine to be at once
            (await start_agent(processes, f"agent-{number}", server.url, "--batch-delay", "0.3")).batcher
            for number, server in enumerate(servers)
        ]


@pytest_asyncio.fixture
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    servers = [ModelServer(), ModelServer()]
    async with AsyncExitStack() as ends:
        for server in servers:
            await server.start()
            ends.push_async_callback(server.stop)
        batchers = await ends.enter_async_context(agents(tmp_path_factory.mktemp("agents"), servers))
        stack = await ends.enter_async_context(
            running_stack(tmp_path_factory.mktemp("stack"), EngineFlags(count=1), watch=True)
        )
        file = stack.config / "models.yaml"
        file.with_suffix(".new").write_text(yaml.safe_dump_all(models(batchers)))
        file.with_suffix(".new").replace(file)
        limits = httpx.Limits(max_connections=None)
        http = await ends.enter_async_context(httpx.AsyncClient(base_url=stack.url, timeout=60, limits=limits))
        one = Served(stack, servers, http)

        async def is_served() -> bool:
            # each of the servers has answered
            statuses = [(await call).status_code for call in (one.predict(1), one.infer(1))]
            return statuses == [200, 200] and all(server.rows for server in servers)

        await eventually(is_served)
        for server in servers:
            server.rows.clear()
        yield one


async def test_64_clients_at_once_get_their_own_answers_for_fewer_calls(served: Served) -> None:
    for server in served.servers:
        server.call_s = 0.1
    numbers = range(64)
    answers = await asyncio.gather(*(served.predict(number, -number) for number in numbers))
    assert [one.json() for one in answers] == [{"predictions": [2 * number, -2 * number]} for number in numbers]
    assert sum(served.rows) == 128
    assert len(served.rows) < 48
    assert max(served.rows) <= 32


async def test_v2_clients_get_their_own_answers_and_ids(served: Served) -> None:
    for server in served.servers:
        server.call_s = 0.1
    answers = await asyncio.gather(*(served.infer(number) for number in range(64)))
    assert [(one.json()["id"], one.json()["outputs"][0]["data"]) for one in answers] == [
        (str(number), [2 * number]) for number in range(64)
    ]
    assert len(served.rows) < 48


async def test_one_bad_request_of_32_fails_alone(served: Served) -> None:
    for server in served.servers:
        server.call_s, server.poison = 0.05, 13
    answers = await asyncio.gather(*(served.predict(number) for number in range(32)))
    assert [one.status_code for one in answers] == [400 if number == 13 else 200 for number in range(32)]
    assert [one.json()["predictions"] for number, one in enumerate(answers) if number != 13] == [
        [2 * number] for number in range(32) if number != 13
    ]


async def test_a_server_that_is_killed_in_a_batch_costs_no_answer(served: Served) -> None:
    ill = served.servers[0]
    ill.gate.clear()
    calls = [asyncio.create_task(served.predict(number)) for number in range(32)]

    await eventually(lambda: sum(one.done() for one in calls) + sum(ill.rows) == 32)
    assert max(ill.rows) > 1
    await ill.stop()
    answers = await asyncio.gather(*calls)
    assert [one.json() for one in answers] == [{"predictions": [2 * number]} for number in range(32)]


async def test_a_request_that_waits_for_others_is_in_flight_at_envoy(served: Served) -> None:
    for server in served.servers:
        server.gate.clear()
    calls = [asyncio.create_task(served.predict(number)) for number in range(20)]

    async def are_active(count: int) -> bool:
        return await served.active() == count

    await eventually(lambda: are_active(20))
    for server in served.servers:
        server.gate.set()
    assert {one.status_code for one in await asyncio.gather(*calls)} == {200}
    await eventually(lambda: are_active(0))
