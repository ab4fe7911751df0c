"""One publisher's stream of KV events into the index: in order, whole, or known not to be.

Messages are numbered from 0 at each start of the engine. What was missed is asked for again where the engine offers a replay;
where it does not, the index is emptied of that engine rather than trusted, and fills again with what comes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from extproc.prefix.kv_events import decode_batch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from extproc.prefix.kv_index import KvIndex, Source


class KvStream:
    """State of one stream. ``is_whole``: everything since the engine's start has been applied; None before the first word."""

    def __init__(self, index: KvIndex, source: Source) -> None:
        self.is_whole: bool | None = None
        self._index = index
        self._source = source
        self._expected: int | None = None

    def disconnected(self) -> None:
        """The engine is gone: so is its cache, as far as we can know."""
        self._index.clear(self._source)
        self._expected, self.is_whole = None, None

    def receive(self, number: int, payload: bytes) -> int | None:
        """Apply a message, or say from which number on to ask for a replay, which must hold this one too.

        Raises UnreadableEvents.
        """
        expected = self._expected
        if number == expected or (number == 0 and expected is None):
            self._apply(number, payload)
            return None
        if expected is not None and number > expected:
            return expected
        if expected is not None:
            # backwards: another process with an empty cache
            self._index.clear(self._source)
            self._expected, self.is_whole = None, None
            if number == 0:
                self._apply(number, payload)
                return None
        return 0

    def is_old(self, number: int) -> bool:
        """Whether a replay has already brought this message."""
        return self._expected is not None and number < self._expected

    def replayed(self, start: int, messages: Iterable[tuple[int, bytes]]) -> None:
        """What a replay from ``start`` on brought; an engine that has said nothing yet brings nothing.

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
        """There is no replay: begin again with this message. Raises UnreadableEvents."""
        self._index.clear(self._source)
        self._apply(number, payload)
        self.is_whole = number == 0

    def _apply(self, number: int, payload: bytes) -> None:
        self._expected = number + 1
        if number == 0:
            self.is_whole = True
        self._index.apply(self._source, decode_batch(payload).events)
