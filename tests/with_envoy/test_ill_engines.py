# SPDX-License-Identifier: Apache-2.0
"""One of three engines is ill, and stays so: after its first seconds, clients hardly meet it. Short drills."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import httpx
import msgspec
import pytest
import pytest_asyncio

from bench.stack.loopback_stack import ALIAS, EngineFlags, Stack, running_stack
from tests.with_envoy.drill import DrillResult, DrillSettings, drill

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

# an engine is ill beside the others, whose speed depends on the machine
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.real_time]

FLAGS = EngineFlags(count=3, speed=5.0, stream_headers="first-token")
SETTINGS = DrillSettings(warm_s=1.5, onset_s=4.0, ill_s=10.0, patience_s=5.0)
# Of 180 requests. The engine is tried again once in a while; without care it fails 15 to 80 of them.
MOST_FAILED = 4


# Of the first two no client ever learns; the others reach clients until the engine is known to be ill.
KINDS = ("500", "429", "400", "garbage", "cut")


class Drilled(msgspec.Struct, frozen=True):
    """What clients met, and what extproc logged meanwhile."""

    result: DrillResult
    log: str


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def drilled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Drilled]:
    """A drill of each kind, on a stack of its own, all at the same time: a drill waits more than it computes."""
    all_started = asyncio.Barrier(len(KINDS))

    async def run(kind: str) -> Drilled:
        async with running_stack(tmp_path_factory.mktemp(kind) / "stack", FLAGS) as running:
            await all_started.wait()
            result = await drill(running, kind, SETTINGS)
            return Drilled(result, (running.directory / "extproc.log").read_text())

    async with asyncio.TaskGroup() as group:
        tasks = {kind: group.create_task(run(kind)) for kind in KINDS}
    return {kind: task.result() for kind, task in tasks.items()}


@pytest.mark.parametrize("kind", KINDS[:2])
async def test_errors_before_the_first_byte_go_to_the_next_engine_and_no_client_sees_them(
    drilled: dict[str, Drilled], kind: str
) -> None:
    result = drilled[kind].result
    assert (result.failed_at_onset, result.failed_after) == (0, 0), result.errors
    assert result.ill_share < 0.1


@pytest.mark.parametrize("kind", KINDS[2:])
async def test_an_engine_whose_answers_are_worse_than_the_others_is_avoided(
    drilled: dict[str, Drilled], kind: str
) -> None:
    result, log = drilled[kind].result, drilled[kind].log
    if kind != "cut":
        # where all cuts come before the first byte, the next engine answers; the log below says that there were some
        assert result.failed_at_onset > 0, "the engine was not ill"
    assert result.failed_after <= MOST_FAILED, result.errors
    assert result.ill_share < 0.1
    # once for each way in which it fails: an answer that is cut before its first byte goes to the next engine
    assert log.count("fails more than the others") in ({1, 2} if kind == "cut" else {1})


@pytest_asyncio.fixture(loop_scope="module")
async def three(tmp_path: Path) -> AsyncIterator[Stack]:
    """A stack of this test's own."""
    async with running_stack(tmp_path / "stack", FLAGS) as running:
        yield running


async def test_an_overload_is_not_multiplied(three: Stack) -> None:
    """All engines say 429: a client gets it after a bounded number of tries, and soon."""
    async with httpx.AsyncClient(timeout=30) as http:
        for engine in three.engines:
            await http.post(f"{engine}/faults", json={"fault": "unavailable", "status": 429, "times": 1_000_000})
        before = await tries(three, http)
        body = {"model": ALIAS, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
        answers = [await http.post(f"{three.url}/v1/chat/completions", json=body) for _ in range(50)]
        after = await tries(three, http)
    assert {answer.status_code for answer in answers} == {429}
    assert after - before <= 3 * 50


async def tries(stack: Stack, http: httpx.AsyncClient) -> int:
    """Requests that Envoy has sent to engines, retries included."""
    name = "cluster.server/default/llama.upstream_rq_total"
    text = (await http.get(f"{stack.admin}/stats", params={"filter": f"^{name}$"})).text
    return int(text.rpartition(":")[2])
