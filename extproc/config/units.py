"""Quantities with their unit in configuration: ``250ms``, ``1h``, ``64Ki``; never bare numbers."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from extproc.config.errors import Path
    from extproc.config.schema import Finding

_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SIZE = re.compile(r"(\d+)(Ki|Mi|Gi)?")
_BYTES = {None: 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}


def parse_duration_s(text: str) -> float:
    """Seconds in ``text``: one or more numbers with a unit, largest first (``1h30m``, ``250ms``)."""
    parts = _DURATION.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        msg = f"'{text}' is not a duration; write a number with a unit, such as 250ms, 30s, 5m or 1h"
        raise ValueError(msg)
    return sum(float(number) * _SECONDS[unit] for number, unit in parts)


def parse_size_bytes(text: str) -> int:
    """Bytes in ``text``: a whole number with Ki, Mi or Gi, or bare bytes."""
    match = _SIZE.fullmatch(text)
    if match is None:
        msg = f"'{text}' is not a size; write a whole number with a unit, such as 512Ki or 64Mi"
        raise ValueError(msg)
    return int(match[1]) * _BYTES[match[2]]


def check(parse: Callable[[str], object], text: str, path: Path) -> Iterator[Finding]:
    """What ``parse`` says against ``text``, if anything."""
    try:
        parse(text)
    except ValueError as error:
        yield path, str(error)
