# SPDX-License-Identifier: Apache-2.0
"""The examples on our pages: every block of code, with its language.

Where one cannot be checked, a comment above it says why, or which test runs it: ``<!-- example: REASON -->``. The pages
of docs/reference are generated, and tested where they are made.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from tools.site_pages import PAGES as SITE_PAGES

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT: Final = Path(__file__).parent.parent
PAGES: Final = [*(ROOT / name for name in SITE_PAGES), *sorted((ROOT / "docs").glob("*.md"))]
_REASON: Final = re.compile(r"^<!-- example: (.*) -->$")
_FENCE: Final = re.compile(r"( *)```(\w*)$")


class Example(NamedTuple):
    """``number``: its place on the page, from 1. ``reason``: why it is not checked, empty if it is.
    ``is_script``: a fenced block of commands, which runs, behind those before it on its page; indented ones are for
    reading.
    """

    page: str
    number: int
    language: str
    text: str
    reason: str
    is_script: bool


def examples_of(page: Path) -> Iterator[Example]:
    """All blocks of code: fenced ones, and indented ones, which are commands."""
    name = str(page.relative_to(ROOT)).removeprefix("docs/")
    number, reason, at = 0, "", 0
    lines = [*page.read_text().splitlines(), ""]
    while at < len(lines):
        line, begin = lines[at], at + 1
        at += 1
        if (found := _REASON.match(line)) is not None:
            reason = found[1]
        elif (fence := _FENCE.match(line)) is not None:
            while lines[at].strip() != "```":
                at += 1
            number += 1
            text = "".join(f"{one.removeprefix(fence[1])}\n" for one in lines[begin:at])
            yield Example(name, number, fence[2], text, reason, fence[2] == "bash")
            reason = ""
            at += 1
        elif line.startswith("    ") and (at < 2 or not lines[at - 2]):
            while lines[at].startswith("    "):
                at += 1
            number += 1
            text = "".join(f"{one[4:]}\n" for one in lines[begin - 1 : at])
            yield Example(name, number, "bash", text, reason, is_script=False)
            reason = ""


EXAMPLES: Final = [one for page in PAGES for one in examples_of(page)]
