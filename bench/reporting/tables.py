# SPDX-License-Identifier: Apache-2.0
"""One table for all outputs: the terminal, Markdown and HTML."""

from __future__ import annotations

import html
from collections.abc import Sequence

import msgspec
import rich.table


class Table(msgspec.Struct, frozen=True):
    """Text in rows under ``headings``. The first column names what a row is about; the others hold its values.

    ``row_styles``: rich's style of each row on the terminal, such as "bold"; empty for plain rows.
    """

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    row_styles: Sequence[str] = ()

    def on_terminal(self) -> rich.table.Table:
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

    def as_html(self) -> str:
        """A ``<table>``, without the title."""
        head = "".join(f"<th>{html.escape(heading)}</th>" for heading in self.headings)
        rows = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in self.rows)
        return f"<table><tr>{head}</tr>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"
