# SPDX-License-Identifier: Apache-2.0
"""Adapters on demand, through Envoy: more adapters than fit, loads that fail, engines that die, clients that leave."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import aiohttp
import httpx
import pytest
import pytest_asyncio

from bench.stack.loopback_stack import ALIAS, EngineFlags, Stack, running_stack
from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = pytest.mark.asyncio(loop_scope="module")

NAMES = [f"adapter-{number}" for number in range(10)]
SLOTS = 2
LORA = (
    "--enable-lora",
    f"--max-loras={SLOTS}",
    f"--max-cpu-loras={SLOTS}",
    "--lora-overflow=refuse",
    "--lora-load-time=1",
)
FLAGS = EngineFlags(count=2, speed=20.0, stream_headers="first-token", more=LORA)
SOURCES = {
    **{name: f"/adapters/{name}" for name in NAMES},
    "not-there": "/adapters/missing",
    "too-large": "/adapters/rank-256",
}
MORE = {"adapterLoading": {"adapters": [{"name": name, "source": SOURCES[name]} for name in SOURCES], "timeout": "20s"}}
ROUTE = {"loraAdapters": list(SOURCES)}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """Two engines that hold two adapters each."""
    directory = tmp_path_factory.mktemp("adapters") / "stack"
    async with running_stack(directory, FLAGS, more=MORE, route=ROUTE) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def own(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Stack]:
    """A stack of the test's own; its parameter: what of ``adapterLoading`` is different."""
    flags = EngineFlags(count=2, speed=20.0, stream_headers="first-token", more=LORA, apart=True)
    more = {"adapterLoading": {**MORE["adapterLoading"], **getattr(request, "param", {})}}
    async with running_stack(tmp_path / "stack", flags, more=more, route=ROUTE) as running:
        yield running


class Answer(NamedTuple):
    status_code: int
    retry_after: str
    body: bytes

    @property
    def error(self) -> dict[str, str]:
        error: dict[str, str] = json.loads(self.body)["error"]
        return error


async def ask(stack: Stack, model: str, *, tokens: int = 4, timeout_s: float = 40) -> Answer:
    body = {"model": model, "messages": [{"role": "user", "content": f"hello {model}"}], "max_tokens": tokens}
    # not httpx: a client of its takes 50 ms to make, and there are hundreds of requests
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_s)) as http,
        http.post(f"{stack.url}/v1/chat/completions", json=body) as answer,
    ):
        return Answer(answer.status, answer.headers.get("retry-after", ""), await answer.read())


async def counts(stack: Stack, name: str) -> Counter[str]:
    """The values of a metric: by result, where there is one, else by endpoint or the server."""
    async with httpx.AsyncClient(timeout=60) as http:
        text = (await http.get(f"{stack.metrics}/metrics")).text
    found: Counter[str] = Counter()
    for line in text.splitlines():
        if line.startswith(name + "{"):
            labels = dict(re.findall(r'(\w+)="([^"]*)"', line))
            found[labels.get("result") or labels.get("endpoint") or labels["server"]] += int(float(line.split()[-1]))
    return found


async def held(engine: str) -> list[str]:
    async with httpx.AsyncClient(timeout=60) as http:
        return sorted(one["id"] for one in (await http.get(f"{engine}/v1/models")).json()["data"] if one["parent"])


async def test_ten_adapters_share_two_engines_that_hold_two_each_and_no_request_fails(shared: Stack) -> None:
    rng = random.Random(4)
    asked = [rng.choice(NAMES) for _ in range(300)]
    before = await counts(shared, "attache_adapter_loads_total")

    async def client(models: list[str]) -> list[int]:
        return [(await ask(shared, model)).status_code for model in models]

    statuses = [one for row in await asyncio.gather(*(client(asked[part::12]) for part in range(12))) for one in row]
    assert Counter(statuses) == {200: 300}
    loads = await counts(shared, "attache_adapter_loads_total") - before
    assert not loads.keys() & {"broken", "unreachable"}
    unloads = sum((await counts(shared, "attache_adapter_unloads_total")).values())
    assert loads["loaded"] - unloads == 2 * SLOTS
    assert loads["loaded"] < 300 * (1 - 2 * SLOTS / len(NAMES))
    for engine in shared.engines:
        assert len(await held(engine)) == SLOTS


async def test_siblings_wait_for_one_load(shared: Stack) -> None:
    there = {*await held(shared.engines[0]), *await held(shared.engines[1])}
    name = next(one for one in NAMES if one not in there)
    before = sum((await counts(shared, "attache_adapter_loads_total")).values())
    answers = await asyncio.gather(*(ask(shared, name) for _ in range(20)))
    assert {one.status_code for one in answers} == {200}
    assert sum((await counts(shared, "attache_adapter_loads_total")).values()) - before == 1


@pytest.mark.parametrize("name", ["not-there", "too-large"])
async def test_a_broken_adapter_is_an_openai_error_and_costs_its_neighbours_nothing(shared: Stack, name: str) -> None:
    before = await counts(shared, "attache_adapter_loads_total")
    broken = [asyncio.create_task(ask(shared, name)) for _ in range(20)]
    neighbours = await asyncio.gather(*(ask(shared, ALIAS) for _ in range(20)))
    assert {one.status_code for one in neighbours} == {200}
    for answer in await asyncio.gather(*broken):
        assert answer.status_code == 502
        error = answer.error
        assert (error["code"], error["param"]) == ("adapter_not_loadable", "model")
        assert "/adapters" not in error["message"]
    # it is remembered: each engine was asked once
    assert (await counts(shared, "attache_adapter_loads_total") - before)["broken"] == 2


async def test_a_load_that_fails_is_tried_at_the_other_engine(own: Stack) -> None:
    async with httpx.AsyncClient(timeout=60) as http:
        # the first choice of two idle engines
        await http.post(f"{own.engines[0]}/faults", json={"fault": "fail-loads", "times": 1, "status": 500})
    assert (await ask(own, NAMES[0])).status_code == 200
    assert await held(own.engines[0]) == []
    assert await held(own.engines[1]) == [NAMES[0]]


async def test_an_engine_that_dies_while_it_loads_costs_a_load(own: Stack) -> None:
    async with httpx.AsyncClient(timeout=60) as http:
        await http.post(
            f"{own.engines[0]}/faults", json={"fault": "fail-loads", "times": 1, "status": 0, "after_s": 20}
        )
    asked = asyncio.create_task(ask(own, NAMES[0]))

    async def waits() -> bool:
        return (await counts(own, "attache_adapter_waiting"))["default/llama"] == 1

    await eventually(waits)
    os.kill(own.pids["engine-0"], signal.SIGKILL)
    assert (await asked).status_code == 200
    assert await held(own.engines[1]) == [NAMES[0]]
    # and what the dead engine had is loaded anew
    assert (await ask(own, NAMES[1])).status_code == 200


async def test_a_client_that_leaves_leaves_the_others_alone(own: Stack) -> None:
    async with httpx.AsyncClient(timeout=60) as http:
        for engine in own.engines:
            fault = {"fault": "fail-loads", "times": 1, "status": 0, "after_s": 1}
            await http.post(f"{engine}/faults", json=fault)
    with pytest.raises(TimeoutError):
        await ask(own, NAMES[0], timeout_s=0.3)
    others = await asyncio.gather(ask(own, NAMES[0]), ask(own, NAMES[0]))
    assert {one.status_code for one in others} == {200}
    assert sum((await counts(own, "attache_adapter_loads_total")).values()) == 1

    async def nothing_is_left() -> bool:
        return not any((await counts(own, "attache_in_flight")).values())

    await eventually(nothing_is_left)


@pytest.mark.parametrize("own", [{"timeout": "1s"}], indirect=True)
async def test_while_all_slots_are_in_use_a_request_waits_and_is_then_told_to_come_back(own: Stack) -> None:
    busy = [asyncio.create_task(ask(own, name, tokens=60_000)) for name in NAMES[: 2 * SLOTS]]

    async def all_held() -> bool:
        return len([*await held(own.engines[0]), *await held(own.engines[1])]) == 2 * SLOTS

    await eventually(all_held)
    refused = await ask(own, NAMES[9])
    assert refused.status_code == 503
    assert refused.retry_after == "5"
    error = refused.error
    assert error["code"] == "adapter_unavailable"
    assert "all slots are in use by other adapters" in error["message"]
    # nothing in use was unloaded for it
    assert await counts(own, "attache_adapter_unloads_total") == Counter()
    for one in busy:
        one.cancel()


async def test_an_adapter_that_an_engine_lost_is_loaded_again(own: Stack) -> None:
    assert (await ask(own, NAMES[0])).status_code == 200
    (engine,) = [one for one in own.engines if await held(one)]
    async with httpx.AsyncClient(timeout=60) as http:
        await http.post(f"{engine}/v1/unload_lora_adapter", json={"lora_name": NAMES[0]})

    async def serves_again() -> bool:
        return (await ask(own, NAMES[0])).status_code == 200

    await eventually(serves_again)
