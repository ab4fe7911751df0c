# SPDX-License-Identifier: Apache-2.0
"""Bounds on how many JSON objects and members a body may have, checked before it is decoded.

Decoding an object costs as much as decoding kilobytes of text, so a body of empty messages would hold up all other
requests for seconds, and take a hundred times its size in memory. Braces and colons are counted first, which is fast.
Where there are many, they may stand in text, as in prompts with source code; then only those outside of strings count.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from extproc.errors import BadRequest

# Long conversations with many tools have a few thousand of each.
MOST_OBJECTS: Final = 32_768
MOST_MEMBERS: Final = 4 * MOST_OBJECTS
# No shorter body can have more: ``{},`` is the shortest object in a list, ``"":0,`` the shortest member.
_SHORT_BYTES: Final = 3 * MOST_OBJECTS
_CHUNK_BYTES: Final = 1 << 20
_QUOTE, _BRACE, _COLON = b'"{:'


def check_bounds(body: bytes) -> None:
    """Raise BadRequest if the body has more objects or members than any real request."""
    if len(body) <= _SHORT_BYTES:
        return
    # a fifth of the time of bytes.count
    text = np.frombuffer(body, np.uint8)
    if np.count_nonzero(text == _BRACE) <= MOST_OBJECTS and np.count_nonzero(text == _COLON) <= MOST_MEMBERS:
        return
    objects = members = start = 0
    is_inside = False
    while start < len(body):
        end = min(len(body), start + _CHUNK_BYTES)
        while end < len(body) and body[end - 1 : end] == b"\\":
            # an escape must not be divided
            end += 1
        in_chunk, in_chunk_members, is_inside = _count_outside_strings(body[start:end], is_inside=is_inside)
        objects, members, start = objects + in_chunk, members + in_chunk_members, end
        if objects > MOST_OBJECTS or members > MOST_MEMBERS:
            raise BadRequest(
                f"The body has more than {MOST_OBJECTS} JSON objects or {MOST_MEMBERS} fields; send fewer messages."
            )


def _count_outside_strings(chunk: bytes, *, is_inside: bool) -> tuple[int, int, bool]:
    """Objects, members, and whether the chunk ends inside of a string. ``is_inside``: whether it begins in one."""
    # what is left of escapes is no quotation mark, so the quotation marks that remain begin and end strings
    plain = np.frombuffer(chunk.replace(b"\\\\", b"").replace(b'\\"', b""), np.uint8)
    if not plain.size:
        return 0, 0, is_inside
    inside = np.logical_xor.accumulate(plain == _QUOTE) ^ is_inside
    outside = ~inside
    objects = int(np.count_nonzero((plain == _BRACE) & outside))
    members = int(np.count_nonzero((plain == _COLON) & outside))
    return objects, members, bool(inside[-1])
