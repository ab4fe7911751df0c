# SPDX-License-Identifier: Apache-2.0
"""Words that names of modules, classes and functions do without, each with the field's own: ``make check``."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT: Final = Path(__file__).parent.parent
_PACKAGES: Final = ("attache", "extproc", "controller", "bench", "tools")
_WORD: Final = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+")

INSTEAD: Final = {
    "acting": "actuator, before_action",
    "bell": "enqueue",
    "calm": "idle, unchanged",
    "doer": "actuator",
    "happened": "event",
    "hear": "ingest",
    "heard": "received",
    "hears": "receives",
    "keeper": "adapter",
    "keepers": "adapters",
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
    "speaks": "reports",
    "spoken": "reported",
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
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    names += [(node.name, node.lineno) for node in ast.walk(tree) if isinstance(node, kinds)]
    for one, line in names:
        for word in _WORD.findall(one):
            if word.lower() in INSTEAD:
                yield f"{path}:{line}: {one}: '{word.lower()}' -> {INSTEAD[word.lower()]}"


def main() -> int:
    """Exit status: 1 if there is any."""
    lines = [
        line
        for package in _PACKAGES
        for file in sorted((ROOT / package).rglob("*.py"))
        for line in find_words(file.stem, str(file.relative_to(ROOT)), ast.parse(file.read_text()))
    ]
    print("\n".join(lines) or "no word that should not come back")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
