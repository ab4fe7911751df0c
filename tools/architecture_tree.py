# SPDX-License-Identifier: Apache-2.0
"""The tree of packages in ARCHITECTURE.md, from the first lines of their docstrings."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT: Final = Path(__file__).parent.parent
PAGE: Final = ROOT / "ARCHITECTURE.md"
BEGIN: Final = "<!-- the tree: written by make generate -->"
END: Final = "<!-- end of the tree -->"
_PACKAGES: Final = ("attache", "extproc", "controller", "bench")
_COLUMN: Final = 26
_WIDTH: Final = 120


def package_tree() -> str:
    """All packages, one line each, in a block of text."""
    lines = [line for package in _PACKAGES for line in _lines(ROOT / package, depth=0)]
    return "\n".join([BEGIN, "```text", *lines, "```", END])


def with_tree(page: str) -> str:
    """The page with its tree written anew; raises ValueError if it has no place for one."""
    before, found, rest = page.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not (found and ended):
        raise ValueError(f"{PAGE.name} needs the lines '{BEGIN}' and '{END}'")
    return before + package_tree() + after


def _lines(folder: Path, depth: int) -> Iterator[str]:
    yield _line(f"{folder.name}/", _summary(folder / "__init__.py"), depth)
    for package in sorted(path.parent for path in folder.glob("*/__init__.py")):
        yield from _lines(package, depth + 1)


def _line(name: str, summary: str, depth: int) -> str:
    line = ("  " * depth + name).ljust(_COLUMN) + summary
    return line.rstrip() if len(line) <= _WIDTH else line[: _WIDTH - 1].rsplit(" ", 1)[0].rstrip(",;:") + " …"


def _summary(path: Path) -> str:
    said = ast.get_docstring(ast.parse(path.read_text())) or ""
    return said.split("\n\n")[0].replace("\n", " ").replace("``", "").rstrip(".")
