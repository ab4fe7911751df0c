# SPDX-License-Identifier: Apache-2.0
"""What the translations share: JSON objects that nobody has checked, tables of fields, what was dropped, errors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from extproc.refusals import BadRequest, Refusal, UntranslatableAnswer
from extproc.wire_names import ANTHROPIC_TYPES

Object = dict[str, Any]
# A token count above this is no count.
_MOST_TOKENS: Final = 2**53
# Names of dropped fields go into a header.
_MOST_DROPPED: Final = 32
_SAFE_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MOST_ERROR_CHARACTERS: Final = 4096
_ANTHROPIC: Final = frozenset(ANTHROPIC_TYPES.values())
_decoder: Final = msgspec.json.Decoder()
_encode: Final = msgspec.json.Encoder().encode


class Malformed(ValueError):
    """A JSON value does not have the form that its API gives it. The text names the field and the form."""


class FieldRule(msgspec.Struct, frozen=True):
    """What becomes of a top-level field of a request.

    ``to``: its name in the other API, the value unchanged. ``values``: the values that have a counterpart, and theirs;
    others are dropped. ``note``: what code makes of it, for the reference page. ``refused``: a request with it is
    refused always, as it would mean something else without it; the text says what to do. ``neutral``: values that mean
    the same as its absence. Without any of these, it is dropped.
    """

    to: str = ""
    values: Mapping[str, str] | None = None
    note: str = ""
    refused: str = ""
    neutral: tuple[object, ...] = (None,)


Fields = Mapping[str, FieldRule]


class DroppedFields:
    """Dotted paths of the request's fields that have no counterpart: each once, at most 32."""

    def __init__(self) -> None:
        self._paths: dict[str, None] = {}

    def add(self, path: str) -> None:
        """Record a field; its name may be a client's own."""
        if len(self._paths) < _MOST_DROPPED:
            self._paths[path if _SAFE_NAME.fullmatch(path) else "unknown"] = None

    def add_unknown(self, value: Object, known: frozenset[str], path: str) -> None:
        """Record the fields of ``value`` that nothing reads."""
        for name in value.keys() - known:
            if value[name] is not None:
                self.add(f"{path}.{name}" if path else name)

    @property
    def paths(self) -> tuple[str, ...]:
        """In alphabetical order."""
        return tuple(sorted(self._paths))


def apply_fields(fields: Fields, request: Object, dropped: DroppedFields) -> Object:
    """The fields of ``request`` that need no more than a table."""
    out: Object = {}
    for name, value in request.items():
        field = fields.get(name)
        if field is None:
            if value is not None:
                dropped.add(name)
        elif any(value is one or (value == one and type(value) is type(one)) for one in field.neutral):
            continue
        elif field.refused:
            raise BadRequest(
                f"`{name}` has no counterpart in the API of this model's engines; {field.refused}.", param=name
            )
        elif field.values is not None:
            found = field.values.get(value) if isinstance(value, str) else None
            if found is None:
                dropped.add(name)
            else:
                out[field.to] = found
        elif field.to:
            out[field.to] = value
        elif not field.note:
            dropped.add(name)
    return out


def decode_object(body: bytes) -> Object:
    """A JSON object; of fields that stand twice, the last."""
    try:
        return as_object(_decoder.decode(body), "the body")
    except RecursionError:
        raise Malformed("the body is nested too deeply") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Malformed(f"the body is not JSON: {error}") from None


def encode_json(value: object) -> bytes:
    """As JSON."""
    try:
        return _encode(value)
    except RecursionError:
        raise Malformed("the body is nested too deeply") from None


def compact_json(value: object) -> str:
    """As JSON in a text: arguments of a tool call."""
    return encode_json(value).decode()


def parse_tool_arguments(value: object) -> Object | None:
    """The arguments that a text of JSON has; None if it is no JSON object. No text at all is an empty object."""
    if not value:
        return {}
    try:
        return decode_object(as_text(value, "arguments").encode())
    except Malformed:
        return None


def as_object(value: object, path: str) -> Object:
    """A JSON object."""
    if isinstance(value, dict):
        return value
    raise Malformed(f"{path} must be an object")


def as_objects(value: object, path: str) -> list[Object]:
    """A list of JSON objects; an empty one for null."""
    if value is None:
        return []
    if isinstance(value, list):
        for one in value:
            if not isinstance(one, dict):
                raise Malformed(f"{path} must be a list of objects")
        return value
    raise Malformed(f"{path} must be a list")


def as_text(value: object, path: str) -> str:
    """A text; an empty one for null."""
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    raise Malformed(f"{path} must be a text")


def as_count(value: object) -> int:
    """A number of tokens; 0 for what is none."""
    return value if type(value) is int and 0 <= value < _MOST_TOKENS else 0


def as_index(value: object, path: str) -> int:
    """A position in a list; 0 for null."""
    if value is None:
        return 0
    if type(value) is int and 0 <= value < _MOST_TOKENS:
        return value
    raise Malformed(f"{path} must be a number from 0")


def member_object(value: Object, name: str) -> Object:
    """The object under ``name``; an empty one if there is none."""
    found = value.get(name)
    return found if isinstance(found, dict) else {}


def type_of(value: Object) -> str:
    """The type that an object names; none if it is no text."""
    found = value.get("type")
    return found if isinstance(found, str) else ""


def with_id_prefix(identifier: object, prefix: str) -> str:
    """An engine's id with the prefix that the client's API gives such ids."""
    bare = identifier if isinstance(identifier, str) else ""
    for known in ("chatcmpl-", "msg_", "resp_"):
        bare = bare.removeprefix(known)
    return prefix + bare


def join_texts(texts: list[str]) -> str:
    """Pieces of one text."""
    return texts[0] if len(texts) == 1 else "".join(texts)


def engine_error(status: int, body: bytes) -> Object:
    """The error in an answer of any engine or proxy: message, type, code, param; of text, the beginning."""
    try:
        whole = decode_object(body)
    except Malformed:
        plain = body[:_MOST_ERROR_CHARACTERS].decode(errors="replace").strip()
        is_text = bool(plain) and not plain.startswith("<")
        return error_object(status, {"message": plain} if is_text else {})
    return error_object(status, whole)


def error_object(status: int, found: Object) -> Object:
    """The same of a parsed object: ``{"error": {...}}``, ``{"error": "..."}`` or the error itself."""
    inner = found.get("error")
    error = inner if isinstance(inner, dict) else {"message": inner} if isinstance(inner, str) else found
    message, kind, code, param = (error.get(name) for name in ("message", "type", "code", "param"))
    message = message or error.get("detail")  # FastAPI
    by_status = ANTHROPIC_TYPES.get(status, "invalid_request_error" if 400 <= status < 500 else "api_error")
    return {
        "message": message[:_MOST_ERROR_CHARACTERS]
        if message and isinstance(message, str)
        else f"The engine answered with status {status} and no message.",
        "type": kind if isinstance(kind, str) and kind != "error" else by_status,
        "param": param if isinstance(param, str) else None,
        "code": code if isinstance(code, str) else None,
        "status": code if type(code) is int and 400 <= code < 600 else status,
    }


def stream_error(message: str, kind: str = "api_error", code: str | None = "answer_untranslatable") -> Object:
    """An error of ours in a stream, as a chunk of the hub."""
    return {"error": {"message": message, "type": kind, "code": code, "param": None}}


def openai_error(error: Object) -> Object:
    """In the form that OpenAI's clients expect."""
    return {"error": {name: error.get(name) for name in ("message", "type", "param", "code")}}


def anthropic_error(error: Object) -> Object:
    """In the form that Anthropic's clients expect."""
    kind = error.get("type")
    if kind not in _ANTHROPIC:
        kind = ANTHROPIC_TYPES.get(error.get("status", 500), "api_error")
    return {"type": "error", "error": {"type": kind, "message": error["message"]}}


def untranslatable_request_refusal(path: str, what: str) -> Refusal:
    """Of a request whose content or tools an engine's API cannot have: the model would answer another one."""
    return BadRequest(
        f"`{path}` has {what:.128}, which has no counterpart in the API of this model's engines; send texts, images "
        "and files in the request itself, and define tools as functions that you run yourself.",
        param=path,
    )


def malformed_request_refusal(error: Malformed) -> Refusal:
    """Of a client's body."""
    return BadRequest(f"This request cannot be translated for this model's engines: {error}.")


def malformed_answer(error: Exception) -> Refusal:
    """Of an engine's body."""
    return UntranslatableAnswer(f"The engine's answer cannot be translated: {error}.")
