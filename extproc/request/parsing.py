# SPDX-License-Identifier: Apache-2.0
"""Request bodies of every API to an InferenceRequest, or to a refusal that says what to correct."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NoReturn

import msgspec

from extproc.errors import BadRequest
from extproc.protocol import (
    CHAT_PATH,
    COMPLETIONS_PATH,
    COUNT_TOKENS_PATH,
    EMBEDDINGS_PATH,
    GENERATE_PATH,
    MESSAGES_PATH,
    RESPONSES_PATH,
)
from extproc.request import anthropic, openai
from extproc.request.amounts import NUMBERS
from extproc.request.bounds import check_bounds, check_rest
from extproc.request.generate import generate
from extproc.request.model import Api, InferenceRequest

if TYPE_CHECKING:
    from collections.abc import Callable

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
