# SPDX-License-Identifier: Apache-2.0
"""Several extproc processes behind one Envoy."""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
from collections import Counter
from typing import TYPE_CHECKING, Any

import httpx
import msgspec
import pytest
import pytest_asyncio

from bench.live.load_client import LoadClient
from bench.reporting.request_results import cached_token_ratio
from bench.stack.loopback_stack import ALIAS, EngineFlags, running_stack
from bench.stack.processes import has_spare_worker, workers_of
from bench.workload.generators import Conversations, conversation_workload
from tests.decision_log import read_outcomes
from tests.examples import slow
from tests.waiting import eventually
from tests.with_envoy.load import Load

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from bench.reporting.request_results import RequestResult
    from bench.stack.loopback_stack import Stack

MODES = [slow("Open"), "Close"]
PICKED = 'attache_requests_total{outcome="picked"}'
SHAPE = Conversations(sessions=100, sessions_per_s=5.0, system_prompts=12, system_tokens=3000)


class Routed(msgspec.Struct, frozen=True):
    """``imbalance``: the busiest engine's requests over the mean."""

    cached_token_ratio: float
    imbalance: float
    failed: int


async def routed(directory: Path, workers: int) -> Routed:
    """Play the conversations over ``workers`` extproc processes, which replicate their events over sockets."""
    results: list[RequestResult] = []
    flags = EngineFlags(count=4, speed=6.0, kv_blocks=3000, apart=True)
    logged = ("--decision-log", str(directory / "decisions"), "--decision-sample", "1")
    async with running_stack(directory / "stack", flags, workers=workers, extproc_flags=logged) as stack:
        client = LoadClient(stack.url, ALIAS, speed=6.0, on_result=results.append)
        await client.send(conversation_workload(SHAPE))
    served = served_by(directory)
    good = [one for one in results if not one.error]
    imbalance = max(served.values()) / statistics.fmean(served.values())
    return Routed(cached_token_ratio(good), imbalance, len(results) - len(good))


def served_by(directory: Path) -> Counter[str]:
    """Requests by the engine that answered, from the logs of all processes."""
    return Counter(one.served for file in directory.glob("decisions*") for one in read_outcomes(file))


def folder(directory: Path, name: str) -> Path:
    made = directory / name
    made.mkdir()
    return made


@pytest.mark.real_time
async def test_two_workers_find_as_much_in_caches_as_one(tmp_path: Path) -> None:
    # side by side, so that both have the same machine
    one, two = await asyncio.gather(routed(folder(tmp_path, "one"), 1), routed(folder(tmp_path, "two"), 2))
    assert one.failed == two.failed == 0
    assert two.cached_token_ratio > one.cached_token_ratio - 0.03
    assert two.imbalance < one.imbalance + 0.35


class Workers:
    """A stack with ``count`` workers, and a client."""

    def __init__(self, stack: Stack, http: httpx.AsyncClient, count: int = 2) -> None:
        self.stack = stack
        self.http = http
        host, _, first = stack.metrics.removeprefix("http://").partition(":")
        self._pages = [f"http://{host}:{int(first) + number}/metrics" for number in range(count)]

    @property
    def supervisor(self) -> int:
        return self.stack.processes.pid("extproc")

    async def values(self, name: str) -> list[float]:
        """The sum of a metric's series at each worker; -1 at one that does not answer or has none."""
        return [await self._value(page, name) for page in self._pages]

    async def _value(self, page: str, name: str) -> float:
        try:
            text = (await self.http.get(page)).text
        except httpx.TransportError:
            return -1
        found = [float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name)]
        return sum(found) if found else -1

    async def all_pick(self) -> None:
        """Until Envoy sends requests to all, as it does once it has checked their health."""
        before = await self.values(PICKED)

        async def do() -> bool:
            return all(now > max(old, 0) for now, old in zip(await self.values(PICKED), before, strict=True))

        await eventually(do)


# Answers are long enough to run while a worker dies, and clients so few that no worker is too busy to answer
def load_on(pair: Workers) -> Load:
    return Load(pair.stack.url, clients=6, output_tokens=60, pause_s=0.05)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=MODES)
async def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Workers]:
    """In both failure modes. Each test leaves both workers picking."""
    flags = EngineFlags(count=3, speed=5.0, stream_headers="first-token")
    async with (
        running_stack(
            tmp_path_factory.mktemp("pair") / "stack",
            flags,
            workers=2,
            gateway={"failureMode": request.param, "messageTimeout": "30s"},
            extproc_flags=("--grace", "3s"),
        ) as stack,
        httpx.AsyncClient(timeout=60) as http,
    ):
        yield Workers(stack, http)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_worker_that_is_killed_costs_nobody_anything_and_comes_back(pair: Workers) -> None:
    async with load_on(pair) as load:
        await pair.all_pick()
        os.kill(workers_of(pair.supervisor)[1], signal.SIGKILL)
        await load.more(60)
        await pair.all_pick()
    assert load.tally.lost == []
    assert load.tally.cut == 0

    async def all_idle() -> bool:
        return await pair.values("attache_in_flight") == [0, 0]

    await eventually(all_idle)


@pytest.mark.asyncio(loop_scope="module")
async def test_the_console_of_one_worker_shows_the_requests_of_each(pair: Workers) -> None:
    async def answer(page: str, worker: int) -> dict[str, Any]:
        found = await pair.http.get(f"{pair.stack.metrics}/console/{page}?worker={worker}&limit=200")
        assert found.status_code == 200
        return dict(found.json())

    for worker in range(2):
        await answer("requests", worker)
    async with load_on(pair):
        await pair.all_pick()
    for worker, picked in enumerate(await pair.values(PICKED)):
        state = await answer("state", worker)
        assert (state["process"]["worker"], state["process"]["workers"]) == (worker, 2)
        assert state["outcomes"]["picked"] == picked
        assert state["total"]["engines"] == 3

    async def are_settled() -> bool:
        kept = [(await answer("requests", worker))["requests"] for worker in range(2)]
        return all(any(one["status"] == 200 for one in rows) for rows in kept)

    await eventually(are_settled)


@pytest.mark.asyncio(loop_scope="module")
async def test_what_a_worker_that_hangs_does_not_answer_is_asked_of_the_other(pair: Workers) -> None:
    async with load_on(pair) as load:
        await pair.all_pick()
        hung = workers_of(pair.supervisor)[1]
        os.kill(hung, signal.SIGSTOP)
        # its supervisor kills it
        await eventually(lambda: hung not in workers_of(pair.supervisor))
        await pair.all_pick()
    assert load.tally.lost == []
    assert load.tally.cut == 0


@pytest.mark.asyncio(loop_scope="module")
async def test_workers_that_are_restarted_one_by_one_cost_nobody_anything(pair: Workers) -> None:
    async with load_on(pair) as load:
        await pair.all_pick()
        before = set(workers_of(pair.supervisor))
        os.kill(pair.supervisor, signal.SIGUSR1)
        await eventually(lambda: len(set(workers_of(pair.supervisor)) - before) == 2)
        await pair.all_pick()
    assert load.tally.lost == []
    assert load.tally.cut == 0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def alone(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Workers]:
    """One worker that must decide. Each test leaves it picking."""
    flags = EngineFlags(count=3, speed=5.0, stream_headers="first-token")
    async with (
        running_stack(
            tmp_path_factory.mktemp("alone") / "stack",
            flags,
            gateway={"failureMode": "Close", "messageTimeout": "30s"},
            extproc_flags=("--workers", "1"),
        ) as stack,
        httpx.AsyncClient(timeout=60) as http,
    ):
        yield Workers(stack, http, 1)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM], ids=lambda one: one.name)
async def test_the_only_worker_that_ends_or_hangs_costs_nobody_anything(alone: Workers, number: signal.Signals) -> None:
    async with load_on(alone) as load:
        await alone.all_pick()
        # while it loads, nobody would serve, and after some 5 s Envoy takes the only worker for unhealthy
        await eventually(lambda: has_spare_worker(alone.supervisor))
        (worker,) = workers_of(alone.supervisor)
        os.kill(worker, number)
        await eventually(lambda: len(workers_of(alone.supervisor)) == 1 and worker not in workers_of(alone.supervisor))
        await alone.all_pick()
    assert load.tally.lost == []
    assert load.tally.cut == 0


@pytest.mark.asyncio(loop_scope="module")
async def test_the_only_worker_is_replaced_while_a_request_runs_and_costs_nobody_anything(alone: Workers) -> None:
    body = {"model": ALIAS, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 100_000, "stream": True}
    (predecessor,) = workers_of(alone.supervisor)
    async with (
        load_on(alone) as load,
        alone.http.stream("POST", f"{alone.stack.url}/v1/chat/completions", json=body) as answer,
    ):
        pieces = answer.aiter_text()
        await anext(pieces)
        os.kill(alone.supervisor, signal.SIGUSR1)
        await eventually(lambda: len(workers_of(alone.supervisor)) == 2)
        # the pages are those of the successor, which counts anew
        await alone.all_pick()
        assert predecessor in workers_of(alone.supervisor)
        assert (await anext(pieces)).startswith("data: ")
    assert load.tally.lost == []
    assert load.tally.cut == 0
    await eventually(lambda: predecessor not in workers_of(alone.supervisor))


async def test_the_other_worker_is_asked_about_requests_that_a_killed_one_held(tmp_path: Path) -> None:
    one_at_a_time = {"queueDepth": None, "kvUsage": None, "maxWait": None, "maxRequests": 1}
    body = {"model": ALIAS, "messages": [{"role": "user", "content": "hello"}]}
    async with (
        running_stack(
            tmp_path / "stack",
            EngineFlags(count=1, speed=20.0),
            workers=2,
            gateway={"failureMode": "Close", "messageTimeout": "30s"},
            more={"flowControl": {"saturation": one_at_a_time}},
        ) as stack,
        httpx.AsyncClient(timeout=None) as http,  # noqa: S113  the test ends what it holds
    ):
        pair = Workers(stack, http)

        async def ask(tokens: int) -> httpx.Response:
            return await http.post(f"{stack.url}/v1/chat/completions", json={**body, "max_tokens": tokens})

        async def waiting() -> float:
            return sum(await pair.values("attache_queue_waiting"))

        async def both_hold() -> bool:
            return min(await pair.values("attache_queue_waiting")) > 0

        blocker = asyncio.create_task(ask(100_000))
        await eventually(lambda: engine_runs(http, stack.engines[0]))
        held = []
        # until each of the two holds one at least: Envoy gives both as many
        while not await both_hold():
            assert len(held) < 50, (await pair.values(PICKED), await pair.values("attache_queue_waiting"), blocker)
            held.append(asyncio.create_task(ask(1)))
            # one that came before its worker had heard of the blocker is served
            await eventually(lambda: is_value(waiting, sum(not one.done() for one in held)))
        os.kill(workers_of(pair.supervisor)[1], signal.SIGKILL)
        blocker.cancel()
        assert [answer.status_code for answer in await asyncio.gather(*held)] == [200] * len(held)


async def is_value(value: Callable[[], Awaitable[float]], wanted: float) -> bool:
    return await value() == wanted


async def engine_runs(http: httpx.AsyncClient, engine: str) -> bool:
    """Whether the engine has a request."""
    text = (await http.get(f"{engine}/metrics")).text
    return any(
        line.startswith("vllm:num_requests_running") and float(line.rsplit(" ", 1)[1]) for line in text.splitlines()
    )


@pytest.mark.slow
async def test_a_worker_that_is_killed_again_and_again_is_no_way_round_a_limit(tmp_path: Path) -> None:
    flags = EngineFlags(count=1, speed=20.0, stream_headers="first-token")
    limited = {"rateLimits": [{"per": "Route", "unit": "month", "requests": 30}]}
    body = {"model": ALIAS, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
    async with (
        running_stack(tmp_path / "stack", flags, workers=2, route=limited) as stack,
        httpx.AsyncClient(base_url=stack.url, timeout=30) as http,
    ):
        host, _, first = stack.metrics.removeprefix("http://").partition(":")
        pages = [f"http://{host}:{int(first) + number}/metrics" for number in range(2)]
        answers: list[int] = []

        async def ask(times: int) -> None:
            answers.extend([(await http.post("/v1/chat/completions", json=body)).status_code for _ in range(times)])

        async def refused_by(page: str) -> float:
            try:
                text = (await http.get(page)).text
            except httpx.TransportError:
                return 0.0
            name = 'attache_requests_total{outcome="rate_limited"}'
            return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name))

        await ask(40)
        # workers tell each other within milliseconds
        assert 30 <= answers.count(200) <= 33
        granted = answers.count(200)
        for victim in (1, 0, 1):
            os.kill(workers_of(stack.pids["extproc"])[victim], signal.SIGKILL)

            async def both_refuse() -> bool:
                await ask(10)
                return all([await refused_by(page) > 0 for page in pages])

            await eventually(both_refuse)
        assert answers.count(200) == granted
