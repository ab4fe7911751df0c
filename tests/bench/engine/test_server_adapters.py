# SPDX-License-Identifier: Apache-2.0
"""Loading and unloading adapters as a client sees it: vLLM's answers, lists and metrics."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import httpx
import pytest

from bench.engine.hardware import PRESETS
from bench.engine.lora_adapters import AdapterLimits
from bench.engine.scheduler import EngineLimits
from bench.engine.server import EngineServer, EngineSettings
from bench.stack.processes import free_ports
from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


class Engine:
    def __init__(self, url: str) -> None:
        self.http = httpx.AsyncClient(base_url=url, timeout=20)

    async def load(self, name: str, path: str) -> httpx.Response:
        return await self.http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path})

    async def chat(self, model: str) -> int:
        return (await self.http.post("/v1/chat/completions", json={"model": model, **CHAT})).status_code

    async def models(self) -> list[str]:
        return [one["id"] for one in (await self.http.get("/v1/models")).json()["data"]]


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    (port,) = free_ports(1)
    settings = EngineSettings(
        host="127.0.0.1",
        port=port,
        model="llama",
        adapters=(),
        hardware=PRESETS["h100-llama-3.1-8b"],
        limits=EngineLimits(num_gpu_blocks=1000, max_loras=2),
        max_model_len=4000,
        default_max_tokens=8,
        speed=20.0,
        seed=0,
        headers_first=True,
        lora=AdapterLimits(max_loras=2, max_cpu_loras=2, overflow="refuse"),
    )
    async with asyncio.TaskGroup() as tasks:
        server = tasks.create_task(EngineServer(settings).run())
        one = Engine(f"http://127.0.0.1:{port}")

        async def is_up() -> bool:
            try:
                return (await one.http.get("/health")).status_code == 200
            except httpx.TransportError:
                return False

        await eventually(is_up)
        yield one
        await one.http.aclose()
        server.cancel()


async def test_an_adapter_serves_from_its_load_until_it_is_unloaded(engine: Engine) -> None:
    assert await engine.chat("sql") == 404
    answer = await engine.load("sql", "/adapters/sql")
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'sql' added successfully.")
    assert await engine.models() == ["llama", "sql"]
    assert await engine.chat("sql") == 200
    again = await engine.load("sql", "/adapters/sql")
    assert (again.status_code, again.json()["error"]["type"]) == (400, "InvalidUserInput")
    answer = await engine.http.post("/v1/unload_lora_adapter", json={"lora_name": "sql"})
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'sql' removed successfully.")
    assert await engine.chat("sql") == 404


async def test_two_loads_for_the_last_slot_are_one_too_many(engine: Engine) -> None:
    answers = await asyncio.gather(*(engine.load(name, f"/{name}") for name in "abc"))
    assert sorted(one.status_code for one in answers) == [200, 200, 400]


async def test_loads_can_be_made_to_fail(engine: Engine) -> None:
    await engine.http.post("/faults", json={"fault": "fail-loads", "times": 1, "status": 503})
    assert (await engine.load("sql", "/sql")).status_code == 503
    assert (await engine.load("sql", "/sql")).status_code == 200


async def test_metrics_name_the_slots_and_the_adapters_in_use(engine: Engine) -> None:
    await engine.load("sql", "/sql")
    asked = asyncio.create_task(
        engine.http.post("/v1/completions", json={"model": "sql", "prompt": "a", "max_tokens": 900})
    )
    page = ""

    async def is_running() -> bool:
        nonlocal page
        page = (await engine.http.get("/metrics")).text
        return 'running_lora_adapters="sql"' in page

    await eventually(is_running)
    assert 'vllm:lora_requests_info{max_lora="2",running_lora_adapters="sql",waiting_lora_adapters=""}' in page
    assert (await asked).status_code == 200
