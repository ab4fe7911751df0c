# SPDX-License-Identifier: Apache-2.0
"""Protobuf's wire format, as far as frequent answers are written in it directly.

Such an answer is mostly constant. Built from message objects it costs about as much as the pick that it carries,
because every object on the way to a field is allocated and looked up. So the constant parts are serialized once, from
message objects, and an answer is one concatenation of those parts, lengths, and the strings that vary.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from google.protobuf.message import Message

# The value of the field that varies, in the message that a Template is made of.
MARK: Final = "<varies>"

# Of the wire types, the lowest three bits of what stands before a field's value: a length and so many bytes.
_LENGTH_DELIMITED: Final = 2
# Heads are kept for values up to this size.
_KEPT_SIZES: Final = 1024


@lru_cache(maxsize=4096)
def varint(number: int) -> bytes:
    """A number in base 128, lowest digits first; the top bit of a byte says that more follow."""
    digits = bytearray()
    while number >= 0x80:
        digits.append(number & 0x7F | 0x80)
        number >>= 7
    digits.append(number)
    return bytes(digits)


def tag(message: type[Message], name: str) -> bytes:
    """What stands before the length of the field ``name``, which holds a message, a string or bytes."""
    return varint(message.DESCRIPTOR.fields_by_name[name].number << 3 | _LENGTH_DELIMITED)


def field(tag: bytes, value: bytes, *, more: int = 0) -> bytes:
    """A field with ``value``; or, of a field whose value has so many bytes ``more``, all that stands before these.

    So a message may end with a long value that is not copied into each of the fields around it.
    """
    return tag + varint(len(value) + more) + value


class Template:
    """A serialized message but for one string, which may be at any depth."""

    def __init__(self, message: Message) -> None:
        """``message`` has MARK as the value of the string that varies."""
        self._levels = _levels_around_mark(message.SerializeToString(deterministic=True))
        self._tail = b"".join(behind for _, behind in reversed(self._levels))
        self._heads: dict[int, bytes] = {}

    def filled(self, value: bytes) -> tuple[bytes, bytes, bytes]:
        """The message with ``value``, in parts."""
        size = len(value)
        return self._heads.get(size) or self._head(size), value, self._tail

    def _head(self, size: int) -> bytes:
        """All that stands before a value of ``size`` bytes: only the lengths of the fields around it depend on it."""
        head, behind_size = b"", 0
        for before, behind in reversed(self._levels):
            head = before + varint(len(head) + size + behind_size) + head
            behind_size += len(behind)
        if size < _KEPT_SIZES:
            self._heads[size] = head
        return head


def _levels_around_mark(message: bytes) -> list[tuple[bytes, bytes]]:
    """For every field around the mark, outermost first: what its message has before its length, and behind its
    value.
    """
    levels = []
    while message != MARK.encode():
        length_at, start, end = _field_with_mark(message)
        levels.append((message[:length_at], message[end:]))
        message = message[start:end]
    return levels


def _field_with_mark(message: bytes) -> tuple[int, int, int]:
    """Where the field's length begins, its value begins, and its value ends. Knows no fixed-width numbers."""
    end = 0
    while True:
        key, length_at = _read_varint(message, end)
        number, start = _read_varint(message, length_at)
        is_number = key & 7 != _LENGTH_DELIMITED
        end = start if is_number else start + number
        if not is_number and MARK.encode() in message[start:end]:
            return length_at, start, end


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """The number at ``at``, and where it ends."""
    number = shift = 0
    while data[at] >= 0x80:
        number |= (data[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
    return number | data[at] << shift, at + 1
