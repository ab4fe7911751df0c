# SPDX-License-Identifier: Apache-2.0
"""Checks of conditions on headers and paths, and of names and values of headers."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from extproc.api.expressions import compile_expression

if TYPE_CHECKING:
    from collections.abc import Iterator

    from extproc.api.errors import Finding, Path
    from extproc.api.model_route import ModelMatch, StringMatch

# A token of RFC 9110.
_NAME: Final = re.compile(r"[0-9A-Za-z!#$%&'*+.^_`|~-]+")
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")
# What cannot be part of the path that conditions are compared with.
_NOT_IN_PATHS: Final = re.compile(r"[\x00-\x20\x7f?#]")
# Answers cannot do without these as they are.
_FRAMING: Final = frozenset(
    {"connection", "content-encoding", "content-length", "content-type", "host", "transfer-encoding", "upgrade"}
)


def check_matches(given: ModelMatch, path: Path) -> Iterator[Finding]:
    """Conditions that Envoy takes and that a request can meet."""
    for header, match in given.headers.items():
        yield from check_header_name(header, (*path, "headers", header))
        yield from _check_match(match, (*path, "headers", header))
        yield from _check_header_values(match, (*path, "headers", header))
    if given.uri is not None:
        yield from _check_match(given.uri, (*path, "uri"))
        yield from _check_paths(given.uri, (*path, "uri"))


def check_header_name(name: str, path: Path) -> Iterator[Finding]:
    """A name that a header can have."""
    if not _NAME.fullmatch(name):
        shown = ascii(name[:100])
        yield path, f"{shown} is no name of a header; write letters, digits and '-' (for the path, use uri)"


def check_answer_header(name: str, path: Path) -> Iterator[Finding]:
    """A header that the gateway may write into answers."""
    if name.lower() in _FRAMING:
        yield path, f"'{name}' is needed as engines send it; write another name, such as x-served-by"


def _check_match(match: StringMatch, path: Path) -> Iterator[Finding]:
    given = [name for name in ("exact", "prefix", "regex") if getattr(match, name) is not None]
    if len(given) != 1:
        yield path, f"has {' and '.join(given) or 'no condition'}; write exactly one of exact, prefix, regex"
    if match.prefix == "":
        yield (*path, "prefix"), "is empty, so it always holds; write a prefix, or leave the condition out"
    if match.regex is not None:
        try:
            compile_expression(match.regex)
        except ValueError as error:
            yield (*path, "regex"), str(error)


def _check_header_values(match: StringMatch, path: Path) -> Iterator[Finding]:
    for field, value in (("exact", match.exact), ("prefix", match.prefix)):
        if value is None:
            continue
        if _CONTROL.search(value):
            yield (*path, field), f"{value[:100]!a} has a control character, which no header's value can have"
        elif value.lstrip(" ") != value or (field == "exact" and value.rstrip(" ") != value):
            yield (*path, field), f"'{value[:100]}' begins or ends with a space, which is cut off headers; leave it out"


def _check_paths(match: StringMatch, path: Path) -> Iterator[Finding]:
    for field, value in (("exact", match.exact), ("prefix", match.prefix)):
        if value is not None and (value[:1] != "/" or _NOT_IN_PATHS.search(value)):
            advice = "write a path such as /v1/chat/completions, without a query"
            yield (*path, field), f"{value[:100]!a} is not the beginning of a path; {advice}"
