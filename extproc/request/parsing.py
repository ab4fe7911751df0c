# SPDX-License-Identifier: Apache-2.0
"""Request bodies of every API to an InferenceRequest, or to a refusal that says what to correct.

Also what can be learnt of a body without its API: which API it is of, and which steering fields it has.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Final, NoReturn

import msgspec

from extproc.errors import BadRequest
from extproc.protocol import (
    ANTHROPIC_VERSION,
    CHAT_PATH,
    COMPLETIONS_PATH,
    COUNT_TOKENS_PATH,
    EMBEDDINGS_PATH,
    GENERATE_PATH,
    MESSAGES_PATH,
    RESPONSES_PATH,
)
from extproc.request import anthropic, openai
from extproc.request.bounds import check_bounds, check_rest
from extproc.request.generate import generate
from extproc.request.model import ABSENT, NUMBERS, STEERING_FIELDS, Api, InferenceRequest, steering_in

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


INFERENCE_PATHS: Final = {
    CHAT_PATH: Api.CHAT,
    COMPLETIONS_PATH: Api.COMPLETIONS,
    EMBEDDINGS_PATH: Api.EMBEDDINGS,
    RESPONSES_PATH: Api.RESPONSES,
    MESSAGES_PATH: Api.MESSAGES,
    COUNT_TOKENS_PATH: Api.COUNT_TOKENS,
    GENERATE_PATH: Api.GENERATE,
}


def parse(api: Api, body: bytes) -> InferenceRequest:
    """Read the request in ``body``. Raises BadRequest, which says what to correct."""
    if not body:
        raise BadRequest("The request has no body; send a JSON object with at least 'model'.")
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
    check_rest(body, request.contents)
    return request


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


_PARSERS: Final[dict[Api, Callable[[bytes], InferenceRequest]]] = {
    Api.CHAT: openai.chat,
    Api.COMPLETIONS: openai.completion,
    Api.EMBEDDINGS: openai.embeddings,
    Api.RESPONSES: openai.responses,
    Api.MESSAGES: anthropic.messages,
    Api.COUNT_TOKENS: anthropic.count_tokens,
    Api.GENERATE: generate,
}


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


class _Nested(msgspec.Struct, gc=False):
    vllm_xargs: msgspec.Raw = ABSENT
    sampling_params: msgspec.Raw = ABSENT


class _Sampling(msgspec.Struct, gc=False):
    extra_args: msgspec.Raw = ABSENT


def steering_of_unread(body: bytes) -> tuple[str, ...]:
    """The steering fields of a body; none if it is no JSON object.

    Engines read more than JSON: numbers such as NaN, other encodings than UTF-8. In such a body, a field's name in
    quotes counts wherever it stands.
    """
    if not body.lstrip(_BEFORE_OBJECTS).startswith(b"{"):
        return ()
    try:
        nested = _nested.decode(body)
        found = steering_in(msgspec.Raw(body)) + steering_in(nested.vllm_xargs)
        if nested.sampling_params:
            found += steering_in(_sampling.decode(nested.sampling_params).extra_args)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _named_in(body)
    return found


def _named_in(body: bytes) -> tuple[str, ...]:
    text = body.decode(json.detect_encoding(body), errors="replace")
    plain = _ESCAPE.sub(lambda escape: chr(int(escape[1], 16)), text)
    return tuple([name for name in STEERING_FIELDS if f'"{name}"' in plain])


# Spaces, marks of byte order, and the other halves of a brace's two or four bytes.
_BEFORE_OBJECTS: Final = b" \t\r\n\0\xef\xbb\xbf\xfe\xff"
_ESCAPE: Final = re.compile(r"\\u([0-9a-fA-F]{4})")
_nested: Final = msgspec.json.Decoder(_Nested)
_sampling: Final = msgspec.json.Decoder(_Sampling)
