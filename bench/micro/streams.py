# SPDX-License-Identifier: Apache-2.0
"""extproc's processor time for an answer of one token against a streamed thousand.

In bundle mode extproc sees no byte of an answer, so the two should cost the same.
"""

from __future__ import annotations

import asyncio
import statistics
from typing import TYPE_CHECKING, Final

import aiohttp
import msgspec

from bench.stack import ALIAS, EngineFlags, Stack, running_stack
from bench.usage import cpu_seconds

if TYPE_CHECKING:
    from pathlib import Path

_ROUNDS: Final = 3
_REQUESTS: Final = 384
# Enough at once that access log entries come in batches in both rounds, as they do under load.
_AT_ONCE: Final = 128
_LENGTHS: Final = (1, 1000)


class Streams(msgspec.Struct, frozen=True):
    """Microseconds of extproc's processor time a request, medians over the rounds.

    ``idle_us_per_s``: what extproc uses when nobody asks (following its directory, health checks). It is subtracted
    for the duration of each round, because a thousand tokens take longer than one.
    """

    one_token_us: float
    thousand_tokens_us: float
    ratio: float
    idle_us_per_s: float


async def measure(directory: Path) -> Streams:
    """Alternate between short and long answers, through Envoy to fast engines."""
    flags = EngineFlags(count=2, speed=50.0)
    async with running_stack(directory, flags) as stack, aiohttp.ClientSession() as http:
        await _ask_all(http, stack, 1)
        idle = await _idle(stack)
        rounds = [[await _round(http, stack, length, idle) for length in _LENGTHS] for _ in range(_ROUNDS)]
    one, thousand = (statistics.median(pair[side] for pair in rounds) for side in (0, 1))
    ratio = statistics.median(long / short for short, long in rounds)
    return Streams(one * 1e6, thousand * 1e6, ratio, idle * 1e6)


async def _idle(stack: Stack) -> float:
    before = cpu_seconds(stack.pids["extproc"])
    await asyncio.sleep(5)
    return (cpu_seconds(stack.pids["extproc"]) - before) / 5


async def _round(http: aiohttp.ClientSession, stack: Stack, length: int, idle: float) -> float:
    """Seconds of processor time a request."""
    clock = asyncio.get_running_loop().time
    began, before = clock(), cpu_seconds(stack.pids["extproc"])
    await _ask_all(http, stack, length)
    await asyncio.sleep(1)  # the last entries of the access log
    used = cpu_seconds(stack.pids["extproc"]) - before - idle * (clock() - began)
    return used / _REQUESTS


async def _ask_all(http: aiohttp.ClientSession, stack: Stack, length: int) -> None:
    gate = asyncio.Semaphore(_AT_ONCE)

    async def ask(number: int) -> None:
        body = {
            "model": ALIAS,
            "messages": [{"role": "user", "content": f"{number} " + "some words " * 180}],
            "max_tokens": length,
            "stream": True,
        }
        async with gate, http.post(f"{stack.url}/v1/chat/completions", json=body) as answer:
            received = await answer.read()
            assert received.endswith(b"data: [DONE]\n\n"), received[-300:]

    async with asyncio.TaskGroup() as tasks:
        for number in range(_REQUESTS):
            tasks.create_task(ask(number))
