# SPDX-License-Identifier: Apache-2.0
"""Chat completions, the hub: every other API is translated to it and from it.

Two fields of the hub are not OpenAI's. ``reasoning_content`` has the text of a model's reasoning; engines also call it
``reasoning``. ``reasoning_details`` has its pieces with what proves them: ``{"index", "type": "reasoning.text", "text",
"signature", "id"}``, or ``{"index", "type": "reasoning.encrypted", "data"}``. Clients that return both let the next
request keep its signatures.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from extproc.translate import json_fields
from extproc.translate.json_fields import (
    DroppedFields,
    FieldRule,
    Fields,
    Malformed,
    Object,
    as_count,
    as_index,
    as_objects,
    as_text,
    member_object,
)
from extproc.translate.server_sent_events import DONE, encode_data_event

if TYPE_CHECKING:
    from collections.abc import Iterator

TEXT_DETAIL: Final = "reasoning.text"
ENCRYPTED_DETAIL: Final = "reasoning.encrypted"
_ONE_TEXT: Final = "ask for one text"
# What becomes of a request's fields in all other APIs.
FIELDS: Final[Fields] = {
    **{name: FieldRule(name) for name in ("model", "stream", "temperature", "top_p", "top_k", "cache_salt")},
    "stream_options": FieldRule(note="`include_usage` decides whether the client gets usage"),
    "tools": FieldRule(note="`tools`"),
    "tool_choice": FieldRule(note="`tool_choice`"),
    "n": FieldRule(refused=_ONE_TEXT, neutral=(None, 1)),
    "audio": FieldRule(refused=_ONE_TEXT),
    "modalities": FieldRule(refused=_ONE_TEXT, neutral=(None, ["text"])),
    "functions": FieldRule(refused="use `tools`"),
    "function_call": FieldRule(refused="use `tool_choice`"),
    "web_search_options": FieldRule(refused="search yourself"),
    "logprobs": FieldRule(neutral=(None, False)),
    "frequency_penalty": FieldRule(neutral=(None, 0, 0.0)),
    "presence_penalty": FieldRule(neutral=(None, 0, 0.0)),
}
_MESSAGE: Final = frozenset(
    ("role", "content", "refusal", "tool_calls", "tool_call_id", "reasoning", "reasoning_content", "reasoning_details")
)
_FUNCTION: Final = frozenset(("name", "description", "parameters", "strict"))
NO_PARAMETERS: Final[Object] = {"type": "object", "properties": {}}
# Blocks or items of one answer, and its tool calls.
MOST_BLOCKS: Final = 1024


class ToolCallDelta(NamedTuple):
    """A piece of a tool call: the id and the name come once, the arguments in pieces."""

    at: int
    id: str
    name: str
    arguments: str


class ChatDelta(NamedTuple):
    """A chunk, or a whole completion as a single one."""

    id: str
    model: str
    created: int
    reasoning: str
    details: list[Object]
    text: str
    refusal: str
    calls: list[ToolCallDelta]
    finish: str
    stop: str
    usage: Object | None
    service_tier: str


def parse_chat_delta(chunk: Object) -> ChatDelta:
    """Of a chunk or a completion, whose only choice is the first."""
    choices = as_objects(chunk.get("choices"), "choices")
    choice = choices[0] if choices else {}
    delta = choice.get("delta", choice.get("message")) or {}
    delta = json_fields.as_object(delta, "choices.delta")
    details = as_objects(delta.get("reasoning_details"), "reasoning_details")
    stop = choice.get("stop_reason")  # vLLM: the stop sequence, or the id of a token
    usage, tier = chunk.get("usage"), chunk.get("service_tier")
    return ChatDelta(
        id=as_text(chunk.get("id"), "id"),
        model=as_text(chunk.get("model"), "model"),
        created=as_count(chunk.get("created")),
        reasoning="" if any(one.get("text") for one in details) else _reasoning(delta),
        details=details,
        text=as_text(delta.get("content"), "content"),
        refusal=as_text(delta.get("refusal"), "refusal"),
        calls=_calls(delta, json_fields.with_id_prefix(chunk.get("id"), "call_")) if delta.get("tool_calls") else [],
        finish=as_text(choice.get("finish_reason"), "finish_reason"),
        stop=stop if isinstance(stop, str) else "",
        usage=usage if isinstance(usage, dict) else None,
        service_tier=tier if isinstance(tier, str) else "",
    )


def _reasoning(delta: Object) -> str:
    return as_text(delta.get("reasoning") or delta.get("reasoning_content"), "reasoning")


def _calls(delta: Object, prefix: str) -> list[ToolCallDelta]:
    """Some engines give a call no id; clients need one to answer it."""
    found = []
    for position, one in enumerate(as_objects(delta["tool_calls"], "tool_calls")):
        function = member_object(one, "function")
        at = as_index(one["index"], "tool_calls.index") if "index" in one else position
        if at >= MOST_BLOCKS:
            raise Malformed(f"an answer has more than {MOST_BLOCKS} tool calls")
        identifier = as_text(one.get("id"), "tool_calls.id")
        name = as_text(function.get("name"), "tool_calls.function.name")
        arguments = as_text(function.get("arguments"), "tool_calls.function.arguments")
        found.append(ToolCallDelta(at, identifier or f"{prefix}_{at}", name, arguments))
    return found


def reasoning_pieces(message: Object) -> list[Object]:
    """The pieces of a message's reasoning; text alone is a piece without signature."""
    details = as_objects(message.get("reasoning_details"), "reasoning_details")
    plain = _reasoning(message)
    if not details:
        return [{"index": 0, "type": TEXT_DETAIL, "text": plain}] if plain else []
    if plain and not any(one.get("text") for one in details):
        first = next((at for at, one in enumerate(details) if one.get("type") != ENCRYPTED_DETAIL), None)
        if first is not None:
            return [*details[:first], {**details[first], "text": plain}, *details[first + 1 :]]
    return details


def with_reasoning(message: Object, details: list[Object]) -> Object:
    """``message`` with its reasoning: as a text, and in pieces, as streams have it."""
    if details:
        texts = [one["text"] for one in details if one.get("text")]
        if texts:
            message["reasoning_content"] = "".join(texts)
        message["reasoning_details"] = details
    return message


def messages_of(request: Object, dropped: DroppedFields) -> list[Object]:
    """A request's messages; names of their authors are dropped."""
    found = as_objects(request.get("messages"), "messages")
    for one in found:
        dropped.add_unknown(one, _MESSAGE, "messages")
    dropped.add_unknown(member_object(request, "stream_options"), frozenset(("include_usage",)), "stream_options")
    return found


def tool_functions(request: Object, dropped: DroppedFields) -> Iterator[Object]:
    """A request's tools: name, description, parameters, strict."""
    for tool in as_objects(request.get("tools"), "tools"):
        if tool.get("type") != "function":
            raise json_fields.untranslatable_request_refusal("tools", f"one of type {tool.get('type')}")
        function = json_fields.as_object(tool.get("function"), "tools.function")
        dropped.add_unknown(function, _FUNCTION, "tools.function")
        as_text(function.get("name"), "tools.function.name")
        found = {name: one for name, one in function.items() if name in _FUNCTION and one is not None}
        yield {**found, "parameters": member_object(found, "parameters") or NO_PARAMETERS}


def tool_choice(request: Object) -> str | Object | None:
    """The choice of tools: auto, required, none, or a function with its name."""
    choice = request.get("tool_choice")
    if choice is None or choice in ("auto", "required", "none"):
        return choice
    function = member_object(choice, "function") if isinstance(choice, dict) else {}
    if isinstance(function.get("name"), str):
        return function
    raise Malformed("tool_choice must be auto, required, none or a function")


def to_chat(request: Object, dropped: DroppedFields) -> Object:
    """Chat itself."""
    del dropped
    return request


def from_chat(request: Object, dropped: DroppedFields) -> Object:
    """The request as engines that have chat alone take it: none of them verifies signatures."""
    for message in request["messages"]:
        for detail in message.pop("reasoning_details", ()):
            if detail.get("signature") or detail.get("data"):
                dropped.add("reasoning.signature")
    if request.get("stream"):
        request["stream_options"] = {"include_usage": True}
    return request


def answer_to_chat(answer: Object) -> Object:
    """Chat itself."""
    return answer


def answer_from_chat(answer: Object) -> Object:
    """Chat itself."""
    return answer


def make_chunk(first: Object, delta: Object, finish: str | None = None, **more: object) -> Object:
    """A chunk of the answer whose id, model and time ``first`` has."""
    return {**first, "choices": [{"index": 0, "delta": delta, "finish_reason": finish, **more}]}


def make_usage_chunk(first: Object, usage: Object) -> Object:
    """The last chunk, which has usage alone."""
    return {**first, "choices": [], "usage": usage}


def make_usage(*, prompt: int, completion: int, cached: int, written: int, reasoning: int) -> Object:
    """OpenAI's usage: the prompt's tokens include those that were cached, the completion's those of reasoning."""
    prompt_details = {"cached_tokens": cached} | ({"cache_write_tokens": written} if written else {})
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": prompt_details,
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }


class TokenUsage(NamedTuple):
    """Of a completion's usage."""

    prompt: int
    completion: int
    cached: int
    written: int
    reasoning: int


def token_usage(found: Object | None) -> TokenUsage:
    """What a completion's usage says; zeros for what it does not."""
    usage = found or {}
    prompt, completion = (
        member_object(usage, "prompt_tokens_details"),
        member_object(usage, "completion_tokens_details"),
    )
    return TokenUsage(
        prompt=as_count(usage.get("prompt_tokens")),
        completion=as_count(usage.get("completion_tokens")),
        cached=as_count(prompt.get("cached_tokens")),
        written=as_count(prompt.get("cache_write_tokens")),
        reasoning=as_count(completion.get("reasoning_tokens")),
    )


class ToChunks:
    """An engine's chunks are the hub's."""

    more_follows = True  # usage

    def __init__(self) -> None:
        self.ended = False

    def chunks(self, event: Object) -> list[Object]:
        """``event`` itself."""
        choices = as_objects(event.get("choices"), "choices")
        self.ended = self.ended or any(one.get("finish_reason") for one in choices)
        # some providers begin with a chunk that has nothing, not even an id
        return [event] if choices or event.get("usage") or event.get("error") else []


class FromChunks:
    """The hub's chunks are the client's."""

    def __init__(self, *, include_usage: bool) -> None:
        self._include_usage = include_usage

    def events(self, found: Object) -> list[bytes]:
        """The chunk, unless it has usage alone and the client has not requested it."""
        if not self._include_usage and not found.get("choices"):
            return []
        return [encode_data_event(found)]

    def finish(self) -> list[bytes]:
        """The end of a whole answer."""
        return [b"data: %b\n\n" % DONE]

    def fail(self, error: Object) -> list[bytes]:
        """An error; nothing follows it."""
        return [encode_data_event(json_fields.openai_error(error))]
