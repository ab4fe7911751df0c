"""What several extproc processes lose against one: ``python -m bench.workers`` plays the same conversations with 1, 2 and 4.

They share what they send over sockets between them.
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

from bench.load.client import Client
from bench.prediction import read_outcomes
from bench.stack import ALIAS, EngineFlags, running_stack
from bench.workload.generate import Conversations, conversations

if TYPE_CHECKING:
    from bench.load.client import Result

_SPEED: Final = 6.0
SHAPE: Final = Conversations(sessions=160, sessions_per_s=5.0, system_tokens=3000)


class Shared(msgspec.Struct, frozen=True):
    """``imbalance``: the busiest engine's requests over the mean. TTFT in engine seconds."""

    cached_ratio: float
    imbalance: float
    ttft_mean_s: float
    failed: int


async def measure(directory: Path, workers: int, *, shape: Conversations = SHAPE) -> Shared:
    """Play ``shape`` over ``workers`` processes."""
    results: list[Result] = []
    flags = EngineFlags(count=4, speed=_SPEED, kv_blocks=3000, apart=True)
    log = directory / "decisions"
    logged = ("--decision-log", str(log), "--decision-sample", "1")
    async with running_stack(directory / "stack", flags, workers=workers, extproc_flags=logged) as stack:
        client = Client(stack.url, ALIAS, speed=_SPEED, on_result=results.append)
        await client.send(conversations(shape))
    served = _served(directory)
    good = [one for one in results if not one.error]
    return Shared(
        cached_ratio=sum(one.cached_tokens for one in good) / sum(one.prompt_tokens for one in good),
        imbalance=max(served.values()) / statistics.fmean(served.values()),
        ttft_mean_s=statistics.fmean(one.first_token_s - one.due_s for one in good) * _SPEED,
        failed=len(results) - len(good),
    )


def _served(directory: Path) -> Counter[str]:
    """Requests by the engine that answered, as all workers' logs tell."""
    return Counter(one.served for file in directory.glob("decisions*") for one in read_outcomes(file))


def main() -> int:
    """Print all three."""
    parser = argparse.ArgumentParser(prog="bench.workers", description=__doc__)
    parser.add_argument("--workers", default="1,2,4", help="default: %(default)s")
    options = parser.parse_args()
    console = Console()
    for workers in map(int, options.workers.split(",")):
        with tempfile.TemporaryDirectory(prefix="attache-workers-") as directory:
            found = uvloop.run(measure(Path(directory), workers))
        console.print(
            f"{workers} workers: cached-token ratio {found.cached_ratio:.1%}, busiest engine {found.imbalance:.2f} of the "
            f"mean, TTFT mean {found.ttft_mean_s * 1000:.0f} ms, {found.failed} failed",
            highlight=False,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
