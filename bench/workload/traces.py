# SPDX-License-Identifier: Apache-2.0
"""Public traces as workloads, by the name of their format; plain or gzipped.

Traces hold lengths, not text. Where they name the blocks of their prompts, equal names become equal text.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from bench.workload.formats import agentic, arena, azure, burstgpt, mooncake
from bench.workload.formats.rows import Excerpt, Rows, TraceInvalid, open_trace
from bench.workload.sessions import Session, Workload

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

__all__ = ["FORMATS", "Excerpt", "TraceInvalid", "read_trace"]

FORMATS: Final[Mapping[str, Callable[[Rows], list[Session]]]] = MappingProxyType(
    {
        "mooncake": mooncake.sessions,
        "bailian": mooncake.bailian_sessions,
        "azure": azure.sessions,
        "burstgpt": burstgpt.sessions,
        "agentic": agentic.sessions,
        "arena": arena.sessions,
    }
)
# Words in a file's name that tell its format.
_GUESSES: Final = {
    "agentic": "agentic",
    "trace_": "agentic",
    "arena": "arena",
    "vtc": "arena",
    "burst": "burstgpt",
    "blksz_16": "bailian",
    "bailian": "bailian",
}


def read_trace(path: Path, excerpt: Excerpt, format_name: str | None = None) -> Workload:
    """An excerpt of the trace in ``path``. Raises TraceInvalid with file and line.

    ``format_name``: a key of FORMATS; None: by the file name.
    """
    if not path.exists():
        raise TraceInvalid(f"{path}: cannot be read: No such file or directory")
    if path.is_dir():
        raise TraceInvalid(f"{path}: is a directory; name a file of it")
    name = format_name or _guess(path)
    if name not in FORMATS:
        msg = f"{path}: there is no format {name}; there are {', '.join(FORMATS)}"
        raise TraceInvalid(msg)
    try:
        with open_trace(path) as file:
            sessions = FORMATS[name](Rows(path, file, excerpt))
    except (OSError, UnicodeDecodeError, EOFError) as error:
        msg = f"{path}: cannot be read: {error}"
        raise TraceInvalid(msg) from None
    if not sessions:
        msg = f"{path}: has no rows after the first {excerpt.skip}; skip fewer"
        raise TraceInvalid(msg)
    rows = f"rows {excerpt.skip + 1} to {excerpt.skip + len(sessions)}"
    return Workload(f"{path.name}, {rows}", tuple(sessions))


def _guess(path: Path) -> str:
    name = path.name.removesuffix(".gz").lower()
    for word, format_name in _GUESSES.items():
        if word in name:
            return format_name
    if name.endswith(".jsonl"):
        return "mooncake"
    if name.endswith(".csv"):
        return "azure"
    msg = f"{path}: its name does not say what it is; give --format {', '.join(FORMATS)}"

    raise TraceInvalid(msg)
