"""What a comparison came to: one table on the terminal; page, plots and raw numbers in a directory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from rich.table import Table

from bench.load.client import Result
from bench.load.summary import Summary, tpots, ttfts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path


class Run(msgspec.Struct, frozen=True):
    """One policy's run. ``busy``: share of all processors that were at work; near 1 the times measure this machine.

    In virtual time ``busy`` is 0 and ``cpu_s`` is empty.
    """

    policy: str
    summary: Summary
    requests_by_engine: tuple[int, ...]
    busy: float
    cpu_s: dict[str, float]
    results: tuple[Result, ...]


class Comparison(msgspec.Struct, frozen=True):
    """The same workload under several policies. ``speed``: engine seconds in a second of the wall clock."""

    workload: str
    engines: str
    speed: float
    runs: tuple[Run, ...]


def rows(comparison: Comparison) -> list[tuple[str, list[str]]]:
    """The table: what is measured, and its value for each run."""
    summaries = [run.summary for run in comparison.runs]

    def line(name: str, show: Callable[[Summary], str]) -> tuple[str, list[str]]:
        return name, [show(summary) for summary in summaries]

    return [
        line("requests", lambda one: str(one.requests)),
        line("failed", lambda one: str(len(one.errors))),
        line("TTFT mean, ms", lambda one: _ms(one.ttft.mean)),
        line("TTFT p50 / p90 / p99, ms", lambda one: _three(one.ttft.p50, one.ttft.p90, one.ttft.p99)),
        line("TPOT p50 / p90 / p99, ms", lambda one: _three(one.tpot.p50, one.tpot.p90, one.tpot.p99)),
        line("cached-token ratio", lambda one: f"{one.cached_token_ratio:.1%}"),
        line("prompt tokens", lambda one: f"{one.prompt_tokens:,}"),
        line("output tokens per second", lambda one: f"{one.output_tokens_per_s:,.0f}"),
        ("requests per engine", [" ".join(map(str, run.requests_by_engine)) for run in comparison.runs]),
        *([("processors busy", [f"{run.busy:.0%}" for run in comparison.runs])] if comparison.runs[0].busy else []),
    ]


def table(comparison: Comparison) -> Table:
    """For the terminal."""
    made = Table(title=comparison.workload, caption=_caption(comparison))
    made.add_column("")
    for run in comparison.runs:
        made.add_column(run.policy, justify="right")
    for name, values in rows(comparison):
        made.add_row(name, *values)
    return made


def write_report(comparison: Comparison, directory: Path) -> Path:
    """``report.md`` with its plots, and ``results.json`` with every request; the path of the page."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "results.json").write_bytes(msgspec.json.format(msgspec.json.encode(comparison), indent=1))
    _plot(comparison, directory / "latency.png")
    page = directory / "report.md"
    page.write_text(_page(comparison))
    return page


def _page(comparison: Comparison) -> str:
    policies = [run.policy for run in comparison.runs]
    used = [(run.policy, sorted(run.cpu_s.items())) for run in comparison.runs if run.cpu_s]
    lines = [
        f"# {comparison.workload}",
        "",
        _caption(comparison),
        "",
        f"| | {' | '.join(policies)} |",
        f"|---|{'---:|' * len(policies)}",
        *(f"| {name} | {' | '.join(values)} |" for name, values in rows(comparison)),
        "",
        "![TTFT, TPOT and requests per engine](latency.png)",
        "",
        *(["Processor seconds by process:", ""] if used else []),
        *(f"- {policy}: " + ", ".join(f"{name} {seconds:.1f}" for name, seconds in one) for policy, one in used),
    ]
    return "\n".join(lines) + "\n"


def _caption(comparison: Comparison) -> str:
    pace = (
        "real time" if comparison.speed == 1 else f"{comparison.speed:g} engine seconds a second; times are engine time"
    )
    return f"{comparison.engines}; {pace}"


def _plot(comparison: Comparison, file: Path) -> None:
    # a quarter of a second to import, needed once at the end
    import matplotlib as mpl  # noqa: PLC0415

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    figure, (first, second, third) = plt.subplots(1, 3, figsize=(15, 4.5), layout="constrained")
    for run in comparison.runs:
        for axes, values in ((first, ttfts), (second, tpots)):
            x, y = _cumulative([value * 1000 for value in values(run.results, comparison.speed)])
            axes.plot(x, y, label=run.policy, drawstyle="steps-post")
    first.set(title="time to first token", xlabel="ms", ylabel="share of requests", xscale="log")
    second.set(title="time per output token", xlabel="ms", xscale="log")
    width = 0.8 / len(comparison.runs)
    for number, run in enumerate(comparison.runs):
        places = [index + number * width for index in range(len(run.requests_by_engine))]
        third.bar(places, run.requests_by_engine, width, label=run.policy)
    third.set(title="requests per engine", xlabel="engine")
    for axes in (first, second, third):
        axes.legend()
        axes.grid(alpha=0.3)
    figure.savefig(file, dpi=110)
    plt.close(figure)


def _cumulative(values: Sequence[float]) -> tuple[list[float], list[float]]:
    ordered = sorted(values)
    return ordered, [(index + 1) / len(ordered) for index in range(len(ordered))]


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:,.1f}"


def _three(*seconds: float) -> str:
    return " / ".join(map(_ms, seconds))
