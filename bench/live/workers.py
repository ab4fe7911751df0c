# SPDX-License-Identifier: Apache-2.0
"""What several extproc processes lose against one.

``python -m bench.live.workers`` plays the same conversations with 1, 2 and 4 processes, which replicate their events
over sockets.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import uvloop
from rich.console import Console

from bench.live.prediction import read_outcomes
from bench.load.client import LoadClient
from bench.reporting.summary import cached_token_ratio, ttfts_s
from bench.stack import ALIAS, EngineFlags, running_stack
from bench.workload.generators import conversations
from bench.workload.shapes import Conversations

if TYPE_CHECKING:
    from bench.reporting.results import RequestResult

_SPEED: Final = 6.0
SHAPE: Final = Conversations(sessions=160, sessions_per_s=5.0, system_tokens=3000)


class WorkersResult(msgspec.Struct, frozen=True):
    """``imbalance``: the busiest engine's requests over the mean. ``ttft_mean_s``: in engine time."""

    cached_token_ratio: float
    imbalance: float
    ttft_mean_s: float
    failed: int


async def measure(directory: Path, workers: int, *, shape: Conversations = SHAPE) -> WorkersResult:
    """Play ``shape`` over ``workers`` processes. ``directory``: for the stack's files and the decision logs."""
    results: list[RequestResult] = []
    flags = EngineFlags(count=4, speed=_SPEED, kv_blocks=3000, apart=True)
    log = directory / "decisions"
    logged = ("--decision-log", str(log), "--decision-sample", "1")
    async with running_stack(directory / "stack", flags, workers=workers, extproc_flags=logged) as stack:
        client = LoadClient(stack.url, ALIAS, speed=_SPEED, on_result=results.append)
        await client.send(conversations(shape))
    served = _served(directory)
    good = [one for one in results if not one.error]
    return WorkersResult(
        cached_token_ratio=cached_token_ratio(good),
        imbalance=max(served.values()) / statistics.fmean(served.values()),
        ttft_mean_s=statistics.fmean(ttfts_s(good, speed=_SPEED)),
        failed=len(results) - len(good),
    )


def _served(directory: Path) -> Counter[str]:
    """Requests by the engine that answered, from the logs of all processes."""
    return Counter(one.served for file in directory.glob("decisions*") for one in read_outcomes(file))


def main() -> int:
    """Measure and print each number of processes."""
    parser = argparse.ArgumentParser(prog="python -m bench.live.workers", description=__doc__)
    parser.add_argument("--workers", default="1,2,4", help="numbers of processes (default: %(default)s)")
    options = parser.parse_args()
    console = Console()
    for workers in map(int, options.workers.split(",")):
        with tempfile.TemporaryDirectory(prefix="attache-workers-") as directory:
            found = uvloop.run(measure(Path(directory), workers))
        console.print(
            f"{workers} workers: cached-token ratio {found.cached_token_ratio:.1%}, busiest engine"
            f" {found.imbalance:.2f} of the mean, TTFT mean {found.ttft_mean_s * 1000:.0f} ms, {found.failed} failed",
            highlight=False,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
