# SPDX-License-Identifier: Apache-2.0
"""Load the servers of a case in turn, one request at a time and many, round by round."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import msgspec

from bench.micro.compared_servers import ANSWER_BY_ENVOY, BenchmarkCase, ComparedServers
from bench.micro.http_load import RequestLoad
from bench.reporting.request_results import nearest_rank
from bench.stack.processes import Processes, StartFailed, cpu_seconds, is_running, peak_rss_bytes, thread_cpu_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from bench.micro.compared_servers import MeasuredServer

CASES: Final = (
    BenchmarkCase(2_000, 8),
    BenchmarkCase(2_000, 100),
    BenchmarkCase(100_000, 8),
    BenchmarkCase(100_000, 100),
    BenchmarkCase(400_000, 8),
    BenchmarkCase(400_000, 100),
    BenchmarkCase(2_000, 8, renamed=False),
    BenchmarkCase(2_000, 100, renamed=False, in_pieces=True),
    BenchmarkCase(400_000, 100, renamed=False, in_pieces=True),
    BenchmarkCase(2_000, 8, by_path=True),
    BenchmarkCase(400_000, 8, by_path=True),
    BenchmarkCase(2_000, 8, by_call=True),
    BenchmarkCase(400_000, 8, by_call=True),
)
QUICK_CASES: Final = (BenchmarkCase(2_000, 8), BenchmarkCase(100_000, 8))


class LoadPhase(msgspec.Struct, frozen=True):
    """A way to load a server.

    ``by_envoy``: Envoy answers in place of the engines, so that the server is the bottleneck.
    """

    name: str
    at_once: int
    by_envoy: bool = False


ALONE: Final = LoadPhase("one at a time", 1)
BUSY: Final = LoadPhase("24 at once", 24, by_envoy=True)
WHOLE: Final = LoadPhase("32 at once", 32)
PHASES: Final = (ALONE, BUSY, WHOLE)


class MeasurementEffort(msgspec.Struct, frozen=True):
    """Duration of the measurement. A round measures every server once, for ``phase_s`` in each phase."""

    rounds: int
    phase_s: float


FULL: Final = MeasurementEffort(rounds=8, phase_s=0.3)
QUICK: Final = MeasurementEffort(rounds=10, phase_s=0.3)


class PhaseMeasurement(msgspec.Struct, frozen=True):
    """One server in one phase of one round.

    Times are of one request; ``busy``: the server's share of one processor.
    """

    requests_per_s: float
    p50_ms: float
    p90_ms: float
    cpu_us: float
    threads_us: dict[str, float]
    busy: float
    envoy_cpu_us: float | None = None


class OverheadResult(msgspec.Struct, frozen=True):
    """One server: by phase, its loads round by round."""

    start_s: float
    peak_rss_bytes: int
    loads: dict[str, list[PhaseMeasurement]]


class CaseResult(msgspec.Struct, frozen=True):
    """One case, by server."""

    case: BenchmarkCase
    servers: dict[str, OverheadResult]


async def measure(
    case: BenchmarkCase, directory: Path, effort: MeasurementEffort, *, against: Path | None = None
) -> CaseResult:
    """Start all servers of ``case`` and load them in turn.

    ``directory`` is there and empty; ``against``: another checkout.
    """
    others = {} if against is None else {"extproc before": ["bench.micro.checkout_runner", str(against)]}
    async with Processes(directory) as processes:
        servers = await ComparedServers(case, directory, processes, others).start(
            with_gateway=case.endpoints == 8 and case.renamed and not (case.by_path or case.by_call)
        )
        asked = case.requests(64 if case.prompt_bytes < 100_000 else 16)
        direct = f"{ANSWER_BY_ENVOY}: 1\r\n"
        prepared = {phase.name: [one.wire_bytes(direct * phase.by_envoy) for one in asked] for phase in PHASES}
        loads: dict[str, dict[str, list[PhaseMeasurement]]] = {server.name: {} for server in servers}
        for server in servers:  # the first second is not like the others
            load = RequestLoad(prepared[WHOLE.name], connections=8, calls=case.by_call)
            await load.run("127.0.0.1", server.port, seconds=1.0)
        for number in range(effort.rounds):
            # each round begins with another server, so that effects of the order even out
            turn = number % len(servers)
            _expect_all_alive(servers, directory)
            for server in servers[turn:] + servers[:turn]:
                for phase in _phases_of(server):
                    load = RequestLoad(
                        prepared[phase.name],
                        connections=phase.at_once,
                        calls=case.by_call,
                        by_gateway=phase.by_envoy,
                    )
                    found = await _load(server, load, effort.phase_s)
                    loads[server.name].setdefault(phase.name, []).append(found)
        return CaseResult(
            case,
            {one.name: OverheadResult(one.start_s, peak_rss_bytes(one.pid), loads[one.name]) for one in servers},
        )


def _expect_all_alive(servers: Sequence[MeasuredServer], logs: Path) -> None:
    """Raise StartFailed with the log of a server that has ended."""
    for server in servers:
        for pid, name in ((server.pid, server.name), (server.envoy_pid, f"envoy-{server.name}")):
            if pid is not None and not is_running(pid):
                log = (logs / f"{name}.log").read_text(errors="replace")
                raise StartFailed(f"{name} has ended while it was measured; its log ends so:\n{log[-2000:]}")


def _phases_of(server: MeasuredServer) -> list[LoadPhase]:
    """The engine by itself is measured only to be subtracted; only Envoy can answer in place of engines."""
    if server.name == "engine":
        return [ALONE]
    return [phase for phase in PHASES if server.envoy_pid is not None or not phase.by_envoy]


async def _load(server: MeasuredServer, load: RequestLoad, seconds: float) -> PhaseMeasurement:
    clock = asyncio.get_running_loop().time
    threads, began_s = thread_cpu_seconds(server.pid), clock()
    envoy_s = None if server.envoy_pid is None else cpu_seconds(server.envoy_pid)
    rate = await load.run("127.0.0.1", server.port, seconds=seconds)
    used = {name: s - threads.get(name, 0.0) for name, s in thread_cpu_seconds(server.pid).items()}
    answered, took_s = len(load.taken_s), clock() - began_s
    each = 1e6 / answered
    ordered = sorted(load.taken_s)
    return PhaseMeasurement(
        requests_per_s=rate,
        p50_ms=1000 * nearest_rank(ordered, 0.5),
        p90_ms=1000 * nearest_rank(ordered, 0.9),
        cpu_us=sum(used.values()) * each,
        threads_us={name: s * each for name, s in used.items() if s > 0},
        busy=sum(used.values()) / took_s,
        envoy_cpu_us=None
        if envoy_s is None or server.envoy_pid is None
        else (cpu_seconds(server.envoy_pid) - envoy_s) * each,
    )
