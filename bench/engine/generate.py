# SPDX-License-Identifier: Apache-2.0
"""POST /inference/v1/generate as in vLLM: tokens in, tokens out."""

from __future__ import annotations

import json
from array import array
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from bench.engine.api import Job, StreamOptions, TokenId, Tokens
from bench.engine.formats import chat_usage
from bench.engine.text import tokens_of

if TYPE_CHECKING:
    from bench.engine.request import Request, Token


class Sampling(msgspec.Struct):
    """Of vLLM's sampling parameters, what matters here."""

    max_tokens: Tokens | None = None


class GenerateRequest(msgspec.Struct, kw_only=True):
    """The request. ``model``: the engine's own, if it names none."""

    token_ids: Annotated[list[TokenId], msgspec.Meta(min_length=1)]
    sampling_params: Sampling
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None


def generate_job(body: GenerateRequest) -> Job:
    """Four bytes for each token id."""
    return Job(
        model=body.model or "",
        prompt=array("I", body.token_ids).tobytes(),
        max_tokens=body.sampling_params.max_tokens,
        is_streamed=body.stream,
        wants_usage=body.stream_options is not None and body.stream_options.include_usage,
    )


class GenerateFormat:
    """Answers of tokens."""

    def __init__(self, key: str, created: int, model: str) -> None:
        del created, model
        self._head = {"request_id": f"generate-tokens-{key}"}

    def opening(self) -> bytes:
        return b""

    def chunk(self, token: Token) -> bytes:
        return self._event([_choice(token.text, is_last=token.is_last)])

    def closing(self, request: Request, *, wants_usage: bool) -> bytes:
        usage = self._event([], usage=chat_usage(request)) if wants_usage else b""
        return usage + b"data: [DONE]\n\n"

    def whole(self, request: Request) -> bytes:
        choice = _choice(request.answer.decode(), is_last=True)
        return json.dumps({**self._head, "choices": [choice], "usage": chat_usage(request)}).encode()

    def _event(self, choices: list[dict[str, Any]], **more: object) -> bytes:
        return b"data: " + json.dumps({**self._head, "choices": choices, **more}).encode() + b"\n\n"


def _choice(text: str, *, is_last: bool) -> dict[str, Any]:
    reason = "length" if is_last else None
    return {"index": 0, "logprobs": None, "finish_reason": reason, "token_ids": tokens_of(text.encode())}
