# SPDX-License-Identifier: Apache-2.0
"""Rate limits through a real Envoy under random traffic: no window sees more than was promised, with Redis and
without.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from typing import TYPE_CHECKING

import httpx
import msgspec
import pytest

from bench.stack.loopback_stack import ALIAS, EngineFlags, Stack, running_stack
from tests.examples import slow
from tests.redis_server import running_redis
from tests.waiting import eventually
from tests.with_envoy.load import Load
from tests.with_envoy.stand_in import gateway_on

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.redis_server import Redis

__all__ = ["running_redis"]

# Tokens a second, and how many at once.
RATE, BURST = 400, 1.5
# for which clients ask
SECONDS = 3
# that the limit was met at all
ENOUGH_REFUSED = 20
LIMIT = {"per": "Route", "unit": "second", "totalTokens": RATE, "burst": BURST}
CLOCK = time.monotonic  # noqa: TID251 - clients have clocks
FLAGS = EngineFlags(count=2, speed=20.0, stream_headers="first-token")


class Granted(msgspec.Struct, frozen=True):
    """A request that was answered: it was granted between these two times."""

    sent_s: float
    answered_s: float
    tokens: int


class Traffic:
    """Clients that ask at random, for random lengths."""

    def __init__(self, url: str, seed: int) -> None:
        self._url = url
        self._rng = random.Random(seed)
        self.granted: list[Granted] = []
        self.refused = 0
        self.other: list[int] = []

    async def run(self, *, clients: int, seconds: float) -> None:
        """Until then; what the first second taught of prompts' lengths is not part of what was granted."""
        await self._run(2, 1.0)
        await asyncio.sleep(1.0)
        self.granted.clear()
        for _ in range(5):  # a machine that is busy takes longer to ask for more than there is
            await self._run(clients, seconds)
            if self.refused > ENOUGH_REFUSED:
                break

    async def _run(self, clients: int, seconds: float) -> None:
        limits = httpx.Limits(max_connections=None)
        async with (
            httpx.AsyncClient(base_url=self._url, timeout=30, limits=limits) as http,
            asyncio.TaskGroup() as group,
        ):
            for _ in range(clients):
                group.create_task(self._ask_again(http, CLOCK() + seconds))

    async def _ask_again(self, http: httpx.AsyncClient, until_s: float) -> None:
        rng = self._rng
        while CLOCK() < until_s:
            text = "word " * rng.randrange(1, 40)
            body: dict[str, object] = {"model": ALIAS, "messages": [{"role": "user", "content": text}]}
            body["max_tokens"] = rng.randrange(1, 60)
            sent_s = CLOCK()
            answer = await http.post("/v1/chat/completions", json=body)
            if answer.status_code == 200:
                tokens = answer.json()["usage"]["total_tokens"]
                self.granted.append(Granted(sent_s, CLOCK(), tokens))
            elif answer.status_code == 429:
                self.refused += 1
            else:
                self.other.append(answer.status_code)
            await asyncio.sleep(rng.expovariate(10))

    def most_over(self, *, rate: float, burst: float) -> float:
        """By how much the worst window exceeded the promise; below 0 by how much it fell short."""
        return most_over(self.granted, rate=rate, burst=burst)


def most_over(granted: Sequence[Granted], *, rate: float, burst: float) -> float:
    """All that was sent after a window began and answered before it ended was granted within it."""
    worst = -burst
    ends = sorted(granted, key=lambda one: one.answered_s)
    for begin_s in {one.sent_s for one in granted}:
        tokens = 0
        for one in ends:
            if one.sent_s >= begin_s:
                tokens += one.tokens
                worst = max(worst, tokens - rate * (one.answered_s - begin_s) - burst)
    return worst


async def metric(http: httpx.AsyncClient, page: str, name: str) -> float:
    text = (await http.get(page)).text
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name))


@pytest.mark.parametrize("seed", [1, slow(2)])
async def test_no_window_sees_more_tokens_than_the_limit_and_the_burst(tmp_path: Path, seed: int) -> None:
    async with running_stack(tmp_path / "stack", FLAGS, route={"rateLimits": [LIMIT]}) as stack:
        traffic = Traffic(stack.url, seed)
        await traffic.run(clients=12, seconds=SECONDS)
    assert traffic.other == []
    assert traffic.refused > ENOUGH_REFUSED
    assert traffic.most_over(rate=RATE, burst=RATE * BURST) <= 0
    # and most of what was promised was had
    assert sum(one.tokens for one in traffic.granted) > 0.5 * (SECONDS * RATE + RATE * BURST)


@pytest.mark.slow
async def test_four_processes_with_redis_grant_together_what_one_would(tmp_path: Path, redis: Redis) -> None:
    limit = {**LIMIT, "scope": "Global"}
    async with running_stack(
        tmp_path / "stack", FLAGS, route={"rateLimits": [limit]}, workers=4, extproc_flags=["--redis", redis.url]
    ) as stack:
        traffic = Traffic(stack.url, 3)
        for _ in range(3):
            unanswered = await answers_of_redis(stack, 4, "failed")
            await traffic.run(clients=16, seconds=SECONDS)
            # without its answer a process grants its part by itself, and the promise is for as long as Redis answers
            if await answers_of_redis(stack, 4, "failed") == unanswered:
                break
        else:
            pytest.fail("Redis took too long to answer in each of three attempts")
        used = sum(count > 0 for count in await answers_of_redis(stack, 4, "granted"))
    assert traffic.other == []
    assert traffic.refused > ENOUGH_REFUSED
    assert used >= 2, "Envoy did not spread the requests"
    assert traffic.most_over(rate=RATE, burst=RATE * BURST) <= 0
    assert sum(one.tokens for one in traffic.granted) > 0.5 * (SECONDS * RATE + RATE * BURST)


async def answers_of_redis(stack: Stack, workers: int, result: str) -> list[float]:
    """How many of them each worker has had."""
    host, _, first = stack.metrics.rpartition(":")
    async with httpx.AsyncClient(timeout=60) as http:
        pages = [f"{host}:{int(first) + number}/metrics" for number in range(workers)]
        return [await metric(http, page, f'attache_limits_redis_total{{result="{result}"}}') for page in pages]


async def test_redis_dies_under_load_and_no_request_is_lost(tmp_path: Path, redis: Redis) -> None:
    limit = {"per": "Route", "unit": "second", "requests": 100_000, "scope": "Global"}
    async with (
        running_stack(
            tmp_path / "stack", FLAGS, route={"rateLimits": [limit]}, extproc_flags=["--redis", redis.url]
        ) as stack,
        httpx.AsyncClient(timeout=60) as http,
    ):
        page = f"{stack.metrics}/metrics"

        async def count(result: str) -> float:
            return await metric(http, page, f'attache_limits_redis_total{{result="{result}"}}')

        async with Load(stack.url) as load:
            await load.more(100)

            async def has_granted() -> bool:
                return await count("granted") >= 100

            # a machine that is busy may leave some of the first hundred without an answer from Redis in time
            await eventually(has_granted)
            redis.stop()
            await load.more(200)
            assert await count("failed") >= 1
            assert await count("away") >= 50
            redis.start()
            before = await count("granted")

            async def asks_again() -> bool:
                return await count("granted") > before + 50

            await eventually(asks_again)
        assert load.tally.lost == []
        assert load.tally.cut == 0


async def test_who_wants_no_limit_without_redis_gets_an_answer_that_says_so(tmp_path: Path, redis: Redis) -> None:
    limit = {"requests": 1000, "scope": "Global", "withoutRedis": "Refuse"}
    async with (
        running_stack(
            tmp_path / "stack", FLAGS, route={"rateLimits": [limit]}, extproc_flags=["--redis", redis.url]
        ) as stack,
        httpx.AsyncClient(base_url=stack.url, timeout=60) as http,
    ):
        body = {"model": ALIAS, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
        assert (await http.post("/v1/chat/completions", json=body)).status_code == 200
        redis.stop()
        answer = await http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "limits_unavailable"
        assert answer.headers["retry-after"] == "1"


@pytest.mark.parametrize("workers", [slow(1), 2])
async def test_redis_that_goes_and_comes_back_empty_grants_nothing_twice(
    tmp_path: Path, redis: Redis, workers: int
) -> None:
    limit = {"per": "Route", "unit": "month", "requests": 40, "scope": "Global"}
    body = {"model": ALIAS, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
    async with (
        running_stack(
            tmp_path / "stack",
            FLAGS,
            route={"rateLimits": [limit]},
            workers=workers,
            extproc_flags=["--redis", redis.url],
        ) as stack,
        httpx.AsyncClient(base_url=stack.url, timeout=30) as http,
    ):
        answers: list[int] = []

        async def ask(times: int) -> None:
            answers.extend([(await http.post("/v1/chat/completions", json=body)).status_code for _ in range(times)])

        async def by_redis() -> list[float]:
            """How many requests of each process Redis has answered."""
            both = [await answers_of_redis(stack, workers, result) for result in ("granted", "refused")]
            return [granted + refused for granted, refused in zip(*both, strict=True)]

        async def each_asks_redis(before: Sequence[float]) -> None:
            async def asked() -> bool:
                await ask(1)
                return all(now > then for now, then in zip(await by_redis(), before, strict=True))

            # slowly: a worker that Envoy does not know yet, or that has yet to pay what it granted, must not find the
            # limit used up by the other
            await eventually(asked, pause_s=0.5)

        async def alone() -> float:
            """How many requests were granted or refused without Redis."""
            return sum([sum(await answers_of_redis(stack, workers, result)) for result in ("failed", "away")])

        await each_asks_redis([0.0] * workers)
        had, before = answers.count(200), await by_redis()
        redis.stop()
        await ask(20)
        # some by each process on its own
        assert answers.count(200) > had
        redis.start()
        await each_asks_redis(before)
        unanswered = await alone()
        await ask(60)
        await each_asks_redis(await by_redis())
        unanswered = await alone() - unanswered
    assert set(answers) == {200, 429}
    # An answer of Redis that is lost on a busy machine costs one. A process that has no answer in time grants by
    # itself what the other may have been granted.
    assert 39 <= answers.count(200) <= 40 + unanswered


async def test_an_extproc_that_is_killed_again_and_again_finds_its_limits_as_they_were(tmp_path: Path) -> None:
    limit = {"per": "Route", "unit": "month", "requests": 30}
    body = {"model": ALIAS, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
    state = tmp_path / "state"
    async with (
        running_stack(
            tmp_path / "stack", FLAGS, route={"rateLimits": [limit]}, extproc_flags=["--state", str(state)]
        ) as stack,
        httpx.AsyncClient(base_url=stack.url, timeout=30) as http,
    ):
        answers: list[int] = []

        async def ask() -> bool:
            """Whether extproc has decided."""
            answers.append((await http.post("/v1/chat/completions", json=body)).status_code)
            return answers[-1] in {200, 429}

        for _ in range(3):
            for _ in range(8):
                assert await ask()
            # it is saved ten times a second
            await asyncio.sleep(1.0)
            await stack.processes.restart("extproc", signal.SIGKILL)
            await eventually(ask)
        for _ in range(30):
            await ask()
        # a signal saves at once
        await stack.processes.restart("extproc", signal.SIGTERM)
        await eventually(ask)
        for _ in range(30):
            await ask()
    assert set(answers) <= {200, 429, 503}
    assert answers.count(200) == 30


OUTPUT: dict[str, object] = {"per": "Route", "unit": "month", "outputTokens": 500}


def chat(**fields: object) -> dict[str, object]:
    return {"model": ALIAS, "messages": [{"role": "user", "content": "hello"}], **fields}


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
async def test_no_limit_is_got_round_by_the_name_that_the_engine_reads(tmp_path: Path, engine: str) -> None:
    flags = EngineFlags(count=1, speed=50.0, more=("--reads-like", engine))
    names = ("max_tokens", "max_completion_tokens")
    obeyed, other = reversed(names) if engine == "vllm" else names
    async with (
        running_stack(tmp_path / "stack", flags, route={"rateLimits": [OUTPUT]}) as stack,
        httpx.AsyncClient(base_url=stack.url, timeout=30) as http,
    ):
        answers = []
        for _ in range(4):
            answers.append(await http.post("/v1/chat/completions", json=chat(**{obeyed: 300, other: 1})))
            if len(answers) == 1:
                # until what was not used would have come back
                await asyncio.sleep(1.5)
    assert [answer.status_code for answer in answers] == [200, 429, 429, 429]
    assert answers[0].json()["usage"]["completion_tokens"] == 300


async def test_what_runs_into_the_time_limit_of_the_gateway_is_not_free(tmp_path: Path) -> None:
    async with (
        running_stack(
            tmp_path / "stack",
            EngineFlags(count=1, speed=0.2),
            route={"rateLimits": [OUTPUT]},
            more={"trafficPolicy": {"timeout": "5s"}},
        ) as stack,
        httpx.AsyncClient(base_url=stack.url, timeout=30) as http,
    ):
        statuses = []
        for _ in range(3):
            statuses.append((await http.post("/v1/chat/completions", json=chat(max_tokens=400))).status_code)
            if len(statuses) == 1:
                # until what was not used would have come back
                await asyncio.sleep(1.5)
    # the engine had it for seconds; how fast it writes is not known yet, so it costs what was reserved
    assert statuses == [504, 429, 429]


async def test_what_is_written_in_the_background_is_not_free(tmp_path: Path) -> None:
    queued = {"id": "resp_1", "object": "response", "status": "queued", "output": [], "usage": None}
    body = {"model": ALIAS, "input": "hello", "max_output_tokens": 400, "background": True}
    async with gateway_on(tmp_path, route={"rateLimits": [OUTPUT]}) as gateway:
        gateway.engine.is_plain = True
        gateway.engine.pieces = (msgspec.json.encode(queued),)
        url = f"{gateway.url}/v1/responses"
        assert (await gateway.http.post(url, json=body)).status_code == 200
        await gateway.outcomes_since(0)
        assert (await gateway.http.post(url, json=body)).status_code == 429
