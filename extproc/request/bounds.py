# SPDX-License-Identifier: Apache-2.0
"""Bounds on how many JSON values a body may have, checked before it is decoded.

Decoding an object costs as much as decoding kilobytes of text, so a body of empty messages would hold up all other
requests for seconds, and take a hundred times its size in memory. Marks (braces, colons, commas, quotes) are counted
first, which is fast. Where there are many, they may stand in text, as in prompts with source code; then only those
outside of strings count.

Which marks stand outside is computed on bitmaps of the text, as simdjson does it (Langdale, Lemire: Parsing Gigabytes
of JSON per Second, 2019), with Python's integers as bitmaps.
"""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np

from extproc.errors import BadRequest

# Long conversations with many tools have a few thousand of each.
MOST_OBJECTS: Final = 16_384
MOST_MEMBERS: Final = 4 * MOST_OBJECTS
# Names, and values that are text.
MOST_STRINGS: Final = 2 * MOST_MEMBERS
# Of a prompt in tokens; the longest contexts have some millions.
MOST_COMMAS: Final = 3 * 2**20
# Of all but the messages, the prompt or the input: tools, schemas.
MOST_OTHER_BYTES: Final = 4 * 2**20
# No shorter body can have more: ``{},`` is the shortest object in a list, ``"":0,`` the shortest member. The shortest
# text is ``"",``, the shortest value ``1,``.
_SHORT_BYTES: Final = 3 * MOST_OBJECTS
_SHORT_OF_MEMBERS: Final = 5 * MOST_MEMBERS
_CHUNK_BYTES: Final = 1 << 20
_QUOTE, _BRACE, _COLON, _COMMA, _BACKSLASH = b'"{:,\\'
# Bits at even places.
_EVEN: Final = int.from_bytes(b"\x55" * (_CHUNK_BYTES // 8 + 64), "little")


class Counts(msgspec.Struct, frozen=True):
    """Marks outside of strings, and quotes that begin or end one."""

    objects: int = 0
    members: int = 0
    commas: int = 0
    quotes: int = 0

    def plus(self, other: Counts) -> Counts:
        """The sum of both."""
        return Counts(
            self.objects + other.objects,
            self.members + other.members,
            self.commas + other.commas,
            self.quotes + other.quotes,
        )

    @property
    def is_too_much(self) -> bool:
        """Whether no real request has so many."""
        return (
            self.objects > MOST_OBJECTS
            or self.members > MOST_MEMBERS
            or self.commas > MOST_COMMAS
            or self.quotes > 2 * MOST_STRINGS
        )


def check_bounds(body: bytes) -> None:
    """Raise BadRequest if the body has more values than any real request."""
    if len(body) <= _SHORT_BYTES:
        return
    text = np.frombuffer(body, np.uint8)
    # those that the body is long enough to have too many of; a fifth of the time of bytes.count
    marks = (
        _BRACE,
        _COLON if len(body) > _SHORT_OF_MEMBERS else None,
        _COMMA if len(body) > 2 * MOST_COMMAS else None,
        _QUOTE if len(body) > 3 * MOST_STRINGS else None,
    )
    if not Counts(*(0 if mark is None else int(np.count_nonzero(text == mark)) for mark in marks)).is_too_much:
        return
    counts, start, is_inside = Counts(), 0, False
    while start < len(body):
        end = min(len(body), start + _CHUNK_BYTES)
        while end < len(body) and end - start < 2 * _CHUNK_BYTES and body[end - 1 : end] == b"\\":
            # an escape must not be divided
            end += 1
        in_chunk, is_inside = count_outside_strings(text[start:end], is_inside=is_inside)
        counts, start = counts.plus(in_chunk), end
        if counts.is_too_much:
            raise BadRequest(
                f"The body has more than {MOST_OBJECTS} JSON objects, {MOST_MEMBERS} fields, {MOST_STRINGS} texts or "
                f"{MOST_COMMAS} values; send fewer messages or prompts."
            )


def check_rest(body: bytes, contents: tuple[int, int] | None) -> None:
    """Raise BadRequest if all but the ``contents``, a byte range of ``body``, is longer than in any real request."""
    start, end = contents or (0, 0)
    if len(body) - (end - start) > MOST_OTHER_BYTES:
        raise BadRequest(
            f"The fields beside the messages have more than {MOST_OTHER_BYTES} bytes; send shorter tools and schemas."
        )


def count_outside_strings(chunk: np.ndarray[tuple[int], np.dtype[np.uint8]], *, is_inside: bool) -> tuple[Counts, bool]:
    """Of up to 2 MiB that end with no half of an escape. ``is_inside``: whether it begins in a string; also whether it
    ends so.
    """
    quotes = _bitmap(chunk, _QUOTE) & ~_escaped(_bitmap(chunk, _BACKSLASH))
    # a bit is inside if an odd number of quotes stands at or before it
    inside, shift = quotes, 1
    while shift < chunk.size:
        inside ^= inside << shift
        shift *= 2
    everything = (1 << chunk.size) - 1
    inside &= everything
    if is_inside:
        inside ^= everything
    outside = inside ^ everything
    objects, members, commas = ((_bitmap(chunk, mark) & outside).bit_count() for mark in (_BRACE, _COLON, _COMMA))
    return Counts(objects, members, commas, quotes.bit_count()), bool(inside >> max(chunk.size - 1, 0))


def _bitmap(chunk: np.ndarray[tuple[int], np.dtype[np.uint8]], mark: int) -> int:
    """Bit i is set if byte i is ``mark``."""
    return int.from_bytes(np.packbits(chunk == mark, bitorder="little").tobytes(), "little")


def _escaped(backslashes: int) -> int:
    """What a backslash stands before that is not itself escaped: the byte after each run of odd length."""
    if not backslashes:
        return 0
    starts = backslashes & ~(backslashes << 1)
    even_starts, odd_starts = starts & _EVEN, starts & ~_EVEN
    # adding the start of a run to it carries into the byte after it
    after_even = (backslashes + even_starts) & ~backslashes
    after_odd = (backslashes + odd_starts) & ~backslashes
    return (after_even & ~_EVEN) | (after_odd & _EVEN)
