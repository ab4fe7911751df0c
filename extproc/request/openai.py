# SPDX-License-Identifier: Apache-2.0
"""OpenAI request bodies to an InferenceRequest.

Only the fields on which a decision depends are read and checked; the engine checks the others.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Final

import msgspec

from extproc.request.inference_request import (
    ABSENT,
    CHAT_TOKENS,
    LARGE_BYTES,
    Answers,
    ChatTemplateFields,
    CommonFields,
    InferenceRequest,
    OutputTokens,
    OutputTokensOrNone,
    chat_template_texts,
    count_prompts,
    given_values,
    is_given,
    json_without_closing_mark,
    make_request,
    media_in,
    media_of_embeddings,
    prompt_tokens_as_media,
    span_of_large_contents,
)
from extproc.request.json_rewrite import span_of
from extproc.wire_names import Api

if TYPE_CHECKING:
    from extproc.request.json_rewrite import Span

_HEADINGS: Final = {role: f"\n{role}\n".encode() for role in ("user", "assistant", "system", "tool", "developer")}
_THINKING: Final = b"\nthinking\n"
_others: Final = attrgetter(
    "name", "tools", "reasoning", "reasoning_content", "tool_calls", "function_call", "tool_call_id"
)
_tokens: Final = attrgetter(*CHAT_TOKENS)
# What comes before the input, in this order.
_previous: Final = attrgetter(
    "prompt", "conversation", "previous_response_id", "previous_input_messages", "previous_response"
)
# What engines read as false: they are lenient.
_FALSE: Final = frozenset({b"false", b"0", b"0.0", b'"false"', b'"0"', b'"no"', b'"off"', b'"n"', b'"f"'})


class _Message(msgspec.Struct, gc=False):
    """All that templates write of a message. ``tools``: of a system message; Kimi's and GLM's templates have them."""

    role: str
    content: msgspec.Raw = ABSENT
    tool_calls: msgspec.Raw = ABSENT
    tool_call_id: msgspec.Raw = ABSENT
    name: msgspec.Raw = ABSENT
    tools: msgspec.Raw = ABSENT
    reasoning: msgspec.Raw = ABSENT
    reasoning_content: msgspec.Raw = ABSENT
    function_call: msgspec.Raw = ABSENT


class _Chat(ChatTemplateFields, kw_only=True, gc=False):
    """``input_ids``: SGLang's; ``prompt_token_ids`` and, in base64, ``prompt_token_ids_b64``: TensorRT-LLM's. They read
    these in place of the messages.
    """

    messages: list[_Message]
    tools: msgspec.Raw = ABSENT
    input_ids: msgspec.Raw = ABSENT
    prompt_token_ids: msgspec.Raw = ABSENT
    prompt_token_ids_b64: msgspec.Raw = ABSENT
    max_tokens: OutputTokens = None
    max_completion_tokens: OutputTokens = None
    n: Answers = None


class _Completion(CommonFields, kw_only=True, gc=False):
    """``suffix``: SGLang writes it behind each prompt. ``prompt_embeds``: vLLM's, in place of text or beside it."""

    prompt: msgspec.Raw
    suffix: msgspec.Raw = ABSENT
    prompt_embeds: msgspec.Raw = ABSENT
    max_tokens: OutputTokensOrNone = None
    n: Answers = None
    best_of: Answers = None


class _Embeddings(ChatTemplateFields, kw_only=True, gc=False):
    """``messages``: vLLM reads them, too; a body that has both is a chat to it."""

    input: msgspec.Raw
    messages: msgspec.Raw = ABSENT


class _Responses(ChatTemplateFields, kw_only=True, gc=False):
    """``prompt``: a stored one, with the texts that it is filled with. ``previous_input_messages`` and
    ``previous_response``: vLLM's; the conversation until now, sent by the client.
    """

    input: msgspec.Raw
    instructions: msgspec.Raw = ABSENT
    tools: msgspec.Raw = ABSENT
    max_output_tokens: OutputTokens = None
    background: msgspec.Raw = ABSENT
    prompt: msgspec.Raw = ABSENT
    previous_response_id: msgspec.Raw = ABSENT
    conversation: msgspec.Raw = ABSENT
    previous_input_messages: msgspec.Raw = ABSENT
    previous_response: msgspec.Raw = ABSENT


def parse_chat(body: bytes) -> InferenceRequest:
    """POST /v1/chat/completions."""
    request = _chat_decoder.decode(body)
    # given both, vLLM and TensorRT-LLM take max_completion_tokens, SGLang max_tokens
    limit = max(filter(None, (request.max_tokens, request.max_completion_tokens)), default=None)
    contents = _chat_contents(request, body) if len(body) >= LARGE_BYTES else None
    prompt = _chat_prompt(request)
    media = media_in([message.content for message in request.messages])
    for tokens in given_values(*_tokens(request)):
        media = media.plus(prompt_tokens_as_media(tokens))
    return make_request(Api.CHAT, request, prompt, limit, contents, answers=request.n or 1, media=media)


def _chat_prompt(chat: _Chat) -> bytes:
    parts: list[bytes | msgspec.Raw] = [*chat_template_texts(chat), *given_values(*_tokens(chat), chat.tools)]
    for message in chat.messages:
        heading = _HEADINGS.get(message.role) or f"\n{message.role}\n".encode()
        others = _others(message)
        if others == _NO_OTHERS:
            parts += (heading, message.content)
            continue
        name, tools, *thoughts, tool_calls, function_call, tool_call_id = others
        # engines read one of its two names
        thought = max(given_values(*thoughts), key=_size, default=ABSENT)
        parts += (_THINKING, thought, heading) if thought else (heading,)
        parts += (*given_values(name, tools), message.content, *given_values(tool_calls, function_call, tool_call_id))
    return b"".join(parts)


def _chat_contents(chat: _Chat, body: bytes) -> Span | None:
    """From the first message's content to the last one's."""
    contents = [message.content for message in chat.messages if message.content]
    return span_of(body, contents[0], contents[-1]) if contents else None


def parse_completion(body: bytes) -> InferenceRequest:
    """POST /v1/completions."""
    request = _completion_decoder.decode(body)
    prompts = count_prompts(request.prompt, "prompt")
    suffix, embeds = b"".join(given_values(request.suffix)), b"".join(given_values(request.prompt_embeds))
    if suffix:
        prompts = msgspec.structs.replace(prompts, repeated_bytes=(prompts.count - 1) * len(suffix))
    return make_request(
        Api.COMPLETIONS,
        request,
        b"".join((embeds, json_without_closing_mark(request.prompt), suffix)),
        request.max_tokens,
        span_of_large_contents(request.prompt, body),
        answers=prompts.count * max(request.n or 1, request.best_of or 1),
        prompts=prompts,
        media=media_of_embeddings(request.prompt_embeds),
    )


def parse_embeddings(body: bytes) -> InferenceRequest:
    """POST /v1/embeddings."""
    request = _embeddings_decoder.decode(body)
    prompts, contents = count_prompts(request.input, "input"), span_of_large_contents(request.input, body)
    prompt = b"".join(
        (*chat_template_texts(request), *given_values(request.messages), json_without_closing_mark(request.input))
    )
    # nothing is written
    return make_request(Api.EMBEDDINGS, request, prompt, None, contents, answers=0, prompts=prompts)


def parse_responses(body: bytes) -> InferenceRequest:
    """POST /v1/responses."""
    fields = _responses_decoder.decode(body)
    before = given_values(fields.tools, fields.instructions, *_previous(fields))
    parts: list[msgspec.Raw | memoryview] = [
        *chat_template_texts(fields),
        *before,
        json_without_closing_mark(fields.input),
    ]
    contents, media = span_of_large_contents(fields.input, body), media_in([fields.input])
    request = make_request(Api.RESPONSES, fields, b"\n".join(parts), fields.max_output_tokens, contents, media=media)
    is_stored = bool(given_values(fields.previous_response_id, fields.conversation, fields.prompt))
    in_background = is_given(fields.background) and bytes(fields.background) not in _FALSE
    if not is_stored and not in_background:
        return request
    return msgspec.structs.replace(request, has_stored_prompt=is_stored, runs_in_background=in_background)


def _size(value: msgspec.Raw) -> int:
    return memoryview(value).nbytes


_NO_OTHERS: Final = _others(_Message(""))
_chat_decoder: Final = msgspec.json.Decoder(_Chat)
_completion_decoder: Final = msgspec.json.Decoder(_Completion)
_embeddings_decoder: Final = msgspec.json.Decoder(_Embeddings)
_responses_decoder: Final = msgspec.json.Decoder(_Responses)
