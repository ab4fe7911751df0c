# SPDX-License-Identifier: Apache-2.0
"""The report of all scenarios: a page with tables and a plot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from bench.fairness.scenarios import FLOOD_POLICIES
from bench.reporting.plots import figure, log_axis, plot_cumulative

if TYPE_CHECKING:
    from pathlib import Path

    from bench.fairness.scenarios import FairnessReport
    from bench.reporting.origin import MadeBy

# Both tenants wait for so long.
_SHOWN_S: Final = 20.0
# Of tenants, in the order of their names.
_STYLES: Final = ("-", "--", "-.", ":")


def write_report(report: FairnessReport, directory: Path, made_by: MadeBy) -> Path:
    """Write ``report.md`` with its plot, and ``results.json`` with every number; returns the path of the page."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "results.json").write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1))
    _plot(report, directory / "fairness.png")
    lines = ["# Fairness", "", "Simulated H100s with an 8B model, in virtual time, under extproc's own decisions.", ""]
    for table in report.tables():
        lines += [f"## {table.title}", "", *table.as_markdown(), ""]
    lines += ["![TTFT of tenants that do not flood; service of two that wait](fairness.png)", ""]
    lines += [f"Made by `{made_by.command}`; {made_by.versions_line}.", ""]
    page = directory / "report.md"
    page.write_text("\n".join(lines))
    return page


def _plot(report: FairnessReport, file: Path) -> None:
    with figure(file, columns=3, size_inches=(16, 5.2)) as (busy, quiet, service):
        for axes, floods, name in ((busy, report.busy, "busy"), (quiet, report.quiet, "quiet")):
            for one in floods:
                plot_cumulative(axes, f"{one.policy}, flooded", one.ttfts_s, color=_color(one.policy))
                axes.axvline(
                    one.before_s, linestyle=":", color=_color(one.policy), label=f"{one.policy}, p90 before the flood"
                )
            axes.set(title=f"tenants that do not flood, {name}: answers within a TTFT")
            axes.set(xlabel="time to first token, s", ylabel="share of answers")
            log_axis(axes)
        for run in report.service_gap:
            for (name, history), style in zip(sorted(run.history.items()), _STYLES, strict=False):
                instants_s, served = zip(*(one for one in history if one[0] <= _SHOWN_S), strict=True)
                label = f"{run.policy}, tenant {name}"
                service.plot(instants_s, served, label=label, color=_color(run.policy), linestyle=style)
        service.set(title="service given to two tenants that wait", xlim=(0, _SHOWN_S))
        service.set(xlabel="time since the start, s", ylabel="weighted tokens since the start")


def _color(policy: str) -> str:
    """One for each policy, the same in all plots."""
    return f"C{list(FLOOD_POLICIES).index(policy)}"
