# SPDX-License-Identifier: Apache-2.0
"""Durations (``250ms``, ``1h30m``) and sizes (``64Mi``), decoded when read."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Final, Self

_PART: Final = re.compile(r"(\d+\.?\d*|\.\d+)(ns|us|µs|μs|ms|s|m|h|d)", re.ASCII)
_SECONDS: Final = {
    "ns": 1e-9,
    "us": 1e-6,
    "µs": 1e-6,
    "μs": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "m": 60.0,
    "h": 3600.0,
    "d": 86400.0,
}
# Go's longest, some 292 years.
_LONGEST_S: Final = 2**63 / 1e9
_SIZE: Final = re.compile(r"(\d+\.?\d*|\.\d+)(?:([KMGTPE]i)|([kMGTPE])|[eE]\+?(\d{1,2}))?", re.ASCII)
_BINARY: Final = {f"{letter}i": 1024**power for power, letter in enumerate("KMGTPE", start=1)}
_DECIMAL: Final = {letter: 1000**power for power, letter in enumerate("kMGTPE", start=1)}
_LARGEST_SIZE: Final = 2**63 - 1
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


class Duration(float):
    """Seconds, made from text as Go writes durations, with ``d`` for days: ``250ms``, ``1h30m``, ``0s``.

    Arithmetic gives plain floats. ``str`` gives the text back. Raises ValueError.
    """

    __slots__ = ("_text",)
    _text: str

    def __new__(cls, text: object) -> Self:
        """Read ``text``."""
        parts = _PART.findall(text) if isinstance(text, str) else []
        seconds = sum(float(number) * _SECONDS[unit] for number, unit in parts)
        is_whole = text == "0" or "".join(number + unit for number, unit in parts) == text != ""
        if not is_whole or seconds > _LONGEST_S:
            raise ValueError(_no_duration(text))
        duration = super().__new__(cls, seconds)
        duration._text = str(text)
        return duration

    def __str__(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return f"Duration({self._text!r})"

    def __getnewargs__(self) -> tuple[str]:  # type: ignore[override]  # float's own would pass the seconds
        """For copy and pickle."""
        return (self._text,)


class ByteSize(int):
    """Bytes, made from a Kubernetes quantity: ``64Mi``, ``1.5Gi``, ``500M``, ``1e6``, or a plain number.

    Arithmetic gives plain integers. ``str`` gives the text back. Raises ValueError.
    """

    _text: str

    def __new__(cls, given: object) -> Self:
        """Read ``given``; YAML and JSON turn some quantities into numbers by themselves."""
        text = str(given)
        match = None if isinstance(given, bool) else _SIZE.fullmatch(text)
        size = None if match is None else _bytes_of(match)
        if size is None:
            raise ValueError(_no_size(given))
        found = super().__new__(cls, size)
        found._text = text
        return found

    def __str__(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return f"ByteSize({self._text!r})"

    def __getnewargs__(self) -> tuple[str]:  # type: ignore[override]  # int's own would pass the bytes
        """For copy and pickle."""
        return (self._text,)


def decode_quantity(kind: type, value: object) -> object:
    """msgspec's ``dec_hook`` for these types; raises ValueError or, for a foreign type, NotImplementedError."""
    if kind is Duration:
        return Duration(value)
    if kind is ByteSize:
        return ByteSize(value)
    msg = f"no configuration type is a {kind.__name__}"
    raise NotImplementedError(msg)


def decode_quantity_leniently(kind: type, value: object) -> object:
    """The same, with a placeholder for what is invalid."""
    try:
        return decode_quantity(kind, value)
    except ValueError:
        return Duration("1s") if kind is Duration else ByteSize(1)


def _no_duration(given: object) -> str:
    """Why it is none, and how it may have been meant."""
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


def _no_size(given: object) -> str:
    if given is None:
        return "has no value; write a size, such as 64Mi, or leave the field out"
    text = _as_written(given)
    spoken = _SPOKEN.fullmatch(text)
    unit = spoken[2].lower().removesuffix("b").removesuffix("i") if spoken else ""
    if spoken and unit in _SIZE_UNITS and not text.endswith(("m", "i")):
        binary, decimal = f"{spoken[1]}{unit.upper()}i", f"{spoken[1]}{'k' if unit == 'k' else unit.upper()}"
        return f"'{text}' is not a size; write {binary} for powers of 1024, or {decimal} for powers of 1000"
    return f"'{text}' is not a size; write a whole number of bytes, or one with a unit, such as 512Ki, 64Mi or 1G"


def _as_written(given: object) -> str:
    return str(given).lower() if isinstance(given, bool) else str(given)


def _bytes_of(match: re.Match[str]) -> int | None:
    """None unless it is a whole number that a signed 64-bit integer holds, as in Kubernetes."""
    number, binary, decimal, exponent = match.groups()
    factor = _BINARY[binary] if binary else _DECIMAL[decimal] if decimal else 10 ** int(exponent or 0)
    size = Decimal(number) * factor
    return int(size) if size == int(size) and size <= _LARGEST_SIZE else None
