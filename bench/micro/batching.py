# SPDX-License-Identifier: Apache-2.0
"""``python -m bench.micro.batching``: what it gains that the agent joins requests, and what it costs without load.

The engine computes one call at a time. A call takes a fixed time, and a little more for each instance, as calls of an
accelerator do. Clients, each with one request at a time, call the engine itself (**direct**), and the agent before it
(**joined**), in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import aiohttp
import msgspec
import uvloop
from aiohttp import web
from rich.console import Console

from bench.micro.compared_servers import PortProbe
from bench.micro.http_load import RequestLoad, WireRequest
from bench.micro.overhead_figures import run_and_report
from bench.reporting.request_results import nearest_rank
from bench.stack.processes import Processes, busy_share, cpu_seconds, free_ports, read_machine_cpu_time

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Way = Literal["direct", "joined"]
WAYS: Final[tuple[Way, ...]] = ("direct", "joined")
CLIENTS: Final = (1, 8, 64)
_CALL_S: Final = 0.005
_INSTANCE_S: Final = 0.00005
_PHASE_S: Final = 2.0
_FEATURES: Final = 16


class BatchingMeasurement(msgspec.Struct, frozen=True):
    """Clients of one way in one round. ``calls``: of the engine for each request. ``cpu_us``: of the agent for each
    request; 0 without one.
    """

    per_s: float
    p50_ms: float
    p99_ms: float
    calls: float
    cpu_us: float


class Spread(msgspec.Struct, frozen=True):
    """Over the rounds."""

    median: float
    low: float
    high: float


class BatchFigures(msgspec.Struct, frozen=True):
    """Of so many clients. ``rate`` and ``p50``: joined as a multiple of direct, of the same round. ``added_ms``: their
    difference of ``p50``.
    """

    clients: int
    direct: BatchingMeasurement
    joined: BatchingMeasurement
    rate: Spread
    p50: Spread
    added_ms: Spread


class Report(msgspec.Struct, frozen=True):
    """``busy``: of the machine while it was measured, 0 to 1; ``load``: its load average before."""

    load: float
    busy: float
    figures: list[BatchFigures]
    rounds: dict[int, list[dict[Way, BatchingMeasurement]]]


def batch_figures(clients: int, rounds: Sequence[dict[Way, BatchingMeasurement]]) -> BatchFigures:
    """Medians of the rounds, and ratios within them."""

    def spread(value: Callable[[BatchingMeasurement, BatchingMeasurement], float]) -> Spread:
        found = [value(one["joined"], one["direct"]) for one in rounds]
        return Spread(statistics.median(found), min(found), max(found))

    def median(way: Way) -> BatchingMeasurement:
        names = BatchingMeasurement.__struct_fields__
        return BatchingMeasurement(
            **{name: statistics.median(getattr(one[way], name) for one in rounds) for name in names}
        )

    return BatchFigures(
        clients,
        median("direct"),
        median("joined"),
        rate=spread(lambda joined, direct: joined.per_s / direct.per_s),
        p50=spread(lambda joined, direct: joined.p50_ms / direct.p50_ms),
        added_ms=spread(lambda joined, direct: joined.p50_ms - direct.p50_ms),
    )


def markdown(report: Report) -> str:
    """The table of docs/performance.md."""
    lines = [
        "| clients | requests/s | | p50, ms | | p99, ms | | calls for a request | agent's CPU, µs | rate | p50 |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
        "| | direct | joined | direct | joined | direct | joined | joined | of a request | joined : direct | |",
    ]
    for one in report.figures:
        direct, joined = one.direct, one.joined
        columns = (
            *(f"{each.per_s:,.0f}" for each in (direct, joined)),
            *(f"{each.p50_ms:.1f}" for each in (direct, joined)),
            *(f"{each.p99_ms:.1f}" for each in (direct, joined)),
            f"{joined.calls:.2f}",
            f"{joined.cpu_us:,.0f}",
            *(f"{ratio.median:.2f}" for ratio in (one.rate, one.p50)),
        )
        lines.append(f"| {one.clients} | {' | '.join(columns)} |")
    lines.append(f"\nThe machine was busy for {report.busy:.0%}; its load average before was {report.load:.1f}.\n")
    return "\n".join(lines)


class _Engine:
    """V1 of one model; each prediction is the sum of its instance."""

    def __init__(self) -> None:
        self.calls = 0
        self._turn = asyncio.Lock()

    async def predict(self, request: web.Request) -> web.Response:
        instances: list[list[float]] = msgspec.json.decode(await request.read())["instances"]
        async with self._turn:
            self.calls += 1
            await asyncio.sleep(_CALL_S + len(instances) * _INSTANCE_S)
        body = msgspec.json.encode({"predictions": [sum(one) for one in instances]})
        return web.Response(body=body, content_type="application/json")

    async def count(self, _: web.Request) -> web.Response:
        return web.json_response(self.calls)


async def serve_engine(port: int) -> None:
    """The engine, for ever."""
    engine, app = _Engine(), web.Application()
    app.router.add_post("/v1/models/m:predict", engine.predict)
    app.router.add_get("/calls", engine.count)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, backlog=1024).start()
    try:
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


class _Ports(msgspec.Struct, frozen=True):
    by_way: dict[Way, int]
    agent_pid: int


async def _start(processes: Processes) -> _Ports:
    engine, joined, pages = free_ports(3)
    words = ["-m", "bench.micro.batching", "--serve", str(engine)]
    await processes.start("engine", [sys.executable, *words])
    await processes.wait_ready("engine", PortProbe(engine))
    own = ["--engine", f"http://127.0.0.1:{engine}", "--listen", f"127.0.0.1:{pages}", "--settle", "0"]
    words = ["-m", "attache", "agent", "--dialect", "MLServer", "--model", "m", *own]
    pid = await processes.start("agent", [sys.executable, *words, "--batch-listen", f"127.0.0.1:{joined}"])
    await processes.wait_ready("agent", PortProbe(joined))
    return _Ports({"direct": engine, "joined": joined}, pid)


async def measure(
    directory: Path, *, rounds: int, phase_s: float = _PHASE_S
) -> dict[int, list[dict[Way, BatchingMeasurement]]]:
    """By the number of clients, round by round."""
    instances = [[(number + at) % 10 / 4 for at in range(_FEATURES)] for number in range(64)]
    path = "/v1/models/m:predict"
    prepared = [WireRequest(msgspec.json.encode({"instances": [one]}), path).wire_bytes() for one in instances]
    found = dict[int, list[dict[Way, BatchingMeasurement]]]()
    async with Processes(directory) as processes, aiohttp.ClientSession() as http:
        ports = await _start(processes)
        for number in range(rounds):
            for clients in CLIENTS:
                # each round begins with another way, so that effects of the order even out
                ways = WAYS if number % 2 else WAYS[::-1]
                load = {way: await _load(http, ports, way, prepared, clients, phase_s) for way in ways}
                found.setdefault(clients, []).append(load)
    return found


async def _load(
    http: aiohttp.ClientSession, ports: _Ports, way: Way, prepared: Sequence[bytes], clients: int, phase_s: float
) -> BatchingMeasurement:
    calls, cpu_s = await _calls(http, ports), cpu_seconds(ports.agent_pid)
    load = RequestLoad(prepared, connections=clients)
    per_s = await load.run("127.0.0.1", ports.by_way[way], seconds=phase_s)
    taken_ms, count = sorted(1000 * one for one in load.taken_s), len(load.taken_s)
    cpu_us = 1e6 * (cpu_seconds(ports.agent_pid) - cpu_s) / count if way == "joined" else 0.0
    calls = (await _calls(http, ports) - calls) / count
    return BatchingMeasurement(per_s, nearest_rank(taken_ms, 0.5), nearest_rank(taken_ms, 0.99), calls, cpu_us)


async def _calls(http: aiohttp.ClientSession, ports: _Ports) -> float:
    async with http.get(f"http://127.0.0.1:{ports.by_way['direct']}/calls") as answer:
        return float(await answer.text())


async def measure_and_build_report(*, rounds: int) -> Report:
    """All of it."""
    (load, *_), before = os.getloadavg(), read_machine_cpu_time()
    with tempfile.TemporaryDirectory(prefix="attache-batching-") as directory:
        found = await measure(Path(directory), rounds=rounds)
    busy = busy_share(before, read_machine_cpu_time())
    return Report(load, busy, [batch_figures(clients, one) for clients, one in found.items()], found)


def main() -> int:
    """Exit status: 0, 2 if something could not be started."""
    parser = argparse.ArgumentParser(prog="bench.micro.batching", description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=8, metavar="N", help="default: %(default)s")
    parser.add_argument("--serve", type=int, metavar="PORT", help="be the engine")
    parser.add_argument("--out", type=Path, metavar="DIR", default=Path("bench/out"), help="default: %(default)s")
    options = parser.parse_args()
    if options.serve is not None:
        uvloop.run(serve_engine(options.serve))
        return 0
    measured = measure_and_build_report(rounds=options.rounds)
    return run_and_report(measured, markdown, options.out / "batching", Console(highlight=False))


if __name__ == "__main__":
    sys.exit(main())
