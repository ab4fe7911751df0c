# SPDX-License-Identifier: Apache-2.0
"""Request bodies of every API to an InferenceRequest, or to a refusal with the correction.

Also for a body without a known API: its API by its fields, and its steering fields.

How many JSON values a body may have is checked before it is decoded. Decoding an object costs as much as decoding
kilobytes of text, so a body of empty messages would hold up all other requests for seconds, and take a hundred times
its size in memory. Marks (braces, colons, commas, quotes) are counted first, which is fast. Where there are many, they
may stand in text, as in prompts with source code; then only those outside of strings count. Which do is computed on
bitmaps of the text, as simdjson does it (Langdale, Lemire: Parsing Gigabytes of JSON per Second, 2019), with Python's
integers as bitmaps.
"""

from __future__ import annotations

import json
import re
from operator import attrgetter
from pkgutil import resolve_name
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NoReturn

import msgspec
import numpy as np

from extproc.refusals import BadRequest
from extproc.request.inference_request import ABSENT, NUMBERS, STEERING_FIELDS, InferenceRequest, steering_fields_in
from extproc.request.multipart_form import read_form
from extproc.wire_names import ANTHROPIC_VERSION, BODY_APIS, Api

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

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
_NO_HEADERS: Final[Mapping[str, str]] = MappingProxyType({})
# from bytes, or from a Form
_PARSERS: Final[dict[Api, Callable[[Any], InferenceRequest]]] = {
    api: resolve_name(f"{__package__}.{api.spec.parser}") for api in BODY_APIS
}
_FIELDS_OF: Final = {api: [frozenset(one.split()) for one in api.spec.fields_of] for api in BODY_APIS}
# those of all APIs, undecoded
_NAMES: Final = sorted(
    {name.removesuffix("[]") for sets in _FIELDS_OF.values() for one in sets for name in one} - {ANTHROPIC_VERSION}
)
_shape: Final = msgspec.json.Decoder(
    msgspec.defstruct("_Shape", [(name, msgspec.Raw, ABSENT) for name in _NAMES], gc=False)
)
_values: Final = attrgetter(*_NAMES)
# Spaces, marks of byte order, and the other halves of a brace's two or four bytes.
_BEFORE_OBJECTS: Final = b" \t\r\n\0\xef\xbb\xbf\xfe\xff"
_ESCAPE: Final = re.compile(r"\\u([0-9a-fA-F]{4})")


class JsonMarkCounts(msgspec.Struct, frozen=True):
    """Marks outside of strings, and quotes that begin or end one."""

    objects: int = 0
    members: int = 0
    commas: int = 0
    quotes: int = 0

    def plus(self, other: JsonMarkCounts) -> JsonMarkCounts:
        """The sum of both."""
        return JsonMarkCounts(
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
    if not JsonMarkCounts(*(0 if mark is None else int(np.count_nonzero(text == mark)) for mark in marks)).is_too_much:
        return
    counts, start, is_inside = JsonMarkCounts(), 0, False
    while start < len(body):
        end = min(len(body), start + _CHUNK_BYTES)
        while end < len(body) and end - start < 2 * _CHUNK_BYTES and body[end - 1 : end] == b"\\":
            # an escape must not be divided
            end += 1
        in_chunk, is_inside = count_json_marks(text[start:end], is_inside=is_inside)
        counts, start = counts.plus(in_chunk), end
        if counts.is_too_much:
            raise BadRequest(
                f"The body has more than {MOST_OBJECTS} JSON objects, {MOST_MEMBERS} fields, {MOST_STRINGS} texts or "
                f"{MOST_COMMAS} values; send fewer messages or prompts."
            )


def count_json_marks(
    chunk: np.ndarray[tuple[int], np.dtype[np.uint8]], *, is_inside: bool
) -> tuple[JsonMarkCounts, bool]:
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
    return JsonMarkCounts(objects, members, commas, quotes.bit_count()), bool(inside >> max(chunk.size - 1, 0))


def _bitmap(chunk: np.ndarray[tuple[int], np.dtype[np.uint8]], mark: int) -> int:
    """Bit i is set if byte i is ``mark``."""
    return int.from_bytes(np.packbits(chunk == mark, bitorder="little").tobytes(), "little")


def _escaped(backslashes: int) -> int:
    """The escaped bytes: the byte after each run of backslashes of odd length."""
    if not backslashes:
        return 0
    starts = backslashes & ~(backslashes << 1)
    even_starts, odd_starts = starts & _EVEN, starts & ~_EVEN
    # adding the start of a run to it carries into the byte after it
    after_even = (backslashes + even_starts) & ~backslashes
    after_odd = (backslashes + odd_starts) & ~backslashes
    return (after_even & ~_EVEN) | (after_odd & _EVEN)


def parse_body(api: Api, body: bytes, headers: Mapping[str, str] = _NO_HEADERS) -> InferenceRequest:
    """Read the request in ``body``. Raises BadRequest with the correction."""
    if not body:
        raise missing_body_refusal(api)
    if api.spec.body == "form":
        return _PARSERS[api](read_form(body, headers.get("content-type", "")))
    check_bounds(body)
    try:
        # msgspec does not check the text of fields that it skips
        if not body.isascii():
            body.decode()
        request = _PARSERS[api](body)
    except UnicodeDecodeError as error:
        raise BadRequest(f"The body is not UTF-8 at byte {error.start}; send JSON in UTF-8, not compressed.") from None
    except RecursionError:
        raise BadRequest("The body is nested too deeply; send plain messages.") from None
    except msgspec.ValidationError as error:
        _refuse_shape(str(error))
    except msgspec.DecodeError as error:
        raise BadRequest(f"The body is not JSON: {error}.") from None
    start, end = request.contents or (0, 0)
    if len(body) - (end - start) > MOST_OTHER_BYTES:
        raise BadRequest(
            f"The fields beside the messages have more than {MOST_OTHER_BYTES} bytes; send shorter tools and schemas."
        )
    return request


def missing_body_refusal(api: Api) -> BadRequest:
    """The refusal of a request without a body."""
    what = "form" if api.spec.body == "form" else "JSON object"
    return BadRequest(f"The request has no body; send a {what} with at least 'model'.")


def _refuse_shape(problem: str) -> NoReturn:
    """Raise what msgspec reports, ``Expected `str`, got `int` - at `$.model```, with the field in OpenAI's
    ``param``.
    """
    what, _, where = problem.partition(" - at `")
    param = where.rstrip("`").removeprefix("$").lstrip(".") or None
    if "missing required field" in what:
        name = what.split("`")[1]
        param = f"{param}.{name}" if param else name
        raise BadRequest(f"The field '{param}' is missing; it is required.", param=param)
    if param is not None and param in NUMBERS:
        raise BadRequest(f"'{param}' must be {NUMBERS[param]}; send one, or leave the field out.", param=param)
    raise BadRequest(f"{what.replace('`', chr(39))}{f' in {param}' if param else ' as the body'}.", param=param)


def api_by_body(body: bytes, headers: Mapping[str, str]) -> Api | None:
    """By its fields, where a gateway does not send the path; None if it is no JSON object with those of an API.

    Messages are Anthropic's if the client names a version of that API, or writes ``system`` beside them. A request to
    count tokens looks the same; it is taken for the one that costs more, because a client could leave out the
    difference and be charged nothing for a generation.
    """
    if headers.get("content-type", "").lower().startswith("multipart/form-data"):
        return next((api for api in _FIELDS_OF if api.spec.body == "form"), None)
    try:
        shape = _shape.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    found = {name for name, value in zip(_NAMES, _values(shape), strict=True) if value}
    found |= {f"{name}[]" for name in found if _is_list_of_texts(getattr(shape, name))}
    if headers.get(ANTHROPIC_VERSION):
        found.add(ANTHROPIC_VERSION)
    fitting = [(len(fields), api) for api, sets in _FIELDS_OF.items() for fields in sets if fields <= found]
    return max(fitting, key=lambda one: one[0])[1] if fitting else None


def _is_list_of_texts(field: msgspec.Raw) -> bool:
    """Whether it is a list whose elements are no objects, as an item of a conversation is."""
    text = bytes(field).lstrip()
    return text[:1] == b"[" and text[1:].lstrip()[:1] != b"{"


class _Nested(msgspec.Struct, gc=False):
    vllm_xargs: msgspec.Raw = ABSENT
    sampling_params: msgspec.Raw = ABSENT


class _Sampling(msgspec.Struct, gc=False):
    extra_args: msgspec.Raw = ABSENT


def steering_fields_of_unread_body(body: bytes) -> tuple[str, ...]:
    """The steering fields of a body; none if it is no JSON object.

    Engines read more than JSON: numbers such as NaN, other encodings than UTF-8. In such a body, a field's name in
    quotes counts wherever it stands.
    """
    if not body.lstrip(_BEFORE_OBJECTS).startswith(b"{"):
        return ()
    try:
        nested = _nested.decode(body)
        found = steering_fields_in(msgspec.Raw(body)) + steering_fields_in(nested.vllm_xargs)
        if nested.sampling_params:
            found += steering_fields_in(_sampling.decode(nested.sampling_params).extra_args)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _named_in(body)
    return found


def _named_in(body: bytes) -> tuple[str, ...]:
    text = body.decode(json.detect_encoding(body), errors="replace")
    plain = _ESCAPE.sub(lambda escape: chr(int(escape[1], 16)), text)
    return tuple([name for name in STEERING_FIELDS if f'"{name}"' in plain])


_nested: Final = msgspec.json.Decoder(_Nested)
_sampling: Final = msgspec.json.Decoder(_Sampling)
