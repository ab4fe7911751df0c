# SPDX-License-Identifier: Apache-2.0
"""Several extproc processes behind one Envoy."""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import msgspec
import pytest

from bench.live.client import LoadClient
from bench.reporting.results import cached_token_ratio
from bench.stack.stack import ALIAS, EngineFlags, running_stack
from bench.workload.generators import Conversations, conversations
from tests.decision_log import read_outcomes
from tests.waiting import eventually
from tests.with_envoy.load import Load

if TYPE_CHECKING:
    from bench.reporting.results import RequestResult

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
        await client.send(conversations(SHAPE))
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


async def test_a_worker_that_is_killed_costs_nobody_anything_and_comes_back(tmp_path: Path) -> None:
    flags = EngineFlags(count=3, speed=20.0, stream_headers="first-token")
    async with running_stack(tmp_path / "stack", flags, workers=2) as stack, httpx.AsyncClient() as http:
        host, _, first = stack.metrics.removeprefix("http://").partition(":")
        pages = [f"http://{host}:{int(first) + number}/metrics" for number in range(2)]

        async def value(page: str, name: str) -> float | None:
            try:
                text = (await http.get(page)).text
            except httpx.TransportError:
                return None
            found = [float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name)]
            return sum(found) if found else None

        async with Load(stack.url, pause_s=0.05) as load:

            async def both_work() -> bool:
                # Envoy asks for their health once a second, and the first to answer has all until then
                return all([(await value(page, PICKED) or 0) > 20 for page in pages])

            await eventually(both_work)
            os.kill(workers_of(stack.pids["extproc"])[1], signal.SIGKILL)
            await load.more(200)

            async def is_back() -> bool:
                return (await value(pages[1], PICKED) or 0) > 5

            await eventually(is_back)
        assert load.tally.lost == []
        assert load.tally.cut == 0

        async def all_idle() -> bool:
            return [await value(page, "attache_in_flight") for page in pages] == [0, 0]

        await eventually(all_idle)


def workers_of(supervisor: int) -> list[int]:
    """The processes that it started, in their order."""
    children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text()
    return sorted(map(int, children.split()))


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
