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
    legend_below: bool = False,
) -> Iterator[list[Axes]]:
    """Yields ``rows * columns`` axes, row by row, and writes them to ``target`` as PNG at the end, with legends and
    grids.

    ``size_inches``: width and height. ``legend_below``: one legend of all axes below them, where it covers nothing.
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
        if handles and not legend_below:
            axes.legend(fontsize=8)
        marks = dict(zip(labels, handles, strict=True)) | marks
    if legend_below and marks:
        drawn.legend(marks.values(), marks.keys(), loc="outside lower center", ncols=min(6, len(marks)), fontsize=9)
    drawn.savefig(target, format="png", dpi=dpi)
    plt.close(drawn)


def plot_cumulative(axes: Axes, label: str, values: Sequence[float], *, color: str | None = None) -> None:
    """The share of ``values`` that are at most x, as a step function. ``color``: None: the next of the cycle."""
    ordered = sorted(values)
    shares = [(index + 1) / len(ordered) for index in range(len(ordered))]
    axes.plot(ordered, shares, label=label, color=color, drawstyle="steps-post")
