# SPDX-License-Identifier: Apache-2.0
"""What ruff does not check, for ``make check``: words in names, and the order within a module.

Names of modules, classes, functions and metrics do without some words; each has the field's own. A module imports a
name once, and constants stand at its head, unless they are made of what it defines.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeGuard

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT: Final = Path(__file__).parent.parent
_PACKAGES: Final = ("attache", "extproc", "controller", "bench", "tools")
_DEFINITION: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_METRICS: Final = "attache_"
_WORD: Final = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+")

INSTEAD: Final = {
    "acting": "actuator, before_action",
    "awaiting": "held, activation",
    "bell": "enqueue",
    "calm": "idle, unchanged",
    "doer": "actuator",
    "entering": "admission",
    "happened": "event",
    "hear": "ingest",
    "heard": "received",
    "hears": "receives",
    "intake": "request builder",
    "keeper": "reconciler",
    "keepers": "reconcilers",
    "knows": "has, serves",
    "law": "strategy",
    "laws": "strategies",
    "lingering": "draining",
    "look": "read, reconcile, find",
    "looked": "read, reconciled",
    "looker": "reconciler",
    "looking": "reading, reconcile",
    "looks": "reads",
    "nobody": "none",
    "owe": "record_overdraft",
    "owes": "record_overdraft",
    "rested": "reused",
    "room": "headroom, capacity, space",
    "rooms": "headroom, capacities",
    "said": "status, event, reported",
    "say": "report, explain",
    "says": "reports",
    "settling": "warming",
    "slim": "trim",
    "somebody": "subject, caller",
    "speaks": "reports",
    "spoken": "reported",
    "stands": "is_unchanged, position",
    "suspects": "outliers",
    "tell": "report, send",
    "teller": "source",
    "telling": "status, report",
    "tells": "reports",
    "told": "reported, sent",
    "uptake": "acknowledgement",
    "uptakes": "acknowledgements",
    "who": "subject, caller",
    "whom": "subject, caller",
    "wish": "access request",
    "wishes": "access requests, options",
}


def find_words(name: str, path: str, tree: ast.Module) -> Iterator[str]:
    """What stands in the way: ``path:line: name: word -> instead``. ``name``: the module's own."""
    names = [(name, 1)]
    for node in ast.walk(tree):
        if isinstance(node, _DEFINITION):
            names.append((node.name, node.lineno))
        elif isinstance(node, ast.Constant) and str(node.value).startswith(_METRICS):
            names.append((str(node.value), node.lineno))
    for one, line in names:
        for word in _WORD.findall(one):
            if word.lower() in INSTEAD:
                yield f"{path}:{line}: {one}: '{word.lower()}' -> {INSTEAD[word.lower()]}"


def find_misplaced(path: str, tree: ast.Module) -> Iterator[str]:
    """Names that are imported twice, and constants that could stand at the head: ``path:line: message``."""
    imported, defined, is_below = set[str](), set[str](), False
    for node in [one for top in tree.body for one in (top.body if _is_for_types(top) else [top])]:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = {f"{getattr(node, 'module', '')}.{one.name} as {one.asname}" for one in node.names}
            yield from (f"{path}:{node.lineno}: {one} is imported twice" for one in sorted(names & imported))
            imported |= names
        elif isinstance(node, _DEFINITION):
            is_below = True
            defined.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and is_below:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = {one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)}
            used = {one.id for one in ast.walk(node.value or node) if isinstance(one, ast.Name)}
            if names and not used & defined:
                yield f"{path}:{node.lineno}: {min(names)} needs nothing from above; it stands at the head"
            defined |= names
        elif not isinstance(node, ast.Assign | ast.AnnAssign):
            # it may change what it names
            defined |= {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


def _is_for_types(node: ast.stmt) -> TypeGuard[ast.If]:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def main() -> int:
    """Exit status: 1 if there is any."""
    lines = [
        line
        for package in _PACKAGES
        for file in sorted((ROOT / package).rglob("*.py"))
        for tree in [ast.parse(file.read_text())]
        for path in [str(file.relative_to(ROOT))]
        for line in (*find_words(file.stem, path, tree), *find_misplaced(path, tree))
    ]
    print("\n".join(lines) or "no word that should not come back, no constant out of its place")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
