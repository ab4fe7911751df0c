# SPDX-License-Identifier: Apache-2.0
"""The API of a request whose gateway does not say its path."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from extproc.protocol import ANTHROPIC_VERSION
from extproc.request.fields import ABSENT
from extproc.request.model import Api

if TYPE_CHECKING:
    from collections.abc import Mapping


class _Shape(msgspec.Struct, gc=False):
    """The fields by which APIs differ, undecoded."""

    messages: msgspec.Raw = ABSENT
    system: msgspec.Raw = ABSENT
    prompt: msgspec.Raw = ABSENT
    token_ids: msgspec.Raw = ABSENT
    sampling_params: msgspec.Raw = ABSENT
    input: msgspec.Raw = ABSENT
    dimensions: msgspec.Raw = ABSENT
    encoding_format: msgspec.Raw = ABSENT


def api_by_body(body: bytes, headers: Mapping[str, str]) -> Api | None:
    """By the field that holds what is asked; None if it is no JSON object with such a field.

    Messages are Anthropic's if the client names a version of that API, or writes ``system`` beside them. A request to
    count tokens looks the same; it is taken for the one that costs more, because a client could leave out what tells
    them apart and be charged nothing for a generation.
    """
    try:
        shape = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if shape.messages:
        return Api.MESSAGES if shape.system or headers.get(ANTHROPIC_VERSION) else Api.CHAT
    if shape.prompt:
        return Api.COMPLETIONS
    if shape.token_ids and shape.sampling_params:
        return Api.GENERATE
    return _api_of_input(shape) if shape.input else None


def _api_of_input(shape: _Shape) -> Api:
    is_embedded = shape.dimensions or shape.encoding_format or _is_list_of_texts(shape.input)
    return Api.EMBEDDINGS if is_embedded else Api.RESPONSES


def _is_list_of_texts(field: msgspec.Raw) -> bool:
    """Whether it is a list whose elements are no objects, as an item of a conversation is."""
    text = bytes(field).lstrip()
    return text[:1] == b"[" and text[1:].lstrip()[:1] != b"{"


_decoder: Final = msgspec.json.Decoder(_Shape)
