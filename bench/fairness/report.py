"""The scenarios' page: tables and plots."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from pathlib import Path

    from bench.fairness.scenarios import Report


def write_report(report: Report, directory: Path) -> Path:
    """``report.md`` with its plot, and ``results.json`` with every number; the path of the page."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "results.json").write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1))
    _plot(report, directory / "fairness.png")
    lines = ["# Fairness", "", "Simulated H100s with an 8B model, in virtual time, under extproc's own decisions.", ""]
    for title, heads, rows in report.tables():
        lines += [f"## {title}", "", f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
        lines += [f"| {' | '.join(row)} |" for row in rows] + [""]
    lines += ["![TTFT of those that do not flood; service of two that wait](fairness.png)", ""]
    page = directory / "report.md"
    page.write_text("\n".join(lines))
    return page


def _plot(report: Report, file: Path) -> None:
    # a quarter of a second to import, needed once at the end
    import matplotlib as mpl  # noqa: PLC0415

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    figure, (first, second, third) = plt.subplots(1, 3, figsize=(16, 4.5), layout="constrained")
    for axes, floods, name in ((first, report.busy, "busy"), (second, report.quiet, "quiet")):
        for one in floods:
            ordered = sorted(one.ttfts)
            shares = [(index + 1) / len(ordered) for index in range(len(ordered))]
            axes.plot(ordered, shares, label=f"{one.policy}, flooded", drawstyle="steps-post")
            axes.axvline(one.before, linestyle=":", color=axes.lines[-1].get_color())
        axes.set(title=f"TTFT of those that do not flood ({name}; dotted: p90 before)", xlabel="s", xscale="log")
    for run in report.apart:
        for name, history in sorted(run.history.items()):
            times, served = zip(*history, strict=True)
            third.plot(times, served, label=f"{run.policy}: {name}")
    third.set(title="service given, weighted tokens", xlabel="s", xlim=(0, 20))
    for axes in (first, second, third):
        axes.legend(fontsize=8)
        axes.grid(alpha=0.3)
    figure.savefig(file, dpi=110)
    plt.close(figure)
