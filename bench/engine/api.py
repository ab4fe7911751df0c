# SPDX-License-Identifier: Apache-2.0
"""The fields of OpenAI API requests that the engine reads, as vLLM reads them."""

from __future__ import annotations

from array import array
from typing import Annotated, Any

import msgspec

from bench.engine.text import Message, render_chat

Tokens = Annotated[int, msgspec.Meta(ge=1)]


class StreamOptions(msgspec.Struct):
    """``stream_options`` of a streamed request."""

    include_usage: bool = False


TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]


class ChatRequest(msgspec.Struct):
    """POST /v1/chat/completions."""

    model: str
    messages: list[Message]
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None


class CompletionRequest(msgspec.Struct):
    """POST /v1/completions."""

    model: str
    prompt: str | list[TokenId]
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Tokens | None = 16


class ResponsesRequest(msgspec.Struct):
    """POST /v1/responses."""

    model: str
    input: str | list[Message]
    stream: bool = False
    max_output_tokens: Tokens | None = None


class Job(msgspec.Struct, frozen=True):
    """What the engine has to do, whichever API asked. ``max_tokens``: of the answer, if the request limits it.
    ``options``: more that its format needs.
    """

    model: str
    prompt: bytes
    max_tokens: int | None
    is_streamed: bool
    wants_usage: bool
    options: dict[str, Any] = {}


def chat_job(body: ChatRequest) -> Job:
    """A chat as a job."""
    wants_usage = body.stream_options is not None and body.stream_options.include_usage
    return Job(
        model=body.model,
        prompt=render_chat(body.messages),
        max_tokens=body.max_completion_tokens or body.max_tokens,
        is_streamed=body.stream,
        wants_usage=wants_usage,
    )


def sglang_chat_job(body: ChatRequest) -> Job:
    """The same as SGLang reads it: given both limits, it takes the other one (``ChatCompletionRequest`` there)."""
    return msgspec.structs.replace(chat_job(body), max_tokens=body.max_tokens or body.max_completion_tokens)


def completion_job(body: CompletionRequest) -> Job:
    """A completion as a job."""
    wants_usage = body.stream_options is not None and body.stream_options.include_usage
    return Job(
        model=body.model,
        prompt=_prompt_bytes(body.prompt),
        max_tokens=body.max_tokens,
        is_streamed=body.stream,
        wants_usage=wants_usage,
    )


def responses_job(body: ResponsesRequest) -> Job:
    """A response as a job; its stream always ends with usage."""
    messages = [Message("user", body.input)] if isinstance(body.input, str) else body.input
    return Job(
        model=body.model,
        prompt=render_chat(messages),
        max_tokens=body.max_output_tokens,
        is_streamed=body.stream,
        wants_usage=True,
    )


def _prompt_bytes(prompt: str | list[int]) -> bytes:
    """Four bytes for each token id."""

    return prompt.encode() if isinstance(prompt, str) else array("I", prompt).tobytes()
