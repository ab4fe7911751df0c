"""How well extproc knows what is cached: what it expected at the pick against what the engine then reported.

``python -m bench.prediction`` plays the same conversations twice through Envoy, once with the engines' KV events and once with
the approximate index alone. On the way an engine is killed and started again, and messages with events get lost.
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

from bench.load.client import Client
from bench.stack import ALIAS, EngineFlags, running_stack
from bench.workload.generate import Conversations, conversations

if TYPE_CHECKING:
    from bench.stack import Stack

_BLOCK: Final = 16
_SPEED: Final = 8.0
SHAPE: Final = Conversations(sessions=80, sessions_per_s=8.0, system_prompts=12, system_tokens=2000, think_s=2.0)


class Prediction(msgspec.Struct, frozen=True):
    """What the decision log says of one request's end."""

    kind: str
    status: int = 0
    served: str = ""
    predicted_cached_tokens: float = 0.0
    is_precise: bool = False
    prompt_tokens: float | None = None
    cached_tokens: float | None = None


class Errors(msgspec.Struct, frozen=True):
    """Over all good answers: predicted against reported cached tokens. ``precise_share``: decided by KV events."""

    requests: int
    failed: int
    within_a_block: float
    mean_tokens: float
    p99_tokens: float
    precise_share: float


async def measure(directory: Path, *, publishes_events: bool, shape: Conversations = SHAPE) -> Errors:
    """Play ``shape`` with faults on the way."""
    log = directory / "decisions.jsonl"
    flags = EngineFlags(count=3, speed=_SPEED, kv_blocks=6000, publishes_events=publishes_events, apart=True)
    logged = ("--decision-log", str(log), "--decision-sample", "1")
    # engines share two processors with all the rest, so that answers to /tokenize may be late
    more = {"scrapeInterval": "200ms", "tokenizer": {"timeout": "3s"}}
    async with running_stack(directory / "stack", flags, extproc_flags=logged, more=more) as stack:
        client = Client(stack.url, ALIAS, speed=_SPEED, on_result=lambda _: None)
        faults = asyncio.create_task(_disturb(stack))
        await client.send(conversations(shape))
        await faults
        await asyncio.sleep(1.0)  # for the last access log entries
    return _errors(read_outcomes(log))


async def _disturb(stack: Stack) -> None:
    """Lose messages every now and then; kill an engine in the middle."""
    async with aiohttp.ClientSession() as http:
        for number in range(6):
            await asyncio.sleep(0.7)
            if number == 3:
                await stack.processes.restart("engine-0", signal.SIGKILL)
                await asyncio.sleep(1.5)
            async with http.post(f"{stack.engines[1]}/faults", json={"fault": "drop-events", "times": 3}) as answer:
                answer.raise_for_status()


def read_outcomes(log: Path) -> list[Prediction]:
    """Good answers that a decision log tells of."""
    lines = (msgspec.json.decode(line, type=Prediction) for line in log.read_bytes().splitlines())
    return [one for one in lines if one.kind == "outcome"]


def _errors(outcomes: list[Prediction]) -> Errors:
    good = [one for one in outcomes if one.status == 200 and one.prompt_tokens is not None]
    missed = sorted(abs(one.predicted_cached_tokens - (one.cached_tokens or 0)) for one in good)
    return Errors(
        requests=len(good),
        failed=len(outcomes) - len(good),
        within_a_block=sum(one <= _BLOCK for one in missed) / max(len(missed), 1),
        mean_tokens=statistics.fmean(missed) if missed else 0.0,
        p99_tokens=missed[int(0.99 * (len(missed) - 1))] if missed else 0.0,
        precise_share=sum(one.is_precise for one in good) / max(len(good), 1),
    )


def main() -> int:
    """Print both."""
    argparse.ArgumentParser(prog="bench.prediction", description=__doc__).parse_args()
    console = Console()
    for publishes in (True, False):
        with tempfile.TemporaryDirectory(prefix="attache-prediction-") as directory:
            found = uvloop.run(measure(Path(directory), publishes_events=publishes))
        console.print(
            f"{'KV events' if publishes else 'approximate index'}: {found.requests} requests ({found.failed} cut by the kill), "
            f"within a block of {_BLOCK} tokens {found.within_a_block:.1%}, mean error {found.mean_tokens:.1f} tokens, "
            f"p99 {found.p99_tokens:.0f}; {found.precise_share:.0%} decided by events",
            highlight=False,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
