"""``make lab``: one table of policies, traces and loads, with intervals.

Eight engines of 70B on four H100s each. The rows of the traces are those that nothing was tuned on: conversations from row 2,501 on, synthetic
requests from row 1,201 on. Loads are shares of what the engines can do, which is the rate at which requests end between the first tenth and the last
when far too many are asked for, under llm-d's token load policy: 1.79 times the conversation trace's own pace, 1.72 times the synthetic one's.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
from rich.table import Table

from bench.lab.export import pooled, results_of, write_csv, write_json
from bench.lab.html import write_html
from bench.lab.intervals import Interval, mean_interval, ratio_interval, windows
from bench.lab.measures import Measures, Objective
from bench.lab.runner import run_all
from bench.lab.trial import Conditions, Trial
from bench.workload.traces import TraceInvalid

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from rich.console import Console

    from bench.lab.trial import Report

TRACES: Final = Path("../shared/traces")
_OURS: Final = "attache"
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
# Whose means are bounds or no policy to be deployed
_BOUNDS: Final = frozenset({"oracle"})


class Scene(msgspec.Struct, frozen=True):
    """A trace's file, under the name that it has here or in its repository; the rows to play, and the rates for the three loads."""

    name: str
    files: tuple[str, ...]
    skip: int
    limit: int
    rates: Mapping[str, float]


_SCENES: Final = (
    Scene(
        "conversation",
        ("mooncake_conversation_a.jsonl.gz", "conversation_trace.jsonl"),
        2500,
        4500,
        {"moderate (56%)": 1.0, "high (98%)": 1.75, "overload (120%)": 2.15},
    ),
    Scene(
        "synthetic",
        ("mooncake_synthetic_a.jsonl.gz", "synthetic_trace.jsonl"),
        1200,
        1200,
        {"moderate (55%)": 0.95, "high (98%)": 1.68, "overload (120%)": 2.05},
    ),
)


class Line(msgspec.Struct, frozen=True):
    """One policy in one cell; ``against``: its mean TTFT over ours, less 1, paired by request."""

    policy: str
    measures: Measures
    ttft_s: Interval
    against: Interval


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Few: scenes and loads are fixed, so that tables can be compared."""
    add = parser.add_argument
    add(
        "--traces",
        type=Path,
        default=TRACES,
        metavar="DIR",
        help="directory with Mooncake's traces (default: %(default)s)",
    )
    add("--policies", default=",".join(_POLICIES), help="default: %(default)s")
    add(
        "--seeds",
        type=int,
        default=1,
        metavar="N",
        help="of ties and answers; intervals also come from windows of the traces (default: %(default)s)",
    )
    add("--hardware", default="h100x4", help="GPUs of each engine; mixed: h100*4+l40s*4 (default: %(default)s)")
    add("--model", default="70b", help="what engines serve (default: %(default)s)")
    add("--rate-factor", type=float, default=1.0, metavar="X", help="multiply all loads, for other hardware")
    add("--out", type=Path, default=Path("bench/out/lab"), metavar="DIR", help="for reports (default: %(default)s)")
    add("--jobs", type=int, default=0, metavar="N", help="processes (default: one for each processor)")


def lab(options: argparse.Namespace, console: Console) -> int:
    """Raises TraceInvalid."""
    cells = {
        (scene.name, load): [
            Conditions(
                _file(options.traces, scene),
                trace_format="mooncake",
                skip=scene.skip,
                limit=scene.limit,
                rate_scale=rate * options.rate_factor,
                hardware=options.hardware,
                model=options.model,
                seed=seed,
            )
            for seed in range(options.seeds)
        ]
        for scene in _SCENES
        for load, rate in scene.rates.items()
    }
    policies = options.policies.split(",")
    trials = [Trial(policy, one) for seeds in cells.values() for policy in policies for one in seeds]
    reports = run_all(trials, options.out / "runs", console, jobs=options.jobs)
    found = dict(zip(map(_name, trials), reports, strict=True))
    objective = Objective()
    page = ["# The policy lab", "", *_preface(options), ""]
    for (scene, load), seeds in cells.items():
        lines = _lines(
            policies, [[found[_name(Trial(policy, one))] for one in seeds] for policy in policies], objective
        )
        console.print(_table(f"{scene}, {load}", lines))
        page += [f"## {scene}, {load}", "", *_markdown(lines), ""]
    results = results_of(reports, objective)
    write_json(results, options.out / "lab.json")
    write_csv(results, options.out / "lab.csv")
    write_html(reports, objective, options.out / "lab.html")
    (options.out / "lab.md").write_text("\n".join(page))
    console.print(f"written: {options.out}/lab.md, .html, .csv, .json", highlight=False)
    return 0


def _file(directory: Path, scene: Scene) -> str:
    for name in scene.files:
        if (directory / name).exists():
            return str(directory / name)
    msg = f"{directory}: has no {scene.files[-1]}; it is in kvcache-ai/Mooncake, FAST25-release/traces, give its directory with --traces"
    raise TraceInvalid(msg)


def _name(trial: Trial) -> bytes:
    return msgspec.json.encode(trial)


def _preface(options: argparse.Namespace) -> list[str]:
    return [
        f"8 engines of {options.model} on {options.hardware}; {options.seeds} seeds; seconds unless it is said. Intervals: 95%, bootstrap over windows "
        "of the trace and seeds. Against: the policy's mean TTFT over attache's, less 1, paired by request. Goodput: requests a second with a first "
        "token within 5 s and each more within 100 ms.",
    ]


def _lines(policies: Sequence[str], reports: Sequence[Sequence[Report]], objective: Objective) -> list[Line]:
    """The best mean first."""
    blocks = {policy: _blocks(found) for policy, found in zip(policies, reports, strict=True)}
    ours = blocks.get(_OURS, blocks[policies[0]])
    lines = [
        Line(policy, pooled(found, objective), mean_interval(blocks[policy]), ratio_interval(blocks[policy], ours))
        for policy, found in zip(policies, reports, strict=True)
    ]
    return sorted(lines, key=lambda line: line.ttft_s.value)


def _blocks(reports: Sequence[Report]) -> list[Sequence[float]]:
    return [window for report in reports for window in windows([row.ttft_s for row in report.rows if not row.error])]


_HEADINGS: Final = (
    "policy",
    "TTFT mean",
    "95%",
    "against",
    "95% ",
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


def _cells(line: Line) -> list[str]:
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


def _table(title: str, lines: Sequence[Line]) -> Table:
    made = Table(title=title)
    for heading in _HEADINGS:
        made.add_column(heading.strip(), justify="left" if heading == "policy" else "right")
    for line in lines:
        made.add_row(*_cells(line), style="bold" if line.policy == _OURS else "")
    return made


def _markdown(lines: Sequence[Line]) -> list[str]:
    rows = [f"| {' | '.join(_cells(line))} |" for line in lines]
    return [
        f"| {' | '.join(heading.strip() for heading in _HEADINGS)} |",
        f"|---|{'---:|' * (len(_HEADINGS) - 1)}",
        *rows,
    ]
