# SPDX-License-Identifier: Apache-2.0
"""``make run``: a real Envoy, extproc and engines under load, policy by policy, and the report of it.

Every policy meets the same workload with cold caches. Exit status: 0; 1 if a request failed; 2 if something cannot be
started or read; 130 after Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import shlex
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
from bench.live.load_client import LoadClient
from bench.reporting.report_elements import Provenance, Table, figure, plot_cumulative, provenance, use_log_x_axis
from bench.reporting.request_results import (
    RequestResult,
    Summary,
    mean_interval,
    split_into_windows,
    summarize,
    tpots_s,
    ttfts_s,
)
from bench.stack.loopback_stack import ALIAS, EngineFlags, EnvoyMissing, Stack, running_stack
from bench.stack.processes import StartFailed, busy_share, cpu_seconds, read_machine_cpu_time
from bench.workload.generators import Conversations, conversation_workload
from bench.workload.sessions import Workload
from bench.workload.traces import Excerpt, TraceInvalid, read_trace
from extproc.api.config_errors import ConfigInvalid, Mistake
from extproc.llmd.picker_builder import picker_from_text
from extproc.llmd.plugin_types import installed_plugins

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bench.reporting.request_results import Distribution

POLICIES = ("PrefixAware", "RoundRobin")
# Above this the client, Envoy and the engines wait for processors, and times measure them rather than policies.
_BUSY_LIMIT = 0.85


class PolicyRun(msgspec.Struct, frozen=True):
    """One policy's run.

    ``busy``: the share of all processors that were at work, 0 to 1; near 1, times measure this machine. ``cpu_s``:
    processor time by process.
    """

    policy: str
    summary: Summary
    requests_by_engine: tuple[int, ...]
    busy: float
    cpu_s: dict[str, float]
    results: tuple[RequestResult, ...]


class Comparison(msgspec.Struct, frozen=True):
    """The same workload under several policies. ``speed``: engine seconds per second of the wall clock."""

    workload: str
    engines: str
    speed: float
    runs: tuple[PolicyRun, ...]
    made_by: Provenance | None = None


def table(comparison: Comparison) -> Table:
    """A row for each measure, a column for each policy."""
    summaries = [run.summary for run in comparison.runs]

    def row(name: str, show: Callable[[Summary], str]) -> list[str]:
        return [name, *map(show, summaries)]

    rows = [
        row("requests", lambda one: str(one.requests)),
        row("failed", lambda one: str(len(one.errors))),
        row("TTFT mean, ms", lambda one: _ms(one.ttft_s.mean)),
        ["TTFT mean, 95%, ms", *(_interval(run, comparison.speed) for run in comparison.runs)],
        row("TTFT p50 / p90 / p99, ms", lambda one: _percentiles(one.ttft_s)),
        row("TPOT p50 / p90 / p99, ms", lambda one: _percentiles(one.tpot_s)),
        row("cached-token ratio", lambda one: f"{one.cached_token_ratio:.1%}"),
        row("prompt tokens", lambda one: f"{one.prompt_tokens:,}"),
        row("output tokens per second", lambda one: f"{one.output_tokens_per_s:,.0f}"),
        ["requests per engine", *(" ".join(map(str, run.requests_by_engine)) for run in comparison.runs)],
        ["processors busy", *(f"{run.busy:.0%}" for run in comparison.runs)],
    ]
    headings = ["", *(run.policy for run in comparison.runs)]
    return Table(comparison.workload, headings, rows, caption=_caption(comparison))


def write_report(comparison: Comparison, directory: Path) -> Path:
    """Write ``report.md`` with its plots, and ``results.json`` with every request; returns the path of the page."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "results.json").write_bytes(msgspec.json.format(msgspec.json.encode(comparison), indent=1))
    _plot(comparison, directory / "latency.png")
    page = directory / "report.md"
    page.write_text(_page(comparison))
    return page


def _page(comparison: Comparison) -> str:
    shown = table(comparison)
    used = [(run.policy, sorted(run.cpu_s.items())) for run in comparison.runs]
    lines = [
        f"# {shown.title}",
        "",
        shown.caption,
        "",
        *shown.as_markdown(),
        "",
        "![TTFT, TPOT and requests per engine](latency.png)",
        "",
        "Processor seconds by process:",
        "",
        *(f"- {policy}: " + ", ".join(f"{name} {seconds:.1f}" for name, seconds in one) for policy, one in used),
        "",
        "95%: interval of the mean by bootstrap over windows of this run; a second run may differ by more.",
    ]
    if comparison.made_by is not None:
        lines += ["", f"Made by `{comparison.made_by.command}`; {comparison.made_by.versions_line}."]
    return "\n".join(lines) + "\n"


def _caption(comparison: Comparison) -> str:
    pace = (
        "real time"
        if comparison.speed == 1
        else f"{comparison.speed:g} engine seconds per second; times are engine time"
    )
    return f"{comparison.engines}; {pace}"


def _plot(comparison: Comparison, file: Path) -> None:
    with figure(file, columns=3, size_inches=(15, 5)) as (ttft, tpot, served):
        width = 0.8 / len(comparison.runs)
        for number, run in enumerate(comparison.runs):
            color = f"C{number}"
            plot_cumulative(ttft, run.policy, _in_ms(ttfts_s(run.results, speed=comparison.speed)), color=color)
            plot_cumulative(tpot, run.policy, _in_ms(tpots_s(run.results, speed=comparison.speed)), color=color)
            places = [index + (number + 0.5) * width - 0.4 for index in range(len(run.requests_by_engine))]
            served.bar(places, run.requests_by_engine, width, label=run.policy, color=color)
        for axes, what in ((ttft, "time to first token"), (tpot, "time per output token")):
            axes.set(title=f"{what}: answers within it", xlabel=f"{what}, ms", ylabel="share of answers")
            use_log_x_axis(axes)
        served.set(title="requests served by each engine", xlabel="engine", ylabel="requests")
        served.set_xticks(range(max((len(run.requests_by_engine) for run in comparison.runs), default=0)))


def _interval(run: PolicyRun, speed: float) -> str:
    found = mean_interval(split_into_windows(ttfts_s(run.results, speed=speed)))
    return f"{_ms(found.low)} to {_ms(found.high)}"


def _in_ms(seconds: Sequence[float]) -> list[float]:
    return [value * 1000 for value in seconds]


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:,.1f}"


def _percentiles(found: Distribution) -> str:
    return " / ".join(map(_ms, (found.p50, found.p90, found.p99)))


class ComparisonSettings(msgspec.Struct, frozen=True):
    """Options of the command line. ``out``: the directory of the report."""

    workload: Workload
    flags: EngineFlags
    policies: tuple[str, ...]
    out: Path


def main(arguments: list[str] | None = None, prog: str = "python -m bench.live.run") -> int:
    """Run the comparison and print it."""
    console = Console()
    try:
        settings = _read(arguments, prog)
        command = shlex.join([*prog.split(), *(sys.argv[1:] if arguments is None else arguments)])
        comparison = uvloop.run(_compare(settings, console))
        comparison = msgspec.structs.replace(comparison, made_by=provenance(command))
    except (StartFailed, EnvoyMissing, TraceInvalid, ConfigInvalid) as error:
        Console(stderr=True).print(str(error), style="red", markup=False)
        return 2
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.print("stopped; all processes are ended")
        return 130
    console.print(table(comparison).as_rich_table())
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


async def _compare(settings: ComparisonSettings, console: Console) -> Comparison:
    runs = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[state]}"), console=console) as progress:
        for policy in settings.policies:
            bar = progress.add_task(f"{policy}: starting", total=settings.workload.request_count, state="")
            with tempfile.TemporaryDirectory(prefix="attache-run-") as directory:
                picker = policy if policy in POLICIES else Path(policy)
                async with running_stack(Path(directory), settings.flags, picker=picker) as stack:
                    progress.reset(bar, description=Path(policy).stem)
                    runs.append(await _run(Path(policy).stem, stack, settings, progress, bar))
    return Comparison(
        workload=settings.workload.name, engines=_describe(settings.flags), speed=settings.flags.speed, runs=tuple(runs)
    )


def _check(policy: str) -> None:
    """A name, or the file of an EndpointPickerConfig; raises ConfigInvalid for anything else."""
    if policy in POLICIES:
        return
    try:
        picker_from_text(policy, Path(policy).read_text(), installed_plugins())
    except OSError as error:
        raise ConfigInvalid(
            [Mistake(policy, 0, "", f"cannot be read: {error.strerror}; name a file, or {', '.join(POLICIES)}")]
        ) from None


def _describe(flags: EngineFlags) -> str:
    blocks = "" if flags.kv_blocks is None else f" with {flags.kv_blocks} KV blocks of 16 tokens"
    return f"{flags.count} engines of {flags.hardware}{blocks}"


async def _run(policy: str, stack: Stack, settings: ComparisonSettings, progress: Progress, bar: TaskID) -> PolicyRun:
    results: list[RequestResult] = []

    def show(result: RequestResult) -> None:
        results.append(result)
        failed = sum(1 for one in results if one.error)
        times = ttfts_s(results[-50:], speed=settings.flags.speed) or [0.0]
        state = f"TTFT {sum(times) / len(times) * 1000:.0f} ms" + (f", {failed} failed" if failed else "")
        progress.update(bar, advance=1, state=state)

    pids = {**stack.pids, "client": os.getpid()}
    cpu_before = {name: cpu_seconds(pid) for name, pid in pids.items()}
    machine_before = read_machine_cpu_time()
    client = LoadClient(stack.url, ALIAS, speed=settings.flags.speed, on_result=show)
    await client.send(settings.workload)
    busy = busy_share(machine_before, read_machine_cpu_time())
    cpu = {name: cpu_seconds(pid) - cpu_before[name] for name, pid in pids.items()}
    async with aiohttp.ClientSession() as http:
        served = await asyncio.gather(*(_served(http, engine) for engine in stack.engines))
    return PolicyRun(
        policy=policy,
        summary=summarize(results, speed=settings.flags.speed),
        requests_by_engine=tuple(served),
        busy=busy,
        cpu_s=cpu,
        results=tuple(results),
    )


async def _served(http: aiohttp.ClientSession, engine: str) -> int:
    """Requests that the engine has finished, by its own metrics."""
    async with http.get(f"{engine}/metrics") as response:
        counted = re.findall(r"^vllm:request_success_total\{.*\} (\S+)$", await response.text(), re.MULTILINE)
        return int(sum(map(float, counted)))


def parser(prog: str = "python -m bench.live.run") -> argparse.ArgumentParser:
    """The options of the command."""
    made = argparse.ArgumentParser(
        prog=prog,
        description=(
            "Send the same load through Envoy, extproc and simulated engines once for every policy, and compare "
            "latencies. Without a trace, the load is generated conversations."
        ),
        epilog="Exit status: 0; 1 if a request failed; 2 if something could not be started or read; 130 after Ctrl-C.",
    )
    add = made.add_argument
    add("--trace", type=Path, metavar="FILE", help="replay a trace: Mooncake's JSONL or Azure's CSV, plain or .gz")
    add("--skip", type=int, metavar="N", help="rows of the trace to skip (default: 0)")
    add("--limit", type=int, metavar="N", help="rows of the trace to replay (default: 800)")
    add("--engines", type=int, default=4, metavar="N", help="how many engines (default: %(default)s)")
    add("--hardware", choices=sorted(PRESETS), default="h100-llama-3.1-8b", help="default: %(default)s")
    add(
        "--kv-blocks",
        type=int,
        metavar="N",
        help="KV blocks of an engine (default: 3000 for conversations; for traces, what the GPU holds)",
    )
    add("--speed", type=float, help="simulated seconds in one second (default: 1; for traces, 4)")
    add(
        "--policies",
        default=",".join(POLICIES),
        help=(
            "names, or files with an EndpointPickerConfig, such as bench/lab/policies/configs/llm-d-default.yaml "
            "(default: %(default)s)"
        ),
    )
    add("--seed", type=int, default=0, help="of generated conversations (default: %(default)s)")
    add("--out", type=Path, metavar="DIR", help="where the report goes (default: bench/out/run-NAME)")
    return made


def _read(arguments: list[str] | None, prog: str) -> ComparisonSettings:
    made = parser(prog)
    options = made.parse_args(arguments)
    policies = tuple(options.policies.split(","))
    for policy in policies:
        _check(policy)  # before anything is started
    is_trace = options.trace is not None
    if not is_trace and (options.skip, options.limit) != (None, None):
        made.error("--skip and --limit count rows of a trace; name one with --trace FILE (make run TRACE=FILE)")
    if is_trace:
        limit = 800 if options.limit is None else options.limit
        workload = read_trace(options.trace, Excerpt(options.skip or 0, limit))
    else:
        workload = conversation_workload(Conversations(), options.seed)
    flags = EngineFlags(
        count=options.engines,
        hardware=options.hardware,
        speed=options.speed or (4.0 if is_trace else 1.0),
        kv_blocks=options.kv_blocks or (None if is_trace else 3000),
        apart=True,  # what is measured must not wait for one core
    )
    name = options.trace.name.partition(".")[0] if is_trace else "conversations"
    return ComparisonSettings(
        workload=workload, flags=flags, policies=policies, out=options.out or Path("bench/out") / f"run-{name}"
    )


if __name__ == "__main__":
    sys.exit(main())
