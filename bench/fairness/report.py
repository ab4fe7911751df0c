# SPDX-License-Identifier: Apache-2.0
"""The report of all scenarios: a page with tables and a plot."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from bench.reporting.plots import figure, plot_cumulative

if TYPE_CHECKING:
    from pathlib import Path

    from bench.fairness.scenarios import FairnessReport


def write_report(report: FairnessReport, directory: Path) -> Path:
    """Write ``report.md`` with its plot, and ``results.json`` with every number; returns the path of the page."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "results.json").write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1))
    _plot(report, directory / "fairness.png")
    lines = ["# Fairness", "", "Simulated H100s with an 8B model, in virtual time, under extproc's own decisions.", ""]
    for table in report.tables():
        lines += [f"## {table.title}", "", *table.as_markdown(), ""]
    lines += ["![TTFT of tenants that do not flood; service of two that wait](fairness.png)", ""]
    page = directory / "report.md"
    page.write_text("\n".join(lines))
    return page


def _plot(report: FairnessReport, file: Path) -> None:
    with figure(file, columns=3, size_inches=(16, 4.5)) as (busy, quiet, service):
        for axes, floods, name in ((busy, report.busy, "busy"), (quiet, report.quiet, "quiet")):
            for one in floods:
                plot_cumulative(axes, f"{one.policy}, flooded", one.ttfts_s)
                axes.axvline(one.before_s, linestyle=":", color=axes.lines[-1].get_color())
            axes.set(title=f"TTFT of tenants that do not flood ({name}; dotted: p90 before)", xlabel="s", xscale="log")
        for run in report.service_gap:
            for name, history in sorted(run.history.items()):
                instants_s, served = zip(*history, strict=True)
                service.plot(instants_s, served, label=f"{run.policy}: {name}")
        service.set(title="service given, weighted tokens", xlabel="s", xlim=(0, 20))
