# SPDX-License-Identifier: Apache-2.0
"""Authorisation at KEDA's port: which callers may read which decisions, and how many streams each may hold open.

A request names a namespace, and nothing in KEDA's protocol proves the caller's right to it. So every caller that
reaches the port is trusted, unless namespaces or names of certificates are listed.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator

# Each takes some 26 KiB.
MOST_STREAMS: Final = 4096
_OF_A_CALLER: Final = 2
_OF_A_NAMESPACE: Final = 8


class ReadPermissions(msgspec.Struct, frozen=True):
    """``namespaces``: those whose decisions are readable; empty: all. ``clients``: by a name in a client's certificate,
    the namespaces that it may read; none of them: all. Without ``clients``, certificates need no name.
    """

    namespaces: frozenset[str] = frozenset()
    clients: Mapping[str, frozenset[str]] = {}

    def refusal(self, names: Collection[str], namespace: str) -> str:
        """Why a caller may not read a namespace, and the remedy; empty if it may. ``names``: in its certificate."""
        if self.namespaces and namespace not in self.namespaces:
            return (
                f"decisions of the namespace {namespace} are not told here; start attache manager with --keda-namespace"
                f" {namespace}"
            )
        if not self.clients:
            return ""
        known = [self.clients[one] for one in names if one in self.clients]
        if not known:
            message = ", ".join(sorted(names)[:5]) or "none"
            return (
                f"no --keda-client-name of attache manager is in the client's certificate, whose names are: {message}"
            )
        if not any(not one or namespace in one for one in known):
            return f"this client's certificate is not for the namespace {namespace}; add that to its --keda-client-name"
        return ""


def parse_read_permissions(namespaces: Iterable[str], clients: Iterable[str]) -> ReadPermissions:
    """``clients``: each is ``NAME`` or ``NAME=NAMESPACE,NAMESPACE``. Raises ValueError."""
    found: dict[str, frozenset[str]] = {}
    for text in clients:
        name, sign, names = text.partition("=")
        its = frozenset(one.strip() for one in names.split(",")) if sign else frozenset[str]()
        if not name or "" in its:
            raise ValueError(f"{text!r}: write NAME, or NAME=NAMESPACE,NAMESPACE")
        if name in found:
            raise ValueError(f"{name!r} is there twice; write all of its namespaces together")
        found[name] = its
    return ReadPermissions(frozenset(namespaces), found)


class TooManyStreams(Exception):
    """The limit of streams is reached; the message names the caller, and what to do."""


class StreamLimiter:
    """At most ``most`` streams: half of them of one caller, so that one that takes all it can get leaves some to
    others, and an eighth for one namespace.
    """

    def __init__(self, most: int = MOST_STREAMS) -> None:
        self._most = most
        self._of_callers = Counter[str]()
        self._of_namespaces = Counter[str]()

    def __len__(self) -> int:
        return self._of_callers.total()

    @contextlib.contextmanager
    def count_stream(self, caller: str, namespace: str) -> Iterator[None]:
        """While the stream is open. Raises TooMany."""
        self._check(caller, namespace)
        self._of_callers[caller] += 1
        self._of_namespaces[namespace] += 1
        try:
            yield
        finally:
            _take_one(self._of_callers, caller)
            _take_one(self._of_namespaces, namespace)

    def _check(self, caller: str, namespace: str) -> None:
        else_ = "answers to polling go on; close streams that nobody needs, or raise attache manager's --keda-streams"
        of_namespace, of_caller = max(1, self._most // _OF_A_NAMESPACE), max(1, self._most // _OF_A_CALLER)
        if self._of_namespaces[namespace] >= of_namespace:
            raise TooManyStreams(
                f"{of_namespace} streams are open about the namespace {namespace}, the most there may be; {else_}"
            )
        if self._of_callers[caller] >= of_caller:
            raise TooManyStreams(
                f"{of_caller} streams of {caller} are open, the most that one caller may have; {else_}"
            )
        if len(self) >= self._most:
            raise TooManyStreams(f"{self._most} streams are open, the most there may be; {else_}")


def _take_one(counter: Counter[str], name: str) -> None:
    counter[name] -= 1
    if not counter[name]:
        del counter[name]
