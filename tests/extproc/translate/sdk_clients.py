# SPDX-License-Identifier: Apache-2.0
"""The SDKs as oracles: their types validate what is translated, and their clients read it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx2
import openai
from anthropic.types import Message
from anthropic.types.message_create_params import MessageCreateParams
from openai.types.chat import ChatCompletion
from openai.types.chat.completion_create_params import CompletionCreateParams
from openai.types.responses import Response
from openai.types.responses.response_create_params import ResponseCreateParams
from pydantic import BaseModel, TypeAdapter

Json = dict[str, Any]
_PARAMS: dict[str, Any] = {
    "chat": CompletionCreateParams,
    "messages": MessageCreateParams,
    "responses": ResponseCreateParams,
}
_ANSWERS: dict[str, Any] = {"chat": ChatCompletion, "messages": Message, "responses": Response}
_ASKED: Any = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


def validate_request(api: str, request: Json) -> None:
    """By the parameters that the SDK's method takes; raises ValidationError."""
    _consume(_adapter(api).validate_python(request))


@functools.cache
def _adapter(api: str) -> TypeAdapter[Any]:
    return TypeAdapter(_PARAMS[api])


def _consume(value: object) -> None:
    """Iterables are validated as they are read."""
    if isinstance(value, dict):
        for one in value.values():
            _consume(one)
    elif isinstance(value, list | Iterator):
        for one in value:
            _consume(one)


def validated_answer(api: str, answer: Json) -> Json:
    """As the SDK's object has it; raises ValidationError."""
    return _plain(_ANSWERS[api].model_validate(answer, strict=True))


def _plain(found: BaseModel) -> Json:
    return found.model_dump(exclude_none=True, by_alias=True, warnings=False)


def _transport(events: bytes) -> httpx2.MockTransport:
    headers = {"content-type": "text/event-stream"}
    return httpx2.MockTransport(lambda _: httpx2.Response(200, content=events, headers=headers))


def accumulated(api: str, events: bytes) -> Json:
    """A stream as the SDK's helper for streams puts it together; raises what it raises."""
    http = httpx2.Client(transport=_transport(events))
    if api == "messages":
        with (
            anthropic.Anthropic(api_key="k", base_url="http://test", http_client=http, max_retries=0) as client,
            client.messages.stream(max_tokens=5, **_ASKED) as stream,
        ):
            return _plain(stream.get_final_message())
    with openai.OpenAI(api_key="k", base_url="http://test/v1", http_client=http, max_retries=0) as client:
        if api == "responses":
            with client.responses.stream(model="m", input="hello") as stream:
                last = [event for event in stream if event.type in ("response.completed", "response.incomplete")]
                return _plain(last[-1].response)  # the helper's final response is only that of complete answers
        with client.chat.completions.stream(**_ASKED) as chat:
            for _ in chat:  # the helper's final completion is only that of complete answers
                pass
            return _plain(chat.current_completion_snapshot)


def answered(api: str, body: bytes, status: int = 200) -> Any:  # noqa: ANN401 - of three APIs
    """A whole answer as the SDK's method returns it; raises what it raises."""
    headers = {"content-type": "application/json"}
    http = httpx2.Client(
        transport=httpx2.MockTransport(lambda _: httpx2.Response(status, content=body, headers=headers))
    )
    if api == "messages":
        with anthropic.Anthropic(api_key="k", base_url="http://test", http_client=http, max_retries=0) as client:
            return client.messages.create(max_tokens=5, **_ASKED)
    with openai.OpenAI(api_key="k", base_url="http://test/v1", http_client=http, max_retries=0) as client:
        if api == "responses":
            return client.responses.create(model="m", input="hello")
        return client.chat.completions.create(**_ASKED)
