# SPDX-License-Identifier: Apache-2.0
"""What reports are made of: tables for all outputs, plots with matplotlib, and the origin of the figures."""

from __future__ import annotations

import contextlib
import html
import platform
import re
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

import msgspec
import rich.table

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

_LATEX: Final = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        **{one: f"\\{one}" for one in "&%$#_{}"},
    }
)
_MINUS: Final = re.compile(r"(?<!\w)-(?=\d)")
# So that the same figures have the same bytes.
_UNDATED: Final = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}
# An installed package may be inside another repository.
_ROOT: Final = Path(__file__).resolve().parents[2]


class Table(msgspec.Struct, frozen=True):
    """Text in rows under ``headings``. The first column names what a row is about; the others hold its values.

    ``row_styles``: rich's style of each row on the terminal, such as "bold"; empty for plain rows.
    """

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    row_styles: Sequence[str] = ()

    def as_rich_table(self) -> rich.table.Table:
        """For a rich console."""
        made = rich.table.Table(title=self.title, caption=self.caption or None)
        for number, heading in enumerate(self.headings):
            made.add_column(heading, justify="right" if number else "left")
        styles = self.row_styles or [""] * len(self.rows)
        for row, style in zip(self.rows, styles, strict=True):
            made.add_row(*row, style=style)
        return made

    def as_markdown(self) -> list[str]:
        """Lines, without the title."""
        return [
            f"| {' | '.join(self.headings)} |",
            f"|---|{'---:|' * (len(self.headings) - 1)}",
            *(f"| {' | '.join(row)} |" for row in self.rows),
        ]

    def as_latex(self) -> list[str]:
        """Lines of a ``table`` that needs the package booktabs."""
        lines = [f"{' & '.join(map(_latex, row))} \\\\" for row in (self.headings, *self.rows)]
        return [
            r"\begin{table}",
            r"  \centering",
            rf"  \caption{{{_latex(self.title)}}}",
            rf"  \begin{{tabular}}{{l{'r' * (len(self.headings) - 1)}}}",
            *(f"    {line}" for line in (r"\toprule", lines[0], r"\midrule", *lines[1:], r"\bottomrule")),
            r"  \end{tabular}",
            r"\end{table}",
        ]

    def as_html(self) -> str:
        """A ``<table>``, without the title."""
        head = "".join(f"<th>{html.escape(heading)}</th>" for heading in self.headings)
        rows = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in self.rows)
        return f"<table><tr>{head}</tr>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"


def _latex(text: str) -> str:
    """With what LaTeX would take as its own escaped, and real minus signs."""
    return _MINUS.sub("$-$", text.translate(_LATEX))


@contextlib.contextmanager
def figure(
    *targets: Path | IO[bytes],
    rows: int = 1,
    columns: int,
    size_inches: tuple[float, float],
    dpi: int = 110,
    legend_columns: int = 6,
) -> Iterator[list[Axes]]:
    """Yields ``rows * columns`` axes, row by row, and writes them to each of ``targets`` at the end, with grids and one
    legend below all axes, where it covers nothing: files as their suffix says (png, pdf, svg), others as PNG.

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
        below = min(legend_columns, len(marks))
        drawn.legend(marks.values(), marks.keys(), loc="outside lower center", ncols=below, fontsize=9)
    # TrueType: publishers refuse fonts of type 3
    with mpl.rc_context({"pdf.fonttype": 42, "svg.hashsalt": "attache"}):
        for target in targets:
            form = target.suffix.removeprefix(".") if isinstance(target, Path) else "png"
            drawn.savefig(target, format=form, dpi=dpi, metadata=_UNDATED.get(form))
    plt.close(drawn)


def plot_cumulative(axes: Axes, label: str, values: Sequence[float], *, color: str | None = None) -> None:
    """The share of ``values`` that are at most x, as a step function. ``color``: None: the next of the cycle."""
    ordered = sorted(values)
    shares = [(index + 1) / len(ordered) for index in range(len(ordered))]
    axes.plot(ordered, shares, label=label, color=color, drawstyle="steps-post")


def use_log_x_axis(axes: Axes) -> None:
    """A logarithmic x axis with plain numbers: 0.05, 0.1, 0.2."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter  # noqa: PLC0415 - as figure does

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(axis="x", rotation=45)


class Provenance(msgspec.Struct, frozen=True):
    """The command that made results, the versions of what ran it, and the digests of files with policies."""

    command: str
    versions: dict[str, str]
    files: dict[str, str] = {}

    @property
    def versions_line(self) -> str:
        """The versions in a line."""
        return ", ".join(f"{name} {one}" for name, one in self.versions.items())


def provenance(
    command: str, *, versions: Mapping[str, str] | None = None, files: Mapping[str, str] | None = None
) -> Provenance:
    """``command``, and what runs it, with the commit if the code is in a clone.

    ``versions``: further ones. ``files``: digests by file.
    """
    found = {"Python": platform.python_version(), "numpy": version("numpy"), **(versions or {})}
    with contextlib.suppress(PackageNotFoundError):  # a clone need not be installed
        found["attache"] = version("attache")
    if (_ROOT / ".git").exists() and (commit := _commit()):
        found["commit"] = commit
    return Provenance(command, found, dict(files or {}))


def _commit() -> str:
    try:
        said = subprocess.run(
            ["git", "describe", "--always", "--dirty"],  # noqa: S607 - whichever git the user has
            cwd=_ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:  # a clone may be copied to where there is no git
        return ""
    return said.stdout.strip() if said.returncode == 0 else ""
