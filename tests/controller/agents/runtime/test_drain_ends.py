# SPDX-License-Identifier: Apache-2.0
"""Drains beside an engine: what ends them, and who may leave meanwhile."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import httpx
import pytest

from controller.agents.runtime import drain
from controller.agents.runtime.drain import DrainSettings
from tests.controller.agents.runtime.doubles import FakeEngine, beside
from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def _frequent_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain, "_PAUSE_S", 0.05)


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    one = FakeEngine()
    await one.start()
    yield one
    one.hangs = False
    await one.stop()


async def test_a_drain_ends_when_nothing_runs_and_nothing_waits(engine: FakeEngine, tmp_path: Path) -> None:
    engine.running, engine.waiting = 2, 1
    async with beside(engine, tmp_path) as agent:
        await eventually(agent.is_ready)
        draining = asyncio.create_task(agent.http.get("/drain"))
        await eventually(lambda: agent.agent.is_draining)
        assert (await agent.http.get("/ready")).text == "draining\n"
        engine.running = 0
        await asyncio.sleep(0.3)  # some readings of the engine's load
        assert not draining.done()
        engine.waiting = 0
        answer = await draining
        assert answer.json()["outcome"] == "idle"
        assert not await agent.is_ready()
        assert await agent.metric("drain_seconds") > 0
        # asked once more, it is over at once
        assert (await agent.http.post("/drain")).json()["outcome"] == "idle"


async def test_no_link_and_no_form_of_a_web_page_drains_an_engine(engine: FakeEngine, tmp_path: Path) -> None:
    async with beside(engine, tmp_path) as found:
        await eventually(found.is_ready)
        for method in ("GET", "POST"):
            link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
            assert (await found.http.request(method, "/drain", headers=link)).status_code == 403
            assert (await found.http.request(method, "/drain", headers={"host": "rebound.example"})).status_code == 421
        assert await found.is_ready()


async def test_a_drain_ends_with_the_grace(engine: FakeEngine, tmp_path: Path) -> None:
    engine.running = 1
    async with beside(engine, tmp_path, drain=DrainSettings(settle_s=0.0, timeout_s=1.0)) as agent:
        answer = (await agent.http.get("/drain")).json()
        assert answer["outcome"] == "timeout"
        assert answer["running"] == 1


@pytest.mark.parametrize("illness", ["no metrics", "garbage", "hangs"])
async def test_without_metrics_the_grace_decides(illness: str, engine: FakeEngine, tmp_path: Path) -> None:
    async with beside(engine, tmp_path, drain=DrainSettings(settle_s=0.0, timeout_s=0.6)) as agent:
        await eventually(agent.is_ready)
        engine.has_metrics = illness != "no metrics"
        engine.garbage = illness == "garbage"
        engine.hangs = illness == "hangs"
        answer = (await agent.http.get("/drain")).json()
        assert answer["outcome"] == "timeout"
        assert answer["seconds"] >= 0.6
        engine.hangs = False


async def test_an_engine_that_dies_ends_its_drain(engine: FakeEngine, tmp_path: Path) -> None:
    engine.running = 1
    async with beside(engine, tmp_path) as agent:
        await eventually(agent.is_ready)
        draining = asyncio.create_task(agent.http.get("/drain"))
        await eventually(lambda: agent.agent.is_draining)
        await engine.stop()
        assert (await draining).json()["outcome"] == "gone"


async def test_a_client_that_leaves_does_not_end_the_drain(engine: FakeEngine, tmp_path: Path) -> None:
    engine.running = 1
    async with beside(engine, tmp_path) as agent:
        await eventually(agent.is_ready)
        with pytest.raises(httpx.ReadTimeout):
            await agent.http.get("/drain", timeout=0.2)
        assert not await agent.is_ready()
        engine.running = 0
        assert (await agent.http.get("/drain")).json()["outcome"] == "idle"


async def test_a_drain_can_be_taken_back(engine: FakeEngine, tmp_path: Path) -> None:
    engine.running = 1
    async with beside(engine, tmp_path) as agent:
        await eventually(agent.is_ready)
        draining = asyncio.create_task(agent.http.get("/drain"))
        await eventually(lambda: agent.agent.is_draining)
        assert (await agent.http.delete("/drain")).json() == {"was_draining": True}
        assert (await draining).status_code == 409
        assert await agent.is_ready()
        assert (await agent.http.delete("/drain")).json() == {"was_draining": False}


async def test_no_adapter_is_loaded_while_draining(engine: FakeEngine, tmp_path: Path) -> None:
    engine.running = 1
    async with beside(engine, tmp_path) as agent:
        await eventually(agent.is_ready)
        with pytest.raises(httpx.ReadTimeout):
            await agent.http.get("/drain", timeout=0.1)
        assert (await agent.load("sql", "hf://acme/sql")).status_code == 503
        assert engine.calls == []
        engine.running = 0
        assert (await agent.http.get("/drain")).json()["outcome"] == "idle"


async def test_the_agent_does_not_end_before_the_engine_is_drained(engine: FakeEngine, tmp_path: Path) -> None:
    engine.running = 1
    async with beside(engine, tmp_path) as agent:
        await eventually(agent.is_ready)
        agent.ending.set()
        await eventually(lambda: agent.agent.is_draining)
        await asyncio.sleep(0.7)
        assert agent.running is not None
        assert not agent.running.done()
        # a preStop that comes later waits with it
        draining = asyncio.create_task(agent.http.get("/drain"))
        await asyncio.sleep(0.05)
        engine.running = 0
        assert (await draining).json()["outcome"] == "idle"
        # drained, it would end after 30 s in any case
        async with asyncio.timeout(25):
            await agent.running
