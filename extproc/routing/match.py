# SPDX-License-Identifier: Apache-2.0
"""Conditions on headers and paths, compiled once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from extproc.api.matches import compile_expression

if TYPE_CHECKING:
    from extproc.api.model_route import ModelMatch, StringMatch

# Over headers (lower-case names) and path; None always holds.
Condition = Callable[[Mapping[str, str], str], bool] | None


def compile_match(match: ModelMatch | None) -> Condition:
    """The condition that a rule states."""
    if match is None:
        return None
    headers = [(name.lower(), compile_string(condition)) for name, condition in match.headers.items()]
    uri = compile_string(match.uri) if match.uri is not None else None

    def holds(given: Mapping[str, str], path: str) -> bool:
        if uri is not None and not uri(path):
            return False
        return all(name in given and condition(given[name]) for name, condition in headers)

    return holds


def compile_string(match: StringMatch) -> Callable[[str], bool]:
    """A predicate over a whole value, whose characters are the bytes that the client sent."""
    if match.exact is not None:
        return _as_sent(match.exact).__eq__
    if match.prefix is not None:
        prefix = _as_sent(match.prefix)
        return lambda value: value.startswith(prefix)
    matches = compile_expression(match.regex or "")
    return lambda value: matches(value.encode("latin-1", "replace"))


def _as_sent(text: str) -> str:
    """Headers are read byte by byte, as they have no encoding; what is configured is sent as UTF-8."""
    return text.encode().decode("latin-1")
