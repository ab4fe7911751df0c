# SPDX-License-Identifier: Apache-2.0
"""The report of a comparison: a table, and a page with plots and raw numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from bench.reporting.intervals import mean_interval, windows
from bench.reporting.origin import MadeBy
from bench.reporting.plots import figure, log_axis, plot_cumulative
from bench.reporting.results import RequestResult
from bench.reporting.summary import Summary, tpots_s, ttfts_s
from bench.reporting.tables import Table

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from bench.reporting.distribution import Distribution


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
    made_by: MadeBy | None = None


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
            log_axis(axes)
        served.set(title="requests served by each engine", xlabel="engine", ylabel="requests")
        served.set_xticks(range(max((len(run.requests_by_engine) for run in comparison.runs), default=0)))


def _interval(run: PolicyRun, speed: float) -> str:
    found = mean_interval(windows(ttfts_s(run.results, speed=speed)))
    return f"{_ms(found.low)} to {_ms(found.high)}"


def _in_ms(seconds: Sequence[float]) -> list[float]:
    return [value * 1000 for value in seconds]


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:,.1f}"


def _percentiles(found: Distribution) -> str:
    return " / ".join(map(_ms, (found.p50, found.p90, found.p99)))
