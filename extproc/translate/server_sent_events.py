# SPDX-License-Identifier: Apache-2.0
"""Server-sent events: cut out of bytes that come in any pieces, and written."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING, Final

from extproc.translate.json_fields import Malformed, Object, encode_json

if TYPE_CHECKING:
    from collections.abc import Iterator

DONE: Final = b"[DONE]"
# The last event of a stream of responses repeats the whole answer.
MOST_EVENT_BYTES: Final = 16 * 1024 * 1024


class EventReader:
    """The data of each event. Names of events are not read: those of all three APIs stand in the data, too.

    As the standard has it, a line ends with LF, CR, or both, and a byte order mark may stand before the first one.
    """

    def __init__(self) -> None:
        self._line = bytearray()  # that has not ended
        self._searched = 0  # bytes of it that have no line break
        self._is_first = True
        self._is_after_cr = False
        self._data: list[bytes] = []
        self._data_bytes = 0

    @property
    def held_bytes(self) -> int:
        """Of an event that has not ended."""
        return len(self._line) + self._data_bytes

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """The data of events that ``piece`` ends; at most 16 MiB each."""
        piece = self._with_line_feeds(piece)
        buffer = self._line
        buffer += piece
        start, end = 0, buffer.find(b"\n", self._searched)
        while end >= 0:
            line = bytes(buffer[start:end])
            start = end + 1
            data = self._on_line(line)
            if data is not None:
                yield data
            end = buffer.find(b"\n", start)
        del buffer[:start]
        self._searched = len(buffer)
        self._check(len(buffer))

    def _with_line_feeds(self, piece: bytes) -> bytes:
        if self._is_after_cr and piece:
            piece = piece.removeprefix(b"\n")
            self._is_after_cr = False
        if b"\r" in piece:
            self._is_after_cr = piece.endswith(b"\r")
            piece = piece.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        return piece

    def _on_line(self, line: bytes) -> bytes | None:
        if self._is_first:
            line, self._is_first = line.removeprefix(codecs.BOM_UTF8), False
        if line.startswith(b"data:"):
            value = line[6:] if line[5:6] == b" " else line[5:]
            self._data.append(value)
            self._data_bytes += len(value) + 1
            self._check(0)
        elif not line and self._data:
            data = self._data[0] if len(self._data) == 1 else b"\n".join(self._data)
            self._data, self._data_bytes = [], 0
            return data
        return None

    def _check(self, more: int) -> None:
        if self._data_bytes + more > MOST_EVENT_BYTES:
            raise Malformed("an event has more than 16 MiB")


def encode_named_event(event: Object) -> bytes:
    """An event of messages or responses, whose name is its type."""
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), encode_json(event))


def encode_data_event(chunk: Object) -> bytes:
    """An event of chat."""
    return b"data: %b\n\n" % encode_json(chunk)
