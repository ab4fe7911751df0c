# SPDX-License-Identifier: Apache-2.0
"""OpenAI request bodies to an InferenceRequest.

Only the fields on which a decision depends are read and checked; the engine checks the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from extproc.protocol import Api
from extproc.request.model import (
    ABSENT,
    LARGE_BYTES,
    Answers,
    Common,
    InferenceRequest,
    OutputTokens,
    OutputTokensOrNone,
    large_contents,
    media_in,
    opened,
    prompts_in,
    request_of,
)
from extproc.request.rewrite import span_of

if TYPE_CHECKING:
    from extproc.request.rewrite import Span


class _Message(msgspec.Struct, gc=False):
    role: str
    content: msgspec.Raw = ABSENT
    tool_calls: msgspec.Raw = ABSENT
    tool_call_id: str | None = None


class _Chat(Common, kw_only=True, gc=False):
    messages: list[_Message]
    tools: msgspec.Raw = ABSENT
    max_tokens: OutputTokens = None
    max_completion_tokens: OutputTokens = None
    n: Answers = None


class _Completion(Common, kw_only=True, gc=False):
    prompt: msgspec.Raw
    max_tokens: OutputTokensOrNone = None
    n: Answers = None
    best_of: Answers = None


class _Embeddings(Common, kw_only=True, gc=False):
    input: msgspec.Raw


class _Responses(Common, kw_only=True, gc=False):
    input: msgspec.Raw
    instructions: msgspec.Raw = ABSENT
    tools: msgspec.Raw = ABSENT
    max_output_tokens: OutputTokens = None


def chat(body: bytes) -> InferenceRequest:
    """POST /v1/chat/completions."""
    asked = _chat_decoder.decode(body)
    # given both, vLLM and TensorRT-LLM take max_completion_tokens, SGLang max_tokens
    limit = max(filter(None, (asked.max_tokens, asked.max_completion_tokens)), default=None)
    contents = _chat_contents(asked, body) if len(body) >= LARGE_BYTES else None
    media = media_in([message.content for message in asked.messages])
    return request_of(Api.CHAT, asked, _chat_prompt(asked), limit, contents, answers=asked.n or 1, media=media)


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


def completion(body: bytes) -> InferenceRequest:
    """POST /v1/completions."""
    asked = _completion_decoder.decode(body)
    prompt = bytes(opened(asked.prompt))
    prompts = prompts_in(asked.prompt, "prompt")
    return request_of(
        Api.COMPLETIONS,
        asked,
        prompt,
        asked.max_tokens,
        large_contents(asked.prompt, body),
        answers=prompts.count * max(asked.n or 1, asked.best_of or 1),
        prompts=prompts,
    )


def embeddings(body: bytes) -> InferenceRequest:
    """POST /v1/embeddings."""
    asked = _embeddings_decoder.decode(body)
    prompts, contents = prompts_in(asked.input, "input"), large_contents(asked.input, body)
    # nothing is written
    return request_of(Api.EMBEDDINGS, asked, bytes(opened(asked.input)), None, contents, answers=0, prompts=prompts)


def responses(body: bytes) -> InferenceRequest:
    """POST /v1/responses."""
    asked = _responses_decoder.decode(body)
    prompt = b"\n".join((asked.tools, asked.instructions, opened(asked.input)))
    contents, media = large_contents(asked.input, body), media_in([asked.input])
    return request_of(Api.RESPONSES, asked, prompt, asked.max_output_tokens, contents, media=media)


_HEADINGS: Final = {role: f"\n{role}\n".encode() for role in ("user", "assistant", "system", "tool", "developer")}
_chat_decoder: Final = msgspec.json.Decoder(_Chat)
_completion_decoder: Final = msgspec.json.Decoder(_Completion)
_embeddings_decoder: Final = msgspec.json.Decoder(_Embeddings)
_responses_decoder: Final = msgspec.json.Decoder(_Responses)
