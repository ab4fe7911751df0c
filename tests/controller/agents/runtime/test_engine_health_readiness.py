# SPDX-License-Identifier: Apache-2.0
"""Readiness and liveness beside an engine that is ill."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from controller.agents.runtime.engine_health import HealthSettings
from controller.agents.runtime.settings import WarmUpSettings
from extproc.engines.dialects import DIALECTS
from tests.controller.agents.runtime.doubles import FakeEngine, beside
from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    one = FakeEngine()
    await one.start()
    yield one
    one.hangs = False
    await one.stop()


async def test_ready_once_the_model_has_answered(engine: FakeEngine, tmp_path: Path) -> None:
    async with beside(engine, tmp_path) as agent:
        await eventually(agent.is_ready)
        assert "/v1/completions" in engine.asked
        assert await agent.status("/live") == 200
        assert await agent.status("/started") == 200


async def test_an_sglang_engine_of_a_pair_answers_without_the_other(engine: FakeEngine, tmp_path: Path) -> None:
    """It refuses whatever is not for a pair; nothing is transferred for the fake host."""
    engine.needs = {"bootstrap_host", "bootstrap_room"}
    async with beside(engine, tmp_path, dialect=DIALECTS["SGLang"], is_disaggregated=True) as agent:
        await eventually(agent.is_ready)
    async with beside(engine, tmp_path, dialect=DIALECTS["SGLang"]) as agent:
        await eventually(lambda: agent.agent.watch.health.failures > 3)
        assert not await agent.is_ready()


@pytest.mark.parametrize(
    ("dialect", "ready", "health"),
    [
        ("Triton", "/v2/models/my iris/ready", "/v2/health/live"),
        ("MLServer", "/v2/models/my iris/ready", "/v2/health/live"),
        ("KServe", "/v2/models/my iris/ready", "/v2/health/live"),
        # of a model that loads, its state is 200, too
        ("TensorFlow", "/v1/models/my iris/metadata", "/v1/models/my iris"),
    ],
)
async def test_a_model_server_is_ready_once_its_model_is_loaded(
    dialect: str, ready: str, health: str, tmp_path: Path
) -> None:
    server = FakeEngine()
    server.pages = [ready, health]
    server.refused_paths = [ready]
    await server.start()
    try:
        async with beside(server, tmp_path, dialect=DIALECTS[dialect], model="my iris") as agent:
            await eventually(lambda: agent.agent.watch.health.failures > 3)
            assert not await agent.is_ready()
            assert {*server.asked} <= {ready, "/metrics"}
            server.refused_paths = []
            await eventually(agent.is_ready)
            await eventually(lambda: health in server.asked)
    finally:
        await server.stop()


async def test_an_engine_that_never_starts_is_never_ready_and_is_left_to_its_startup_probe(tmp_path: Path) -> None:
    async with beside(FakeEngine(), tmp_path) as agent:
        await eventually(lambda: agent.agent.watch.health.failures > 3)
        assert await agent.status("/ready") == 503
        assert await agent.status("/started") == 503
        assert await agent.status("/live") == 200


async def test_an_engine_that_starts_late_is_found(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with beside(engine, tmp_path) as agent:
        await eventually(lambda: agent.agent.watch.health.failures > 2)
        await engine.start()
        try:
            await eventually(agent.is_ready)
        finally:
            await engine.stop()


async def test_a_page_of_something_else_is_no_answer_of_a_model(engine: FakeEngine, tmp_path: Path) -> None:
    engine.garbage = True
    async with beside(engine, tmp_path) as agent:
        await eventually(lambda: agent.agent.watch.health.failures > 3)
        assert not await agent.is_ready()
        engine.garbage = False
        await eventually(agent.is_ready)


async def test_what_speaks_no_http_is_no_engine(tmp_path: Path) -> None:
    engine = FakeEngine()

    async def babble(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\x00\xff220 mail.example.com\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(babble, "127.0.0.1", engine.port), beside(engine, tmp_path) as agent:
        await eventually(lambda: agent.agent.watch.health.failures > 3)
        assert not await agent.is_ready()
        assert await agent.metric("metrics_up") == 0


async def test_an_engine_without_completions_is_asked_to_chat(engine: FakeEngine, tmp_path: Path) -> None:
    engine.refused_paths = ["/v1/completions"]
    async with beside(engine, tmp_path) as agent:
        await eventually(agent.is_ready)
        assert "/v1/chat/completions" in engine.asked


@pytest.mark.parametrize("path", ["/v1/rerank", "/v1/score", "/v1/audio/transcriptions", "/v1/audio/speech"])
async def test_an_engine_that_writes_no_text_is_asked_by_the_api_that_it_has(tmp_path: Path, path: str) -> None:
    engine = FakeEngine()
    engine.refused_paths = ["/v1/completions", "/v1/chat/completions", "/v1/embeddings"]
    engine.other_paths = [path]
    await engine.start()
    async with beside(engine, tmp_path) as agent:
        await eventually(agent.is_ready)
        assert path in engine.asked
    await engine.stop()


async def test_an_engine_that_hangs_is_not_ready_and_gets_one_question_at_a_time(
    engine: FakeEngine, tmp_path: Path
) -> None:
    async with beside(engine, tmp_path, health=HealthSettings(probe_timeout_s=0.05)) as agent:
        await eventually(agent.is_ready)
        engine.hangs = True
        await eventually(lambda: engine.open_questions > 0)
        engine.most_open = 0

        async def is_unready() -> bool:
            return not await agent.is_ready()

        await eventually(is_unready)
        # many probe intervals later there is still one probe, beside one reading of metrics, however many ask for them
        await asyncio.gather(*(agent.http.get("/ready") for _ in range(20)))
        await asyncio.sleep(1.0)
        assert engine.open_questions <= 2
        assert engine.most_open <= 2
        assert await agent.status("/live") == 200
        engine.hangs = False


async def test_an_engine_that_hangs_for_long_is_dead(engine: FakeEngine, tmp_path: Path) -> None:
    health = HealthSettings(failures=2, probe_timeout_s=0.2, dead_after_s=2.0)
    async with beside(engine, tmp_path, health=health) as agent:
        await eventually(agent.is_ready)
        assert await agent.status("/live") == 200
        engine.hangs = True

        async def is_dead() -> bool:
            return await agent.status("/live") == 503

        await eventually(is_dead)
        # started again: dead no more, and not ready before the model has answered again
        engine.hangs = False
        await engine.stop()

        async def is_alive() -> bool:
            return await agent.status("/live") == 200

        await eventually(is_alive)
        assert not await agent.is_ready()
        engine.prompts.clear()
        await engine.start()
        await eventually(agent.is_ready)
        assert engine.prompts


async def test_an_engine_whose_requests_make_no_progress_is_not_ready(engine: FakeEngine, tmp_path: Path) -> None:
    health = HealthSettings(stalled_after_s=0.3)
    async with beside(engine, tmp_path, health=health) as agent:
        await eventually(agent.is_ready)
        engine.running = 3

        async def is_unready() -> bool:
            return not await agent.is_ready()

        await eventually(is_unready)
        assert "computed nothing" in (await agent.http.get("/ready")).text

        async def is_ready_again() -> bool:
            # it computes on: a busy machine may ask later than after 0.3 s
            engine.tokens += 1
            return await agent.is_ready()

        await eventually(is_ready_again)


async def test_the_warm_up_comes_before_readiness(engine: FakeEngine, tmp_path: Path) -> None:
    warm_up = WarmUpSettings(rounds=2, lengths=(4, 50), prompts=("Who are you?",))
    async with beside(engine, tmp_path, warm_up=warm_up) as agent:
        await eventually(agent.is_ready)
    assert len(engine.prompts) == 1 + 2 * 3
    assert engine.prompts.count("Who are you?") == 2
    assert len(set(engine.prompts)) == 6  # no other two are alike: the prefix cache would answer


async def test_a_warm_up_that_hangs_ends_with_its_time(engine: FakeEngine, tmp_path: Path) -> None:
    warm_up = WarmUpSettings(rounds=1, lengths=(4,), timeout_s=0.3)

    async def hang_at_warm_up() -> bool:
        engine.hangs = engine.hangs or bool(engine.prompts)
        return engine.hangs

    async with beside(engine, tmp_path, warm_up=warm_up) as agent:
        await eventually(hang_at_warm_up, pause_s=0)
        await eventually(lambda: agent.agent.watch.health.phase == "serving")
        engine.hangs = False
        await eventually(agent.is_ready)


async def test_a_slow_engine_is_ready_when_it_has_answered(engine: FakeEngine, tmp_path: Path) -> None:
    engine.slow_s = 1.0
    async with beside(engine, tmp_path, health=HealthSettings(probe_timeout_s=5.0)) as agent:
        await asyncio.sleep(0.1)
        assert not await agent.is_ready()
        await eventually(agent.is_ready)
