"""OpenAI request bodies to an InferenceRequest. Only the fields that decide something are read; the engine checks the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NoReturn

import msgspec

from extproc.errors import BadRequest
from extproc.protocol import CHAT_PATH, COMPLETIONS_PATH, EMBEDDINGS_PATH, RESPONSES_PATH
from extproc.request.model import Api, InferenceRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

INFERENCE_PATHS: Final = {
    CHAT_PATH: Api.CHAT,
    COMPLETIONS_PATH: Api.COMPLETIONS,
    EMBEDDINGS_PATH: Api.EMBEDDINGS,
    RESPONSES_PATH: Api.RESPONSES,
}
_NOTHING: Final = msgspec.Raw(b"")


class _Message(msgspec.Struct):
    role: str
    content: msgspec.Raw = _NOTHING
    tool_calls: msgspec.Raw = _NOTHING
    tool_call_id: str | None = None


class _Common(msgspec.Struct):
    model: str
    stream: bool | None = None
    stream_options: dict[str, msgspec.Raw] | None = None
    max_tokens: int | float | None = None
    cache_salt: str | None = None


class _Chat(_Common, kw_only=True):
    messages: list[_Message]
    tools: msgspec.Raw = _NOTHING
    max_completion_tokens: int | float | None = None


class _Completion(_Common, kw_only=True):
    prompt: msgspec.Raw


class _Embeddings(_Common, kw_only=True):
    input: msgspec.Raw


class _Responses(_Common, kw_only=True):
    input: msgspec.Raw
    instructions: msgspec.Raw = _NOTHING
    tools: msgspec.Raw = _NOTHING
    max_output_tokens: int | float | None = None


def parse(api: Api, body: bytes) -> InferenceRequest:
    """The request in ``body``; raises BadRequest with what to mend."""
    if not body:
        raise BadRequest("The request has no body; send a JSON object with at least 'model'.")
    try:
        # Fields that are passed over are not checked by the decoder.
        if not body.isascii():
            body.decode()
        return _PARSERS[api](body)
    except UnicodeDecodeError as error:
        raise BadRequest(f"The body is not UTF-8 at byte {error.start}; send JSON in UTF-8.") from None
    except RecursionError:
        raise BadRequest("The body is nested too deeply; send plain messages.") from None
    except msgspec.ValidationError as error:
        _refuse_shape(str(error))
    except msgspec.DecodeError as error:
        raise BadRequest(f"The body is not JSON: {error}.") from None


def with_changes(body: bytes, changes: dict[str, object]) -> bytes:
    """The JSON object ``body`` with top-level fields replaced or added; all other values byte for byte."""
    fields: dict[str, object] = dict(_fields_decoder.decode(body))
    fields.update(changes)
    return msgspec.json.encode(fields)


def _refuse_shape(problem: str) -> NoReturn:
    """msgspec says ``Expected `str`, got `int` - at `$.model```; OpenAI's clients look for the field in ``param``."""
    what, _, where = problem.partition(" - at `")
    param = where.rstrip("`").removeprefix("$").lstrip(".") or None
    if "missing required field" in what:
        name = what.split("`")[1]
        param = f"{param}.{name}" if param else name
        raise BadRequest(f"The field '{param}' is missing; it is required.", param=param)
    raise BadRequest(f"{what.replace('`', chr(39))}{f' in {param}' if param else ' as the body'}.", param=param)


def _chat(body: bytes) -> InferenceRequest:
    chat = _chat_decoder.decode(body)
    limit = chat.max_completion_tokens if chat.max_completion_tokens is not None else chat.max_tokens
    return _request(Api.CHAT, chat, _chat_prompt(chat), limit)


def _chat_prompt(chat: _Chat) -> bytes:
    parts: list[bytes | msgspec.Raw] = [chat.tools]
    for message in chat.messages:
        parts += (b"\n", message.role.encode(), b"\n", message.content)
        if message.tool_calls:
            parts.append(message.tool_calls)
        if message.tool_call_id is not None:
            parts.append(message.tool_call_id.encode())
    return b"".join(parts)


def _completion(body: bytes) -> InferenceRequest:
    completion = _completion_decoder.decode(body)
    return _request(Api.COMPLETIONS, completion, _open(completion.prompt), completion.max_tokens)


def _embeddings(body: bytes) -> InferenceRequest:
    embeddings = _embeddings_decoder.decode(body)
    return _request(Api.EMBEDDINGS, embeddings, _open(embeddings.input), None)


def _responses(body: bytes) -> InferenceRequest:
    responses = _responses_decoder.decode(body)
    prompt = _join((responses.tools, responses.instructions, _open(responses.input)))
    return _request(Api.RESPONSES, responses, prompt, responses.max_output_tokens)


def _join(parts: Iterable[bytes | msgspec.Raw]) -> bytes:
    return b"\n".join(parts)


def _open(value: msgspec.Raw) -> bytes:
    """A JSON string or list without its closing mark, so that a longer one extends it."""
    return bytes(value)[:-1]


def _request(api: Api, fields: _Common, prompt: bytes, max_tokens: float | None) -> InferenceRequest:
    if not fields.model:
        raise BadRequest("The field 'model' is empty; name a model (GET /v1/models lists them).", param="model")
    return InferenceRequest(
        api=api,
        model=fields.model,
        prompt=prompt,
        is_streamed=bool(fields.stream),
        stream_options=fields.stream_options or {},
        max_output_tokens=None if max_tokens is None else int(max_tokens),
        cache_salt=fields.cache_salt,
    )


_chat_decoder: Final = msgspec.json.Decoder(_Chat)
_completion_decoder: Final = msgspec.json.Decoder(_Completion)
_embeddings_decoder: Final = msgspec.json.Decoder(_Embeddings)
_responses_decoder: Final = msgspec.json.Decoder(_Responses)
_fields_decoder: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_PARSERS: Final[dict[Api, Callable[[bytes], InferenceRequest]]] = {
    Api.CHAT: _chat,
    Api.COMPLETIONS: _completion,
    Api.EMBEDDINGS: _embeddings,
    Api.RESPONSES: _responses,
}
