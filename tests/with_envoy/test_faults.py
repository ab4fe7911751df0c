"""Under load: engines die, extproc restarts or hangs, the configuration is replaced again and again."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from typing import TYPE_CHECKING

import httpx
import pytest

from bench.stack import ALIAS, MODEL, EngineFlags, Stack, documents, running_stack
from tests.waiting import eventually
from tests.with_envoy.load import Load

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


FLAGS = EngineFlags(count=3, speed=5.0, stream_headers="first-token")


@pytest.fixture
async def fresh(tmp_path: Path) -> AsyncIterator[Stack]:
    """A stack of this test's own, to break."""
    async with running_stack(tmp_path / "stack", FLAGS, watch=True) as running:
        yield running


@pytest.fixture
async def closed(tmp_path: Path) -> AsyncIterator[Stack]:
    """The same for those who prefer errors."""
    gateway = {"failureMode": "Close", "messageTimeout": "1s"}
    async with running_stack(tmp_path / "stack", FLAGS, watch=True, gateway=gateway) as running:
        yield running


async def ask(stack: Stack, model: str = ALIAS, **headers: str) -> httpx.Response:
    body = {"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
    async with httpx.AsyncClient(timeout=30) as http:
        return await http.post(f"{stack.url}/v1/chat/completions", json=body, headers=headers)


async def is_picking(stack: Stack) -> bool:
    """Whether extproc decides: it names its ticket in the access log, and counts the pick."""
    async with httpx.AsyncClient() as http:
        try:
            before = (await http.get(f"{stack.metrics}/metrics")).text
            await ask(stack)
            after = (await http.get(f"{stack.metrics}/metrics")).text
        except httpx.TransportError:
            return False
    name = 'attache_requests_total{outcome="picked"} '
    counts = [text.partition(name)[2].partition("\n")[0] or "0" for text in (before, after)]
    return counts[0] != counts[1]


async def test_an_engine_that_is_killed_costs_no_client_whose_answer_had_not_begun(fresh: Stack) -> None:
    async with Load(fresh.url) as load:
        await load.more(100)
        await fresh.processes.end("engine-1", signal.SIGKILL)
        await load.more(300)
    assert load.tally.lost == []
    # streams that had begun on the dead engine cannot be saved; there were at most as many as clients
    assert load.tally.cut <= 24


async def test_an_engine_that_comes_back_is_used_again(fresh: Stack) -> None:
    engine = fresh.engines[0]
    async with Load(fresh.url) as load:
        await fresh.processes.restart("engine-0", signal.SIGKILL)

        async def is_serving_again() -> bool:
            try:
                async with httpx.AsyncClient() as http:
                    text = (await http.get(f"{engine}/metrics")).text
            except httpx.TransportError:
                return False
            return 'finished_reason="length"' in text

        await eventually(is_serving_again, timeout_s=60)
    assert load.tally.lost == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_a_restart_of_extproc_costs_no_client_anything(fresh: Stack, number: signal.Signals) -> None:
    async with Load(fresh.url) as load:
        await load.more(100)
        await fresh.processes.restart("extproc", number)

        async def picks_again() -> bool:
            return await is_picking(fresh)

        await eventually(picks_again, timeout_s=30)
        await load.more(100)
    assert load.tally.lost == []
    assert load.tally.cut == 0


async def test_without_extproc_the_right_engines_still_serve(fresh: Stack) -> None:
    await fresh.processes.end("extproc", signal.SIGKILL)
    served = await ask(fresh)
    assert served.status_code == 200
    assert served.json()["model"] == MODEL
    steered = await ask(fresh, **{"x-attache-server": "nowhere", "x-gateway-destination-endpoint": "127.0.0.1:1"})
    assert steered.status_code == 200
    async with httpx.AsyncClient() as http:
        listed = (await http.get(f"{fresh.url}/v1/models")).json()
        assert [one["id"] for one in listed["data"]] == [ALIAS]
        assert (await http.get(f"{fresh.url}/metrics")).status_code == 404


async def test_an_extproc_that_hangs_is_passed_over_after_a_while(fresh: Stack) -> None:
    os.kill(fresh.pids["extproc"], signal.SIGSTOP)
    try:
        answers = await asyncio.gather(*(ask(fresh) for _ in range(10)))
        assert [answer.status_code for answer in answers] == [200] * 10
    finally:
        os.kill(fresh.pids["extproc"], signal.SIGCONT)


async def test_closed_means_an_error_that_says_so(closed: Stack) -> None:
    assert (await ask(closed)).status_code == 200
    await closed.processes.end("extproc", signal.SIGKILL)
    refused = await ask(closed)
    assert refused.status_code == 503
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("service_unavailable_error", "no_picker")


async def test_with_no_engine_left_the_error_has_openais_shape(fresh: Stack) -> None:
    for index in range(3):
        await fresh.processes.end(f"engine-{index}", signal.SIGKILL)
    refused = await ask(fresh)
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "no_engine"


async def test_an_overloaded_engine_is_passed_over_on_the_list(fresh: Stack) -> None:
    async with httpx.AsyncClient() as http:
        for engine in fresh.engines[:2]:
            await http.post(f"{engine}/faults", json={"fault": "unavailable", "times": 1000})
    answers = [await ask(fresh) for _ in range(10)]
    assert [answer.status_code for answer in answers] == [200] * 10


def replace(stack: Stack, text: str) -> None:
    fresh = stack.config / "attache.new"
    fresh.write_text(text)
    fresh.replace(stack.config / "attache.yaml")


async def test_a_hundred_replacements_of_the_configuration_lose_no_request(fresh: Stack) -> None:
    addresses = [engine.removeprefix("http://") for engine in fresh.engines]
    rng = random.Random(0)

    def variant(number: int) -> str:
        if number % 5 == 4:
            return rng.choice(["kind: [", "kind: ModelServer\n", ""])
        engines = rng.sample(addresses, rng.randint(1, 3))
        return documents(engines, gateway=fresh.gateway, server=rng.choice(["llama", "llama-b", "llama-c"]))

    async with Load(fresh.url) as load:
        for number in range(100):
            replace(fresh, variant(number))
            await asyncio.sleep(rng.choice([0.02, 0.05, 0.3]))
        final = documents(addresses[:1], gateway=fresh.gateway, server="llama-final")
        replace(fresh, final)

        async def is_applied() -> bool:
            async with httpx.AsyncClient() as http:
                text = (await http.get(f"{fresh.metrics}/metrics")).text
            return f'attache_in_flight{{endpoint="{addresses[0]}",server="default/llama-final"}}' in text

        await eventually(is_applied, timeout_s=30)
        await load.more(200)
    assert load.tally.lost == []
    assert load.tally.cut == 0


async def test_a_server_under_a_new_name_takes_over_without_a_lost_request(fresh: Stack) -> None:
    addresses = [engine.removeprefix("http://") for engine in fresh.engines]
    async with Load(fresh.url) as load:
        for name in ("first", "second"):
            replace(fresh, documents(addresses, gateway=fresh.gateway, server=name))

            async def is_gone_from_envoy(name: str = name) -> bool:
                async with httpx.AsyncClient() as http:
                    clusters = (await http.get(f"{fresh.admin}/clusters")).text
                others = {"first", "second", "llama"} - {name}
                return f"server/default/{name}::" in clusters and not any(
                    f"server/default/{one}::" in clusters for one in others
                )

            await eventually(is_gone_from_envoy, timeout_s=30)
    assert load.tally.lost == []
    assert load.tally.cut == 0
