# SPDX-License-Identifier: Apache-2.0
"""Requests that an agent joins before KServe's SDK server get the answers that the server gives to each alone."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
from typing import TYPE_CHECKING, Any, Final

import httpx
import msgspec
import pytest
import pytest_asyncio

from tests.controller.agents.runtime.batching.double import start_agent
from tests.waiting import eventually
from tests.with_model_servers.conftest import gateway_to, route, server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.with_model_servers.conftest import ModelServers

pytestmark = pytest.mark.asyncio(loop_scope="module")

CLIENTS: Final = 64
_NAME: Final = "kserve-batched"
_CALLS: Final = re.compile(r'^request_predict_seconds_count\{model_name="tree"\} (\S+)$', re.MULTILINE)
_LEFT: Final = re.compile(r"^attache_agent_batch_delay_seconds_count (\S+)$", re.MULTILINE)


class Served(msgspec.Struct, frozen=True):
    """``http``: a client of the gateway. ``direct``: of the server itself, whose process is ``pid``. ``pages``: of the
    agent.
    """

    http: httpx.AsyncClient
    direct: httpx.AsyncClient
    pid: int
    pages: str

    async def calls(self) -> float:
        """That the server has answered."""
        return float(_CALLS.findall((await self.direct.get("/metrics")).text)[0])

    async def left(self) -> float:
        """Requests that the agent has sent to the server, each of them or together."""
        return float(_LEFT.findall((await self.direct.get(f"{self.pages}/metrics")).text)[0])

    async def both(
        self, path: str, model: str, bodies: list[dict[str, Any]]
    ) -> tuple[list[httpx.Response], list[httpx.Response], float]:
        """The answers at once through the gateway, those of the server one after the other, and its calls for the
        former. It stands still until all of them have come.
        """
        alone = [await self.direct.post(path.replace("NAME", "tree"), json=one) for one in bodies]
        before, left = await self.calls(), await self.left()
        os.kill(self.pid, signal.SIGSTOP)
        try:
            asked = asyncio.gather(*(self.http.post(path.replace("NAME", model), json=one) for one in bodies))

            async def all_have_come() -> bool:
                return await self.left() == left + len(bodies)

            await eventually(all_have_come)
        finally:
            os.kill(self.pid, signal.SIGCONT)
        return await asked, alone, await self.calls() - before


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(servers: ModelServers, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    address = await servers.start_kserve(_NAME, "tree")
    agent = await start_agent(servers.processes, "agent", f"http://{address}", "--batch-delay", "0.5")
    documents = [
        server("joined-one", "V1", "tree", agent.batcher),
        server("joined-two", "V2", "tree", agent.batcher),
        route("one", **{"joined-one": 1}),
        route("two", **{"joined-two": 1}),
        server("plain-two", "V2", "tree", address),
        route("plain", **{"plain-two": 1}),
    ]
    limits = httpx.Limits(max_connections=None)
    # uvicorn closes a connection after a 500, without a word of it in the answer
    each_its_own = httpx.Limits(max_keepalive_connections=0)
    async with (
        gateway_to(tmp_path_factory.mktemp("stack"), *documents) as stack,
        httpx.AsyncClient(base_url=stack.url, timeout=60, limits=limits) as http,
        httpx.AsyncClient(base_url=f"http://{address}", timeout=60, limits=each_its_own) as direct,
    ):
        one = Served(http, direct, servers.processes.pid(_NAME), agent.pages)

        async def is_served() -> bool:
            answers = [
                await http.post("/v1/models/one:predict", json={"instances": [flower(1)]}),
                await http.post("/v2/models/two/infer", json=infer("0", flower(1))),
            ]
            return all(each.status_code == 200 for each in answers)

        await eventually(is_served)
        yield one


def flower(number: int) -> list[float]:
    chance = random.Random(number)
    return [round(chance.uniform(*bounds), 1) for bounds in ((4.3, 7.9), (2.0, 4.4), (1.0, 6.9), (0.1, 2.5))]


def infer(name: str, *rows: list[Any]) -> dict[str, Any]:
    tensor = {"name": "x", "shape": [len(rows), 4], "datatype": "FP64", "data": [one for row in rows for one in row]}
    return {"id": name, "inputs": [tensor]}


async def test_v1_answers_of_64_clients_at_once_are_those_of_each_alone(served: Served) -> None:
    bodies = [{"instances": [flower(number), flower(1000 + number)]} for number in range(CLIENTS)]
    joined, alone, calls = await served.both("/v1/models/NAME:predict", "one", bodies)
    assert [(one.status_code, one.content) for one in joined] == [(200, one.content) for one in alone]
    assert len({one.content for one in alone}) > 3
    # those that come within half a second are a call, up to 32 rows
    assert calls < CLIENTS / 4


async def test_v2_answers_of_64_clients_at_once_are_those_of_each_alone(served: Served) -> None:
    bodies = [infer(f"client-{number}", flower(number)) for number in range(CLIENTS)]
    joined, alone, calls = await served.both("/v2/models/NAME/infer", "two", bodies)
    assert [(one.status_code, one.content) for one in joined] == [(200, one.content) for one in alone]
    assert calls < CLIENTS / 4


async def test_a_request_that_the_server_cannot_read_fails_alone(served: Served) -> None:
    bodies = [infer(str(number), ["no", "number", 1, 2] if number == 13 else flower(number)) for number in range(32)]
    joined, alone, _ = await served.both("/v2/models/NAME/infer", "two", bodies)
    assert [(one.status_code, one.content) for one in joined] == [(one.status_code, one.content) for one in alone]
    assert [number for number, one in enumerate(joined) if one.status_code != 200] == [13]


async def test_requests_after_one_that_the_server_cannot_read_are_answered(served: Served) -> None:
    """The server closes the connection after such a one."""
    bodies = [infer(str(number), ["no", "number", 1, 2] if number % 2 else flower(number)) for number in range(200)]
    answers = [(await served.http.post("/v2/models/plain/infer", json=one)).status_code for one in bodies]
    assert answers == [200, 500] * 100


async def test_before_mlserver_a_bad_request_fails_alone(servers: ModelServers) -> None:
    address = await servers.start_mlserver("mlserver-batched", "tree")
    agent = await start_agent(servers.processes, "mlserver-agent", f"http://{address}", "--batch-delay", "0.5")
    bodies = [infer(str(number), ["no", "number", 1, 2] if number == 13 else flower(number)) for number in range(32)]
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=60, limits=limits) as http:
        alone = [await http.post(f"http://{address}/v2/models/tree/infer", json=one) for one in bodies]
        calls = (http.post(f"http://{agent.batcher}/v2/models/tree/infer", json=one) for one in bodies)
        joined = await asyncio.gather(*calls)
        page = (await http.get(f"{agent.pages}/metrics")).text
    assert [(one.status_code, one.json()) for one in joined] == [(one.status_code, one.json()) for one in alone]
    assert [number for number, one in enumerate(joined) if one.status_code != 200] == [13]
    assert "attache_agent_batches_failed_total 1\n" in page
