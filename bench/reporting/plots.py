# SPDX-License-Identifier: Apache-2.0
"""Plots with matplotlib: figures and cumulative distributions."""

from __future__ import annotations

import contextlib
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from matplotlib.artist import Artist
    from matplotlib.axes import Axes


@contextlib.contextmanager
def figure(
    target: Path | IO[bytes],
    *,
    rows: int = 1,
    columns: int,
    size_inches: tuple[float, float],
    dpi: int = 110,
) -> Iterator[list[Axes]]:
    """Yields ``rows * columns`` axes, row by row, and writes them to ``target`` as PNG at the end, with grids and one
    legend below all axes, where it covers nothing.

    ``size_inches``: width and height. What has one label in several axes is to have one look in all of them.
    """
    # Importing matplotlib takes a quarter of a second, and most commands end without a plot.
    import matplotlib as mpl  # noqa: PLC0415

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    drawn, grid = plt.subplots(rows, columns, figsize=size_inches, layout="constrained", squeeze=False)
    every = list(grid.flat)
    yield every
    marks: dict[str, Artist] = {}
    for axes in every:
        axes.grid(alpha=0.3)
        handles, labels = axes.get_legend_handles_labels()
        marks = dict(zip(labels, handles, strict=True)) | marks
    if marks:
        drawn.legend(marks.values(), marks.keys(), loc="outside lower center", ncols=min(6, len(marks)), fontsize=9)
    drawn.savefig(target, format="png", dpi=dpi)
    plt.close(drawn)


def plot_cumulative(axes: Axes, label: str, values: Sequence[float], *, color: str | None = None) -> None:
    """The share of ``values`` that are at most x, as a step function. ``color``: None: the next of the cycle."""
    ordered = sorted(values)
    shares = [(index + 1) / len(ordered) for index in range(len(ordered))]
    axes.plot(ordered, shares, label=label, color=color, drawstyle="steps-post")


def log_axis(axes: Axes) -> None:
    """A logarithmic x axis with plain numbers: 0.05, 0.1, 0.2."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter  # noqa: PLC0415 - as figure does

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(axis="x", rotation=45)
