# SPDX-License-Identifier: Apache-2.0
"""Which code made a cell: a short hash of the sources that a result depends on."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

_ROOT: Final = Path(__file__).resolve().parents[2]
# What decides, what is decided about, and what turns runs into numbers.
_SOURCES: Final = (
    "controller/autoscaler/decision",
    "controller/api",
    "bench/autoscale",
    "bench/engine",
    "bench/virtual",
    "bench/workload",
    "extproc",
)
# These choose cells and tell about them.
_WITHOUT_EFFECT: Final = frozenset(
    f"bench/autoscale/{name}.py"
    for name in ("command", "experiment", "fingerprint", "frontier", "page", "plot", "report", "runner")
)


def code_fingerprint(root: Path = _ROOT) -> str:
    """Twelve hexadecimal digits. A comment changes them as much as a strategy does: code differs, not how."""
    found = hashlib.sha256()
    for file in _files(root):
        found.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return found.hexdigest()[:12]


def _files(root: Path) -> Iterator[Path]:
    for folder in _SOURCES:
        for file in sorted((root / folder).rglob("*.py")):
            if file.relative_to(root).as_posix() not in _WITHOUT_EFFECT:
                yield file
