# SPDX-License-Identifier: Apache-2.0
"""Regular expressions, host names with wildcards and header names, as Envoy and the Gateway API read them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, Protocol

import re2  # type: ignore[import-untyped]  # it brings no annotations

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from extproc.api.config_errors import Finding, Path

# Of a compiled expression, in RE2's instructions: the bundle's bootstrap sets the same number for Envoy. Envoy's own
# default of 100 is exceeded by [a-z]{1,50}.
MAX_PROGRAM_SIZE: Final = 1000
# All hosts.
ANY_HOST: Final = "*"
# A token of RFC 9110.
_NAME: Final = re.compile(r"[0-9A-Za-z!#$%&'*+.^_`|~-]+")
# Clients need these headers of answers unchanged.
_FRAMING: Final = frozenset(
    {"connection", "content-encoding", "content-length", "content-type", "host", "transfer-encoding", "upgrade"}
)


class _Compiled(Protocol):
    """An expression compiled by google-re2."""

    @property
    def programsize(self) -> int: ...

    def fullmatch(self, text: bytes) -> object: ...


def compile_expression(text: str) -> Callable[[bytes], bool]:
    """Whether a whole value matches ``text``; raises ValueError with what to write instead.

    The library is Envoy's own, so extproc and Envoy agree on what matches, and no value takes more than linear time.
    """
    if not text:
        msg = "is empty; write exact: '' for an empty value, or leave the condition out"
        raise ValueError(msg)
    compiled = _compile(text)
    if compiled.programsize > MAX_PROGRAM_SIZE:
        msg = (
            f"compiles to {compiled.programsize} instructions, and Envoy takes at most {MAX_PROGRAM_SIZE}; "
            "write smaller repetitions, or use exact or prefix"
        )
        raise ValueError(msg)
    fullmatch = compiled.fullmatch
    return lambda value: fullmatch(value) is not None


def _compile(text: str) -> _Compiled:
    options = re2.Options()
    options.log_errors = False
    # byte by byte, as Envoy has it
    options.encoding = re2.Options.Encoding.LATIN1
    try:
        compiled: _Compiled = re2.compile(text.encode(), options)
    except (re2.error, UnicodeEncodeError) as error:
        why = error.args[0].decode(errors="replace") if isinstance(error, re2.error) else "it is not UTF-8"
        msg = (
            f"not a regular expression of RE2, as Envoy takes it: {why}; "
            "mend it (there is no look-around and no back-reference) or use exact or prefix"
        )
        raise ValueError(msg) from None
    return compiled


def covers_domain(pattern: str, domain: str) -> bool:
    """Whether all hosts of ``domain`` are hosts of ``pattern``. A wildcard stands for one label or more."""
    if ANY_HOST in (pattern, domain):
        return pattern == ANY_HOST
    return pattern == domain or (pattern.startswith("*.") and domain.endswith(pattern[1:]))


def covering_domains(domain: str) -> list[str]:
    """All that include all hosts of ``domain``, itself among them, the most specific first."""
    if domain == ANY_HOST:
        return [ANY_HOST]
    found = [domain]
    at = domain.find(".", 2 if domain.startswith("*.") else 0)
    while at >= 0:
        found.append(f"*{domain[at:]}")
        at = domain.find(".", at + 1)
    found.append(ANY_HOST)
    return found


def have_common_hosts(one: str, other: str) -> bool:
    """Whether a host can belong to both."""
    return covers_domain(one, other) or covers_domain(other, one)


def check_header_name(name: str, path: Path) -> Iterator[Finding]:
    """A name that a header can have."""
    if not _NAME.fullmatch(name):
        shown = ascii(name[:100])
        yield path, f"{shown} is no name of a header; write letters, digits and '-' (for the path, use uri)"


def check_response_header(name: str, path: Path) -> Iterator[Finding]:
    """A header that the gateway may write into answers."""
    if name.lower() in _FRAMING:
        yield path, f"'{name}' is needed as engines send it; write another name, such as x-served-by"
