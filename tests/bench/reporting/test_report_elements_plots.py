# SPDX-License-Identifier: Apache-2.0
"""Plots: a legend covers nothing, and names each policy once."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from bench.reporting.report_elements import figure, plot_cumulative, use_log_x_axis

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def test_one_legend_lies_below_all_axes_and_names_each_policy_once() -> None:
    target = io.BytesIO()
    drawn: list[Axes] = []
    with figure(target, rows=2, columns=2, size_inches=(10, 6)) as axes:
        drawn += axes
        for number, policy in enumerate(("attache", "round-robin", "my.py:Mine")):
            for one in axes:
                plot_cumulative(one, policy, [0.1, 0.2, 5.0], color=f"C{number}")
    assert target.getvalue().startswith(b"\x89PNG")
    assert all(one.get_legend() is None for one in drawn)
    (legend,) = drawn[0].figure.legends
    assert [one.get_text() for one in legend.get_texts()] == ["attache", "round-robin", "my.py:Mine"]
    top = legend.get_window_extent().y1
    # what belongs to the axes, with their labels, begins above it
    assert all(box.y0 >= top for one in drawn if (box := one.get_tightbbox()) is not None)


def test_a_logarithmic_axis_has_plain_numbers() -> None:
    labels: list[str] = []
    with figure(io.BytesIO(), columns=1, size_inches=(5, 4)) as (axes,):
        plot_cumulative(axes, "attache", [0.05, 0.5, 5.0])
        use_log_x_axis(axes)
        axes.figure.canvas.draw()
        labels += [one.get_text() for one in axes.get_xticklabels()]
    assert {"0.05", "0.5", "5"} <= set(labels)
