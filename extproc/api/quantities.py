# SPDX-License-Identifier: Apache-2.0
"""Durations (``250ms``, ``1h30m``), sizes (``64Mi``), quantities and amounts of money, decoded when read."""

from __future__ import annotations

import math
import re
from decimal import Decimal
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Self

from extproc.api.error_hints import duration_hint, money_hint, quantity_hint, size_hint

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from extproc.api.config_errors import Finding, Path


# Protocol buffers hold no duration of more than 10,000 years, and Envoy multiplies some; a year is longer than any
# useful limit.
_LONGEST_FOR_ENVOY_S: Final = 366 * 86400.0
# Envoy counts milliseconds.
_SHORTEST_S: Final = 0.001
# What Envoy takes as the time for one message to extproc.
LONGEST_MESSAGE_S: Final = 3600.0
# No longer text is read: the patterns below try ever shorter numbers where a unit is missing, and Decimal overflows.
_MOST_CHARACTERS: Final = 64
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
_QUANTITY: Final = re.compile(
    r"([+-]?)(\d+\.?\d*|\.\d+)(?:([KMGTPE]i|[numkMGTPE])|[eE](\+?\d{1,2}|-\d{1,2}))?", re.ASCII
)
_MONEY: Final = re.compile(r"([+-]?)(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,2})?", re.ASCII)
_MICRO: Final = 1_000_000
# Of the currency. Sums of amounts in micro-units stay below 2**53, where floating-point numbers are exact.
_LARGEST_MONEY: Final = 1_000_000_000
_UNITS: Final[Mapping[str, Decimal]] = MappingProxyType(
    {
        **{unit: Decimal(factor) for unit, factor in {**_BINARY, **_DECIMAL}.items()},
        "n": Decimal("1e-9"),
        "u": Decimal("1e-6"),
        "m": Decimal("1e-3"),
    }
)


class _AsWritten:
    """A number that keeps the text from which it was decoded."""

    __slots__ = ()
    _text: str

    def __str__(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._text!r})"

    def __reduce__(self) -> tuple[type[Self], tuple[str]]:
        """For copy and pickle: made anew from the text."""
        return type(self), (self._text,)


class Duration(_AsWritten, float):
    """Seconds, made from text as Go writes durations, with ``d`` for days: ``250ms``, ``1h30m``, ``0s``.

    Arithmetic gives plain floats. ``str`` gives the text back. Raises ValueError.
    """

    __slots__ = ("_text",)

    def __new__(cls, text: object) -> Self:
        """Read ``text``."""
        parts = _PART.findall(text) if isinstance(text, str) and len(text) <= _MOST_CHARACTERS else []
        seconds = sum(float(number) * _SECONDS[unit] for number, unit in parts)
        is_whole = text == "0" or "".join(number + unit for number, unit in parts) == text != ""
        if not is_whole or seconds > _LONGEST_S:
            raise ValueError(duration_hint(text))
        duration = super().__new__(cls, seconds)
        duration._text = str(text)
        return duration


class ByteSize(_AsWritten, int):
    """Bytes, made from a Kubernetes quantity: ``64Mi``, ``1.5Gi``, ``500M``, ``1e6``, or a plain number.

    Arithmetic gives plain integers. ``str`` gives the text back. Raises ValueError.
    """

    def __new__(cls, given: object) -> Self:
        """Read ``given``; YAML and JSON turn some quantities into numbers by themselves."""
        text = str(given)
        is_text = not isinstance(given, bool) and len(text) <= _MOST_CHARACTERS
        match = _SIZE.fullmatch(text) if is_text else None
        size = None if match is None else _bytes_of(match)
        if size is None:
            raise ValueError(size_hint(given))
        found = super().__new__(cls, size)
        found._text = text
        return found


class Quantity(_AsWritten, int):
    """A whole number as Kubernetes writes quantities: ``"500"``, ``1k``, ``"10Gi"``, ``1e3``; a fraction is rounded up.

    For EndpointPickerConfigs, which write numbers of requests and of bytes so. Raises ValueError.
    """

    def __new__(cls, given: object) -> Self:
        """Read ``given``; YAML and JSON turn some quantities into numbers by themselves."""
        text = str(given)
        is_text = not isinstance(given, bool) and len(text) <= _MOST_CHARACTERS
        match = _QUANTITY.fullmatch(text) if is_text else None
        if match is None:
            raise ValueError(quantity_hint(given))
        sign, number, unit, exponent = match.groups()
        value = Decimal(number) * (_UNITS[unit] if unit else Decimal(10) ** int(exponent or 0))
        if sign == "-" and value:
            msg = f"'{text}' is negative; write a positive quantity, or 0 as if there were none"
            raise ValueError(msg)
        if value > _LARGEST_SIZE:
            msg = f"'{text}' is too large; write at most {_LARGEST_SIZE}"
            raise ValueError(msg)
        found = super().__new__(cls, math.ceil(value))
        found._text = text
        return found


class Money(_AsWritten, int):
    """An amount in micro-units of a currency, from decimals: ``2.5``, ``"0.075"``, ``100``. It is never rounded.

    Raises ValueError.
    """

    def __new__(cls, given: object) -> Self:
        """Read ``given``: text, or a number, whose shortest decimals are what was written."""
        text = str(given)
        is_text = not isinstance(given, bool) and len(text) <= _MOST_CHARACTERS
        match = _MONEY.fullmatch(text) if is_text else None
        if match is None:
            raise ValueError(money_hint(given))
        micros = Decimal(text) * _MICRO
        if micros < 0:
            msg = f"'{text}' is negative; write 0 or more"
            raise ValueError(msg)
        if micros > _LARGEST_MONEY * _MICRO:
            msg = f"'{text}' is too large; write at most {_LARGEST_MONEY}"
            raise ValueError(msg)
        if micros != int(micros):
            msg = f"'{text}' has more than 6 digits behind the point; the smallest amount is 0.000001"
            raise ValueError(msg)
        found = super().__new__(cls, int(micros))
        found._text = text
        return found


def money_text(micros: int) -> str:
    """An amount in micro-units as people write it: ``12.34``; at least two decimals, and at most six."""
    digits = str(abs(micros)).zfill(7)
    sign = "-" if micros < 0 else ""
    return f"{sign}{digits[:-6]}.{digits[-6:-4]}{digits[-4:].rstrip('0')}"


def decode_quantity(kind: type, value: object) -> object:
    """msgspec's ``dec_hook`` for these types; raises ValueError or, for a foreign type, NotImplementedError."""
    if kind is Duration:
        return Duration(value)
    if kind is ByteSize:
        return ByteSize(value)
    if kind is Quantity:
        return Quantity(value)
    if kind is Money:
        return Money(value)
    msg = f"no configuration type is a {kind.__name__}"
    raise NotImplementedError(msg)


def decode_quantity_leniently(kind: type, value: object) -> object:
    """The same, with a placeholder for what is invalid."""
    try:
        return decode_quantity(kind, value)
    except ValueError:
        placeholders: dict[type, object] = {
            Duration: Duration("1s"),
            ByteSize: ByteSize(1),
            Quantity: Quantity(1),
            Money: Money(1),
        }
        return placeholders[kind]


def _bytes_of(match: re.Match[str]) -> int | None:
    """None unless it is a whole number that a signed 64-bit integer holds, as in Kubernetes."""
    number, binary, decimal, exponent = match.groups()
    factor = _BINARY[binary] if binary else _DECIMAL[decimal] if decimal else 10 ** int(exponent or 0)
    size = Decimal(number) * factor
    return int(size) if size == int(size) and size <= _LARGEST_SIZE else None


def check_duration(
    duration: Duration, path: Path, *, shortest_s: float = _SHORTEST_S, longest_s: float = _LONGEST_FOR_ENVOY_S
) -> Iterator[Finding]:
    """Envoy takes a duration from ``shortest_s`` to ``longest_s``; in some places 0 means none."""
    if not shortest_s <= duration <= longest_s:
        yield path, f"Envoy takes no {duration} here; write a time from {shortest_s:g}s to {longest_s:g}s"
