# SPDX-License-Identifier: Apache-2.0
"""How many streams may be open at KEDA's port: in all, of one caller, and about one namespace."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

# Each takes some 26 KiB.
MOST_STREAMS: Final = 4096
_OF_A_CALLER: Final = 2
_OF_A_NAMESPACE: Final = 8


class TooMany(Exception):
    """No more streams; the message says of whom, and what to do."""


class OpenStreams:
    """At most ``most`` of them: half of these of one caller, so that another one finds room beside one that takes all
    it can get, and an eighth about one namespace.
    """

    def __init__(self, most: int = MOST_STREAMS) -> None:
        self._most = most
        self._of_callers = Counter[str]()
        self._of_namespaces = Counter[str]()

    def __len__(self) -> int:
        return self._of_callers.total()

    @contextlib.contextmanager
    def one(self, caller: str, namespace: str) -> Iterator[None]:
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
            raise TooMany(
                f"{of_namespace} streams are open about the namespace {namespace}, the most there may be; {else_}"
            )
        if self._of_callers[caller] >= of_caller:
            raise TooMany(f"{of_caller} streams of {caller} are open, the most that one caller may have; {else_}")
        if len(self) >= self._most:
            raise TooMany(f"{self._most} streams are open, the most there may be; {else_}")


def _take_one(counter: Counter[str], name: str) -> None:
    counter[name] -= 1
    if not counter[name]:
        del counter[name]
