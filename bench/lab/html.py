# SPDX-License-Identifier: Apache-2.0
"""The lab's report as one self-contained HTML file: tables and plots."""

from __future__ import annotations

import base64
import html
import io
from collections import defaultdict
from typing import TYPE_CHECKING, Final

import numpy as np

from bench.lab.columns import policy_table
from bench.lab.export import by_policy, pooled
from bench.reporting.plots import figure, plot_cumulative

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

    from bench.lab.measures import LatencyObjective
    from bench.lab.trial import RequestRow, TrialReport

_STYLE: Final = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:75em;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse}td,th{padding:.2em .8em;text-align:right;border-bottom:1px solid #ddd}"
    "td:first-child,th:first-child{text-align:left}img{max-width:100%}"
)


def write_html(reports: Sequence[TrialReport], objective: LatencyObjective, file: Path) -> None:
    """Write a section for each set of conditions, with all policies side by side."""
    sections: dict[str, list[TrialReport]] = defaultdict(list)
    for report in reports:
        conditions = report.trial.conditions
        engines = f"{conditions.engines} engines of {conditions.hardware}, {conditions.model}"
        sections[f"{report.workload}; rate x{conditions.rate_scale:g}, {engines}"].append(report)
    body = "".join(_section(name, found, objective) for name, found in sections.items())
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(
        f"<!doctype html><meta charset=utf-8><title>Policy lab</title><style>{_STYLE}</style><h1>Policy lab</h1>"
        "<p>Virtual time. Seconds, unless a heading has a unit. "
        f"Objective: the first token within {objective.ttft_s:g} s, each further one within {1000 * objective.tpot_s:g} ms. "
        f"Excess: TTFT beyond the lower bound, an idle engine that holds all that was sent before.</p>{body}"
    )


def _section(name: str, reports: Sequence[TrialReport], objective: LatencyObjective) -> str:
    policies = by_policy(reports)
    measures = {policy: pooled(found, objective) for policy, found in policies.items()}
    rows = {policy: [row for one in found for row in one.rows if not row.error] for policy, found in policies.items()}
    table = policy_table(name, measures)
    return f"<h2>{html.escape(name)}</h2>{table.as_html()}{_plots(rows, reports[0].duration_s)}"


def _plots(rows: Mapping[str, Sequence[RequestRow]], duration_s: float) -> str:
    """Six plots as one image inside the page. ``rows``: good answers by policy."""
    image = io.BytesIO()
    with figure(image, rows=2, columns=3, size_inches=(17, 9), dpi=90) as (ttft, tpot, within, cached, balance, labels):
        for policy, found in rows.items():
            plot_cumulative(ttft, policy, [row.ttft_s for row in found if row.ttft_s > 0])
            plot_cumulative(tpot, policy, [row.tpot_s for row in found if row.output_tokens > 1 and row.tpot_s > 0])
            _objectives(within, policy, found, duration_s)
            _balance(balance, policy, found, duration_s)
        _bars(cached, {policy: _cached(found) for policy, found in rows.items()})
        _labels(labels, rows)
        ttft.set(title="time to first token, s", xscale="log")
        tpot.set(title="time per output token, s", xscale="log")
        within.set(title="requests per second within a time to first token, s", xscale="log")
        cached.set(title="cached-token ratio")
        balance.set(title="busiest engine over the mean, in flight")
        labels.set(title="mean TTFT by label, s")
    return f'<img alt="plots" src="data:image/png;base64,{base64.b64encode(image.getvalue()).decode()}">'


def _objectives(ax: Axes, policy: str, rows: Sequence[RequestRow], duration_s: float) -> None:
    limits = np.geomspace(0.1, 60, 40)
    ttfts = np.sort(np.array([row.ttft_s for row in rows]))
    ax.plot(limits, np.searchsorted(ttfts, limits, side="right") / (duration_s or 1), label=policy)


def _balance(ax: Axes, policy: str, rows: Sequence[RequestRow], duration_s: float) -> None:
    """The busiest engine's requests in flight over the mean, at a hundred instants."""
    instants = np.linspace(0, duration_s, 100)
    engines = max((row.engine for row in rows), default=0) + 1
    flights = np.zeros((engines, instants.size))
    for row in rows:
        low, high = np.searchsorted(instants, [row.due_at_s, row.due_at_s + row.e2e_s])
        flights[row.engine, low:high] += 1
    mean = flights.mean(axis=0)
    ax.plot(instants, np.divide(flights.max(axis=0), mean, out=np.ones(instants.size), where=mean > 0), label=policy)


def _cached(rows: Sequence[RequestRow]) -> float:
    return sum(row.cached_tokens for row in rows) / max(1, sum(row.prompt_tokens for row in rows))


def _bars(ax: Axes, values: Mapping[str, float]) -> None:
    ax.barh(list(values), list(values.values()))
    ax.invert_yaxis()


def _labels(ax: Axes, rows: Mapping[str, Sequence[RequestRow]]) -> None:
    """Mean TTFT of at most twenty labels: those with most requests."""
    for policy, found in rows.items():
        by_label: dict[str, list[float]] = defaultdict(list)
        for row in found:
            by_label[row.label].append(row.ttft_s)
        most = sorted(by_label, key=lambda label: -len(by_label[label]))[:20]
        ax.plot([label or "all" for label in most], [np.mean(by_label[label]) for label in most], "o-", label=policy)
    ax.tick_params(axis="x", rotation=70, labelsize=7)
