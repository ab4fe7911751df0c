# SPDX-License-Identifier: Apache-2.0
"""Label selectors as the API writes them: ``a=b``, ``a!=b``, ``a in (b,c)``, ``a notin (b)``, ``a``, ``!a``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
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
    terms = [_term(one) for one in _terms(text)]
    return lambda labels: all(term(labels) for term in terms)


def required_labels(text: str) -> dict[str, str]:
    """The labels of which a selector allows one value only: by these, what it selects can be looked up.

    Raises ValueError.
    """
    found: dict[str, str] = {}
    for one in _terms(text):
        values: list[str] = one["values"].split(",") if one["set"] == "in" else []
        if one["sign"] in ("=", "=="):
            found[one["key"]] = one["value"]
        elif len(values) == 1:
            found[one["of"]] = values[0].strip()
    return found


def _terms(text: str) -> Iterator[re.Match[str]]:
    end, at = len(text.strip()), 0
    while at < end:
        found = _TERM.match(text, at) if len(text) <= _LONGEST else None
        if found is None:
            raise ValueError(f"unable to parse the label selector {text[:100]!r}")
        yield found
        at = found.end()


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
