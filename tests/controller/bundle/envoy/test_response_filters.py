# SPDX-License-Identifier: Apache-2.0
"""The page that says which headers of answers are removed, against the lists in the code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from extproc.wire_names import RESERVED_FROM_ENGINES, RESERVED_IN_ANSWERS

PAGE: Final = Path(__file__).resolve().parents[4] / "docs" / "operations.md"


def test_the_page_has_all_of_them_and_no_others() -> None:
    table = PAGE.read_text().partition("| headers that begin with |")[2].partition("\n\n")[0]
    rows = [line.strip("|").split("|") for line in table.splitlines()[2:]]
    removed = [{name for row in rows if "removed" in row[place] for name in prefixes(row[0])} for place in (1, 2)]
    assert removed == [set(RESERVED_FROM_ENGINES), set(RESERVED_IN_ANSWERS)]


def prefixes(cell: str) -> list[str]:
    """Those in code, but for the name of a field."""
    return [one for one in re.findall(r"`([^`]+)`", cell) if one != "servedHeader"]
