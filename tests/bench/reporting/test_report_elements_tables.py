# SPDX-License-Identifier: Apache-2.0
"""One table in three outputs."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from bench.reporting.report_elements import Table

TABLE = Table("title", ["policy", "TTFT, s"], [["a<b", "1.5"], ["ours", "1.0"]], row_styles=["", "bold"])


def test_markdown_has_headings_values_to_the_right_and_a_line_for_each_row() -> None:
    assert TABLE.as_markdown() == ["| policy | TTFT, s |", "|---|---:|", "| a<b | 1.5 |", "| ours | 1.0 |"]


def test_html_escapes_what_it_shows() -> None:
    assert TABLE.as_html() == (
        "<table><tr><th>policy</th><th>TTFT, s</th></tr>"
        "<tr><td>a&lt;b</td><td>1.5</td></tr><tr><td>ours</td><td>1.0</td></tr></table>"
    )


def test_the_terminal_shows_the_title_and_every_cell() -> None:
    out = io.StringIO()
    Console(file=out, width=60).print(TABLE.as_rich_table())
    assert all(text in out.getvalue() for text in ("title", "policy", "TTFT, s", "a<b", "1.5", "ours", "1.0"))


def test_rows_and_styles_must_match() -> None:
    with pytest.raises(ValueError, match="zip"):
        Table("t", ["a"], [["1"], ["2"]], row_styles=["bold"]).as_rich_table()
