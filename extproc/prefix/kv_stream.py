# SPDX-License-Identifier: Apache-2.0
"""Applies one publisher's KV events to the index, in order, and detects gaps.

An engine numbers its messages from 0 after each start. Missed messages are requested again if the engine offers a
replay. Otherwise its blocks are dropped from the index, which fills again with later events.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from extproc.prefix.kv_events import decode_batch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from extproc.prefix.kv_index import KvIndex, Source


class KvStream:
    """One stream. ``is_whole``: every event since the engine's start was applied; None before the first one."""

    def __init__(self, index: KvIndex, source: Source) -> None:
        self.is_whole: bool | None = None
        self._index = index
        self._source = source
        self._expected: int | None = None

    def disconnected(self) -> None:
        """The connection is lost: assume that the engine's cache is empty."""
        self._index.clear(self._source)
        self._expected, self.is_whole = None, None

    def receive(self, number: int, payload: bytes) -> int | None:
        """Apply a message and return None, or return the number from which to request a replay.

        The replay must include this message. Raises UnreadableEvents.
        """
        expected = self._expected
        if number == expected or (number == 0 and expected is None):
            self._apply(number, payload)
            return None
        if expected is not None and number > expected:
            return expected
        if expected is not None:
            # a smaller number: the engine has restarted with an empty cache
            self._index.clear(self._source)
            self._expected, self.is_whole = None, None
            if number == 0:
                self._apply(number, payload)
                return None
        return 0

    def is_old(self, number: int) -> bool:
        """Whether this message was already applied, as part of a replay."""
        return self._expected is not None and number < self._expected

    def replayed(self, start: int, messages: Iterable[tuple[int, bytes]]) -> None:
        """Apply the ``messages`` of a replay from number ``start``; empty if the engine has published nothing.

        Raises UnreadableEvents.
        """
        known = [(number, payload) for number, payload in messages if number >= start]
        if not start or (known and known[0][0] > start):
            self._index.clear(self._source)
        is_whole = bool(self.is_whole) if start else True
        if known and known[0][0] > start:
            is_whole = False
        self._expected = start
        for number, payload in known:
            is_whole = is_whole and number == self._expected
            self._apply(number, payload)
        self.is_whole = is_whole

    def missed(self, number: int, payload: bytes) -> None:
        """There is no replay: drop the engine's blocks and start with this message. Raises UnreadableEvents."""
        self._index.clear(self._source)
        self._apply(number, payload)
        self.is_whole = number == 0

    def _apply(self, number: int, payload: bytes) -> None:
        self._expected = number + 1
        if number == 0:
            self.is_whole = True
        self._index.apply(self._source, decode_batch(payload).events)
