# SPDX-License-Identifier: Apache-2.0
"""What the response cache costs and gains: ``python -m bench.micro.response_cache``.

`attache serve` runs twice, with a response cache and without, in front of an engine that answers at once. Each round
loads the gateway without, then the other with requests that nothing stored may answer, so that each answer is copied
and stored, then with requests that only a stored answer may answer. Ratios are those of a round to its requests without
a cache; the table has their medians. Processor time is that of Envoy and extproc.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from bench.micro.http_load import RequestLoad, WireRequest, chat_requests
from bench.micro.instant_engine import EVENTS
from bench.micro.observability import TOKEN, GatewayVariant, start_variant
from bench.micro.translation import Case, Round, measure
from bench.stack.processes import Processes, free_ports

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bench.micro.observability import RunningGateway

_PROMPTS: Final = 64
CASES: Final = (
    Case("2 KB, one at a time", 1),
    Case("2 KB, 24 at once", 24),
    Case("2 KB, a stream of 80 events, 24 at once", 24, events=80),
)
# What requests ask of the cache; a hit without a stored answer is 504, which ends the run.
WAYS: Final = {"no cache": "no-cache", "miss": "no-cache", "hit": "only-if-cached"}
_ROLES: Final = ("envoy", "extproc")
# Copies of answers come after their answers.
_STORED_S: Final = 1.0

Found = dict[str, list[Round]]


def requests_of(case: Case, way: str) -> list[bytes]:
    """Chats that a cache may look up."""
    headers = f"authorization: Bearer {TOKEN}\r\ncache-control: {WAYS[way]}\r\n"
    more: dict[str, object] = {"temperature": 0}
    if case.events:
        headers += f"{EVENTS}: {case.events}\r\n"
        more["stream"] = True
    bodies = [{**json.loads(one.body), **more} for one in chat_requests(2_000, count=_PROMPTS)]
    return [WireRequest(json.dumps(body).encode()).wire_bytes(headers) for body in bodies]


async def _fill(port: int) -> None:
    """Store an answer to each request."""
    for case in CASES[1:]:
        await RequestLoad(requests_of(case, "miss"), connections=_PROMPTS).run("127.0.0.1", port, seconds=0.0)
    await asyncio.sleep(_STORED_S)


async def run(rounds: int, seconds: float) -> dict[str, Found]:
    """By the name of the case, all ways: ``rounds`` times each after one that does not count."""
    engine, collector = free_ports(2)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        async with Processes(directory) as processes:
            words = ("-m", "bench.micro.instant_engine", "--ports", str(engine))
            await processes.start("engine", (sys.executable, *words))

            async def gateway(variant: GatewayVariant) -> RunningGateway:
                return await start_variant(variant, engine, collector, processes, directory / variant.name)

            plain, cached = (
                await gateway(GatewayVariant("plain")),
                await gateway(GatewayVariant("cached", has_cache=True)),
            )
            await _fill(cached.port)
            found: dict[str, Found] = {case.name: {way: [] for way in WAYS} for case in CASES}
            for number in range(rounds + 1):
                for case in CASES:
                    for way in list(WAYS)[:: -1 if number % 2 else 1]:
                        one = plain if way == "no cache" else cached
                        pids = {role: one.pids[role] for role in _ROLES}
                        result = await measure(pids, one.port, requests_of(case, way), case.at_once, seconds)
                        await asyncio.sleep(_STORED_S)
                        if number:
                            found[case.name][way].append(result)
            return found


def table(found: Mapping[str, Found]) -> str:
    """One line a case and way. Ratios are to the same round without a cache."""
    lines = [
        "| | | p50, ms | ratio | requests/s | ratio | Envoy, us | extproc, us | both, ratio |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    median = statistics.median
    for case, ways in found.items():
        bases = ways["no cache"]
        for way, results in ways.items():
            pairs = list(zip(results, bases, strict=True))
            cells = (
                f"{median(one.p50_s for one in results) * 1e3:.2f}",
                f"{median(one.p50_s / base.p50_s for one, base in pairs):.2f}",
                f"{median(one.rate for one in results):.0f}",
                f"{median(one.rate / base.rate for one, base in pairs):.2f}",
                *(f"{median(one.cpu_us[role] for one in results):.0f}" for role in _ROLES),
                f"{median(one.total_cpu_us / base.total_cpu_us for one, base in pairs):.2f}",
            )
            lines.append(f"| {case} | {way} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="bench.micro.response_cache", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=1.5, help="of a round of one case and way")
    options = parser.parse_args()
    print(table(asyncio.run(run(options.rounds, options.seconds))))
    print(f"\nMedians of {options.rounds} rounds of {options.seconds:g} s; load averages", *os.getloadavg())
    return 0


if __name__ == "__main__":
    sys.exit(main())
