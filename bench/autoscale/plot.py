# SPDX-License-Identifier: Apache-2.0
"""Cost against attainment: a panel for each load, a line for each policy over its settings."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from bench.autoscale.policies import BOUNDS, OURS
from bench.reporting.plots import figure

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from bench.autoscale.report import Line

_COLUMNS: Final = 3


def write_plot(
    loads: Mapping[str, Mapping[str, Sequence[Line]]], tuned: Mapping[str, Mapping[str, Line]], file: Path
) -> None:
    """As PNG. ``tuned``: the setting of each policy that tuning chose, which gets a larger mark."""
    rows = math.ceil(len(loads) / _COLUMNS)
    with figure(file, rows=rows, columns=_COLUMNS, size_inches=(6 * _COLUMNS, 4.5 * rows)) as panels:
        for axes, (load, policies) in zip(panels, loads.items(), strict=False):
            for policy, lines in policies.items():
                spots = sorted((one.spot for one in lines), key=lambda one: one.cost)
                width = 2.5 if policy == OURS else 1.0
                style = ":" if policy in BOUNDS else "-"
                xs, ys = [one.cost for one in spots], [100 * one.attainment for one in spots]
                (drawn,) = axes.plot(xs, ys, style, marker=".", linewidth=width, label=policy)
                mine = tuned[load][policy].spot
                axes.plot([mine.cost], [100 * mine.attainment], "o", color=drawn.get_color(), markersize=8)
            axes.set_title(load)
            axes.set_xlabel("cost an hour")
            axes.set_ylabel("requests in target, %")
        for axes in panels[len(loads) :]:
            axes.set_axis_off()
