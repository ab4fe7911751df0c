# SPDX-License-Identifier: Apache-2.0
"""What to say of a duration, a size or a quantity that cannot be read: how it was probably meant."""

from __future__ import annotations

import json
import re
from typing import Final

_BARE_NUMBER: Final = re.compile(r"\d+(\.\d+)?", re.ASCII)
# How people write a unit that is refused, and how it is written here.
_SPOKEN: Final = re.compile(r"(\d+(?:\.\d+)?) ?([A-Za-z]+)", re.ASCII)
_MEANT: Final = {
    **dict.fromkeys(("ms", "msec", "msecs", "millisecond", "milliseconds", "millis"), "ms"),
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), "s"),
    **dict.fromkeys(("m", "min", "mins", "minute", "minutes"), "m"),
    **dict.fromkeys(("h", "hr", "hrs", "hour", "hours"), "h"),
    **dict.fromkeys(("d", "day", "days"), "d"),
}
_SIZE_UNITS: Final = frozenset("kmgtpe")
# Of a value that are shown.
_MOST_SHOWN: Final = 80


def no_duration(given: object) -> str:
    """Why ``given`` is no duration, and how it was probably meant."""
    if given is None:
        return "has no value; write a duration, such as 30s, or leave the field out"
    text = _as_written(given)
    if _BARE_NUMBER.fullmatch(text):
        return f"{text} has no unit; write {text}s if it is seconds, {text}ms if milliseconds"
    spoken = _SPOKEN.fullmatch(text)
    meant = spoken and _MEANT.get(spoken[2].lower())
    if spoken and meant and f"{spoken[1]}{meant}" != text:
        return f"'{text}' is not a duration; write {spoken[1]}{meant}"
    return f"'{text}' is not a duration; write a number with a unit, such as 250ms, 30s, 5m or 1h30m"


def no_size(given: object) -> str:
    """Why ``given`` is no size, and how it was probably meant."""
    if given is None:
        return "has no value; write a size, such as 64Mi, or leave the field out"
    text = _as_written(given)
    meant = _by_powers(text) or "write a whole number of bytes, or one with a unit, such as 512Ki, 64Mi or 1G"
    return f"'{text}' is not a size; {meant}"


def no_quantity(given: object) -> str:
    """Why ``given`` is no quantity of Kubernetes, and how it was probably meant."""
    if given is None:
        return "has no value; write a quantity, such as 500 or 10Gi, or leave the field out"
    text = _as_written(given)
    meant = _by_powers(text) or "write a whole number, or one with a unit, such as 500, 1k, 10G or 10Gi"
    return f"'{text}' is not a quantity; {meant}"


def _by_powers(text: str) -> str:
    """How a number with a unit as people write it, such as 10GB, is written; empty if it is none."""
    spoken = _SPOKEN.fullmatch(text)
    unit = spoken[2].lower().removesuffix("b").removesuffix("i") if spoken else ""
    if not spoken or unit not in _SIZE_UNITS or text.endswith(("m", "i")):
        return ""
    number, letter = spoken[1], unit.upper()
    return f"write {number}{letter}i for powers of 1024, {number}{'k' if unit == 'k' else letter} for powers of 1000"


def _as_written(given: object) -> str:
    text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False, default=str)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
