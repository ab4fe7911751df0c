# SPDX-License-Identifier: Apache-2.0
"""Answers in the bytes that vLLM writes: one format for each API, streamed and whole."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from bench.engine.request import Request, Token


class Format(Protocol):
    """How one API writes an answer.

    Made with the request's key, its time of creation in Unix seconds, and the model.
    """

    def opening(self) -> bytes:
        """The beginning of a stream, sent together with the first token."""

    def chunk(self, token: Token) -> bytes:
        """One token of a stream."""

    def closing(self, request: Request, *, wants_usage: bool) -> bytes:
        """The end of a stream. ``wants_usage``: as ``stream_options.include_usage`` asks."""

    def whole(self, request: Request) -> bytes:
        """An answer that is not streamed."""


class ChatFormat:
    """Chat completions."""

    def __init__(self, key: str, created: int, model: str) -> None:
        self._head = {"id": f"chatcmpl-{key}", "created": created, "model": model}
        self._event = _event_template({**self._head, "object": "chat.completion.chunk"}, {"delta": {"content": "%s"}})

    def opening(self) -> bytes:
        delta = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return _event({**self._head, "object": "chat.completion.chunk", "choices": [delta]})

    def chunk(self, token: Token) -> bytes:
        return (self._event % (token.text, '"length"' if token.is_last else "null")).encode()

    def closing(self, request: Request, *, wants_usage: bool) -> bytes:
        return _closing({**self._head, "object": "chat.completion.chunk"}, request, wants_usage=wants_usage)

    def whole(self, request: Request) -> bytes:
        message = {"role": "assistant", "content": request.answer.decode()}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}
        return _dump({**self._head, "object": "chat.completion", "choices": [choice], "usage": chat_usage(request)})


class CompletionFormat:
    """Completions."""

    def __init__(self, key: str, created: int, model: str) -> None:
        self._head = {"id": f"cmpl-{key}", "object": "text_completion", "created": created, "model": model}
        self._event = _event_template(self._head, {"text": "%s"})

    def opening(self) -> bytes:
        return b""

    def chunk(self, token: Token) -> bytes:
        return (self._event % (token.text, '"length"' if token.is_last else "null")).encode()

    def closing(self, request: Request, *, wants_usage: bool) -> bytes:
        return _closing(self._head, request, wants_usage=wants_usage)

    def whole(self, request: Request) -> bytes:
        choice = {"index": 0, "text": request.answer.decode(), "logprobs": None, "finish_reason": "length"}
        return _dump({**self._head, "choices": [choice], "usage": chat_usage(request)})


class ResponsesFormat:
    """Responses: named events, with usage in the last."""

    def __init__(self, key: str, created: int, model: str) -> None:
        self._head = {"id": f"resp_{key}", "object": "response", "created_at": created, "model": model}
        self._item = f"msg_{key}"

    def opening(self) -> bytes:
        return self._named("response.created", {"response": {**self._head, "status": "in_progress", "output": []}})

    def chunk(self, token: Token) -> bytes:
        delta = {"item_id": self._item, "output_index": 0, "content_index": 0, "delta": token.text}
        return self._named("response.output_text.delta", delta)

    def closing(self, request: Request, *, wants_usage: bool) -> bytes:
        del wants_usage  # always there
        return self._named("response.completed", {"response": self._whole(request)})

    def whole(self, request: Request) -> bytes:
        return _dump(self._whole(request))

    def _whole(self, request: Request) -> dict[str, Any]:
        text = {"type": "output_text", "text": request.answer.decode(), "annotations": []}
        item = {"id": self._item, "type": "message", "role": "assistant", "status": "completed", "content": [text]}
        cached = {"cached_tokens": request.cached_tokens or 0}
        usage = {
            "input_tokens": request.prompt_tokens,
            "input_tokens_details": cached,
            "output_tokens": request.produced,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": request.tokens,
        }
        rest = {"parallel_tool_calls": False, "tool_choice": "auto", "tools": []}
        return {**self._head, **rest, "status": "completed", "output": [item], "usage": usage}

    def _named(self, name: str, fields: dict[str, Any]) -> bytes:
        return f"event: {name}\n".encode() + _event({"type": name, "sequence_number": 0, **fields})


def chat_usage(request: Request) -> dict[str, Any]:
    """The ``usage`` object. As in vLLM, details are null when nothing was cached."""
    details = {"cached_tokens": request.cached_tokens} if request.cached_tokens else None
    return {
        "prompt_tokens": request.prompt_tokens,
        "total_tokens": request.tokens,
        "completion_tokens": request.produced,
        "prompt_tokens_details": details,
    }


def error_body(message: str, *, status: int, kind: str, param: str | None = None) -> bytes:
    """An error object as vLLM writes it. ``param``: the field at fault."""
    return _dump({"error": {"message": message, "type": kind, "param": param, "code": status}})


def _closing(head: dict[str, Any], request: Request, *, wants_usage: bool) -> bytes:
    usage = _event({**head, "choices": [], "usage": chat_usage(request)}) if wants_usage else b""
    return usage + b"data: [DONE]\n\n"


def _event_template(head: dict[str, Any], content: dict[str, Any]) -> str:
    """An event without its text and finish reason: events are written for every token, so the rest is made once."""

    choice = {"index": 0, **content, "logprobs": None, "finish_reason": "%s"}
    text = _event({**head, "choices": [choice]}).decode()
    return text.replace('"finish_reason":"%s"', '"finish_reason":%s')


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + _dump(value) + b"\n\n"


def _dump(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
