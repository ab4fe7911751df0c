# SPDX-License-Identifier: Apache-2.0
"""Kubernetes quantities (``500m``, ``2Gi``) as numbers."""

from __future__ import annotations

import re
from typing import Final

_FORM: Final = re.compile(r"^([+-]?[0-9.]+)([eE][+-]?[0-9]+|[numkKMGTPE]i?)?$")
_UNITS: Final = {
    "n": 1e-9, "u": 1e-6, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18,
    "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50, "Ei": 2.0**60,
}  # fmt: skip


def quantity(text: str | float) -> float:
    """The number; raises ValueError."""
    found = _FORM.match(str(text))
    if found is None:
        raise ValueError(f"{text!r} is no quantity")
    number, unit = found.groups()
    if not unit:
        return float(number)
    if unit in _UNITS:
        return float(number) * _UNITS[unit]
    return float(number + unit)
