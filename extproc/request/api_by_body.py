# SPDX-License-Identifier: Apache-2.0
"""The API of a request whose gateway does not say its path."""

from __future__ import annotations

import msgspec

from extproc.request.model import Api

_ABSENT = msgspec.Raw(b"")


class _Shape(msgspec.Struct, gc=False):
    """The fields by which APIs differ, undecoded."""

    messages: msgspec.Raw = _ABSENT
    prompt: msgspec.Raw = _ABSENT
    input: msgspec.Raw = _ABSENT
    dimensions: msgspec.Raw = _ABSENT
    encoding_format: msgspec.Raw = _ABSENT


def api_by_body(body: bytes) -> Api | None:
    """By the field that holds what is asked; None if it is no JSON object with such a field."""
    try:
        shape = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if bytes(shape.messages):
        return Api.CHAT
    if bytes(shape.prompt):
        return Api.COMPLETIONS
    if not bytes(shape.input):
        return None
    if bytes(shape.dimensions) or bytes(shape.encoding_format) or _is_list_of_texts(shape.input):
        return Api.EMBEDDINGS
    return Api.RESPONSES


def _is_list_of_texts(field: msgspec.Raw) -> bool:
    """Whether it is a list whose elements are no objects, as an item of a conversation is."""
    text = bytes(field).lstrip()
    return text[:1] == b"[" and text[1:].lstrip()[:1] != b"{"


_decoder = msgspec.json.Decoder(_Shape)
