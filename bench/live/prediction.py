# SPDX-License-Identifier: Apache-2.0
"""Predicted against reported cached tokens: by KV events, and approximate.

``python -m bench.live.prediction`` plays the same conversations twice through Envoy, once with the engines' KV events
and once with the approximate index alone. Meanwhile an engine is killed and started again, and messages with events
get lost.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import statistics
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

import aiohttp
import msgspec
import uvloop
from rich.console import Console

from bench.load.client import LoadClient
from bench.reporting.distribution import nearest_rank
from bench.stack import ALIAS, EngineFlags, running_stack
from bench.workload.generators import conversations
from bench.workload.shapes import Conversations

if TYPE_CHECKING:
    from bench.stack import Stack

_BLOCK: Final = 16
_SPEED: Final = 8.0
SHAPE: Final = Conversations(sessions=80, sessions_per_s=8.0, system_prompts=12, system_tokens=2000, think_s=2.0)


class LoggedOutcome(msgspec.Struct, frozen=True):
    """A line of the decision log about the end of a request."""

    kind: str
    status: int = 0
    served: str = ""
    predicted_cached_tokens: float = 0.0
    is_precise: bool = False
    prompt_tokens: float | None = None
    cached_tokens: float | None = None


class PredictionErrors(msgspec.Struct, frozen=True):
    """Errors of the prediction, in tokens, over all good answers.

    ``within_a_block``: the share of answers whose error is at most a KV block, 0 to 1. ``precise_share``: the share
    whose prediction came from KV events, 0 to 1.
    """

    requests: int
    failed: int
    within_a_block: float
    mean_tokens: float
    p99_tokens: float
    precise_share: float


async def measure(directory: Path, *, publishes_events: bool, shape: Conversations = SHAPE) -> PredictionErrors:
    """Play ``shape`` with faults. ``directory``: for the stack's files and the decision log."""
    log = directory / "decisions.jsonl"
    flags = EngineFlags(count=3, speed=_SPEED, kv_blocks=6000, publishes_events=publishes_events, apart=True)
    logged = ("--decision-log", str(log), "--decision-sample", "1")
    # engines share the processors with everything else, so that answers to /tokenize may be late
    more = {"scrapeInterval": "200ms", "tokenizer": {"timeout": "3s"}}
    async with running_stack(directory / "stack", flags, extproc_flags=logged, more=more) as stack:
        client = LoadClient(stack.url, ALIAS, speed=_SPEED, on_result=lambda _: None)
        faults = asyncio.create_task(_disturb(stack))
        await client.send(conversations(shape))
        await faults
        await asyncio.sleep(1.0)  # for the last access log entries
    return _errors(read_outcomes(log))


async def _disturb(stack: Stack) -> None:
    """Lose messages now and then; kill an engine in the middle."""
    async with aiohttp.ClientSession() as http:
        for number in range(6):
            await asyncio.sleep(0.7)
            if number == 3:
                await stack.processes.restart("engine-0", signal.SIGKILL)
                await asyncio.sleep(1.5)
            async with http.post(f"{stack.engines[1]}/faults", json={"fault": "drop-events", "times": 3}) as answer:
                answer.raise_for_status()


def read_outcomes(log: Path) -> list[LoggedOutcome]:
    """The ends of requests in a decision log."""
    lines = (msgspec.json.decode(line, type=LoggedOutcome) for line in log.read_bytes().splitlines())
    return [one for one in lines if one.kind == "outcome"]


def _errors(outcomes: list[LoggedOutcome]) -> PredictionErrors:
    good = [one for one in outcomes if one.status == 200 and one.prompt_tokens is not None]
    errors = sorted(abs(one.predicted_cached_tokens - (one.cached_tokens or 0)) for one in good)
    return PredictionErrors(
        requests=len(good),
        failed=len(outcomes) - len(good),
        within_a_block=sum(one <= _BLOCK for one in errors) / max(len(errors), 1),
        mean_tokens=statistics.fmean(errors) if errors else 0.0,
        p99_tokens=nearest_rank(errors, 0.99) if errors else 0.0,
        precise_share=sum(one.is_precise for one in good) / max(len(good), 1),
    )


def main() -> int:
    """Measure and print both."""
    argparse.ArgumentParser(prog="python -m bench.live.prediction", description=__doc__).parse_args()
    console = Console()
    for publishes in (True, False):
        with tempfile.TemporaryDirectory(prefix="attache-prediction-") as directory:
            found = uvloop.run(measure(Path(directory), publishes_events=publishes))
        console.print(
            f"{'KV events' if publishes else 'approximate index'}: {found.requests} requests ({found.failed} cut by the"
            f" kill), error within a block of {_BLOCK} tokens {found.within_a_block:.1%}, mean {found.mean_tokens:.1f}"
            f" tokens, p99 {found.p99_tokens:.0f}; {found.precise_share:.0%} decided by events",
            highlight=False,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
