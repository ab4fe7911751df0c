# SPDX-License-Identifier: Apache-2.0
"""Engines die, extproc restarts or hangs; clients ask all the while."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from typing import TYPE_CHECKING

import aiohttp
import httpx
import pytest
import pytest_asyncio
from yarl import URL

from bench.stack.loopback_stack import ALIAS, EngineFlags, Stack, running_stack
from controller.bundle.envoy_admin_client import running_requests
from controller.bundle.envoy_drain import drain_on_demand
from tests.waiting import eventually
from tests.with_envoy.load import Load

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


pytestmark = pytest.mark.asyncio(loop_scope="module")

FLAGS = EngineFlags(count=3, speed=5.0, stream_headers="first-token")
APART = EngineFlags(count=3, speed=5.0, stream_headers="first-token", apart=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sturdy(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """For tests that leave engines and configuration as they were, and extproc to be started again."""
    async with running_stack(tmp_path_factory.mktemp("sturdy") / "stack", FLAGS, watch=True) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def mended(sturdy: Stack) -> AsyncIterator[Stack]:
    """A stack that serves, whatever the test does to its extproc."""
    yield sturdy
    if not sturdy.processes.is_running("extproc"):
        await sturdy.processes.start_again("extproc")
    await eventually(lambda: is_picking(sturdy))


@pytest_asyncio.fixture(loop_scope="module")
async def apart(tmp_path: Path) -> AsyncIterator[Stack]:
    """A stack of this test's own whose engines can be killed one by one."""
    async with running_stack(tmp_path / "stack", APART) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def closed(tmp_path: Path) -> AsyncIterator[Stack]:
    """The same for those who prefer errors."""
    gateway = {"failureMode": "Close", "messageTimeout": "1s"}
    async with running_stack(tmp_path / "stack", FLAGS, gateway=gateway) as running:
        yield running


async def ask(stack: Stack, model: str = ALIAS, *, tokens: int = 2, **headers: str) -> httpx.Response:
    body = {"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": tokens}
    async with httpx.AsyncClient(timeout=30) as http:
        return await http.post(f"{stack.url}/v1/chat/completions", json=body, headers=headers)


async def health(stack: Stack) -> tuple[int, str]:
    """What a load balancer gets in front of Envoy."""
    async with httpx.AsyncClient(timeout=60) as http:
        answer = await http.get(f"{stack.url}/healthz")
    return answer.status_code, answer.text


HEALTHY = (200, "ok\n")
ILL = (503, "Envoy drains, or needs extproc, which is away\n")


async def is_picking(stack: Stack) -> bool:
    """Whether extproc decides: it names its ticket in the access log, and counts the pick."""
    async with httpx.AsyncClient(timeout=60) as http:
        try:
            before = (await http.get(f"{stack.metrics}/metrics")).text
            await ask(stack)
            after = (await http.get(f"{stack.metrics}/metrics")).text
        except httpx.TransportError:
            return False
    name = 'attache_requests_total{outcome="picked"} '
    counts = [text.partition(name)[2].partition("\n")[0] or "0" for text in (before, after)]
    return counts[0] != counts[1]


async def test_an_engine_that_is_killed_costs_no_client_whose_answer_had_not_begun(apart: Stack) -> None:
    async with Load(apart.url) as load:
        await load.more(100)
        await apart.processes.end("engine-1", signal.SIGKILL)
        await load.more(300)
    assert load.tally.lost == []
    # streams that had begun on the dead engine cannot be saved; there were at most as many as clients
    assert load.tally.cut <= 24


async def test_an_engine_that_comes_back_is_used_again(apart: Stack) -> None:
    engine = apart.engines[0]
    async with Load(apart.url) as load:
        await apart.processes.restart("engine-0", signal.SIGKILL)

        async def is_serving_again() -> bool:
            try:
                async with httpx.AsyncClient(timeout=60) as http:
                    text = (await http.get(f"{engine}/metrics")).text
            except httpx.TransportError:
                return False
            return 'finished_reason="length"' in text

        await eventually(is_serving_again)
    assert load.tally.lost == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_a_restart_of_extproc_costs_no_client_anything(mended: Stack, number: signal.Signals) -> None:
    async with Load(mended.url) as load:
        await load.more(100)
        await mended.processes.restart("extproc", number)

        async def picks_again() -> bool:
            return await is_picking(mended)

        await eventually(picks_again)
        await load.more(100)
    assert load.tally.lost == []
    assert load.tally.cut == 0


async def test_without_extproc_the_right_engines_still_serve(mended: Stack) -> None:
    await mended.processes.end("extproc", signal.SIGKILL)
    served = await ask(mended)
    assert served.status_code == 200
    assert served.json()["model"] == ALIAS
    steered = await ask(mended, **{"x-attache-server": "nowhere", "x-gateway-destination-endpoint": "127.0.0.1:1"})
    assert steered.status_code == 200
    async with httpx.AsyncClient(timeout=60) as http:
        listed = (await http.get(f"{mended.url}/v1/models")).json()
        assert [one["id"] for one in listed["data"]] == [ALIAS]
        assert (await http.get(f"{mended.url}/metrics")).status_code == 404
    assert await health(mended) == HEALTHY


async def test_load_balancers_see_that_envoy_drains(mended: Stack) -> None:
    async with aiohttp.ClientSession() as http:
        try:
            await http.post(URL(f'{mended.admin}/healthcheck/fail?"', encoded=True))
            assert await health(mended) == ILL
            # who still comes is served
            assert (await ask(mended)).status_code == 200
        finally:
            await http.post(URL(f'{mended.admin}/healthcheck/ok?"', encoded=True))
    assert await health(mended) == HEALTHY


async def test_no_web_page_can_stop_or_change_envoy(mended: Stack) -> None:
    changes = ["quitquitquit", "logging?level=trace", "reset_counters", "drain_listeners", "drain_listeners?graceful"]
    changes += ['quitquitquit?"', 'drain_listeners?graceful&inboundonly&"', 'healthcheck/fail?"', 'reopen_logs?"']
    changes += ["?quitquitquit"]
    async with httpx.AsyncClient(timeout=60) as http:
        # its addresses are written as those of browsers, by WHATWG's URL standard
        answers = [await http.post(f"{mended.admin}/{path}") for path in changes]
        assert answers[-2].url.query == b"%22"
        assert [one.status_code for one in answers] == [403] * len(changes)
        assert (await http.get(f"{mended.admin}/ready")).text == "LIVE\n"
    assert mended.processes.is_running("envoy")
    assert await health(mended) == HEALTHY
    assert (await ask(mended)).status_code == 200


async def test_an_envoy_that_drains_closes_connections_and_has_drained_when_no_request_runs(
    mended: Stack, tmp_path: Path
) -> None:
    file, stop = tmp_path / "drain", threading.Event()
    addresses = [mended.admin.removeprefix("http://")]
    words = (drain_on_demand, file, lambda: addresses, stop)
    draining = asyncio.create_task(asyncio.to_thread(*words, settle_s=0.1))
    try:
        long = asyncio.create_task(ask(mended, tokens=4000))
        await eventually(lambda: running_requests(addresses[0]) > 0)
        await asyncio.to_thread(file.touch)

        async def connections_are_closed() -> bool:
            return (await ask(mended)).headers.get("connection") == "close"

        await eventually(connections_are_closed)
        assert not long.done()
        assert await asyncio.to_thread(file.exists)
        assert (await long).status_code == 200
        await eventually(lambda: not file.exists())
    finally:
        stop.set()
        await draining
        async with aiohttp.ClientSession() as http:
            await http.post(URL(f'{mended.admin}/healthcheck/ok?"', encoded=True))


async def test_an_extproc_that_hangs_is_passed_over_after_a_while(mended: Stack) -> None:
    pid = mended.processes.pid("extproc")
    os.kill(pid, signal.SIGSTOP)
    try:
        answers = await asyncio.gather(*(ask(mended) for _ in range(10)))
        assert [answer.status_code for answer in answers] == [200] * 10
    finally:
        os.kill(pid, signal.SIGCONT)


async def test_closed_means_an_error_that_says_so(closed: Stack) -> None:
    assert (await ask(closed)).status_code == 200
    assert await health(closed) == HEALTHY
    await closed.processes.end("extproc", signal.SIGKILL)
    refused = await ask(closed)
    assert refused.status_code == 503
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("service_unavailable_error", "no_picker")
    assert refused.headers["retry-after"] == "5"

    async def is_ill() -> bool:
        return await health(closed) == ILL

    await eventually(is_ill)
    await closed.processes.start_again("extproc")

    async def is_healthy() -> bool:
        return await health(closed) == HEALTHY

    await eventually(is_healthy)


async def test_an_answer_that_runs_outlives_extproc_though_nothing_new_is_taken(closed: Stack) -> None:
    body = {"model": ALIAS, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 300, "stream": True}
    async with (
        httpx.AsyncClient(timeout=60) as http,
        http.stream("POST", f"{closed.url}/v1/chat/completions", json=body) as answer,
    ):
        pieces = answer.aiter_text()
        text = await anext(pieces)
        await closed.processes.end("extproc", signal.SIGKILL)
        assert (await ask(closed)).status_code == 503
        async for piece in pieces:
            text += piece
    assert text.endswith("data: [DONE]\n\n")


KEYS = {"apiKeys": [{"name": "acme", "key": "acme-secret", "tenant": "acme"}]}
BEARER = {"authorization": "Bearer acme-secret"}
LIMITED = {"rateLimits": [{"requests": 1000}]}


@pytest.mark.parametrize(
    ("gateway", "route", "status"),
    [
        ({}, LIMITED, 503),
        ({"authentication": KEYS}, {}, 503),
        ({"authentication": KEYS, "cacheIsolation": "Shared"}, {}, 200),
        ({"failureMode": "Open"}, LIMITED, 200),
    ],
    ids=["limits", "caches by tenant", "keys alone", "opened"],
)
async def test_without_extproc_nobody_gets_round_what_it_decides(
    tmp_path: Path, gateway: dict[str, object], route: dict[str, object], status: int
) -> None:
    headers = BEARER if "authentication" in gateway else {}
    async with running_stack(tmp_path / "stack", FLAGS, gateway=gateway, route=route, headers=headers) as stack:
        assert (await ask(stack, **headers)).status_code == 200
        await stack.processes.end("extproc", signal.SIGKILL)
        answer = await ask(stack, **headers)
        assert answer.status_code == status
        if status == 503:
            error = answer.json()["error"]
            assert (error["type"], error["code"]) == ("service_unavailable_error", "no_picker")
        elif headers:
            # who asks is known without extproc
            assert (await ask(stack)).status_code == 401


async def test_with_no_engine_left_the_error_has_openais_shape(apart: Stack) -> None:
    for index in range(3):
        await apart.processes.end(f"engine-{index}", signal.SIGKILL)
    refused = await ask(apart)
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "no_engine"
    assert refused.headers["retry-after"] == "5"


async def test_an_overloaded_engine_is_passed_over_on_the_list(mended: Stack) -> None:
    favourite = await who_answers(mended)
    overloaded = [favourite, next(engine for engine in mended.engines if engine != favourite)]
    retries_before = await retries(mended)
    async with httpx.AsyncClient(timeout=60) as http:
        for engine in overloaded:
            await http.post(f"{engine}/faults", json={"fault": "unavailable", "times": 1000})
        answers = [await ask(mended) for _ in range(10)]
        for engine in overloaded:
            await http.post(f"{engine}/faults", json={"fault": "unavailable", "times": 0})
    assert [answer.status_code for answer in answers] == [200] * 10
    assert await retries(mended) > retries_before


async def who_answers(stack: Stack) -> str:
    """The engine that gets this prompt: the one that has it in its cache, from the second time on."""

    async def answered() -> list[float]:
        async with httpx.AsyncClient(timeout=60) as http:
            pages = [(await http.get(f"{engine}/metrics")).text for engine in stack.engines]
        name = "vllm:request_success_total"
        return [sum(float(n.split()[-1]) for n in page.splitlines() if n.startswith(name)) for page in pages]

    await ask(stack)
    before = await answered()
    await ask(stack)
    gained = [after - earlier for after, earlier in zip(await answered(), before, strict=True)]
    return stack.engines[gained.index(1)]


async def retries(stack: Stack) -> int:
    """Requests that Envoy has sent on to the next engine of the list."""
    async with httpx.AsyncClient(timeout=60) as http:
        text = (
            await http.get(
                f"{stack.admin}/stats", params={"filter": "^cluster.server/default/llama.upstream_rq_retry$"}
            )
        ).text
    return int(text.rpartition(":")[2])
