# SPDX-License-Identifier: Apache-2.0
"""Change top-level fields of a JSON object without decoding or re-encoding the values of the others.

The object is decoded one level deep, changed and written again: every other value is copied byte for byte, so that
numbers keep their digits and members their order. A field that occurs twice, or whose name is escaped, comes out once
and in plain form, with the value that ``parse`` read: the engine cannot read another.

Scanning a long prompt for that is most of the work, and ``parse`` has scanned it before. So a large body is given
together with the span of its contents; they are cut out, the short remainder is changed, and they are put back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Collection

# A byte range of a body, ``start`` and ``end``, that begins and ends with a whole JSON value.
Span = tuple[int, int]

# Stands for the contents while the remainder is changed. A client that writes the same loses the short cut, no more.
_PLACEHOLDER: Final = b'"\\u0000contents\\u0000"'
_decoder: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


def with_changes(
    body: bytes, changes: dict[str, object], contents: Span | None = None, *, without: Collection[str] = ()
) -> bytes:
    """The JSON object ``body`` with top-level fields replaced, added or removed; all other values byte for byte.

    ``without``: the fields to remove.
    ``contents``: the span of what makes the body long, which need not be read again.
    """
    if contents is not None:
        start, end = contents
        short = _changed(without_contents(body, contents), changes, without)
        before, _, after = short.partition(_PLACEHOLDER)
        # once, and not replaced by a change
        if short.count(_PLACEHOLDER) == 1:
            return b"".join((before, memoryview(body)[start:end], after))
    return _changed(body, changes, without)


def has_unambiguous_names(body: bytes, contents: Span | None = None) -> bool:
    """Whether every top-level name of ``body`` occurs once, and as it is: no reader can find another value than
    ``parse`` did.

    For sure if it is written as most clients' libraries write JSON, without spaces or with one after each mark; a body
    in any other form is taken for one that is not plain. ``contents``: as in ``with_changes``.
    """
    body = without_contents(body, contents)
    fields = raw_top_level_fields(body)
    if msgspec.json.encode(fields) == body:
        return True
    spaced = [b'"%b": %b' % (name.encode(), value) for name, value in fields.items()]
    return b"{%b}" % b", ".join(spaced) == body


def raw_top_level_fields(body: bytes, contents: Span | None = None) -> dict[str, msgspec.Raw]:
    """The top-level fields of the JSON object ``body``, undecoded. ``contents``: this span of it is left out."""
    return _decoder.decode(without_contents(body, contents))


def without_contents(body: bytes, contents: Span | None) -> bytes:
    """``body`` with a short text in place of its ``contents``."""
    return body if contents is None else b"".join((body[: contents[0]], _PLACEHOLDER, body[contents[1] :]))


def span_of(body: bytes, first: msgspec.Raw, last: msgspec.Raw) -> Span | None:
    """Where the values ``first`` to ``last``, decoded from ``body``, stand in it; None if they are not views of it."""
    base = _address(body)
    start, end = _address(first) - base, _address(last) - base + memoryview(last).nbytes
    return (start, end) if 0 <= start < end <= len(body) else None


def spans_of_fields(body: bytes, names: Collection[str]) -> dict[str, Span]:
    """Where the values of these top-level fields stand, of those that are there; none if the body is no JSON object."""
    try:
        fields = _decoder.decode(body)
    except msgspec.DecodeError:
        return {}
    found = {name: span_of(body, fields[name], fields[name]) for name in names if name in fields}
    return {name: span for name, span in found.items() if span is not None}


def _address(data: bytes | msgspec.Raw) -> int:
    return np.frombuffer(data, np.uint8).ctypes.data


def _changed(body: bytes, changes: dict[str, object], without: Collection[str]) -> bytes:
    fields = _decoder.decode(body)
    for name in without:
        fields.pop(name, None)
    return msgspec.json.encode(fields | changes)
