# SPDX-License-Identifier: Apache-2.0
"""``make lab``: one table of policies, traces and loads, with intervals.

Eight engines, each a 70B model on four H100s. Nothing was tuned on the rows that are played: conversations from row
2,501 on, synthetic requests from row 1,201 on. Loads are shares of the engines' capacity. That was measured under
llm-d's token load policy with far too many requests, as the rate at which requests end between the first and the last
tenth of the run: 1.72 times the pace of the conversation trace, 1.71 times that of the synthetic one.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from bench.lab.disaggregation import TraceInput, run_pairs_lab
from bench.lab.export import build_replay_results, pool_measures, ttft_windows, write_csv, write_json
from bench.lab.figures import sweeps_of, write_figures, write_latex
from bench.lab.html_report import write_html
from bench.lab.measures import LatencyObjective, Measures
from bench.lab.trial import Trial, TrialConditions, check_trials
from bench.lab.trial_runner import run_trials
from bench.reporting.report_elements import Table
from bench.reporting.request_results import ConfidenceInterval, mean_interval, ratio_interval
from bench.workload.traces import TraceInvalid

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from bench.lab.trial import TrialReport

TRACES: Final = Path("../shared/traces")
_OURS: Final = "attache"
# Shares of capacity were measured with these.
_HARDWARE: Final = "h100x4"
_MODEL: Final = "70b"
_POLICIES: Final = (
    _OURS,
    "llm-d-token-load",
    "lmetric",
    "preble",
    "dynamo",
    "llm-d-blend",
    "llm-d-precise",
    "kthena",
    "sglang",
    "aibrix-prefix-cache",
    "aibrix-least-kv-cache",
    "ray",
    "power-of-two",
    "least-request",
    "round-robin",
    "random",
    "oracle",
)
# Bounds, and not policies that can be deployed.
_BOUNDS: Final = frozenset({"oracle"})
_WHERE: Final = "kvcache-ai/Mooncake, FAST25-release/traces"
_HEADINGS: Final = (
    "policy",
    "TTFT mean",
    "95%",
    "against",
    "95%",
    "p50",
    "p90",
    "p99",
    "excess",
    "TPOT, ms",
    "E2E",
    "cached",
    "goodput",
    "errors",
)


class TraceLoads(msgspec.Struct, frozen=True):
    """A trace, the rows to play and the loads.

    ``files``: names that the trace's file may have; none for a generator of this name. ``rates``: rate scale by load.
    """

    name: str
    files: tuple[str, ...]
    skip: int
    limit: int
    rates: Mapping[str, float]


_TRACES: Final = (
    TraceLoads(
        name="conversation",
        files=("mooncake_conversation_a.jsonl.gz", "conversation_trace.jsonl"),
        skip=2500,
        limit=4500,
        rates={"moderate (56%)": 0.97, "high (98%)": 1.69, "overload (120%)": 2.07},
    ),
    TraceLoads(
        name="synthetic",
        files=("mooncake_synthetic_a.jsonl.gz", "synthetic_trace.jsonl"),
        skip=1200,
        limit=1200,
        rates={"moderate (56%)": 0.95, "high (98%)": 1.68, "overload (120%)": 2.05},
    ),
)


# In place of traces, for a clone without them. They are not used for tuning, and are no shares of a capacity.
_GENERATED: Final = (
    TraceLoads(name="chat", files=(), skip=0, limit=0, rates={"x1": 1.0, "x2": 2.0, "x4": 4.0}),
    TraceLoads(name="shared-prefix", files=(), skip=0, limit=0, rates={"x0.5": 0.5, "x1": 1.0, "x1.5": 1.5}),
)


class PolicyResult(msgspec.Struct, frozen=True):
    """One policy under one load. ``against``: its mean TTFT over Attaché's, minus 1, paired by request."""

    policy: str
    measures: Measures
    ttft_s: ConfidenceInterval
    against: ConfidenceInterval


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Traces, policies, seeds, rates and hardware."""
    add = parser.add_argument
    add(
        "--traces",
        type=Path,
        metavar="DIR",
        help=f"directory with Mooncake's traces (default: {TRACES} if it is there, else generators)",
    )
    add("--policies", default=",".join(_POLICIES), help="names, my.py:Mine, or files; default: %(default)s")
    add(
        "--seeds",
        type=int,
        default=1,
        metavar="N",
        help="of ties and answers; intervals also come from windows of the traces (default: %(default)s)",
    )
    add(
        "--hardware",
        default=_HARDWARE,
        help="GPUs of each engine; mixed: h100*4+l40s*4; a GPU's file: rig.yamlx2 (default: %(default)s)",
    )
    add("--model", default=_MODEL, help="what engines serve (default: %(default)s)")
    add(
        "--rates",
        type=_rates,
        default=(),
        metavar="X,X,...",
        help="in place of the three loads: times the pace of the trace, for a figure of TTFT against the rate",
    )
    add("--rate-factor", type=float, default=1.0, metavar="X", help="multiply all loads, for other hardware")
    add(
        "--pairs",
        action="store_true",
        help="prefill and decode engines against whole ones, by goodput, in place of the pickers (needs traces)",
    )
    add("--out", type=Path, default=Path("bench/out/lab"), metavar="DIR", help="for reports (default: %(default)s)")
    add("--jobs", type=int, default=0, metavar="N", help="processes (default: one for each processor)")


def _rates(text: str) -> tuple[float, ...]:
    rates = tuple(map(float, text.split(",")))
    if not all(0 < one < math.inf for one in rates):
        raise argparse.ArgumentTypeError(f"{text}: write numbers above 0, as in 0.5,1,1.5")
    return rates


def lab(options: argparse.Namespace, console: Console) -> int:
    """Raises TraceInvalid, ConfigInvalid, PolicyFailed or HardwareUnknown."""
    directory = options.traces or TRACES
    has_traces = options.traces is not None or TRACES.is_dir()
    if not has_traces:
        console.print(
            f"There is no directory of traces: generators play. For real traffic put the files of {_WHERE} into one "
            "directory and give it with --traces; a trace of your own is played by replay --trace FILE.",
            style="yellow",
        )
    if options.pairs:
        return _pairs(options, directory, console)
    is_measured = (options.hardware, options.model, options.rate_factor) == (_HARDWARE, _MODEL, 1.0)
    cells = {
        (trace.name, load if is_measured else load.partition(" (")[0]): [
            TrialConditions(
                _file(directory, trace) if has_traces else trace.name,
                trace_format="mooncake" if has_traces else None,
                skip=trace.skip,
                limit=trace.limit,
                rate_scale=rate * options.rate_factor,
                hardware=options.hardware,
                model=options.model,
                seed=seed,
            )
            for seed in range(options.seeds)
        ]
        for trace in (_TRACES if has_traces else _GENERATED)
        for load, rate in ({f"x{one:g}": one for one in options.rates} or trace.rates).items()
    }
    policies = options.policies.split(",")
    trials = [Trial(policy, one) for seeds in cells.values() for policy in policies for one in seeds]
    check_trials(trials)
    reports = run_trials(trials, options.out / "runs", console, jobs=options.jobs)
    found = dict(zip(map(_name, trials), reports, strict=True))
    objective = LatencyObjective()
    page = ["# The policy lab", "", *_preface(options), ""]
    tables = []
    for (trace, load), seeds in cells.items():
        lines = _lines(
            policies, [[found[_name(Trial(policy, one))] for one in seeds] for policy in policies], objective
        )
        tables.append(_table(f"{trace}, {load}", lines))
    tables += [sweep.table() for sweep in sweeps_of(reports)]
    for table in tables:
        console.print(table.as_rich_table())
        page += [f"## {table.title}", "", *table.as_markdown(), ""]
    results = build_replay_results(reports, objective, options.command_line)
    write_json(results, options.out / "lab.json")
    write_csv(results, options.out / "lab.csv")
    write_html(reports, results, options.out / "lab.html")
    if results.made_by is not None:
        page += [f"Made by `{results.made_by.command}`; {results.made_by.versions_line}.", ""]
    (options.out / "lab.md").write_text("\n".join(page))
    write_latex(tables, options.out / "lab.tex", results.made_by)
    figures = write_figures(reports, options.out / "figures")
    console.print(f"written: {options.out}/lab.md, .html, .csv, .json, .tex", highlight=False)
    console.print(f"written: {len(figures)} figures, PDF and SVG, under {options.out}/figures", highlight=False)
    return 0


def _pairs(options: argparse.Namespace, directory: Path, console: Console) -> int:
    traces = [TraceInput(trace.name, _file(directory, trace), trace.skip) for trace in _TRACES]
    tables = run_pairs_lab(traces, options.out, console, jobs=options.jobs)
    page = ["# Prefill and decode engines", ""]
    for table in tables:
        console.print(table.as_rich_table())
        page += [f"## {table.title}", "", *table.as_markdown(), ""]
    (options.out / "pairs.md").write_text("\n".join(page))
    console.print(f"written: {options.out}/pairs.md", highlight=False)
    return 0


def _file(directory: Path, trace: TraceLoads) -> str:
    for name in trace.files:
        if (directory / name).exists():
            return str(directory / name)
    msg = f"{directory}: has no {trace.files[-1]}; it is in {_WHERE}; give its directory with --traces"
    raise TraceInvalid(msg)


def _name(trial: Trial) -> bytes:
    return msgspec.json.encode(trial)


def _preface(options: argparse.Namespace) -> list[str]:
    seeds = "1 seed" if options.seeds == 1 else f"{options.seeds} seeds"
    return [
        (
            f"8 engines of {options.model} on {options.hardware}; {seeds}; seconds, unless a heading has a unit."
            " Intervals: 95%, bootstrap over windows of the trace and seeds. Against: the policy's mean TTFT over"
            " attache's, minus 1, paired by request. Goodput: requests per second with the first token within 5 s and"
            " each further one within 100 ms."
        ),
    ]


def _lines(
    policies: Sequence[str], reports: Sequence[Sequence[TrialReport]], objective: LatencyObjective
) -> list[PolicyResult]:
    """The lowest mean TTFT first. ``reports``: for each policy, those of all seeds."""

    blocks = {policy: ttft_windows(found) for policy, found in zip(policies, reports, strict=True)}
    ours = blocks.get(_OURS, blocks[policies[0]])
    lines = [
        PolicyResult(
            policy=policy,
            measures=pool_measures(found, objective),
            ttft_s=mean_interval(blocks[policy]),
            against=ratio_interval(blocks[policy], ours),
        )
        for policy, found in zip(policies, reports, strict=True)
    ]
    return sorted(lines, key=lambda line: line.ttft_s.value)


def _cells(line: PolicyResult) -> list[str]:
    one, against = line.measures, line.against
    return [
        line.policy + (" (a bound)" if line.policy in _BOUNDS else ""),
        f"{line.ttft_s.value:.3f}",
        f"{line.ttft_s.low:.2f} to {line.ttft_s.high:.2f}",
        f"{against.value:+.0%}",
        f"{against.low:+.0%} to {against.high:+.0%}",
        f"{one.ttft_s.p50:.2f}",
        f"{one.ttft_s.p90:.2f}",
        f"{one.ttft_s.p99:.1f}",
        f"{one.excess_ttft_s.mean:.3f}",
        f"{1000 * one.tpot_s.mean:.0f}",
        f"{one.e2e_s.mean:.1f}",
        f"{one.cached_token_ratio:.1%}",
        f"{one.goodput:.2f}",
        str(one.errors),
    ]


def _table(title: str, lines: Sequence[PolicyResult]) -> Table:
    styles = ["bold" if line.policy == _OURS else "" for line in lines]
    return Table(title, _HEADINGS, [_cells(line) for line in lines], row_styles=styles)
