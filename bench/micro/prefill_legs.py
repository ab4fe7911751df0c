# SPDX-License-Identifier: Apache-2.0
"""``python -m bench.micro.prefill_legs``: what a prefill leg costs, by extproc and by a sidecar, through a real Envoy.

Three ways, each with an Envoy and an extproc of its own, have the same engines, which answer at once:

- **whole**: the decode engine computes the prompt; there is no leg.
- **gateway**: extproc makes the leg while it holds the request (``leg: Gateway``).
- **sidecar**: a proxy before the decode engine makes it, and passes the answer's bytes (``prefill_sidecar.py``).

    added(way) = p50(way) - p50(whole) - p50(the prefill engine, asked directly with the same body)

Latencies are of one request at a time. CPU is of the processes that make the leg, extproc and sidecar, above that of
``whole``; once with answers of one piece, once with answers of 100 events. Memory is what 200 requests of 1 MB take
that wait for their prefill at the same time.
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
from rich.console import Console

from bench.micro.compared_servers import HttpProbe, PortProbe
from bench.micro.http_load import RequestLoad, chat_requests
from bench.micro.instant_engine import EVENTS
from bench.micro.overhead_figures import run_and_report
from bench.reporting.request_results import nearest_rank
from bench.stack.loopback_stack import ALIAS, documents, envoy_command
from bench.stack.processes import (
    Processes,
    busy_share,
    cpu_seconds,
    free_ports,
    peak_rss_bytes,
    read_machine_cpu_time,
    rss_bytes,
)
from controller.bundle.sync import write_bundle_once
from extproc.api.config_loader import load_directory

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

Way = Literal["whole", "gateway", "sidecar"]
WAYS: Final[tuple[Way, ...]] = ("whole", "gateway", "sidecar")
LEGS: Final[tuple[Way, ...]] = ("gateway", "sidecar")
SIZES: Final = (2_000, 100_000, 1_000_000)
_EVENTS: Final = 100
_AT_ONCE: Final = 16
_HELD: Final = 200
_HELD_BYTES: Final = 1_000_000
# Longer than it takes to send all of them.
_PAUSE_S: Final = 20.0
_PHASE_S: Final = 0.6
_PAIR: Final = {
    "prefillLabels": {"role": "prefill"},
    "decodeLabels": {"role": "decode"},
    "minUncachedTokens": 0,
    "decideBy": "UncachedTokens",
}
_IN_FLIGHT: Final = "attache_prefill_legs_in_flight"
_MIB: Final = 1024 * 1024


class LegCost(msgspec.Struct, frozen=True):
    """One way in one round. ``cpu_us``: of a request, of what makes the leg; ``events_cpu_us``: with an answer of many
    events. ``envoy_cpu_us``: Envoy's.
    """

    p50_ms: float
    cpu_us: float
    events_cpu_us: float
    envoy_cpu_us: float


class LegRound(msgspec.Struct, frozen=True):
    """``prefill_ms``: of the prefill engine alone, the median."""

    prefill_ms: float
    loads: dict[Way, LegCost]


class Spread(msgspec.Struct, frozen=True):
    """Over the rounds."""

    median: float
    low: float
    high: float


class LegFigures(msgspec.Struct, frozen=True):
    """Of one size. ``ratios``: the gateway's figure, as a part of the sidecar's, of the same round."""

    size: int
    added_ms: dict[Way, Spread]
    cpu_us: dict[Way, Spread]
    events_cpu_us: dict[Way, Spread]
    ratios: dict[str, Spread]


class ProcessMemory(msgspec.Struct, frozen=True):
    """Of one process. ``held``: requests that waited at the same time, as its metrics say; None: it has none."""

    before_bytes: int
    peak_bytes: int
    held: int | None = None

    def growth_per_body_byte(self, bodies_bytes: int) -> float:
        """Its growth, as a multiple of the bodies that were held."""
        return (self.peak_bytes - self.before_bytes) / bodies_bytes


class LegReport(msgspec.Struct, frozen=True):
    """``busy``: of the machine while it was measured, 0 to 1; ``load``: its load average before."""

    load: float
    busy: float
    figures: list[LegFigures]
    memory: dict[Way, ProcessMemory]
    rounds: dict[int, list[LegRound]]


def leg_figures(size: int, rounds: Sequence[LegRound]) -> LegFigures:
    """The module's formulas."""
    added = {way: [_added_ms(one, way) for one in rounds] for way in LEGS}
    cpu = {way: [_above_whole(one, way, lambda load: load.cpu_us) for one in rounds] for way in LEGS}
    events = {way: [_above_whole(one, way, lambda load: load.events_cpu_us) for one in rounds] for way in LEGS}
    measured = {"added latency": added, "CPU": cpu, "CPU, 100 events": events}
    return LegFigures(
        size,
        added_ms=_spreads(added),
        cpu_us=_spreads(cpu),
        events_cpu_us=_spreads(events),
        ratios={name: _spread(_ratios(one["gateway"], one["sidecar"])) for name, one in measured.items()},
    )


def _added_ms(one: LegRound, way: Way) -> float:
    return one.loads[way].p50_ms - one.loads["whole"].p50_ms - one.prefill_ms


def _above_whole(one: LegRound, way: Way, value: Callable[[LegCost], float]) -> float:
    return value(one.loads[way]) - value(one.loads["whole"])


def _ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Where noise makes the other one free, there is none."""
    return [one / other for one, other in zip(ours, theirs, strict=True) if other > 0] or [float("nan")]


def _spreads(values: Mapping[Way, Sequence[float]]) -> dict[Way, Spread]:
    return {way: _spread(one) for way, one in values.items()}


def _spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values))


class _Server(msgspec.Struct, frozen=True):
    """``pids``: of what makes the leg, extproc first."""

    port: int
    metrics: str
    pids: tuple[int, ...]
    envoy_pid: int


class _Bench:
    """Starts what is measured in ``directory``; ``processes`` ends it."""

    def __init__(self, directory: Path, processes: Processes, *, tokens: int, pause_s: float = 0.0) -> None:
        self._directory = directory
        self._processes = processes
        self._tokens = tokens
        self._pause_s = pause_s
        self.prefill = self._decode = 0

    async def start(self) -> dict[Way, _Server]:
        """Raises StartFailed."""
        self.prefill, self._decode, sidecar = free_ports(3)
        engine, prefills = (
            "bench.micro.instant_engine",
            ["--prefilled", str(self._tokens), "--pause", str(self._pause_s)],
        )
        await self._start("prefill", self.prefill, [engine, "--ports", str(self.prefill), *prefills])
        await self._start("decode", self._decode, [engine, "--ports", str(self._decode)])
        words = ["bench.micro.prefill_sidecar", "--port", str(sidecar), "--decode", f"127.0.0.1:{self._decode}"]
        sidecar_pid = await self._start("sidecar", sidecar, words)
        leg = {"leg": "Gateway", "connector": "NixlConnector", **_PAIR}
        return {
            "whole": await self._behind_envoy("whole", {"endpoints": [self._at(self._decode, "decode")]}),
            "gateway": await self._behind_envoy("gateway", {"endpoints": self._pair(self._decode), "pdGroup": leg}),
            "sidecar": await self._behind_envoy(
                "sidecar", {"endpoints": self._pair(sidecar), "pdGroup": {"leg": "Sidecar", **_PAIR}}, sidecar_pid
            ),
        }

    @staticmethod
    def _at(port: int, role: str) -> dict[str, object]:
        return {"address": f"127.0.0.1:{port}", "labels": {"role": role}}

    def _pair(self, decode: int) -> list[dict[str, object]]:
        return [self._at(self.prefill, "prefill"), self._at(decode, "decode")]

    async def _start(self, name: str, port: int, words: list[str]) -> int:
        """Its process id, once it accepts connections."""
        pid = await self._processes.start(name, [sys.executable, "-m", *words])
        await self._processes.wait_ready(name, PortProbe(port))
        return pid

    async def _behind_envoy(self, name: str, more: Mapping[str, object], *others: int) -> _Server:
        listen, admin, grpc, metrics = free_ports(4)
        ports = {"listen": listen, "admin": admin, "extproc": grpc}
        gateway = {key: f"127.0.0.1:{port}" for key, port in ports.items()}
        patient = {**gateway, "messageTimeout": "60s", "failureMode": "Close"}
        config, bundle = self._directory / name / "config", self._directory / name / "envoy"
        config.mkdir(parents=True)
        (config / "attache.yaml").write_text(documents([], gateway=patient, more={"scrapeInterval": "0s", **more}))
        write_bundle_once(load_directory(config), bundle, str(bundle))
        flags = ["--config", str(config), "--listen", gateway["extproc"], "--metrics", f"127.0.0.1:{metrics}"]
        pid = await self._start(f"extproc-{name}", grpc, ["extproc", *flags])
        envoy_pid = await self._processes.start(f"envoy-{name}", envoy_command(bundle))
        await self._processes.wait_ready(f"envoy-{name}", HttpProbe(listen, ALIAS))
        return _Server(listen, f"http://127.0.0.1:{metrics}/metrics", (pid, *others), envoy_pid)


async def measure(size: int, directory: Path, *, rounds: int) -> list[LegRound]:
    """All ways in turn, round by round. ``directory`` is there and empty."""
    async with Processes(directory) as processes:
        bench = _Bench(directory, processes, tokens=max(16, size // 4))
        servers = await bench.start()
        asked = chat_requests(size, count=32 if size < 100_000 else 8)
        plain, events = ([one.wire_bytes(more) for one in asked] for more in ("", f"{EVENTS}: {_EVENTS}\r\n"))
        for one in servers.values():  # the first second is not like the others
            await RequestLoad(plain, connections=4).run("127.0.0.1", one.port, seconds=1.0)
        found = []
        for number in range(rounds):
            # each round begins with another way, so that effects of the order even out
            turn = number % len(WAYS)
            loads = {way: await _load(servers[way], plain, events) for way in WAYS[turn:] + WAYS[:turn]}
            found.append(LegRound(await _p50_ms(bench.prefill, plain), loads))
        return found


async def _p50_ms(port: int, prepared: Sequence[bytes]) -> float:
    load = RequestLoad(prepared, connections=1)
    await load.run("127.0.0.1", port, seconds=_PHASE_S)
    return 1000 * nearest_rank(sorted(load.taken_s), 0.5)


async def _load(server: _Server, plain: Sequence[bytes], events: Sequence[bytes]) -> LegCost:
    p50_ms = await _p50_ms(server.port, plain)
    cpu_us, envoy_us = await _cpu_us(server, plain)
    events_us, _ = await _cpu_us(server, events)
    return LegCost(p50_ms, cpu_us, events_us, envoy_us)


async def _cpu_us(server: _Server, prepared: Sequence[bytes]) -> tuple[float, float]:
    """Of a request: of what makes the leg, and of Envoy."""
    pids = (*server.pids, server.envoy_pid)
    before = [cpu_seconds(pid) for pid in pids]
    load = RequestLoad(prepared, connections=_AT_ONCE)
    await load.run("127.0.0.1", server.port, seconds=_PHASE_S)
    *legs, envoy = (1e6 * (cpu_seconds(pid) - s) / len(load.taken_s) for pid, s in zip(pids, before, strict=True))
    return sum(legs), envoy


async def measure_memory(directory: Path) -> dict[Way, ProcessMemory]:
    """What holds the bodies: extproc, or the sidecar."""
    async with Processes(directory) as processes, aiohttp.ClientSession() as http:
        bench = _Bench(directory, processes, tokens=_HELD_BYTES // 4, pause_s=_PAUSE_S)
        servers = await bench.start()
        prepared = [one.wire_bytes() for one in chat_requests(_HELD_BYTES, count=8)]
        found = dict[Way, ProcessMemory]()
        for way in LEGS:
            server = servers[way]
            holder = server.pids[-1]
            before, most = rss_bytes(holder), 0
            load = RequestLoad(prepared, connections=_HELD)
            running = asyncio.create_task(load.run("127.0.0.1", server.port, seconds=0.0, patience_s=120.0))
            while not running.done():
                most = max(most, await _in_flight(http, server.metrics))
                await asyncio.sleep(0.25)
            await running
            found[way] = ProcessMemory(before, peak_rss_bytes(holder), most if way == "gateway" else None)
        return found


async def _in_flight(http: aiohttp.ClientSession, url: str) -> int:
    async with http.get(url) as answer:
        text = await answer.text()
    lines = (line for line in text.splitlines() if line.startswith(_IN_FLIGHT))
    return int(sum(float(line.rpartition(" ")[2]) for line in lines))


def markdown(report: LegReport) -> str:
    """The tables of docs/performance.md."""
    lines = [
        "| prompt | added latency, ms | | CPU of a request, µs | | with 100 events, µs | | gateway : sidecar | | |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
        "| | gateway | sidecar | gateway | sidecar | gateway | sidecar | latency | CPU | with 100 events |",
    ]
    for one in report.figures:
        added = [f"{one.added_ms[way].median:.2f}" for way in LEGS]
        cpu = [f"{by[way].median:,.0f}" for by in (one.cpu_us, one.events_cpu_us) for way in LEGS]
        ratios = [f"{ratio.median:.2f}" for ratio in one.ratios.values()]
        lines.append(f"| {one.size // 1000:,} KB | {' | '.join([*added, *cpu, *ratios])} |")
    bodies = _HELD * _HELD_BYTES
    for way, memory in report.memory.items():
        held = "" if memory.held is None else f", {memory.held} at the same time"
        lines.append(
            f"\n{way}: {_HELD} bodies of 1 MB{held}: {memory.before_bytes / _MIB:.0f} MiB before, at most "
            f"{memory.peak_bytes / _MIB:.0f} MiB: {memory.growth_per_body_byte(bodies):.2f} times the bodies."
        )
    lines.append(f"\nThe machine was busy for {report.busy:.0%}; its load average before was {report.load:.1f}.\n")
    return "\n".join(lines)


async def measure_and_build_report(console: Console, sizes: Sequence[int], *, rounds: int) -> LegReport:
    """All of it."""
    (load, *_), before = os.getloadavg(), read_machine_cpu_time()
    found = dict[int, list[LegRound]]()
    for size in sizes:
        console.print(f"{size // 1000:,} KB")
        with tempfile.TemporaryDirectory(prefix="attache-legs-") as directory:
            found[size] = await measure(size, Path(directory), rounds=rounds)
    console.print(f"{_HELD} bodies of 1 MB")
    with tempfile.TemporaryDirectory(prefix="attache-legs-") as directory:
        memory = await measure_memory(Path(directory))
    busy = busy_share(before, read_machine_cpu_time())
    return LegReport(load, busy, [leg_figures(size, one) for size, one in found.items()], memory, found)


def main() -> int:
    """Exit status: 0, 2 if something could not be started."""
    parser = argparse.ArgumentParser(prog="bench.micro.prefill_legs", description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=8, metavar="N", help="default: %(default)s")
    parser.add_argument("--kb", type=int, action="append", metavar="N", help="sizes of prompts (default: 2, 100, 1000)")
    parser.add_argument("--out", type=Path, metavar="DIR", default=Path("bench/out"), help="default: %(default)s")
    options = parser.parse_args()
    console = Console(highlight=False)
    sizes = [1000 * one for one in options.kb] if options.kb else SIZES
    measured = measure_and_build_report(console, sizes, rounds=options.rounds)
    return run_and_report(measured, markdown, options.out / "legs", console)


if __name__ == "__main__":
    sys.exit(main())
