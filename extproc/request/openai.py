# SPDX-License-Identifier: Apache-2.0
"""OpenAI request bodies to an InferenceRequest.

Only the fields on which a decision depends are read and checked; the engine checks the others.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Final, NoReturn

import msgspec

from extproc.errors import BadRequest
from extproc.protocol import CHAT_PATH, COMPLETIONS_PATH, EMBEDDINGS_PATH, RESPONSES_PATH
from extproc.request.amounts import (
    NO_MEDIA,
    NUMBERS,
    ONE_PROMPT,
    Answers,
    Media,
    OutputTokens,
    OutputTokensOrNone,
    Priority,
    Prompts,
    media_in,
    prompts_in,
)
from extproc.request.bounds import check_bounds, check_rest
from extproc.request.model import INTERNAL_FIELDS, Api, InferenceRequest
from extproc.request.rewrite import span_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from extproc.request.rewrite import Span

INFERENCE_PATHS: Final = {
    CHAT_PATH: Api.CHAT,
    COMPLETIONS_PATH: Api.COMPLETIONS,
    EMBEDDINGS_PATH: Api.EMBEDDINGS,
    RESPONSES_PATH: Api.RESPONSES,
}
_ABSENT: Final = msgspec.Raw(b"")
# Shorter bodies are rewritten as a whole: finding the span of the content would cost more than it saves.
_LARGE_BYTES: Final = 32 * 1024


class _Message(msgspec.Struct, gc=False):
    role: str
    content: msgspec.Raw = _ABSENT
    tool_calls: msgspec.Raw = _ABSENT
    tool_call_id: str | None = None


class _Common(msgspec.Struct, gc=False):
    model: str
    stream: bool | None = None
    stream_options: dict[str, msgspec.Raw] | None = None
    # read to be checked; who goes first is not the client's to say
    priority: Priority = None
    cache_salt: str | None = None
    # what INTERNAL_FIELDS of the model lists beside it
    kv_transfer_params: msgspec.Raw = _ABSENT
    ec_transfer_params: msgspec.Raw = _ABSENT
    bootstrap_host: msgspec.Raw = _ABSENT
    bootstrap_port: msgspec.Raw = _ABSENT
    bootstrap_room: msgspec.Raw = _ABSENT
    data_parallel_rank: msgspec.Raw = _ABSENT
    routed_dp_rank: msgspec.Raw = _ABSENT
    disagg_prefill_dp_rank: msgspec.Raw = _ABSENT
    disaggregated_params: msgspec.Raw = _ABSENT
    lora_path: msgspec.Raw = _ABSENT
    lora_request: msgspec.Raw = _ABSENT
    session_params: msgspec.Raw = _ABSENT
    request_id: msgspec.Raw = _ABSENT
    rid: msgspec.Raw = _ABSENT
    extra_key: msgspec.Raw = _ABSENT


class _Chat(_Common, kw_only=True, gc=False):
    messages: list[_Message]
    tools: msgspec.Raw = _ABSENT
    max_tokens: OutputTokens = None
    max_completion_tokens: OutputTokens = None
    n: Answers = None


class _Completion(_Common, kw_only=True, gc=False):
    prompt: msgspec.Raw
    max_tokens: OutputTokensOrNone = None
    n: Answers = None
    best_of: Answers = None


class _Embeddings(_Common, kw_only=True, gc=False):
    input: msgspec.Raw


class _Responses(_Common, kw_only=True, gc=False):
    input: msgspec.Raw
    instructions: msgspec.Raw = _ABSENT
    tools: msgspec.Raw = _ABSENT
    max_output_tokens: OutputTokens = None


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
    """Raise what msgspec reports, ``Expected `str`, got `int` - at `$.model```, with the field in OpenAI's ``param``."""
    what, _, where = problem.partition(" - at `")
    param = where.rstrip("`").removeprefix("$").lstrip(".") or None
    if "missing required field" in what:
        name = what.split("`")[1]
        param = f"{param}.{name}" if param else name
        raise BadRequest(f"The field '{param}' is missing; it is required.", param=param)
    if param is not None and param in NUMBERS:
        raise BadRequest(f"'{param}' must be {NUMBERS[param]}; send one, or leave the field out.", param=param)
    raise BadRequest(f"{what.replace('`', chr(39))}{f' in {param}' if param else ' as the body'}.", param=param)


def _chat(body: bytes) -> InferenceRequest:
    chat = _chat_decoder.decode(body)
    limit = chat.max_tokens if chat.max_completion_tokens is None else chat.max_completion_tokens
    contents = _chat_contents(chat, body) if len(body) >= _LARGE_BYTES else None
    media = media_in([message.content for message in chat.messages])
    return _request(Api.CHAT, chat, _chat_prompt(chat), limit, contents, answers=chat.n or 1, media=media)


def _chat_prompt(chat: _Chat) -> bytes:
    parts: list[bytes | msgspec.Raw] = [chat.tools]
    for message in chat.messages:
        parts += (_HEADINGS.get(message.role) or f"\n{message.role}\n".encode(), message.content)
        if message.tool_calls:
            parts.append(message.tool_calls)
        if message.tool_call_id is not None:
            parts.append(message.tool_call_id.encode())
    return b"".join(parts)


def _chat_contents(chat: _Chat, body: bytes) -> Span | None:
    """From the first message's content to the last one's."""
    contents = [message.content for message in chat.messages if message.content]
    return span_of(body, contents[0], contents[-1]) if contents else None


def _completion(body: bytes) -> InferenceRequest:
    completion = _completion_decoder.decode(body)
    prompt = bytes(_open(completion.prompt))
    prompts = prompts_in(completion.prompt)
    return _request(
        Api.COMPLETIONS,
        completion,
        prompt,
        completion.max_tokens,
        _contents(completion.prompt, body),
        answers=prompts.count * max(completion.n or 1, completion.best_of or 1),
        prompts=prompts,
    )


def _embeddings(body: bytes) -> InferenceRequest:
    embeddings = _embeddings_decoder.decode(body)
    prompts, contents = prompts_in(embeddings.input), _contents(embeddings.input, body)
    # nothing is written
    return _request(
        Api.EMBEDDINGS, embeddings, bytes(_open(embeddings.input)), None, contents, answers=0, prompts=prompts
    )


def _responses(body: bytes) -> InferenceRequest:
    responses = _responses_decoder.decode(body)
    prompt = b"\n".join((responses.tools, responses.instructions, _open(responses.input)))
    contents, media = _contents(responses.input, body), media_in([responses.input])
    return _request(Api.RESPONSES, responses, prompt, responses.max_output_tokens, contents, media=media)


def _open(value: msgspec.Raw) -> memoryview:
    """A JSON string or list without its closing mark, so that a longer one extends it."""
    return memoryview(value)[:-1]


def _contents(value: msgspec.Raw, body: bytes) -> Span | None:
    return span_of(body, value, value) if len(body) >= _LARGE_BYTES else None


def _request(
    api: Api,
    fields: _Common,
    prompt: bytes,
    max_tokens: int | None,
    contents: Span | None,
    *,
    answers: int = 1,
    prompts: Prompts = ONE_PROMPT,
    media: Media = NO_MEDIA,
) -> InferenceRequest:
    if not fields.model:
        raise BadRequest("The field 'model' is empty; name a model (GET /v1/models lists them).", param="model")
    return InferenceRequest(
        api,
        fields.model,
        prompt,
        bool(fields.stream),
        fields.stream_options or {},
        max_tokens,
        fields.cache_salt,
        contents,
        answers,
        prompts,
        media,
        _internal_fields(fields),
    )


def _internal_fields(fields: _Common) -> tuple[str, ...]:
    """Nearly always none: that is found out at once."""
    values = _internal_values(fields)
    if values == _NO_INTERNAL:
        return ()
    return tuple([name for name, value in zip(INTERNAL_FIELDS, values, strict=True) if value])


_internal_values: Final = attrgetter(*INTERNAL_FIELDS)
_NO_INTERNAL: Final = _internal_values(_Common(model=""))
_HEADINGS: Final = {role: f"\n{role}\n".encode() for role in ("user", "assistant", "system", "tool", "developer")}
_chat_decoder: Final = msgspec.json.Decoder(_Chat)
_completion_decoder: Final = msgspec.json.Decoder(_Completion)
_embeddings_decoder: Final = msgspec.json.Decoder(_Embeddings)
_responses_decoder: Final = msgspec.json.Decoder(_Responses)
_PARSERS: Final[dict[Api, Callable[[bytes], InferenceRequest]]] = {
    Api.CHAT: _chat,
    Api.COMPLETIONS: _completion,
    Api.EMBEDDINGS: _embeddings,
    Api.RESPONSES: _responses,
}
