# SPDX-License-Identifier: Apache-2.0
"""The lab's report as one self-contained HTML file: tables and plots."""

from __future__ import annotations

import base64
import html
import io
from collections import defaultdict
from typing import TYPE_CHECKING, Final

import numpy as np

from bench.lab.export import group_by_conditions, group_by_policy, pool_measures, ttft_windows
from bench.lab.measures import policy_table
from bench.reporting.report_elements import figure, plot_cumulative, use_log_x_axis
from bench.reporting.request_results import mean_interval

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

    from bench.lab.export import ReplayResults
    from bench.lab.measures import LatencyObjective
    from bench.lab.trial import RequestRow, TrialReport
    from bench.reporting.request_results import ConfidenceInterval

_STYLE: Final = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:85em;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse}td,th{padding:.2em .6em;text-align:right;border-bottom:1px solid #ddd}"
    "td{white-space:nowrap}div{overflow-x:auto}"
    "td:first-child,th:first-child{text-align:left}img{max-width:100%}code{overflow-wrap:anywhere}"
)
_MANY: Final = 20


def write_html(reports: Sequence[TrialReport], results: ReplayResults, file: Path) -> None:
    """Write a section for each set of conditions, with all policies side by side."""
    objective = results.objective
    colors = _colors(list(group_by_policy(reports)))
    body = "".join(_section(name, found, objective, colors) for name, found in group_by_conditions(reports).items())
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(
        f"<!doctype html><meta charset=utf-8><title>Policy lab</title><style>{_STYLE}</style><h1>Policy"
        " lab</h1><p>Virtual time. Seconds, unless a heading has a unit. Objective: the first token within"
        f" {objective.ttft_s:g} s, each further one within {1000 * objective.tpot_s:g} ms. Excess: TTFT beyond the"
        " lower bound, an idle engine that holds all that was sent before. 95%: interval of the mean TTFT, bootstrap"
        f" over windows of the trace and seeds.</p>{body}{_origin(results)}"
    )


def _origin(results: ReplayResults) -> str:
    if results.made_by is None:
        return ""
    files = {file: digest for trial in results.trials for file, digest in trial.files.items()} | results.made_by.files
    read = "; ".join(f"{file} (xxh3 {digest})" for file, digest in files.items())
    return (
        f"<h2>How this was made</h2><p><code>{html.escape(results.made_by.command)}</code></p>"
        f"<p>{html.escape(results.made_by.versions_line)}{html.escape(f'. Files: {read}') if read else ''}</p>"
    )


def _colors(policies: Sequence[str]) -> dict[str, str]:
    """One for each policy, the same in all plots; beyond twenty they begin again."""
    return {policy: f"C{number}" if len(policies) <= 10 else _twenty(number) for number, policy in enumerate(policies)}


def _twenty(number: int) -> str:
    from matplotlib import colormaps  # noqa: PLC0415 - as bench.reporting.report_elements does, which says why
    from matplotlib.colors import to_hex  # noqa: PLC0415

    return to_hex(colormaps["tab20"](number % _MANY))


def _section(name: str, reports: Sequence[TrialReport], objective: LatencyObjective, colors: Mapping[str, str]) -> str:
    policies = group_by_policy(reports)
    measures = {policy: pool_measures(found, objective) for policy, found in policies.items()}
    intervals = {policy: mean_interval(ttft_windows(found)) for policy, found in policies.items()}
    table = policy_table(name, measures, intervals)
    return f"<h2>{html.escape(name)}</h2><div>{table.as_html()}</div>{_plots(policies, intervals, colors)}"


def _plots(
    policies: Mapping[str, Sequence[TrialReport]],
    intervals: Mapping[str, ConfidenceInterval],
    colors: Mapping[str, str],
) -> str:
    """Six plots as one image inside the page, and a seventh if sessions have labels."""
    rows = {policy: [row for one in found for row in one.rows if not row.error] for policy, found in policies.items()}
    image = io.BytesIO()
    has_labels = len({row.label for found in rows.values() for row in found}) > 1
    lines = 3 if has_labels else 2
    height = 4.3 * lines + 0.25 * (len(rows) // 6)
    with figure(image, rows=lines, columns=3, size_inches=(15, height), dpi=90) as axes:
        ttft, tpot, within, means, cached, balance, *others = axes
        for policy, found in rows.items():
            color = colors[policy]
            plot_cumulative(ttft, policy, [row.ttft_s for row in found if row.ttft_s > 0], color=color)
            speeds = [row.tpot_s for row in found if row.output_tokens > 1 and row.tpot_s > 0]
            plot_cumulative(tpot, policy, speeds, color=color)
            _objectives(within, policy, policies[policy], color)
            _balance(balance, policy, policies[policy][0], color)
        _means(means, intervals, colors)
        _bars(cached, {policy: _cached(found) for policy, found in rows.items()}, colors)
        for one in others[1:]:
            one.set_visible(False)
        if has_labels:
            _labels(others[0], rows, colors)
        for one, what in ((ttft, "time to first token"), (tpot, "time per output token")):
            one.set(title=f"{what}: answers within it", xlabel=f"{what}, s", ylabel="share of answers")
        within.set(title="throughput within a time to first token", ylim=(0, None))
        within.set(xlabel="time to first token, s", ylabel="answers within it, 1/s")
        for one in (ttft, tpot, within):
            use_log_x_axis(one)
        means.set(title="mean time to first token, with 95% intervals", xlabel="mean time to first token, s")
        cached.set(title="prompt tokens from caches", xlabel="share of prompt tokens", xlim=(0, 1))
        balance.set(title="imbalance, until the last arrival", xlabel="time since the start, s")
        balance.set(ylabel="in flight, busiest engine over the mean")
    return f'<img alt="plots" src="data:image/png;base64,{base64.b64encode(image.getvalue()).decode()}">'


def _objectives(ax: Axes, policy: str, reports: Sequence[TrialReport], color: str) -> None:
    ttfts = np.sort(np.array([row.ttft_s for report in reports for row in report.rows if not row.error]))
    if not ttfts.size:
        return
    limits = np.geomspace(max(ttfts[0], 1e-3), max(ttfts[-1], 2e-3), 100)
    duration_s = sum(report.duration_s for report in reports) or 1.0
    ax.plot(limits, np.searchsorted(ttfts, limits, side="right") / duration_s, label=policy, color=color)


def _balance(ax: Axes, policy: str, report: TrialReport, color: str) -> None:
    """The busiest engine's requests in flight over the mean, at a hundred instants of the first seed.

    It ends with the last arrival: while engines finish what they have, no policy can balance anything.
    """
    rows = [row for row in report.rows if not row.error]
    instants = np.linspace(0, max((row.due_at_s for row in rows), default=0.0), 100)
    flights = np.zeros((len(report.busy), instants.size))
    for row in rows:
        low, high = np.searchsorted(instants, [row.due_at_s, row.due_at_s + row.e2e_s])
        flights[row.engine, low:high] += 1
    mean = flights.mean(axis=0)
    shares = np.divide(flights.max(axis=0), mean, out=np.ones(instants.size), where=mean > 0)
    ax.plot(instants, shares, label=policy, color=color)


def _cached(rows: Sequence[RequestRow]) -> float:
    return sum(row.cached_tokens for row in rows) / max(1, sum(row.prompt_tokens for row in rows))


def _bars(ax: Axes, values: Mapping[str, float], colors: Mapping[str, str]) -> None:
    ax.barh(list(values), list(values.values()), color=[colors[policy] for policy in values])
    ax.invert_yaxis()


def _means(ax: Axes, intervals: Mapping[str, ConfidenceInterval], colors: Mapping[str, str]) -> None:
    for policy, one in intervals.items():
        low, high = max(0.0, one.value - one.low), max(0.0, one.high - one.value)
        ax.errorbar(one.value, policy, xerr=[[low], [high]], fmt="o", capsize=4, color=colors[policy])
    ax.invert_yaxis()


def _labels(ax: Axes, rows: Mapping[str, Sequence[RequestRow]], colors: Mapping[str, str]) -> None:
    """Mean TTFT of at most twenty labels: those with most requests."""
    for policy, found in rows.items():
        by_label: dict[str, list[float]] = defaultdict(list)
        for row in found:
            by_label[row.label].append(row.ttft_s)
        most = sorted(by_label, key=lambda label: -len(by_label[label]))[:_MANY]
        means = [float(np.mean(by_label[label])) for label in most]
        ax.plot([label or "all" for label in most], means, "o", label=policy, color=colors[policy])
    ax.tick_params(axis="x", rotation=70, labelsize=7)
    ax.set(title="by label of the sessions", xlabel="label", ylabel="mean time to first token, s")
