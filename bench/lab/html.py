"""A report as one HTML file that needs nothing else: a table and plots."""

from __future__ import annotations

import base64
import html
import io
from collections import defaultdict
from typing import TYPE_CHECKING, Final

import numpy as np

from bench.lab.export import pooled

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

    from bench.lab.measures import Measures, Objective
    from bench.lab.trial import Report, Row

_STYLE: Final = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:75em;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse}td,th{padding:.2em .8em;text-align:right;border-bottom:1px solid #ddd}"
    "td:first-child,th:first-child{text-align:left}img{max-width:100%}"
)
_COLUMNS: Final[Mapping[str, Callable[[Measures], str]]] = {
    "TTFT mean": lambda one: f"{one.ttft_s.mean:.3f}",
    "p50": lambda one: f"{one.ttft_s.p50:.3f}",
    "p90": lambda one: f"{one.ttft_s.p90:.3f}",
    "p99": lambda one: f"{one.ttft_s.p99:.2f}",
    "excess": lambda one: f"{one.excess_ttft_s.mean:.3f}",
    "TPOT mean, ms": lambda one: f"{1000 * one.tpot_s.mean:.1f}",
    "E2E mean": lambda one: f"{one.e2e_s.mean:.2f}",
    "cached": lambda one: f"{one.cached_token_ratio:.1%}",
    "goodput, 1/s": lambda one: f"{one.goodput:.2f}",
    "errors": lambda one: str(one.errors),
    "imbalance": lambda one: f"{one.imbalance:.2f}",
    "fairness": lambda one: f"{one.fairness:.3f}",
}


def write_html(reports: Sequence[Report], objective: Objective, file: Path) -> None:
    """A section for each set of conditions, with all policies side by side."""
    sections: dict[str, list[Report]] = defaultdict(list)
    for report in reports:
        conditions = report.trial.conditions
        load = f"rate x{conditions.rate_scale:g}, {conditions.engines} engines of {conditions.hardware}, {conditions.model}"
        sections[f"{report.workload}; {load}"].append(report)
    body = "".join(_section(name, found, objective) for name, found in sections.items())
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(
        f"<!doctype html><meta charset=utf-8><title>Policy lab</title><style>{_STYLE}</style><h1>Policy lab</h1>"
        f"<p>Virtual time. Seconds unless it is said. Objective: first token within {objective.ttft_s:g} s, each more within "
        f"{1000 * objective.tpot_s:g} ms. Excess: over an idle engine that holds all that was sent before.</p>{body}"
    )


def _section(name: str, reports: Sequence[Report], objective: Objective) -> str:
    by_policy: dict[str, list[Report]] = defaultdict(list)
    for report in reports:
        by_policy[report.trial.policy].append(report)
    measures = {policy: pooled(found, objective) for policy, found in by_policy.items()}
    head = "".join(f"<th>{column}</th>" for column in ("policy", *_COLUMNS))
    lines = "".join(
        f"<tr><td>{html.escape(policy)}</td>" + "".join(f"<td>{show(one)}</td>" for show in _COLUMNS.values()) + "</tr>"
        for policy, one in measures.items()
    )
    rows = {policy: [row for one in found for row in one.rows if not row.error] for policy, found in by_policy.items()}
    return f"<h2>{html.escape(name)}</h2><table><tr>{head}</tr>{lines}</table>{_plots(rows, reports[0].duration_s)}"


def _plots(rows: Mapping[str, Sequence[Row]], duration_s: float) -> str:
    # a quarter of a second to import, needed once at the end
    import matplotlib as mpl  # noqa: PLC0415

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    figure, axes = plt.subplots(2, 3, figsize=(17, 9), layout="constrained")
    for policy, found in rows.items():
        _distribution(axes[0][0], policy, [row.ttft_s for row in found])
        _distribution(axes[0][1], policy, [row.tpot_s for row in found if row.output_tokens > 1])
        _objectives(axes[0][2], policy, found, duration_s)
        _balance(axes[1][1], policy, found, duration_s)
    _bars(axes[1][0], {policy: _cached(found) for policy, found in rows.items()})
    _labels(axes[1][2], rows)
    titles = ("time to first token, s", "time per output token, s", "requests a second within a time to first token, s")
    for ax, title in zip(axes[0], titles, strict=True):
        ax.set(title=title, xscale="log")
    for ax, title in zip(
        axes[1], ("cached-token ratio", "busiest engine over the mean, in flight", "mean TTFT by label, s"), strict=True
    ):
        ax.set(title=title)
    axes[0][0].legend(fontsize=8)
    for ax in axes.flat:
        ax.grid(alpha=0.3)
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=90)
    plt.close(figure)
    return f'<img alt="plots" src="data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}">'


def _distribution(ax: Axes, policy: str, values: Sequence[float]) -> None:
    ordered = np.sort(np.array([value for value in values if value > 0]))
    ax.plot(ordered, np.arange(1, ordered.size + 1) / max(1, ordered.size), label=policy, drawstyle="steps-post")


def _objectives(ax: Axes, policy: str, rows: Sequence[Row], duration_s: float) -> None:
    limits = np.geomspace(0.1, 60, 40)
    ttfts = np.sort(np.array([row.ttft_s for row in rows]))
    ax.plot(limits, np.searchsorted(ttfts, limits, side="right") / (duration_s or 1), label=policy)


def _balance(ax: Axes, policy: str, rows: Sequence[Row], duration_s: float) -> None:
    """In flight at each engine, at a hundred moments."""
    moments = np.linspace(0, duration_s, 100)
    engines = max((row.engine for row in rows), default=0) + 1
    flights = np.zeros((engines, moments.size))
    for row in rows:
        low, high = np.searchsorted(moments, [row.due_s, row.due_s + row.e2e_s])
        flights[row.engine, low:high] += 1
    mean = flights.mean(axis=0)
    ax.plot(moments, np.divide(flights.max(axis=0), mean, out=np.ones(moments.size), where=mean > 0), label=policy)


def _cached(rows: Sequence[Row]) -> float:
    return sum(row.cached_tokens for row in rows) / max(1, sum(row.prompt_tokens for row in rows))


def _bars(ax: Axes, values: Mapping[str, float]) -> None:
    ax.barh(list(values), list(values.values()))
    ax.invert_yaxis()


def _labels(ax: Axes, rows: Mapping[str, Sequence[Row]]) -> None:
    """At most twenty labels, those with most requests."""
    for policy, found in rows.items():
        by_label: dict[str, list[float]] = defaultdict(list)
        for row in found:
            by_label[row.label].append(row.ttft_s)
        most = sorted(by_label, key=lambda label: -len(by_label[label]))[:20]
        ax.plot([label or "all" for label in most], [np.mean(by_label[label]) for label in most], "o-", label=policy)
    ax.tick_params(axis="x", rotation=70, labelsize=7)
