# SPDX-License-Identifier: Apache-2.0
"""Calls of gRPC whose message names the model: where its name stands, and the same message with another name.

Of a field that occurs twice, readers of protobuf take the last one, so the name is not known before the end of the
message. All fields of the message are passed over, by their lengths; what they have in them is not read. A message with
two names is refused: an engine must serve the model whose limits and policies were checked.
"""

from __future__ import annotations

import re
from functools import lru_cache
from struct import Struct
from typing import TYPE_CHECKING, Final

from extproc.refusals import BadRequest, CompressedMessage, MethodNotAllowed, ModelRepositoryRefused, UnknownPath
from extproc.request.inference_request import FieldSpan, GrpcModelLocation, InferenceRequest
from extproc.wire_names import APIS_BY_CALL, CALL_ROOTS, REPOSITORY_CALLS, SERVER_CALLS, Api

if TYPE_CHECKING:
    from collections.abc import Mapping

    from extproc.wire_names import GrpcModelCalls

# Of a message, and of its part that names the model: requests have some hundreds of tensors.
MOST_FIELDS: Final = 4096
MOST_NAME_BYTES: Final = 1024
_SHOWN_CHARACTERS: Final = 100
# Whether the message is compressed, and its length.
_PREFIX: Final = Struct(">BL")
_LENGTH_DELIMITED: Final = 2
# Of protobuf's numbers, by wire type.
_FIXED_BYTES: Final = {1: 8, 5: 4}
_VERSION_FIELD: Final = 2
_MOST_KEY: Final = 2**32 - 1
_CALL_TYPE: Final = re.compile(r"application/grpc(\+proto)?(;.*)?")
_TIMEOUT: Final = re.compile(r"[0-9]{1,8}[HMSmun]")
_NAMES: Final = {(1,): "model_name", (1, 1): "model_spec.name"}


@lru_cache(maxsize=4096)
def encode_varint(number: int) -> bytes:
    """A number in base 128, lowest digits first; the top bit of a byte means that more follow."""
    digits = bytearray()
    while number >= 0x80:
        digits.append(number & 0x7F | 0x80)
        number >>= 7
    digits.append(number)
    return bytes(digits)


def api_of_call(path: str, method: str, *, headers: Mapping[str, str], has_body: bool) -> Api | None:
    """The API of a call; None if the path is of no service of model servers. Raises a Refusal.

    Calls about the gateway itself are V2's, too.
    """
    if not path.startswith(CALL_ROOTS):
        return None
    if method != "POST":
        raise MethodNotAllowed(f"{path[:_SHOWN_CHARACTERS]} takes POST, not {method[:20]}.")
    refuse_repository_call(path)
    api = Api.V2_GRPC if path in SERVER_CALLS else APIS_BY_CALL.get(path)
    if api is None:
        known = ", ".join(one.rpartition("/")[2] for one in (*APIS_BY_CALL, *SERVER_CALLS))
        raise UnknownPath(f"There is no call {path[:_SHOWN_CHARACTERS]} here; there are {known}.")
    if not has_body:
        raise BadRequest("The call has no message; send one that names the model.")
    check_headers(headers)
    return api


def check_headers(headers: Mapping[str, str]) -> None:
    """Raise BadRequest for headers that make engines cut the stream or answer INTERNAL: that would count as their
    failure.
    """
    if not _CALL_TYPE.fullmatch(headers.get("content-type", "")):
        raise BadRequest("The call has another content-type than gRPC's; send application/grpc.")
    if headers.get("te") != "trailers":
        raise BadRequest("The call does not take trailers, in which its status comes; send the header te: trailers.")
    if not _TIMEOUT.fullmatch(headers.get("grpc-timeout", "0n")):
        raise BadRequest("The call's grpc-timeout is no number of at most 8 digits and a unit; send one such as 500m.")


def refuse_repository_call(path: str) -> None:
    """Raise ModelRepositoryRefused for the calls by which engines load and unload models, which the controller does."""
    if path in REPOSITORY_CALLS:
        raise ModelRepositoryRefused(
            "Clients cannot list, load or unload the models of an engine; ask for the model that you want to use."
        )


def read_call(api: Api, body: bytes) -> InferenceRequest:
    """The request of a whole body, which is one message. Raises BadRequest with the correction."""
    calls = api.spec.calls
    if calls is None:
        raise TypeError(f"{api.name} is not served over gRPC")
    start, end = _message_in(body)
    spans = list[FieldSpan]()
    has_version = False
    for number in calls.name:
        found, seen = _find(body, start, end, number, field=_NAMES[calls.name])
        if found is None:
            raise _no_name(calls)
        spans.append(found)
        has_version = _VERSION_FIELD in seen
        start, end = found.start, found.end
    return InferenceRequest(
        api,
        _name(body[start:end], calls),
        b"",
        is_streamed=False,
        stream_options={},
        max_output_tokens=None,
        answers=0,
        call=GrpcModelLocation(tuple(spans), has_version=has_version),
    )


def _message_in(body: bytes) -> tuple[int, int]:
    """Where the message begins and ends."""
    if len(body) < _PREFIX.size:
        raise BadRequest("The call has no message; send one that names the model.")
    flag, size = _PREFIX.unpack_from(body)
    if flag == 1:
        raise CompressedMessage("The message is compressed, so that its model cannot be read; send it uncompressed.")
    if flag:
        raise BadRequest(f"The message begins with {flag}, which is no flag of gRPC.")
    came = len(body) - _PREFIX.size
    if size > came:
        raise BadRequest(f"The message has {came} bytes and says that it has {size}.")
    if size < came:
        raise BadRequest("The call has more than one message; send one.")
    return _PREFIX.size, len(body)


def _find(body: bytes, start: int, end: int, wanted: int, *, field: str) -> tuple[FieldSpan | None, set[int]]:
    """The only field ``wanted`` of the message between ``start`` and ``end``; None if there is none. Also the numbers
    of all fields.
    """
    found: FieldSpan | None = None
    seen, at, left = set[int](), start, MOST_FIELDS
    while at < end:
        left -= 1
        if left < 0:
            raise BadRequest(f"The message has more than {MOST_FIELDS} fields; send fewer tensors at a time.")
        key, value_at = _read_varint(body, at, end, most_bytes=5)
        number, kind = key >> 3, key & 7
        if not number or key > _MOST_KEY:
            raise _no_message(at)
        seen.add(number)
        length_at, at = value_at, _end_of_value(body, value_at, end, kind)
        if number != wanted:
            continue
        if found is not None or kind != _LENGTH_DELIMITED:
            raise BadRequest(f"The message names {field} more than once, or not as text; name it once.")
        found = FieldSpan(length_at, _read_varint(body, length_at, end)[1], at)
    return found, seen


def _end_of_value(body: bytes, at: int, end: int, kind: int) -> int:
    if kind == _LENGTH_DELIMITED:
        size, value_at = _read_varint(body, at, end)
        after = value_at + size
    elif kind == 0:
        _, after = _read_varint(body, at, end)
    elif kind in _FIXED_BYTES:
        after = at + _FIXED_BYTES[kind]
    else:
        # groups, which none of these messages has
        raise _no_message(at)
    if after > end:
        raise _no_message(at)
    return after


def _read_varint(body: bytes, at: int, end: int, *, most_bytes: int = 10) -> tuple[int, int]:
    """The number at ``at``, and where it ends."""
    number = shift = 0
    for place in range(at, min(end, at + most_bytes)):
        digit = body[place]
        number |= (digit & 0x7F) << shift
        if digit < 0x80:
            return number, place + 1
        shift += 7
    raise _no_message(at)


def _no_message(at: int) -> BadRequest:
    return BadRequest(f"The message is no protobuf message at byte {at - _PREFIX.size}.")


def _no_name(calls: GrpcModelCalls) -> BadRequest:
    return BadRequest(f"The message names no model; write its name into {_NAMES[calls.name]}.", param="model")


def _name(name: bytes, calls: GrpcModelCalls) -> str:
    if not name:
        raise _no_name(calls)
    if len(name) > MOST_NAME_BYTES:
        raise BadRequest(f"The model's name has {len(name)} bytes; names have at most {MOST_NAME_BYTES}.")
    try:
        return name.decode()
    except UnicodeDecodeError:
        raise BadRequest("The model's name is not UTF-8; write the name that a ModelRoute has.") from None


def with_model_name(body: bytes, call: GrpcModelLocation, model: str) -> bytes:
    """The same message with another name of the model, and the lengths that follow from it: of the fields around the
    name, from the inside out, and of the message.
    """
    *outer, name = call.spans
    # all of body[start:end] is replaced
    start, end, replacement = name.length_at, name.end, _with_length(model.encode())
    for field in reversed(outer):
        replacement = _with_length(body[field.start : start] + replacement + body[end : field.end])
        start, end = field.length_at, field.end
    before, after = body[_PREFIX.size : start], body[end:]
    prefix = _PREFIX.pack(0, len(before) + len(replacement) + len(after))
    return b"".join((prefix, before, replacement, after))


def _with_length(value: bytes) -> bytes:
    return encode_varint(len(value)) + value
