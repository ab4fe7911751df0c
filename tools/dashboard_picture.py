# SPDX-License-Identifier: Apache-2.0
"""Draws panels of the dashboard from a Prometheus: ``python -m tools.dashboard_picture URL START END FILE``."""

from __future__ import annotations

import argparse
import io
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlencode
from urllib.request import urlopen

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from tools.dashboard import ROWS, Panel

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from matplotlib.axes import Axes

# three a row, as in the dashboard; the others are empty without a cluster or repeat these
TITLES: Final = (
    *("Requests by outcome", "Answers by status", "Served by the first choice"),
    *("Waiting", "Time in the queue", "Saturation"),
    *("Requests in flight", "Avoided", "Prompt tokens from the cache"),
)
_STEP_S: Final = 5
# what Grafana takes for $__rate_interval: four times the interval at which Prometheus scrapes, and at least this
_RATE_INTERVAL: Final = "20s"
# by variable of the picture's style: in light and in dark mode
_COLORS: Final = {
    "page": ("#ffffff", "#0d1117"),
    "ink": ("#1f2328", "#e6edf3"),
    "line": ("#8c959f", "#6e7681"),
    "one": ("#0969da", "#58a6ff"),
    "two": ("#bc4c00", "#f0883e"),
    "three": ("#1a7f37", "#3fb950"),
    "four": ("#8250df", "#bc8cff"),
    "five": ("#bf3989", "#f778ba"),
}
_UNITS: Final = {"reqps": " [1/s]", "s": " [s]"}


def main() -> None:
    """Write the picture."""
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("url", help="of the Prometheus")
    made.add_argument("start", type=float, help="seconds since 1970")
    made.add_argument("end", type=float)
    made.add_argument("file", type=Path)
    options = made.parse_args()
    panels = {panel.title: panel for _, row in ROWS for panel in row}
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "attache", "font.size": 8})
    figure = Figure(figsize=(12, 8), layout="constrained", facecolor=_light("page"))
    for axes, title in zip(figure.subplots(len(TITLES) // 3, 3).flat, TITLES, strict=True):
        _draw(axes, panels[title], options)
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    options.file.write_text(_themed(text.getvalue()))


def _draw(axes: Axes, panel: Panel, options: argparse.Namespace) -> None:
    colors = [_light(name) for name in ("one", "two", "three", "four", "five")]
    series = [line for expression, name in panel.queries for line in _series(expression, name, options)]
    for number, (name, times, values) in enumerate(series):
        minutes = [(at_s - options.start) / 60 for at_s in times]
        axes.plot(minutes, values, label=name, color=colors[number % len(colors)], linewidth=1.2)
    axes.set_title(panel.title + _UNITS.get(panel.unit, ""), color=_light("ink"), loc="left", fontweight="bold")
    axes.set_xlabel("minutes", color=_light("ink"))
    axes.set(facecolor=_light("page"), xlim=(0, (options.end - options.start) / 60))
    axes.set_ylim(0, 1.3 * axes.get_ylim()[1])  # room for the names of lines
    if panel.unit == "percentunit":
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    if panel.title == "Avoided":
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.tick_params(colors=_light("ink"))
    axes.spines[:].set_color(_light("line"))
    axes.legend(loc="upper left", fontsize=6, frameon=False, labelcolor=_light("ink"))


def _series(expression: str, name: str, options: argparse.Namespace) -> Iterator[tuple[str, list[float], list[float]]]:
    """Name, times and values of each line."""
    query = {
        "query": expression.replace("$__rate_interval", _RATE_INTERVAL),
        "start": options.start,
        "end": options.end,
        "step": _STEP_S,
    }
    with urlopen(f"{options.url}/api/v1/query_range?{urlencode(query)}") as answer:  # noqa: S310 - the caller's own
        found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
    for one in found:
        points = [(at_s, float(value)) for at_s, value in one["values"] if value != "NaN"]
        if points:
            yield _filled(name, one["metric"]), [at_s for at_s, _ in points], [value for _, value in points]


def _filled(name: str, labels: Mapping[str, str]) -> str:
    return re.sub(r"{{(\w+)}}", lambda match: labels.get(match[1], ""), name)


def _light(name: str) -> str:
    return _COLORS[name][0]


def _themed(svg: str) -> str:
    """``svg`` with colours of the reader's mode, and with a system font."""
    light, dark = ("; ".join(f"--{name}: {both[mode]}" for name, both in _COLORS.items()) for mode in (0, 1))
    style = (
        f"<style>\n   svg {{ {light} }}\n"
        f"   @media (prefers-color-scheme: dark) {{\n    svg {{ {dark} }}\n   }}\n"
        '   text { font-family: system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif !important }\n'
        "  </style>"
    )
    for name, (color, _) in _COLORS.items():
        svg = svg.replace(color, f"var(--{name})")
    svg = re.sub(r"\d+\.\d{3,}", lambda match: f"{float(match[0]):.2f}", svg)
    return svg.replace("<defs>", f"{style}\n <defs>", 1)


if __name__ == "__main__":
    main()
