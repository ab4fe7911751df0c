"""``make run``: Envoy, extproc and engines under load, prefix-aware picking against round robin.

Every policy meets the same workload with cold caches. Exit status: 0, 1 if a request failed, 2 if something could not be
started or read, 130 after Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
import msgspec
import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from bench.engine.hardware import PRESETS
from bench.engine.scheduler import Limits
from bench.load.client import Client
from bench.load.summary import summarize, ttfts
from bench.processes import StartFailed
from bench.report import Comparison, Run, table, write_report
from bench.stack import ALIAS, EngineFlags, EnvoyMissing, Stack, documents, running_stack
from bench.usage import busy_share, cpu_seconds, machine_time
from bench.virtual.engines import kind_of
from bench.virtual.simulation import Simulation
from bench.workload.generate import Conversations, conversations
from bench.workload.sessions import Workload
from bench.workload.traces import Part, TraceInvalid, read_trace
from extproc.config.errors import ConfigInvalid, Mistake
from extproc.config.load import load
from extproc.scheduling.picker_config import read_picker_text
from extproc.scheduling.pickers import make_picker
from extproc.scheduling.registry import installed

if TYPE_CHECKING:
    from bench.load.client import Result
    from extproc.scheduling.pickers import MakePicker

POLICIES = ("PrefixAware", "RoundRobin")
# Above this the client, Envoy and the engines wait for processors, and times say more about them than about policies.
_BUSY_LIMIT = 0.85


class Settings(msgspec.Struct, frozen=True):
    """The command line, read."""

    workload: Workload
    flags: EngineFlags
    policies: tuple[str, ...]
    out: Path
    is_virtual: bool


def main(arguments: list[str] | None = None) -> int:
    """The whole comparison."""
    console = Console()
    try:
        settings = _read(arguments)
        if settings.is_virtual:
            comparison = _compare_in_virtual_time(settings)
        else:
            comparison = uvloop.run(_compare(settings, console))
    except (StartFailed, EnvoyMissing, TraceInvalid, ConfigInvalid) as error:
        console.print(str(error), style="red", markup=False)
        return 2
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.print("stopped; all processes are ended")
        return 130
    console.print(table(comparison))
    page = write_report(comparison, settings.out)
    console.print(f"report: {page}", highlight=False)
    return _verdict(comparison, console)


def _verdict(comparison: Comparison, console: Console) -> int:
    for run in comparison.runs:
        if run.busy > _BUSY_LIMIT:
            console.print(
                f"{run.policy}: processors were {run.busy:.0%} busy, so times include waiting for them; "
                "lower --speed or the load",
                style="yellow",
            )
    errors = [error for run in comparison.runs for error in run.summary.errors]
    for error in sorted(set(errors))[:5]:
        console.print(f"{errors.count(error)} failed: {error}", style="red", markup=False)
    return 1 if errors else 0


async def _compare(settings: Settings, console: Console) -> Comparison:
    runs = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[state]}"), console=console) as progress:
        for policy in settings.policies:
            bar = progress.add_task(f"{policy}: starting", total=settings.workload.requests, state="")
            with tempfile.TemporaryDirectory(prefix="attache-run-") as directory:
                picker = policy if policy in POLICIES else Path(policy)
                async with running_stack(Path(directory), settings.flags, picker=picker) as stack:
                    progress.reset(bar, description=Path(policy).stem)
                    runs.append(await _run(Path(policy).stem, stack, settings, progress, bar))
    return Comparison(settings.workload.name, _describe(settings.flags), settings.flags.speed, tuple(runs))


def _compare_in_virtual_time(settings: Settings) -> Comparison:
    """The same without Envoy and HTTP: seconds instead of minutes, and no machine to wait for."""
    flags = settings.flags
    hardware = PRESETS[flags.hardware]
    limits = Limits(num_gpu_blocks=flags.kv_blocks or hardware.kv_tokens() // Limits().block_size)
    addresses = [f"10.0.{number // 250}.{number % 250 + 1}:8000" for number in range(flags.count)]
    runs = []
    for policy in settings.policies:
        named = policy if policy in POLICIES else POLICIES[0]
        snapshot = load({"all.yaml": documents(addresses, picker=named, gateway={}).encode()})
        kinds = dict.fromkeys(addresses, kind_of(hardware, limits))
        simulation = Simulation(snapshot, kinds, make_picker=_picker_of(policy))
        results = simulation.run(settings.workload)
        served = tuple(machine.served for machine in simulation.machines.values())
        runs.append(Run(Path(policy).stem, summarize(results, 1.0), served, 0.0, {}, tuple(results)))
    return Comparison(settings.workload.name, _describe(flags), 1.0, tuple(runs))


def _picker_of(policy: str) -> MakePicker:
    """A name of ours, or the file of an EndpointPickerConfig; raises ConfigInvalid."""
    if policy in POLICIES:
        return make_picker
    try:
        picker = read_picker_text(policy, Path(policy).read_text(), installed()).picker
    except OSError as error:
        raise ConfigInvalid(
            [Mistake(policy, 0, "", f"cannot be read: {error.strerror}; name a file, or {', '.join(POLICIES)}")]
        ) from None
    return lambda _spec, _files: picker


def _describe(flags: EngineFlags) -> str:
    blocks = "" if flags.kv_blocks is None else f" with {flags.kv_blocks} KV blocks of 16 tokens"
    return f"{flags.count} engines of {flags.hardware}{blocks}"


async def _run(policy: str, stack: Stack, settings: Settings, progress: Progress, bar: TaskID) -> Run:
    results: list[Result] = []

    def show(result: Result) -> None:
        results.append(result)
        failed = sum(1 for one in results if one.error)
        times = ttfts(results[-50:], settings.flags.speed) or [0.0]
        state = f"TTFT {sum(times) / len(times) * 1000:.0f} ms" + (f", {failed} failed" if failed else "")
        progress.update(bar, advance=1, state=state)

    pids = {**stack.pids, "client": os.getpid()}
    cpu_before = {name: cpu_seconds(pid) for name, pid in pids.items()}
    machine_before = machine_time()
    client = Client(stack.url, ALIAS, speed=settings.flags.speed, on_result=show)
    await client.send(settings.workload)
    busy = busy_share(machine_before, machine_time())
    cpu = {name: cpu_seconds(pid) - cpu_before[name] for name, pid in pids.items()}
    async with aiohttp.ClientSession() as http:
        served = await asyncio.gather(*(_served(http, engine) for engine in stack.engines))
    return Run(policy, summarize(results, settings.flags.speed), tuple(served), busy, cpu, tuple(results))


async def _served(http: aiohttp.ClientSession, engine: str) -> int:
    """Requests that the engine has finished, by its own count."""
    async with http.get(f"{engine}/metrics") as response:
        counted = re.findall(r"^vllm:request_success_total\{.*\} (\S+)$", await response.text(), re.MULTILINE)
        return int(sum(map(float, counted)))


def _read(arguments: list[str] | None) -> Settings:
    parser = argparse.ArgumentParser(
        prog="bench.run", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--trace", type=Path, metavar="FILE", help="replay Mooncake JSONL or Azure CSV, plain or .gz")
    parser.add_argument("--skip", type=int, default=0, help="rows of the trace to pass over")
    parser.add_argument("--limit", type=int, default=800, help="rows of the trace to replay (default: 800)")
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--hardware", choices=sorted(PRESETS), default="h100-llama-3.1-8b")
    parser.add_argument("--kv-blocks", type=int, help="default: 3000 for generated conversations, a GPU's for traces")
    parser.add_argument("--speed", type=float, help="engine seconds in a second (default: 1; 4 for traces)")
    parser.add_argument(
        "--policies",
        default=",".join(POLICIES),
        help="also files of EndpointPickerConfig, such as bench/policies/configs/llm-d-default.yaml\n(default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of generated conversations")
    parser.add_argument(
        "--virtual", action="store_true", help="in virtual time: the same decisions without Envoy and HTTP"
    )
    parser.add_argument("--out", type=Path, help="default: bench/out/run-NAME")
    options = parser.parse_args(arguments)
    policies = tuple(options.policies.split(","))
    for policy in policies:
        _picker_of(policy)  # raises ConfigInvalid before anything is started
    is_trace = options.trace is not None
    if is_trace:
        workload = read_trace(options.trace, Part(options.skip, options.limit))
    else:
        workload = conversations(Conversations(), options.seed)
    flags = EngineFlags(
        count=options.engines,
        hardware=options.hardware,
        speed=options.speed or (4.0 if is_trace else 1.0),
        kv_blocks=options.kv_blocks or (None if is_trace else 3000),
        apart=True,  # what is measured must not wait for one core
    )
    name = options.trace.name.partition(".")[0] if is_trace else "conversations"
    return Settings(workload, flags, policies, options.out or Path("bench/out") / f"run-{name}", options.virtual)


if __name__ == "__main__":
    sys.exit(main())
