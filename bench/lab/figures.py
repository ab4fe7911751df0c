# SPDX-License-Identifier: Apache-2.0
"""Figures and tables for a paper: the time to first token by policy, and against the rate of requests.

A figure is written as PDF and as SVG. Policies differ by color, marker and line, so that print without colors and eyes
that see fewer of them can tell eight apart; the colors are those of Okabe and Ito.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from bench.lab.export import group_by_conditions, group_by_policy, ttft_windows
from bench.reporting.report_elements import Table, figure, use_log_x_axis
from bench.reporting.request_results import ConfidenceInterval, mean_interval

if TYPE_CHECKING:
    from collections.abc import Iterable
    from contextlib import AbstractContextManager
    from pathlib import Path

    from matplotlib.axes import Axes

    from bench.lab.trial import TrialConditions, TrialReport
    from bench.reporting.report_elements import Provenance

_COLORS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999933")
_MARKERS: Final = "os^DvPX*"
_LINES: Final = ("-", "--", ":", "-.")
_WIDTH_INCHES: Final = 5.0
_LEGEND_COLUMNS: Final = 3
_NOT_IN_NAMES: Final = re.compile(r"[^a-z0-9.]+")
_LONGEST_NAME: Final = 120


class Sweep(msgspec.Struct, frozen=True):
    """Trials that differ in their rate, policy and seed alone. ``title``: all else. ``rates``: of requests, 1/s,
    rising. ``ttft_s``: of each policy the mean at each rate; None where no answer was good.
    """

    title: str
    rates: Sequence[float]
    ttft_s: Mapping[str, Sequence[ConfidenceInterval | None]]

    def table(self) -> Table:
        """A row for each policy, a column for each rate."""
        title = f"{self.title}: mean TTFT in seconds by requests per second, with intervals of 95%"
        headings = ["policy", *(f"{rate:.3g}/s" for rate in self.rates)]
        return Table(title, headings, [[policy, *map(_cell, found)] for policy, found in self.ttft_s.items()])


def _cell(found: ConfidenceInterval | None) -> str:
    return "none" if found is None else f"{found.value:.3g} ({found.low:.3g} to {found.high:.3g})"


def sweeps_of(reports: Sequence[TrialReport]) -> list[Sweep]:
    """Of all conditions that were played at two rates or more."""
    grouped: dict[TrialConditions, dict[float, list[TrialReport]]] = defaultdict(lambda: defaultdict(list))
    for report in reports:
        conditions = report.trial.conditions
        fixed = msgspec.structs.replace(conditions, seed=0, rate_scale=1.0)
        grouped[fixed][conditions.rate_scale].append(report)
    return [_sweep(conditions, found) for conditions, found in grouped.items() if len(found) > 1]


def _sweep(conditions: TrialConditions, found: Mapping[float, Sequence[TrialReport]]) -> Sweep:
    scales = sorted(found)
    policies = {scale: group_by_policy(found[scale]) for scale in scales}
    names = dict.fromkeys(report.trial.policy for scale in scales for report in found[scale])
    workloads = {report.workload for report in found[scales[0]]}
    # what a generator makes has its seed in its name
    workload = workloads.pop() if len(workloads) == 1 else f"{conditions.trace}, {len(workloads)} seeds together"
    return Sweep(
        title=f"{workload}; {conditions.engines_text()}",
        rates=[_mean(map(request_rate, found[scale])) for scale in scales],
        ttft_s={name: [_ttft(policies[scale].get(name, [])) for scale in scales] for name in names},
    )


def request_rate(report: TrialReport) -> float:
    """Requests that fell due per second. Turns of a conversation wait for answers, so it depends on the policy, too."""
    last_at_s = max((row.due_at_s for row in report.rows), default=0.0)
    return len(report.rows) / last_at_s if last_at_s else 0.0


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)


def _ttft(reports: Sequence[TrialReport]) -> ConfidenceInterval | None:
    blocks = ttft_windows(reports)
    return mean_interval(blocks) if blocks else None


def write_figures(reports: Sequence[TrialReport], folder: Path) -> list[Path]:
    """The files: of each sweep the TTFT against the rate, and of each set of conditions how TTFTs are distributed."""
    folder.mkdir(parents=True, exist_ok=True)
    styles = _styles(list(group_by_policy(reports)))
    written = []
    for sweep in sweeps_of(reports):
        files = _files(folder, f"ttft-by-rate {sweep.title}")
        _draw_sweep(sweep, files, styles)
        written += files
    for words, found in group_by_conditions(reports).items():
        files = _files(folder, f"ttft {words}")
        _draw_distribution(group_by_policy(found), files, styles)
        written += files
    return written


def _files(folder: Path, title: str) -> list[Path]:
    name = _NOT_IN_NAMES.sub("-", title.lower()).strip("-.")[:_LONGEST_NAME]
    return [folder / f"{name}.{form}" for form in ("pdf", "svg")]


class _Style(msgspec.Struct, frozen=True):
    color: str
    marker: str
    line: str


def _styles(policies: Sequence[str]) -> dict[str, _Style]:
    """One for each policy, the same in all figures."""
    count = len(_COLORS)
    return {
        policy: _Style(_COLORS[number % count], _MARKERS[number % count], _LINES[number // count % len(_LINES)])
        for number, policy in enumerate(policies)
    }


def _axes(files: Sequence[Path], policies: int) -> AbstractContextManager[list[Axes]]:
    """One diagram, with room for the legend below it."""
    height = 3.1 + 0.2 * math.ceil(policies / _LEGEND_COLUMNS)
    return figure(*files, columns=1, size_inches=(_WIDTH_INCHES, height), legend_columns=_LEGEND_COLUMNS)


def _draw_sweep(sweep: Sweep, files: Sequence[Path], styles: Mapping[str, _Style]) -> None:
    with _axes(files, len(sweep.ttft_s)) as (axes,):
        for policy, found in sweep.ttft_s.items():
            points = [(rate, one) for rate, one in zip(sweep.rates, found, strict=True) if one is not None]
            style, values = styles[policy], [one.value for _, one in points]
            # the bounds are resampled: the mean of all need not lie between them
            bars = [
                [max(0.0, one.value - one.low) for _, one in points],
                [max(0.0, one.high - one.value) for _, one in points],
            ]
            axes.errorbar(
                [rate for rate, _ in points],
                values,
                yerr=bars,
                label=policy,
                color=style.color,
                marker=style.marker,
                linestyle=style.line,
                markersize=4,
                capsize=2,
                linewidth=1.2,
            )
        axes.set(xlabel="requests per second", ylabel="mean time to first token, s", yscale="log")


def _draw_distribution(
    policies: Mapping[str, Sequence[TrialReport]], files: Sequence[Path], styles: Mapping[str, _Style]
) -> None:
    with _axes(files, len(policies)) as (axes,):
        for policy, reports in policies.items():
            ttfts = sorted(row.ttft_s for one in reports for row in one.rows if not row.error and row.ttft_s > 0)
            shares = [(index + 1) / len(ttfts) for index in range(len(ttfts))]
            style = styles[policy]
            axes.plot(
                ttfts,
                shares,
                label=policy,
                color=style.color,
                linestyle=style.line,
                marker=style.marker,
                markevery=max(1, len(ttfts) // 8),
                markersize=4,
                linewidth=1.2,
                drawstyle="steps-post",
            )
        axes.set(xlabel="time to first token, s", ylabel="share of answers")
        use_log_x_axis(axes)


def write_latex(tables: Iterable[Table], file: Path, origin: Provenance | None) -> None:
    """Tables for a paper that uses the package booktabs; comments say how they were made."""
    lines = [r"% needs \usepackage{booktabs}"]
    if origin is not None:
        lines += [f"% {origin.command}", f"% {origin.versions_line}"]
    for table in tables:
        lines += ["", *table.as_latex()]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join([*lines, ""]))
