# SPDX-License-Identifier: Apache-2.0
"""Header blocks of HTTP/2 (HPACK, RFC 7541), read mostly from memory.

Gateways repeat themselves, and decoding takes longer than all else of a request's beginning. A block that is equal to
the last one has the same headers. The server allows no dynamic table, so a field has the same bytes in every block, and
those seen before are known. Of a block that differs in one value alone, as in a ``traceparent``, only that is read.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

from hpack import Decoder, HPACKError
from hpack.huffman_table import HUFFMAN_COMPLETE, HUFFMAN_EMIT_SYMBOL, HUFFMAN_FAIL, HUFFMAN_TABLE

if TYPE_CHECKING:
    from hpack.table import HeaderTable

Headers = list[tuple[str, str]]

# Of a connection. A client that sends others all the time costs what decoding costs.
_MOST_FIELDS: Final = 256
_LARGEST_FIELD: Final = 512
# More bytes make no number that a block has room for.
_LONGEST_NUMBER: Final = 5
_INDEXED: Final = 0x80
_INCREMENTAL: Final = 0x40
_SIZE_UPDATE: Final = 0x20
_BELOW_FLAG: Final = 0x7F
_HUFFMAN: Final = 0x80
_TOO_LARGE: Final = "headers in too many bytes"


class BadHeaderBlock(Exception):
    """What a client has sent is no header block."""


class _Frame(NamedTuple):
    """Blocks that differ in one value. ``before``: the bytes of a block up to it; ``after``: those behind its field.
    ``headers``: of a block, with the name at ``place``. ``left``: how many bytes the value may have.
    """

    before: bytes
    after: bytes
    headers: Headers
    place: int
    left: int


class HeaderBlockDecoder:
    """Decodes the blocks of one connection, in their order. ``most_bytes``: of the headers of one block, decoded."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._decoder = Decoder(max_header_list_size=most_bytes)
        # the last block and its headers, if reading it again would give the same
        self._last: tuple[bytes, Headers] = (b"", [])
        self._fields: dict[bytes, tuple[str, str]] = {}
        self._frame: _Frame | None = None

    def decode(self, block: bytes) -> Headers:
        """Its headers; raises BadHeaderBlock, after which nothing of the connection can be read."""
        if block == self._last[0]:
            return self._last[1]
        if not block:
            return []
        try:
            # the client may use a dynamic table until it has heard that it may not
            if self._decoder.header_table.maxsize or _SIZE_UPDATE <= block[0] < _INCREMENTAL:
                return self._decode_whole(block)
            headers = self._decode_value(block) or self._decode_fields(block)
        except (HPACKError, IndexError, ValueError) as error:
            raise BadHeaderBlock(str(error)[:200]) from None
        self._last = block, headers
        return headers

    def _decode_whole(self, block: bytes) -> Headers:
        self._frame = None
        table = self._decoder.header_table
        before = table.maxsize, len(table.dynamic_entries), _newest(table)
        headers = self._decoded(block)
        is_same = before[:2] == (table.maxsize, len(table.dynamic_entries)) and before[2] is _newest(table)
        self._last = (block, headers) if is_same else (b"", [])
        return headers

    def _decode_value(self, block: bytes) -> Headers | None:
        """Of a block that differs from earlier ones in one value; None if it does not."""
        frame = self._frame
        if frame is None or not (block.startswith(frame.before) and block.endswith(frame.after)):
            return None
        text = block[len(frame.before) : len(block) - len(frame.after)]
        if not text or _end_of_text(text, 0) != len(text):
            return None
        begin = 1 if text[0] & _BELOW_FLAG != _BELOW_FLAG else _end_of_number(text, 0)
        value = _from_huffman(text[begin:]) if text[0] & _HUFFMAN else text[begin:]
        if len(value) > frame.left:
            raise ValueError(_TOO_LARGE)
        headers = frame.headers.copy()
        headers[frame.place] = headers[frame.place][0], value.decode("latin-1")
        return headers

    def _decode_fields(self, block: bytes) -> Headers:
        fields, headers, at, left = self._fields, list[tuple[str, str]](), 0, self._most_bytes
        new: list[tuple[int, int, int]] = []
        while at < len(block):
            end = _end_of_field(block, at)
            field = block[at:end]
            header = fields.get(field)
            if header is None:
                (header,) = self._decoded(field)
                new.append((len(headers), at, end))
                if len(field) <= _LARGEST_FIELD:
                    if len(fields) >= _MOST_FIELDS:
                        fields.clear()
                    fields[field] = header
            headers.append(header)
            left -= 32 + len(header[0]) + len(header[1])
            if left < 0:
                raise ValueError(_TOO_LARGE)
            at = end
        if len(new) == 1 and not block[new[0][1]] & _INDEXED:
            ((index, at, end),) = new
            begin = _begin_of_value(block, at)
            self._frame = _Frame(block[:begin], block[end:], headers, index, left + len(headers[index][1]))
        return headers

    def _decoded(self, block: bytes) -> Headers:
        fields = self._decoder.decode(block, raw=True)
        return [(bytes(name).decode("latin-1"), bytes(value).decode("latin-1")) for name, value in fields]


def _end_of_field(block: bytes, at: int) -> int:
    """Where the field ends that begins there; raises IndexError behind the block's end."""
    first = block[at]
    if first & _INDEXED:
        return at + 1 if first != 0xFF else _end_of_number(block, at)
    return _end_of_text(block, _begin_of_value(block, at))


def _begin_of_value(block: bytes, at: int) -> int:
    """Of a field that has its value in itself."""
    first = block[at]
    mask = 0x3F if first & _INCREMENTAL else 0x0F
    if first & mask:
        return at + 1 if first & mask != mask else _end_of_number(block, at)
    return _end_of_text(block, at + 1)


def _end_of_text(block: bytes, at: int) -> int:
    size = block[at] & _BELOW_FLAG
    if size != _BELOW_FLAG:
        return at + 1 + size
    end = _end_of_number(block, at)
    for number, byte in enumerate(block[at + 1 : end]):
        size += (byte & _BELOW_FLAG) << 7 * number
    return end + size


def _end_of_number(block: bytes, at: int) -> int:
    """Where an integer ends whose prefix is all ones (RFC 7541, section 5.1)."""
    for end in range(at + 1, at + 1 + _LONGEST_NUMBER):
        if not block[end] & 0x80:
            return end + 1
    raise ValueError("a number without end")


def _from_huffman(data: bytes) -> bytes:
    """By bytes instead of half bytes, as the library goes: in a third of the time."""
    state, is_whole, parts = 0, True, list[bytes]()
    for byte in data:
        state, text, is_whole = _step(state, byte)
        parts.append(text)
    if not is_whole:
        raise HPACKError("Incomplete Huffman string")
    return b"".join(parts)


@lru_cache(maxsize=1 << 16)
def _step(state: int, byte: int) -> tuple[int, bytes, bool]:
    """Of a Huffman decoder: its next state, what it writes, and whether the text may end there."""
    text, flags = b"", 0
    for half in (byte >> 4, byte & 0x0F):
        state, flags, symbol = HUFFMAN_TABLE[16 * state + half]
        if flags & HUFFMAN_FAIL:
            raise HPACKError("Invalid Huffman string")
        if flags & HUFFMAN_EMIT_SYMBOL:
            text += bytes([symbol])
    return state, text, bool(flags & HUFFMAN_COMPLETE)


def _newest(table: HeaderTable) -> tuple[bytes, bytes] | None:
    return table.dynamic_entries[0] if table.dynamic_entries else None
