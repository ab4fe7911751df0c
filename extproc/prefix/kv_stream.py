# SPDX-License-Identifier: Apache-2.0
"""Applies one publisher's KV events to the index, in order, and detects gaps.

An engine numbers its messages from 0 after each start. Missed messages are requested again if the engine offers a
replay. Otherwise its blocks are dropped from the index, which fills again with later events.

Messages are applied in slices: what applies them lets requests be served between two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from extproc.prefix.kv_events import Removed, Stored, decode_batch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from extproc.prefix.kv_events import Event
    from extproc.prefix.kv_index import KvIndex, Source

# Blocks and events that are applied at once: 1 to 3 ms.
_SLICE: Final = 1_000


class KvStream:
    """One stream into ``index``."""

    def __init__(self, index: KvIndex, source: Source) -> None:
        self._index = index
        self._source = source
        self._expected: int | None = None
        self._is_whole: bool | None = None

    @property
    def is_whole(self) -> bool | None:
        """Whether every event since the engine's start is in the index; None before the first one."""
        return self._is_whole and self._index.is_complete(self._source)

    @property
    def is_truncated(self) -> bool:
        """Whether the engine has more blocks, media or block sizes than are followed."""
        return not self._index.is_complete(self._source)

    def disconnected(self) -> None:
        """The connection is lost: assume that the engine's cache is empty."""
        self._index.clear(self._source)
        self._expected, self._is_whole = None, None

    def gap_before(self, number: int) -> int | None:
        """From which number on to request a replay, which must include this message; None: it can be applied.

        After a smaller number than before, the engine has restarted with an empty cache.
        """
        expected = self._expected
        if expected is not None and number < expected:
            self.disconnected()
            expected = None
        if number == (expected or 0):
            return None
        return expected or 0

    def is_old(self, number: int) -> bool:
        """Whether this message was already applied, as part of a replay."""
        return self._expected is not None and number < self._expected

    def apply(self, number: int, payload: bytes) -> Iterator[None]:
        """Apply the next message, a slice with each step. Raises UnreadableEvents."""
        self._expected = number + 1
        if number == 0:
            self._is_whole = True
        for events in _slices(decode_batch(payload)):
            self._index.apply(self._source, events)
            yield

    def replayed(self, start: int, messages: Iterable[tuple[int, bytes]]) -> Iterator[None]:
        """Apply the ``messages`` of a replay from number ``start``, a slice with each step. There are none if the
        engine has published nothing. Raises UnreadableEvents.
        """
        known = [(number, payload) for number, payload in messages if number >= start]
        if not start or (known and known[0][0] > start):
            self._index.clear(self._source)
        is_whole = bool(self._is_whole) if start else True
        if known and known[0][0] > start:
            is_whole = False
        self._expected = start
        for number, payload in known:
            is_whole = is_whole and number == self._expected
            yield from self.apply(number, payload)
        self._is_whole = is_whole

    def missed(self, number: int, payload: bytes) -> Iterator[None]:
        """There is no replay: drop the engine's blocks and start with this message, a slice with each step. Raises
        UnreadableEvents.
        """
        self._index.clear(self._source)
        self._is_whole = False
        yield from self.apply(number, payload)


def _slices(events: Iterable[Event]) -> Iterator[list[Event]]:
    together: list[Event] = []
    size = 0
    for event in events:
        together.append(event)
        size += 1 + (len(event.hashes) if isinstance(event, (Stored, Removed)) else 0)
        if size >= _SLICE:
            yield together
            together, size = [], 0
    yield together
