# SPDX-License-Identifier: Apache-2.0
"""``python -m bench.micro.pickers``: what extproc costs beside llm-d's picker, by the endpoint picker protocol.

Each stands behind an Envoy of its own with the same configuration: bodies both ways in pieces, no access log. All have
the same engines and the same EndpointPickerConfig, and take turns. Processor time changes less by other work on the
machine than latency does. What a picker takes without requests, such as for reading the engines' metrics, is measured
and left out. Added latency is what a request takes beyond one through an Envoy that asks no picker, in the same rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import uvloop
import yaml

from bench.micro.compared_servers import HttpProbe, PortProbe, bundle_files
from bench.micro.http_load import RequestLoad, chat_requests
from bench.micro.instant_engine import EVENTS
from bench.stack.loopback_stack import MODEL, EnvoyMissing, documents, envoy_command
from bench.stack.processes import Processes, StartFailed, cpu_seconds, free_ports
from controller.bundle.sync import PublishStep, write_step

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

_ENGINES: Final = 4
_SCORERS: Final = {"queue-scorer": 2, "kv-cache-utilization-scorer": 2, "prefix-cache-scorer": 3}
_OURS, _BEFORE, _LLM_D, _NONE = "extproc", "extproc before", "llm-d", "no picker"


class LoadShape(msgspec.Struct, frozen=True):
    """``events``: of each answer; 0: it is not streamed."""

    name: str
    prompt_bytes: int
    at_once: int
    events: int = 0


LOADS: Final = (
    LoadShape("2 KB", 2_000, 32),
    LoadShape("100 KB", 100_000, 32),
    LoadShape("2 KB, 80 tokens streamed", 2_000, 32, events=80),
    LoadShape("2 KB, one at a time", 2_000, 1),
    LoadShape("2 KB, 80 tokens streamed, one at a time", 2_000, 1, events=80),
)


class RunningPicker(msgspec.Struct, frozen=True):
    """One that runs. ``pid``: None: the Envoy asks none. ``port``: of the Envoy in front of it."""

    name: str
    pid: int | None
    envoy_pid: int
    port: int

    def cpu_seconds(self) -> tuple[float, float]:
        """Of the picker, and of its Envoy."""
        return 0.0 if self.pid is None else cpu_seconds(self.pid), cpu_seconds(self.envoy_pid)


class PickerCost(msgspec.Struct, frozen=True):
    """Of one request in one round, in milliseconds: processor time, and the median of what a request took.
    ``idle``: the share of a core that the picker takes without requests.
    """

    idle: float
    picker_ms: float
    envoy_ms: float
    taken_ms: float


# by load and picker, of each round
Costs = dict[str, dict[str, list[PickerCost]]]


def picker_config(endpoints: Path | None = None) -> str:
    """An EndpointPickerConfig. ``endpoints``: a file of them for a picker without Kubernetes."""
    plugins: list[dict[str, object]] = [{"type": name} for name in _SCORERS]
    plugins += [{"type": "approx-prefix-cache-producer"}, {"type": "max-score-picker"}]
    weights = [{"pluginRef": name, "weight": weight} for name, weight in _SCORERS.items()]
    profile = {"name": "default", "plugins": [*weights, {"pluginRef": "max-score-picker"}]}
    document: dict[str, object] = {
        "apiVersion": "llm-d.ai/v1alpha1",
        "kind": "EndpointPickerConfig",
        "plugins": plugins,
        "schedulingProfiles": [profile],
    }
    if endpoints is not None:
        plugins.append({"type": "file-discovery", "parameters": {"path": str(endpoints)}})
        document["dataLayer"] = {"discovery": {"pluginRef": "file-discovery"}}
    return yaml.safe_dump(document)


class _Stand:
    """Starts engines and pickers in ``directory``; ``processes`` ends them."""

    def __init__(self, directory: Path, processes: Processes) -> None:
        self._directory = directory
        self._processes = processes
        self._engines: list[str] = []

    async def start_engines(self) -> None:
        ports = free_ports(_ENGINES)
        self._engines = [f"127.0.0.1:{port}" for port in ports]
        words = ["-m", "bench.micro.instant_engine", "--ports", ",".join(map(str, ports))]
        await self._processes.start("engines", [sys.executable, *words])
        await self._processes.wait_ready("engines", PortProbe(ports[-1]))

    async def start_picker(self, name: str, program: Sequence[str]) -> RunningPicker:
        """``program``: takes extproc's arguments, or llm-d's; empty: the Envoy asks no picker."""
        listen, admin, grpc, metrics, health = free_ports(5)
        place = self._directory / name
        config, bundle = place / "config", place / "envoy"
        config.mkdir(parents=True)
        (config / "epp.yaml").write_text(picker_config())
        gateway = {"listen": f"127.0.0.1:{listen}", "admin": f"127.0.0.1:{admin}", "extproc": f"127.0.0.1:{grpc}"}
        patient = {**gateway, "messageTimeout": "30s", "failureMode": "Close"}
        text = documents(self._engines, gateway=patient, alias=MODEL, more={"pickerConfig": "epp.yaml"})
        (config / "attache.yaml").write_text(text)
        # which engine is picked is nothing to Envoy's configuration
        plain = documents(self._engines, gateway=patient, alias=MODEL)
        write_step(bundle, PublishStep(0, bundle_files(plain, bundle, in_pieces=True, asks=bool(program))))
        pid = None
        if program:
            if name == _LLM_D:
                words = self._llm_d_words(place, grpc, health, metrics)
            else:
                words = ["--config", str(config), "--listen", f"127.0.0.1:{grpc}", "--metrics", f"127.0.0.1:{metrics}"]
            pid = await self._processes.start(name, [*program, *words])
            await self._processes.wait_ready(name, PortProbe(grpc))
        envoy_pid = await self._processes.start(f"envoy-{name}", envoy_command(bundle))
        await self._processes.wait_ready(f"envoy-{name}", HttpProbe(listen, MODEL))
        return RunningPicker(name, pid, envoy_pid, listen)

    def _llm_d_words(self, place: Path, grpc: int, health: int, metrics: int) -> list[str]:
        """Its logs are off, its tracing and TLS, too."""
        split = [engine.split(":") for engine in self._engines]
        listed = [{"name": f"e{at}", "address": host, "port": port} for at, (host, port) in enumerate(split)]
        endpoints, config = place / "endpoints.yaml", place / "epp.yaml"
        endpoints.write_text(yaml.safe_dump({"endpoints": listed}))
        config.write_text(picker_config(endpoints))
        ports = ["--grpc-port", str(grpc), "--grpc-health-port", str(health), "--metrics-port", str(metrics)]
        quiet = ["--tracing=false", "--secure-serving=false", "--zap-log-level=error"]
        return ["--pool-name", "llama", "--config-file", str(config), *ports, *quiet]


async def measure(programs: Mapping[str, Sequence[str]], rounds: int, seconds: float) -> Costs:
    """By load and picker, the cost in each round."""
    costs: Costs = {load.name: {name: [] for name in programs} for load in LOADS}
    with tempfile.TemporaryDirectory(prefix="attache-pickers-") as directory:
        async with Processes(Path(directory)) as processes:
            stand = _Stand(Path(directory), processes)
            await stand.start_engines()
            pickers = [await stand.start_picker(name, program) for name, program in programs.items()]
            # the first round is not like the others
            for number in range(rounds + 1):
                turn = number % len(pickers)
                idle = await _idle(pickers, seconds)
                for load in LOADS:
                    for picker in pickers[turn:] + pickers[:turn]:
                        cost = await _cost(picker, load, seconds, idle[picker.name])
                        if number:
                            costs[load.name][picker.name].append(cost)
    return costs


async def _idle(pickers: Sequence[RunningPicker], seconds: float) -> dict[str, float]:
    """By picker, the share of a core that it takes without requests."""
    before = [picker.cpu_seconds()[0] for picker in pickers]
    began_s = time.perf_counter()
    await asyncio.sleep(seconds)
    each = 1 / (time.perf_counter() - began_s)
    return {picker.name: (picker.cpu_seconds()[0] - at) * each for picker, at in zip(pickers, before, strict=True)}


async def _cost(picker: RunningPicker, load: LoadShape, seconds: float, idle: float) -> PickerCost:
    asked = chat_requests(load.prompt_bytes, count=64 if load.prompt_bytes < 100_000 else 16, model=MODEL)
    more = f"{EVENTS}: {load.events}\r\n" if load.events else ""
    wire = RequestLoad([one.wire_bytes(more) for one in asked], connections=load.at_once)
    before, began_s = picker.cpu_seconds(), time.perf_counter()
    await wire.run("127.0.0.1", picker.port, seconds=seconds)
    took_s, after, each = time.perf_counter() - began_s, picker.cpu_seconds(), 1000 / len(wire.taken_s)
    picker_ms = (after[0] - before[0] - idle * took_s) * each
    return PickerCost(idle, picker_ms, (after[1] - before[1]) * each, statistics.median(wire.taken_s) * 1000)


def markdown(costs: Costs) -> Iterator[str]:
    """Lines of two tables: medians, and the range over the rounds."""
    pickers = [name for name in next(iter(costs.values())) if name != _NONE]
    yield "| CPU of a request, ms | " + " | ".join(f"{name} | Envoy before it" for name in pickers) + " |"
    yield "|---" * (1 + 2 * len(pickers)) + "|"
    for load, found in costs.items():
        cells = []
        for name in pickers:
            cells.append(_spread(one.picker_ms for one in found[name]))
            cells.append(f"{statistics.median(one.envoy_ms for one in found[name]):.2f}")
        yield f"| {load} | {' | '.join(cells)} |"
    idle = ((one.idle for found in costs.values() for one in found[name]) for name in pickers)
    yield f"| without requests, share of a core | {' | | '.join(map(_spread, idle))} | |"
    yield ""
    yield "| added latency, ms | " + " | ".join(pickers) + " |"
    yield "|---" * (1 + len(pickers)) + "|"
    for load, found in costs.items():
        added = [
            [ours.taken_ms - none.taken_ms for ours, none in zip(found[name], found[_NONE], strict=True)]
            for name in pickers
        ]
        yield f"| {load} | {' | '.join(map(_spread, added))} |"


def _spread(values: Iterable[float]) -> str:
    found = sorted(values)
    return f"{statistics.median(found):.2f} ({found[0]:.2f} to {found[-1]:.2f})"


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0, or 2 if something could not be started."""
    parser = argparse.ArgumentParser(
        prog="bench.micro.pickers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--llm-d", type=Path, metavar="PROGRAM", help="llm-d's picker: cmd/epp of llm-d-router, built")
    parser.add_argument("--against", type=Path, metavar="DIR", help="a checkout whose extproc is measured, too")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each load in a round; default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("bench/out"), metavar="DIR")
    options = parser.parse_args(arguments)
    programs = {_NONE: [], _OURS: [sys.executable, "-m", "extproc"]}
    if options.against is not None:
        programs[_BEFORE] = [sys.executable, "-m", "bench.micro.checkout_runner", str(options.against)]
    if options.llm_d is not None:
        programs[_LLM_D] = [str(options.llm_d)]
    try:
        costs = uvloop.run(measure(programs, options.rounds, options.seconds))
    except (StartFailed, EnvoyMissing) as error:
        print(error, file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    table = "\n".join(markdown(costs)) + "\n"
    (options.out / "pickers.md").write_text(table)
    (options.out / "pickers.json").write_bytes(msgspec.json.encode(costs))
    print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
