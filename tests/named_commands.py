# SPDX-License-Identifier: Apache-2.0
"""The commands that pages name: in blocks of code, and in prose between backticks."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from tools.site_pages import PAGES as SITE_PAGES

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT: Final = Path(__file__).parent.parent
PAGES: Final = (*(ROOT / name for name in SITE_PAGES), *sorted((ROOT / "docs").rglob("*.md")))
# after variables, and by a path, such as .venv/bin/python
_COMMAND: Final = r"(?:\w+=\S+ )*(?:[\w./-]+/)?(python3?|make|attache) "
_IN_BLOCK: Final = re.compile(rf"^(?: {{4}})?{_COMMAND}((?:[^\n]*\\\n)*[^\n]*)$", re.MULTILINE)
_IN_PROSE: Final = re.compile(rf"`{_COMMAND}([^`]*)`")
_FENCED: Final = re.compile(r"^ *```.*?^ *```$", re.DOTALL | re.MULTILINE)
# where a line of prose goes on; in YAML behind another #
_WRAP: Final = re.compile(r"\n *(?:# )?(?=\S)")


class NamedCommand(NamedTuple):
    """``page``: its path from the root of the repository. ``program``: python, make or attache.

    ``is_mention``: the command stands in prose, where arguments may be missing.
    """

    page: str
    program: str
    words: tuple[str, ...]
    is_mention: bool


def named_commands(page: Path) -> Iterator[NamedCommand]:
    """All commands of a page, or of the comments of a manifest."""
    text, name = page.read_text(), str(page.relative_to(ROOT))
    if page.suffix == ".md":
        for program, typed in _IN_BLOCK.findall(text):
            yield NamedCommand(name, program.rstrip("3"), _first_command(typed), is_mention=False)
    for program, typed in _IN_PROSE.findall(_WRAP.sub(" ", _FENCED.sub("", text))):
        yield NamedCommand(name, program.rstrip("3"), _first_command(typed), is_mention=True)


def _first_command(typed: str) -> tuple[str, ...]:
    """Its words, without what follows a pipe, a redirection or an ampersand."""
    lexer = shlex.shlex(typed.replace("\\\n", " "), posix=True, punctuation_chars=";&|<>")
    lexer.whitespace_split = True
    words = list(lexer)
    end = next((at for at, word in enumerate(words) if set(word) <= set(";&|<>")), len(words))
    return tuple(words[:end])
