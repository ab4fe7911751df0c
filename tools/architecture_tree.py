# SPDX-License-Identifier: Apache-2.0
"""What ARCHITECTURE.md has from docstrings: the tree of packages, from their first lines, and a request's states."""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT: Final = Path(__file__).parent.parent
PAGE: Final = ROOT / "ARCHITECTURE.md"
_STATES: Final = ROOT / "extproc" / "core" / "request_states.py"
_PACKAGES: Final = ("attache", "extproc", "controller", "bench")
_COLUMN: Final = 26
_WIDTH: Final = 120


def with_parts(page: str) -> str:
    """The page with its tree and its states written anew; raises ValueError if it has no place for one."""
    tree = "\n".join(line for package in _PACKAGES for line in _lines(ROOT / package, depth=0))
    return _with_part(_with_part(page, "tree", tree), "states", _drawing(_STATES))


def _with_part(page: str, name: str, text: str) -> str:
    begin, end = f"<!-- the {name}: written by make generate -->", f"<!-- end of the {name} -->"
    before, found, rest = page.partition(begin)
    _, ended, after = rest.partition(end)
    if not (found and ended):
        raise ValueError(f"{PAGE.name} needs the lines '{begin}' and '{end}'")
    return f"{before}{begin}\n```text\n{text}\n```\n{end}{after}"


def _drawing(path: Path) -> str:
    """The paragraph of the module's docstring that is indented."""
    (found,) = (one for one in _docstring(path).split("\n\n") if one.startswith("    "))
    return textwrap.dedent(found)


def _lines(folder: Path, depth: int) -> Iterator[str]:
    yield _line(f"{folder.name}/", _summary(folder / "__init__.py"), depth)
    for package in sorted(path.parent for path in folder.glob("*/__init__.py")):
        yield from _lines(package, depth + 1)


def _line(name: str, summary: str, depth: int) -> str:
    line = ("  " * depth + name).ljust(_COLUMN) + summary
    return line.rstrip() if len(line) <= _WIDTH else line[: _WIDTH - 1].rsplit(" ", 1)[0].rstrip(",;:") + " …"


def _summary(path: Path) -> str:
    return _docstring(path).split("\n\n")[0].replace("\n", " ").replace("``", "").rstrip(".")


def _docstring(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text())) or ""
