# SPDX-License-Identifier: Apache-2.0
"""Label selectors as the API writes them: ``a=b``, ``a!=b``, ``a in (b,c)``, ``a notin (b)``, ``a``, ``!a``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Final

_TERM: Final = re.compile(
    r"\s*(?:(?P<key>[\w./-]+)\s*(?P<sign>==|=|!=)\s*(?P<value>[\w./-]*)"
    r"|(?P<of>[\w./-]+)\s+(?P<set>in|notin)\s*\((?P<values>[^()]*)\)"
    r"|(?P<absent>!\s*)?(?P<has>[\w./-]+))\s*(?:,|$)"
)
_LONGEST: Final = 4096

Matches = Callable[[Mapping[str, str]], bool]


def selector(text: str) -> Matches:
    """Whether labels match all terms of it; raises ValueError."""
    terms: list[Matches] = []
    at = 0
    while at < len(text.strip()) and len(text) <= _LONGEST:
        found = _TERM.match(text, at)
        if found is None:
            break
        terms.append(_term(found))
        at = found.end()
    if at < len(text.strip()):
        raise ValueError(f"unable to parse the label selector {text[:100]!r}")
    return lambda labels: all(term(labels) for term in terms)


def _term(found: re.Match[str]) -> Matches:
    if found["key"] is not None:
        key, value = found["key"], found["value"]
        if found["sign"] == "!=":
            return lambda labels: labels.get(key) != value
        return lambda labels: labels.get(key) == value
    if found["set"] is not None:
        of, values = found["of"], {one.strip() for one in found["values"].split(",")}
        if found["set"] == "notin":
            return lambda labels: labels.get(of) not in values
        return lambda labels: labels.get(of) in values
    has, is_absent = found["has"], found["absent"] is not None
    return lambda labels: (has in labels) != is_absent
