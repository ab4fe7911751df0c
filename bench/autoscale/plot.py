# SPDX-License-Identifier: Apache-2.0
"""Cost against attainment: a panel for each load, a line for each policy over its settings."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from bench.autoscale.frontier import unsurpassed
from bench.autoscale.policies import BOUNDS, OURS, OWN, POLICIES
from bench.reporting.plots import figure

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

    from bench.autoscale.report import Line

_COLUMNS: Final = 3
# Colours that differ also for people who see few of them, then by lightness.
_COLOURS: Final = (
    "#e69f00", "#56b4e9", "#009e73", "#cc79a7", "#d55e00", "#8c564b", "#7f7f7f", "#bcbd22", "#9467bd", "#17becf",
)  # fmt: skip
_OURS: Final = "#0033cc"
_SECOND: Final = "-second"
# Settings below this, and below those that are judged, are outside the panel, so that the rest can be told apart.
_FLOOR: Final = 60.0


def write_plot(
    loads: Mapping[str, Mapping[str, Sequence[Line]]], tuned: Mapping[str, Mapping[str, Line]], file: Path
) -> None:
    """As PNG. ``tuned``: the setting of each policy that tuning chose, which gets a larger mark."""
    columns = min(_COLUMNS, len(loads))
    rows = math.ceil(len(loads) / columns)
    with figure(file, rows=rows, columns=columns, size_inches=(max(9, 5 * columns), 4 * rows + 1.2)) as panels:
        for axes, (load, policies) in zip(panels, loads.items(), strict=False):
            for policy, lines in policies.items():
                _draw(axes, policy, lines, tuned[load].get(policy))
            axes.set_title(load)
            axes.set_xlabel("cost an hour, in the first kind's replicas")
            axes.set_ylabel("requests in target, %")
            judged = [100 * one.spot.attainment - 2 for one in tuned[load].values()]
            axes.set_ylim(max(0.0, min([_FLOOR, *judged])), 100.8)
        for axes in panels[len(loads) :]:
            axes.set_axis_off()
        _add_legend(panels[0], {policy for policies in loads.values() for policy in policies})


def _draw(axes: Axes, policy: str, lines: Sequence[Line], chosen: Line | None) -> None:
    """Every setting as a dot; a line along those that no cheaper one surpasses."""
    look = _look(policy)
    spots = [one.spot for one in lines]
    axes.plot([one.cost for one in spots], [100 * one.attainment for one in spots], ".", color=look["color"], alpha=0.6)
    best = unsurpassed(spots)
    axes.plot([one.cost for one in best], [100 * one.attainment for one in best], **look)
    if chosen is not None:
        size = 11 if policy == OURS else 8
        axes.plot(
            [chosen.spot.cost], [100 * chosen.spot.attainment], "o", color=look["color"], markersize=size, zorder=4
        )


def _look(policy: str) -> dict[str, Any]:
    """The same for a policy in every panel."""
    name = policy.removesuffix(_SECOND)
    if name in OWN:
        return {
            "color": _OURS,
            "linewidth": 3.0 if name == OURS else 1.5,
            "linestyle": "-" if name == OURS else "--",
            "zorder": 3,
        }
    if name in BOUNDS:
        return {"color": "black", "linewidth": 1.5, "linestyle": ":"}
    others = [one for one in POLICIES if one not in OWN and one not in BOUNDS]
    style = "--" if policy.endswith(_SECOND) else "-"
    return {"color": _COLOURS[others.index(name) % len(_COLOURS)], "linewidth": 1.2, "linestyle": style}


def _add_legend(axes: Axes, policies: Iterable[str]) -> None:
    """Below all panels, so that it covers nothing."""
    from matplotlib.lines import Line2D  # noqa: PLC0415 - as bench.reporting.plots does, which says why

    present = set(policies)
    order = [one for name in POLICIES for one in (name, name + _SECOND) if one in present]
    handles = [Line2D([], [], label=one, **_look(one)) for one in order]
    handles.append(
        Line2D([], [], color="grey", marker="o", linestyle="", markersize=8, label="the setting that is judged")
    )
    axes.figure.legend(handles=handles, loc="outside lower center", ncols=5, fontsize=9)
