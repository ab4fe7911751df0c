# SPDX-License-Identifier: Apache-2.0
"""``attache agent`` beside a simulated engine, both as processes."""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.controller.agents.runtime.pods import Pod, resident_kib
from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from bench.stack.orphan_reaper import ProcessGuard

# Of the agent, with its metrics read; measured: 39 MiB.
MOST_KIB = 64 * 1024


@pytest.fixture
async def pod(guard: ProcessGuard) -> AsyncIterator[Pod]:
    one = Pod(guard)
    async with one.http:
        yield one


async def test_a_pods_life(pod: Pod) -> None:
    async with pod.agent("--warm-up", "1", "--settle", "0") as agent:
        await eventually(pod.is_unready)
        async with pod.engine("--speed", "2"):
            await eventually(pod.is_ready)
            # one token to prove it, three prompts to warm it up
            await eventually(lambda: has_finished(pod, 4))
            assert resident_kib(agent.pid) < MOST_KIB
            # the pod is deleted while a stream runs
            stream = await pod.running_stream(300)
            drain = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "attache", "agent", "drain"),
                *("--agent", pod.agent_url),
                stdout=asyncio.subprocess.PIPE,
            )
            await eventually(pod.is_unready)
            agent.send_signal(signal.SIGTERM)
            said, _ = await drain.communicate()
            assert stream.done()
            assert await stream >= 300
            assert b'"outcome": "idle"' in said
            assert drain.returncode == 0
            assert await agent.wait() == 0


async def test_an_engine_that_is_killed_while_it_is_drained(pod: Pod) -> None:
    async with pod.engine() as engine, pod.agent("--settle", "0") as agent:
        await eventually(pod.is_ready)
        stream = await pod.running_stream(2000)
        drain = asyncio.create_task(pod.ask("/drain"))
        await eventually(pod.is_unready)
        engine.kill()
        assert (await drain).json()["outcome"] == "gone"
        with pytest.raises(httpx.HTTPError):
            await stream
        agent.send_signal(signal.SIGTERM)
        assert await agent.wait() == 0


async def test_an_engine_that_computes_nothing_gets_no_requests_until_it_does(pod: Pod) -> None:
    async with pod.engine(), pod.agent("--stalled-after", "1"):
        await eventually(pod.is_ready)
        stream = await pod.running_stream(300)

        async def is_unready_while_stalled() -> bool:
            await pod.fault(fault="stall", for_s=2)
            return await pod.is_unready()

        await eventually(is_unready_while_stalled)
        assert "computed nothing" in (await pod.ask("/ready")).text
        await eventually(pod.is_ready)
        assert await stream >= 300


async def test_an_engine_that_answers_garbage_first(pod: Pod) -> None:
    async with pod.engine():
        await eventually(pod.listens)
        await pod.fault(fault="ill", kind="garbage", times=3)
        async with pod.agent():
            await eventually(pod.is_ready)
            assert await pod.metric('agent_probes_total{answer="bad"}') == 3


async def has_finished(pod: Pod, requests: int) -> bool:
    return await pod.metric("engine_finished_requests_total") == requests
