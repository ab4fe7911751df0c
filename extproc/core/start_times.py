# SPDX-License-Identifier: Apache-2.0
"""How long ModelServers without engines take to get one: measured here, for retry-after."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Collection

_WEIGHT: Final = 0.3
# What took longer was not started for the request that waited.
_LONGEST_START_S: Final = 3600.0
# Of a start that is later than expected: clients come back when it has taken this share longer.
_LATE_SHARE: Final = 0.1
_LEAST_REST_S: Final = 1.0
# Nobody has waited for the time of so many starts: the next request begins a new one.
_STARTS_TO_FORGET: Final = 2


class StartTimes:
    """By server: since when an engine is awaited, and the recent mean of what starts took."""

    def __init__(self) -> None:
        self._since_s: dict[str, float] = {}
        # since when nobody waits any more
        self._left_s: dict[str, float] = {}
        self._typical_s: dict[str, float] = {}

    @property
    def awaited(self) -> Collection[str]:
        """The servers of which an engine is awaited, also by clients that have left since."""
        return self._since_s.keys()

    def begin(self, server: str, now: float, assumed_s: float) -> None:
        """A request waits for an engine; only the first since the last one left counts.

        Clients that left long before it did not cause the start that comes now: none was begun for them, as where they
        hung up at once.
        """
        left_s = self._left_s.pop(server, None)
        if left_s is not None and now - left_s > _STARTS_TO_FORGET * self.typical_s(server, assumed_s):
            self._since_s.pop(server, None)
        self._since_s.setdefault(server, now)

    def left(self, server: str, now: float) -> None:
        """Nobody waits any more, and an engine may still come."""
        if server in self._since_s:
            self._left_s[server] = now

    def end(self, server: str, now: float) -> float:
        """An engine is there. Returns how long it took."""
        took_s = now - self._since_s.pop(server)
        self._left_s.pop(server, None)
        if took_s <= _LONGEST_START_S:
            known = self._typical_s.get(server)
            self._typical_s[server] = took_s if known is None else known + _WEIGHT * (took_s - known)
        return took_s

    def cancel(self, server: str) -> None:
        """Nobody waits for it any more: who did was served elsewhere."""
        self._since_s.pop(server, None)
        self._left_s.pop(server, None)

    def keep(self, servers: Collection[str]) -> None:
        """Forget all other servers."""
        for server in {*self._since_s, *self._typical_s}.difference(servers):
            self._since_s.pop(server, None)
            self._left_s.pop(server, None)
            self._typical_s.pop(server, None)

    def typical_s(self, server: str, assumed_s: float) -> float:
        """What a start takes; ``assumed_s`` until one was measured."""
        return self._typical_s.get(server, assumed_s)

    def retry_after_s(self, server: str, assumed_s: float, now: float) -> int:
        """What is left of the start, as expected: whole seconds, at least one."""
        so_far_s = now - self._since_s.get(server, now)
        rest_s = self.typical_s(server, assumed_s) - so_far_s
        if rest_s <= 0:
            rest_s = _LATE_SHARE * so_far_s
        return math.ceil(max(_LEAST_REST_S, rest_s))
