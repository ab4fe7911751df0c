# SPDX-License-Identifier: Apache-2.0
"""OpenAI's responses, to chat and from it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from extproc.translate import chat, json_fields
from extproc.translate.json_fields import (
    DroppedFields,
    FieldRule,
    Fields,
    Malformed,
    Object,
    as_count,
    as_index,
    as_object,
    as_objects,
    as_text,
    member_object,
)
from extproc.translate.server_sent_events import MOST_EVENT_BYTES, encode_named_event

if TYPE_CHECKING:
    from collections.abc import Iterator

_WHOLE: Final = "send the whole conversation as `input`"
ENCRYPTED: Final = "reasoning.encrypted_content"

_SAME: Final[Fields] = {
    **{
        name: FieldRule(name)
        for name in (
            "parallel_tool_calls",
            "user",
            "safety_identifier",
            "prompt_cache_key",
            "prompt_cache_retention",
            "service_tier",
        )
    },
    "metadata": FieldRule("metadata", neutral=(None, {})),
}
TO_CHAT: Final[Fields] = {
    **_SAME,
    "model": FieldRule("model"),
    "input": FieldRule(note="`messages`"),
    "instructions": FieldRule(note="the first of `messages`"),
    "max_output_tokens": FieldRule("max_tokens"),
    "stream": FieldRule("stream"),
    "temperature": FieldRule("temperature"),
    "top_p": FieldRule("top_p"),
    "top_k": FieldRule("top_k"),
    "cache_salt": FieldRule("cache_salt"),
    "tools": FieldRule(note="`tools`"),
    "tool_choice": FieldRule(note="`tool_choice`"),
    "reasoning": FieldRule(note="`reasoning_effort`"),
    "text": FieldRule(note="`response_format`, `verbosity`"),
    "include": FieldRule(note=f"`{ENCRYPTED}`: nothing, as answers have it anyway"),
    "truncation": FieldRule(neutral=(None, "disabled")),
    "store": FieldRule(refused="set it to false", neutral=(None, False)),
    "previous_response_id": FieldRule(refused=_WHOLE),
    "conversation": FieldRule(refused=_WHOLE),
    "prompt": FieldRule(refused=_WHOLE),
    "context_management": FieldRule(refused="shorten the conversation yourself"),
    "background": FieldRule(refused="wait for the answer", neutral=(None, False)),
}
FROM_CHAT: Final[Fields] = {
    **chat.FIELDS,
    **_SAME,
    "messages": FieldRule(note="`input`"),
    "max_tokens": FieldRule("max_output_tokens"),
    "max_completion_tokens": FieldRule(note="`max_output_tokens`"),
    "reasoning_effort": FieldRule(note="`reasoning.effort`"),
    "verbosity": FieldRule(note="`text.verbosity`"),
    "response_format": FieldRule(note="`text.format`"),
    "store": FieldRule(note="`store`; false without it"),
}
_TEXTS: Final = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_TEXT: Final = frozenset(("type", "text", "refusal", "annotations", "logprobs"))
_TOOL: Final = frozenset(("type", "name", "description", "parameters", "strict"))
_FORMAT: Final = ("name", "schema", "strict", "description")
# Ids of reasoning items begin so if they are redacted thinking of messages: nothing else in them can show it.
_REDACTED: Final = "rse"
_INCOMPLETE: Final = {"length": "max_output_tokens", "content_filter": "content_filter"}
_FINISH: Final = {"max_output_tokens": "length", "content_filter": "content_filter"}
# What the text of an item is called: in its part, in events of the part, and in those of the text.
_PARTS: Final = {"text": "output_text", "refusal": "refusal", "reasoning": "reasoning_text"}


# Requests to chat


def to_chat(request: Object, dropped: DroppedFields) -> Object:
    """A request for responses as one for chat."""
    out = json_fields.apply_fields(TO_CHAT, request, dropped)
    messages: list[Object] = []
    if request.get("instructions"):
        messages.append({"role": "system", "content": as_text(request["instructions"], "instructions")})
    given = request.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else as_objects(given, "input")
    messages += _messages(items, dropped)
    out["messages"] = _with_one_system(messages)
    if request.get("tools"):
        out["tools"] = [_tool(one, dropped) for one in as_objects(request["tools"], "tools")]
    if request.get("tool_choice") is not None:
        out["tool_choice"] = _choice(request["tool_choice"])
    reasoning, written = member_object(request, "reasoning"), member_object(request, "text")
    if reasoning.get("effort") is not None:
        out["reasoning_effort"] = reasoning["effort"]
    dropped.add_unknown(reasoning, frozenset(("effort",)), "reasoning")
    if written.get("verbosity") is not None:
        out["verbosity"] = written["verbosity"]
    form = member_object(written, "format")
    if json_fields.type_of(form) == "json_schema":
        schema = {name: form[name] for name in _FORMAT if form.get(name) is not None}
        out["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif json_fields.type_of(form) not in ("", "text"):
        out["response_format"] = form
    if request.get("include") not in (None, [], [ENCRYPTED]):
        dropped.add("include")
    return out


def _with_one_system(messages: list[Object]) -> list[Object]:
    """The messages of the system before all others as one: templates of many models take no second."""
    leading = next((at for at, one in enumerate(messages) if one["role"] != "system"), len(messages))
    if leading < 2:
        return messages
    parts: list[Object] = []
    for one in messages[:leading]:
        content = one["content"]
        parts += [{"type": "text", "text": content}] if isinstance(content, str) else content
    joined = "\n\n".join(one["text"] for one in parts)
    return [{"role": "system", "content": joined}, *messages[leading:]]


class _Turn:
    """The assistant's items that stand side by side: one message, as the calls in it are answered together."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.refusals: list[str] = []
        self.details: list[Object] = []
        self.calls: list[Object] = []

    def message(self) -> Object | None:
        if not (self.texts or self.refusals or self.details or self.calls):
            return None
        out: Object = {"role": "assistant", "content": json_fields.join_texts(self.texts) if self.texts else None}
        if self.refusals:
            out["refusal"] = json_fields.join_texts(self.refusals)
        if self.calls:
            out["tool_calls"] = self.calls
        return chat.with_reasoning(out, self.details)

    def add(self, item: Object, dropped: DroppedFields) -> bool:
        """Whether ``item`` is the assistant's."""
        kind = json_fields.type_of(item) or "message"
        if kind == "function_call":
            function = {
                "name": as_text(item.get("name"), "name"),
                "arguments": as_text(item.get("arguments"), "arguments"),
            }
            identifier = as_text(item.get("call_id") or item.get("id"), "call_id")
            self.calls.append({"id": identifier, "type": "function", "function": function})
        elif kind == "reasoning":
            self.details.append(_detail(item, len(self.details)))
        elif kind == "message" and item.get("role") == "assistant":
            content = item.get("content")
            parts = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
            for one in (_part(found, dropped) for found in as_objects(parts, "input.content")):
                if one["type"] not in ("text", "refusal"):
                    raise Malformed("input.content of the assistant must have text alone")
                (self.texts if one["type"] == "text" else self.refusals).append(one[one["type"]])
        else:
            return False
        return True


def _messages(items: list[Object], dropped: DroppedFields) -> Iterator[Object]:
    turn = _Turn()
    images: list[Object] = []  # of tools' results: the user's, behind all results
    for item in items:
        kind, role = json_fields.type_of(item) or "message", item.get("role")
        is_new = kind in ("message", "reasoning") and role in (None, "assistant") and turn.texts and not turn.calls
        if kind != "function_call_output" and images:
            yield {"role": "user", "content": images}
            images = []
        if not is_new and turn.add(item, dropped):
            continue
        message = turn.message()
        if message is not None:
            yield message
        turn = _Turn()
        if is_new:
            turn.add(item, dropped)
        elif kind == "function_call_output":
            content, more = _output(item.get("output"), dropped)
            images += more
            yield {"role": "tool", "tool_call_id": as_text(item.get("call_id"), "input.call_id"), "content": content}
        else:
            yield _message(item, kind, dropped)
    message = turn.message()
    if message is not None:
        yield message
    if images:
        yield {"role": "user", "content": images}


def _message(item: Object, kind: object, dropped: DroppedFields) -> Object:
    if kind != "message":
        raise json_fields.untranslatable_request_refusal("input", f"an item of type {kind}")
    role, content = item.get("role"), item.get("content")
    if role not in ("user", "system", "developer"):
        raise Malformed("input.role must be user, assistant, system or developer")
    found = (
        content if isinstance(content, str) else [_part(one, dropped) for one in as_objects(content, "input.content")]
    )
    if role == "user":
        return {"role": "user", "content": found}
    if not isinstance(found, str):
        if any(one["type"] != "text" for one in found):
            raise Malformed(f"input.content of the {role} must have text alone")
        found = found[0]["text"] if len(found) == 1 else found
    return {"role": "system", "content": found}


def _output(value: object, dropped: DroppedFields) -> tuple[str | list[Object], list[Object]]:
    if isinstance(value, str) or value is None:
        return value or "", []
    parts = [_part(one, dropped) for one in as_objects(value, "input.output")]
    texts = [one for one in parts if one["type"] == "text"]
    return texts or "", [one for one in parts if one["type"] != "text"]


def _part(found: Object, dropped: DroppedFields) -> Object:
    kind = json_fields.type_of(found)
    path = "input.content"
    if kind in _TEXTS:
        dropped.add_unknown(found, _TEXT, path)
        name = _TEXTS[kind]
        return {"type": name, name: as_text(found.get(name), f"{path}.{name}")}
    if kind == "input_image" and found.get("image_url") is not None:
        dropped.add_unknown(found, frozenset(("type", "image_url", "detail")), path)
        image = {"url": as_text(found["image_url"], f"{path}.image_url")}
        if found.get("detail") not in (None, "auto"):
            image["detail"] = found["detail"]
        return {"type": "image_url", "image_url": image}
    if kind == "input_file" and found.get("file_data") is not None:
        file = {name: found[name] for name in ("file_data", "filename") if found.get(name) is not None}
        return {"type": "file", "file": file}
    raise json_fields.untranslatable_request_refusal(path, f"a part of type {kind}")


def _detail(item: Object, at: int) -> Object:
    """A reasoning item: its text, or what stands for it."""
    if as_text(item.get("id"), "reasoning.id").startswith(f"{_REDACTED}_"):
        return {"index": at, "type": chat.ENCRYPTED_DETAIL, "data": as_text(item.get("encrypted_content"), "reasoning")}
    pieces = as_objects(item.get("content"), "reasoning.content")
    texts = [as_text(one.get("text"), "reasoning.content.text") for one in pieces]
    texts = texts or [as_text(one.get("text"), "summary.text") for one in as_objects(item.get("summary"), "summary")]
    out: Object = {"index": at, "type": chat.TEXT_DETAIL, "text": "\n\n".join(texts)}
    signature = as_text(item.get("encrypted_content"), "reasoning.encrypted_content")
    return {**out, "signature": signature, "id": as_text(item.get("id"), "reasoning.id")} if signature else out


def _tool(tool: Object, dropped: DroppedFields) -> Object:
    if json_fields.type_of(tool) != "function":
        raise json_fields.untranslatable_request_refusal("tools", f"one of type {tool.get('type')}")
    dropped.add_unknown(tool, _TOOL, "tools")
    function = {
        "name": as_text(tool.get("name"), "tools.name"),
        "parameters": member_object(tool, "parameters") or chat.NO_PARAMETERS,
    }
    for name in ("description", "strict"):
        if tool.get(name):
            function[name] = tool[name]
    return {"type": "function", "function": function}


def _choice(choice: object) -> str | Object:
    if choice in ("auto", "required", "none"):
        return choice
    if isinstance(choice, dict) and json_fields.type_of(choice) == "function" and isinstance(choice.get("name"), str):
        return {"type": "function", "function": {"name": choice["name"]}}
    raise Malformed("tool_choice must be auto, required, none or a function")


# Requests from chat


def from_chat(request: Object, dropped: DroppedFields) -> Object:
    """A request for chat as one for responses."""
    out = json_fields.apply_fields(FROM_CHAT, request, dropped)
    if request.get("max_completion_tokens") is not None:
        out["max_output_tokens"] = request["max_completion_tokens"]
    out["store"] = bool(request.get("store"))  # it is the default there, and not in chat
    out["input"] = [item for one in chat.messages_of(request, dropped) for item in _items(one, dropped)]
    if request.get("tools"):
        # true is the default of strict there, and not in chat
        tools = chat.tool_functions(request, dropped)
        out["tools"] = [{"type": "function", "strict": False, **one} for one in tools]
    choice = chat.tool_choice(request)
    if choice is not None:
        out["tool_choice"] = {"type": "function", "name": choice["name"]} if isinstance(choice, dict) else choice
    if request.get("reasoning_effort") is not None:
        out["reasoning"] = {"effort": request["reasoning_effort"]}
        if request["reasoning_effort"] != "none" and not out["store"]:
            out["include"] = [ENCRYPTED]
    written: Object = {}
    form = member_object(request, "response_format")
    if json_fields.type_of(form) == "json_schema":
        schema = member_object(form, "json_schema")
        written["format"] = {"type": "json_schema", **{name: schema[name] for name in _FORMAT if name in schema}}
    elif json_fields.type_of(form) not in ("", "text"):
        written["format"] = form
    if request.get("verbosity") is not None:
        written["verbosity"] = request["verbosity"]
    if written:
        out["text"] = written
    return out


def _items(message: Object, dropped: DroppedFields) -> Iterator[Object]:
    role, content = message.get("role"), message.get("content")
    if role == "assistant":
        yield from _assistant_items(message, dropped)
    elif role == "tool":
        call = as_text(message.get("tool_call_id"), "messages.tool_call_id")
        yield {"type": "function_call_output", "call_id": call, "output": _input(content, dropped)}
    elif role in ("user", "system", "developer"):
        yield {"type": "message", "role": role, "content": _input(content, dropped)}
    else:
        raise Malformed("messages.role must be system, developer, user, assistant or tool")


def _assistant_items(message: Object, dropped: DroppedFields) -> Iterator[Object]:
    """Reasoning without signature is left out: engines that keep no state cannot verify it."""
    for at, detail in enumerate(chat.reasoning_pieces(message)):
        if not detail.get("signature"):
            dropped.add("messages.reasoning_content")
            continue
        item = {"type": "reasoning", "id": detail.get("id") or f"rs_{at}", "encrypted_content": detail["signature"]}
        written = as_text(detail.get("text"), "reasoning_details.text")
        yield {**item, "summary": [{"type": "summary_text", "text": written}] if written else []}
    content = message.get("content")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else as_objects(content, "messages.content")
    texts = [as_text(one.get("text") or one.get("refusal"), "messages.content.text") for one in parts]
    written = json_fields.join_texts([*texts, as_text(message.get("refusal"), "messages.refusal")])
    if written:
        yield {"type": "message", "role": "assistant", "content": written}
    for call in as_objects(message.get("tool_calls"), "tool_calls"):
        function = member_object(call, "function")
        yield {
            "type": "function_call",
            "call_id": as_text(call.get("id"), "tool_calls.id"),
            "name": as_text(function.get("name"), "tool_calls.function.name"),
            "arguments": as_text(function.get("arguments"), "tool_calls.function.arguments"),
        }


def _input(content: object, dropped: DroppedFields) -> str | list[Object]:
    if isinstance(content, str):
        return content
    return [_input_part(one, dropped) for one in as_objects(content, "messages.content")]


def _input_part(found: Object, dropped: DroppedFields) -> Object:
    kind = json_fields.type_of(found)
    path = "messages.content"
    if kind == "text":
        dropped.add_unknown(found, frozenset(("type", "text")), path)
        return {"type": "input_text", "text": as_text(found.get("text"), f"{path}.text")}
    if kind == "image_url":
        image = member_object(found, "image_url")
        dropped.add_unknown(found, frozenset(("type", "image_url")), path)
        url = as_text(image.get("url"), f"{path}.image_url.url")
        # engines refuse an image without detail
        return {"type": "input_image", "image_url": url, "detail": image.get("detail") or "auto"}
    file = member_object(found, "file")
    if kind == "file" and file:
        return {"type": "input_file", **{name: one for name, one in file.items() if one is not None}}
    raise json_fields.untranslatable_request_refusal(path, f"a part of type {kind}")


# Answers


def answer_to_chat(answer: Object) -> Object:
    """A whole response as a completion."""
    turn = _Turn()
    for item in as_objects(answer.get("output"), "output"):
        turn.add(item, DroppedFields())  # what the provider ran itself is left out
    message = turn.message() or {"role": "assistant", "content": None}
    choice = {"index": 0, "message": message, "finish_reason": _finish(answer, calls=bool(turn.calls))}
    return {
        **_first(answer, "chat.completion"),
        "choices": [choice],
        "usage": _usage_to_chat(member_object(answer, "usage")),
    }


def _finish(answer: Object, *, calls: bool) -> str:
    reason = member_object(answer, "incomplete_details").get("reason")
    if answer.get("status") == "incomplete":
        return _FINISH.get(reason, "length") if isinstance(reason, str) else "length"
    return "tool_calls" if calls else "stop"


def _first(answer: Object, kind: str) -> Object:
    created = answer.get("created_at")
    return {
        "id": json_fields.with_id_prefix(answer.get("id"), "chatcmpl-"),
        "object": kind,
        "created": int(created) if isinstance(created, (int, float)) and 0 <= created < 2**40 else 0,
        "model": as_text(answer.get("model"), "model"),
        **_tier(answer),
    }


def _tier(answer: Object) -> Object:
    tier = answer.get("service_tier")
    return {"service_tier": tier} if isinstance(tier, str) else {}


def _usage_to_chat(usage: Object) -> Object:
    given, written = member_object(usage, "input_tokens_details"), member_object(usage, "output_tokens_details")
    return chat.make_usage(
        prompt=as_count(usage.get("input_tokens")),
        completion=as_count(usage.get("output_tokens")),
        cached=as_count(given.get("cached_tokens")),
        written=as_count(given.get("cache_write_tokens")),
        reasoning=as_count(written.get("reasoning_tokens")),
    )


def answer_from_chat(answer: Object) -> Object:
    """A whole completion as a response: what its stream would end with."""
    stream = FromChunks(include_usage=True)
    message = member_object((as_objects(answer.get("choices"), "choices") or [{}])[0], "message")
    stream.add_chunk(
        {**answer, "choices": [{**answer["choices"][0], "delta": _in_pieces(message)}]} if message else answer
    )
    return stream.whole_answer()


def _in_pieces(message: Object) -> Object:
    """With its reasoning in pieces that have an index, as chunks have."""
    details = [{**one, "index": at} for at, one in enumerate(chat.reasoning_pieces(message))]
    return {**message, "reasoning_details": details, "reasoning": None, "reasoning_content": None}


def error_event(error: Object) -> Object:
    """The error of a failed response."""
    status = error.get("status", 500)
    code = "rate_limit_exceeded" if status == 429 else "invalid_prompt" if 400 <= status < 500 else "server_error"
    return {"code": code, "message": error["message"]}


def _usage_from_chat(found: Object | None) -> Object:
    tokens = chat.token_usage(found)
    return {
        "input_tokens": tokens.prompt,
        "input_tokens_details": {"cached_tokens": tokens.cached, "cache_write_tokens": tokens.written},
        "output_tokens": tokens.completion,
        "output_tokens_details": {"reasoning_tokens": tokens.reasoning},
        "total_tokens": tokens.prompt + tokens.completion,
    }


# Streams


class ToChunks:
    """Events of responses as chunks."""

    more_follows = False

    def __init__(self) -> None:
        self.ended = False
        self._first: Object = {}
        self._calls: dict[int, int] = {}  # the call at this position of the output
        self._details: dict[int, int] = {}  # the piece of reasoning at this position
        self._written: set[int] = set()  # positions of which deltas came

    def chunks(self, event: Object) -> list[Object]:
        """Those that ``event`` becomes: none for what repeats others, and for what chat has no place for."""
        kind = json_fields.type_of(event)
        if kind in ("error", "response.failed"):
            return [
                {
                    "error": member_object(event, "error")
                    or member_object(member_object(event, "response"), "error")
                    or event
                }
            ]
        if kind == "response.created":
            self._first = _first(as_object(event.get("response"), "response"), "chat.completion.chunk")
            return [chat.make_chunk(self._first, {"role": "assistant", "content": ""})]
        if not self._first:
            raise Malformed("an event came before response.created")
        if kind in ("response.completed", "response.incomplete"):
            return self._finish(as_object(event.get("response"), "response"))
        if kind in ("response.output_item.added", "response.output_item.done"):
            at = _position(event)
            item = as_object(event.get("item"), "item")
            return self._added(at, item) if kind.endswith("added") else self._done(at, item)
        return self._delta(str(kind), event)

    def _added(self, at: int, item: Object) -> list[Object]:
        if json_fields.type_of(item) == "reasoning":
            self._details.setdefault(at, len(self._details))
        if json_fields.type_of(item) != "function_call" or at in self._calls:
            return []
        self._calls[at] = len(self._calls)
        function = {"name": as_text(item.get("name"), "item.name"), "arguments": ""}
        identifier = as_text(item.get("call_id") or item.get("id"), "item.call_id")
        return self._call(at, {"id": identifier, "type": "function", "function": function})

    def _delta(self, kind: str, event: Object) -> list[Object]:
        at = _position(event)
        if kind == "response.reasoning_summary_part.added":
            return self._reasoning(at, "\n\n") if event.get("summary_index") else []
        if not kind.endswith(".delta"):
            return []
        if kind in ("response.output_text.delta", "response.refusal.delta"):
            self._written.add(at)
            name = "content" if kind == "response.output_text.delta" else "refusal"
            return [chat.make_chunk(self._first, {name: as_text(event.get("delta"), "delta")})]
        if kind in ("response.reasoning_text.delta", "response.reasoning_summary_text.delta"):
            self._written.add(at)
            return self._reasoning(at, as_text(event.get("delta"), "delta"))
        if kind == "response.function_call_arguments.delta":
            if at not in self._calls:
                raise Malformed("arguments came without their function call")
            self._written.add(at)
            return self._call(at, {"function": {"arguments": as_text(event.get("delta"), "delta")}})
        return []

    def _reasoning(self, at: int, written: str) -> list[Object]:
        place = self._details.setdefault(at, len(self._details))
        detail = {"index": place, "type": chat.TEXT_DETAIL, "text": written}
        return [chat.make_chunk(self._first, {"reasoning_content": written, "reasoning_details": [detail]})]

    def _done(self, at: int, item: Object) -> list[Object]:
        """What no delta has brought: engines may send items whole."""
        turn = _Turn()
        out = self._added(at, item)
        if not turn.add(item, DroppedFields()):
            return out
        message = turn.message() or {}
        is_new = at not in self._written
        if is_new and turn.calls:
            out += self._call(at, {"function": {"arguments": turn.calls[0]["function"]["arguments"]}})
        if is_new and (message.get("content") or turn.refusals):
            out.append(chat.make_chunk(self._first, {name: message.get(name) for name in ("content", "refusal")}))
        for detail in turn.details:
            if is_new and detail.get("text"):
                out += self._reasoning(at, detail["text"])
            if "data" in detail:
                redacted = {**detail, "index": self._details[at]}
                out.append(chat.make_chunk(self._first, {"reasoning_details": [redacted]}))
            if "signature" in detail:
                proof = {"index": self._details[at], "type": chat.TEXT_DETAIL}
                proof |= {"signature": detail["signature"], "id": detail["id"]}
                out.append(chat.make_chunk(self._first, {"reasoning_details": [proof]}))
        return out

    def _call(self, at: int, call: Object) -> list[Object]:
        return [chat.make_chunk(self._first, {"tool_calls": [{"index": self._calls[at], **call}]})]

    def _finish(self, answer: Object) -> list[Object]:
        self.ended = True
        last = chat.make_usage_chunk(self._first, _usage_to_chat(member_object(answer, "usage")))
        return [chat.make_chunk(self._first, {}, _finish(answer, calls=bool(self._calls))), {**last, **_tier(answer)}]


def _position(event: Object) -> int:
    at = as_index(event.get("output_index"), "output_index")
    if at >= chat.MOST_BLOCKS:
        raise Malformed(f"an answer has more than {chat.MOST_BLOCKS} items")
    return at


class _Item:
    """An item of the output that is being written; ``texts``: its pieces."""

    def __init__(self, kind: str, at: int, item: Object) -> None:
        self.kind = kind
        self.at = at
        self.item = item
        self.texts: list[str] = []
        self.signature = ""


class FromChunks:
    """Chunks as events of responses.

    The last event repeats the answer, so its text is kept: at most 16 MiB. An item ends where the next begins; function
    calls end with the answer, as engines may write several at a time.
    """

    def __init__(self, *, include_usage: bool) -> None:
        del include_usage  # responses always have it
        self._answer: Object = {}
        self._items: list[_Item] = []
        self._open: _Item | None = None
        self._key: tuple[str, int] | None = None
        self._calls: dict[int, _Item] = {}
        self._finish = ""
        self._usage: Object | None = None
        self._kept = 0
        self._number = 0
        self._out: list[Object] = []

    def events(self, found: Object) -> list[bytes]:
        """Those that a chunk becomes."""
        self.add_chunk(found)
        return self._written()

    def add_chunk(self, found: Object) -> None:
        """Add a chunk to the answer."""
        piece = chat.parse_chat_delta(found)
        if not self._answer:
            self._start(piece)
        for detail in piece.details:
            if json_fields.type_of(detail) == chat.ENCRYPTED_DETAIL:
                self._redacted(as_text(detail.get("data"), "reasoning_details.data"))
            else:
                item = self._item("reasoning", as_index(detail.get("index"), "reasoning_details.index"))
                self._write(item, as_text(detail.get("text"), "reasoning_details.text"))
                signature = as_text(detail.get("signature"), "reasoning_details.signature")
                self._keep(len(signature))
                item.signature = signature or item.signature
        if piece.reasoning:
            self._write(self._item("reasoning", 0), piece.reasoning)
        if piece.text:
            self._write(self._item("text", 0), piece.text)
        if piece.refusal:
            self._write(self._item("refusal", 0), piece.refusal)
        for call in piece.calls:
            self._write(self._call(call), call.arguments)
        self._finish, self._usage = piece.finish or self._finish, piece.usage or self._usage
        if piece.service_tier:
            self._answer["service_tier"] = piece.service_tier

    def _start(self, piece: chat.ChatDelta) -> None:
        self._answer = {
            "id": json_fields.with_id_prefix(piece.id, "resp_"),
            "object": "response",
            "created_at": piece.created,
            "status": "in_progress",
            "model": piece.model,
            "output": [],
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "error": None,
            "incomplete_details": None,
            **({"service_tier": piece.service_tier} if piece.service_tier else {}),
        }
        self._emit("response.created", response=dict(self._answer))
        self._emit("response.in_progress", response=dict(self._answer))

    def _emit(self, kind: str, **fields: object) -> None:
        self._out.append({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1

    def _add(self, kind: str, prefix: str, item: Object) -> _Item:
        at = len(self._items)
        if at >= chat.MOST_BLOCKS:
            raise Malformed(f"an answer has more than {chat.MOST_BLOCKS} items")
        self._keep(sum(len(one) for one in item.values() if isinstance(one, str)))
        identifier = f"{prefix}_{self._answer['id'].removeprefix('resp_')}_{at}"
        found = _Item(kind, at, {"id": identifier, **item, "status": "in_progress"})
        self._items.append(found)
        self._emit("response.output_item.added", output_index=at, item=dict(found.item))
        return found

    def _item(self, kind: str, which: int) -> _Item:
        """The open item of this kind, or a new one."""
        if self._open is not None and self._key == (kind, which):
            return self._open
        self._close()
        if kind == "reasoning":
            found = self._add(kind, "rs", {"type": "reasoning", "summary": [], "content": []})
        else:
            found = self._add(kind, "msg", {"type": "message", "role": "assistant", "content": []})
        self._emit("response.content_part.added", **self._place(found), part=_part_of(kind, ""))
        self._open, self._key = found, (kind, which)
        return found

    def _redacted(self, data: str) -> None:
        self._close()
        item = self._add("reasoning", _REDACTED, {"type": "reasoning", "summary": [], "encrypted_content": data})
        item.item["status"] = "completed"
        self._emit("response.output_item.done", output_index=item.at, item=item.item)

    def _call(self, call: chat.ToolCallDelta) -> _Item:
        found = self._calls.get(call.at)
        if found is None:
            self._close()
            item = {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": ""}
            found = self._calls[call.at] = self._add("call", "fc", item)
        return found

    def _place(self, item: _Item) -> Object:
        return {"item_id": item.item["id"], "output_index": item.at, "content_index": 0}

    def _write(self, item: _Item, written: str) -> None:
        if not written:
            return
        self._keep(len(written))
        item.texts.append(written)
        place = {"item_id": item.item["id"], "output_index": item.at}
        if item.kind == "call":
            self._emit("response.function_call_arguments.delta", **place, delta=written)
        else:
            more: Object = {"logprobs": []} if item.kind == "text" else {}
            self._emit(f"response.{_PARTS[item.kind]}.delta", **place, content_index=0, delta=written, **more)

    def _keep(self, size: int) -> None:
        self._kept += size
        if self._kept > MOST_EVENT_BYTES:
            raise Malformed("the answer has more than 16 MiB of text")

    def _close(self) -> None:
        if self._open is not None:
            self._end(self._open)
            self._open = self._key = None

    def _end(self, item: _Item) -> None:
        whole = "".join(item.texts)
        if item.kind == "call":
            item.item["arguments"] = whole
            place = {"item_id": item.item["id"], "output_index": item.at, "name": item.item["name"]}
            self._emit("response.function_call_arguments.done", **place, arguments=whole)
        else:
            kind = _PARTS[item.kind]
            more: Object = {"logprobs": []} if item.kind == "text" else {}
            name = "refusal" if item.kind == "refusal" else "text"
            self._emit(f"response.{kind}.done", **self._place(item), **{name: whole}, **more)
            self._emit("response.content_part.done", **self._place(item), part=_part_of(item.kind, whole))
            item.item["content"] = [_part_of(item.kind, whole)]
        if item.signature:
            item.item["encrypted_content"] = item.signature
        item.item["status"] = "completed"
        self._emit("response.output_item.done", output_index=item.at, item=item.item)

    def whole_answer(self) -> Object:
        """The answer, ended."""
        self._close()
        for item in self._calls.values():
            self._end(item)
        self._answer["output"] = [one.item for one in self._items]
        reason = _INCOMPLETE.get(self._finish)
        self._answer["status"] = "incomplete" if reason else "completed"
        self._answer["incomplete_details"] = {"reason": reason} if reason else None
        self._answer["usage"] = _usage_from_chat(self._usage)
        return self._answer

    def finish(self) -> list[bytes]:
        """The end of a whole answer."""
        answer = self.whole_answer()
        self._emit(f"response.{answer['status']}", response=answer)
        return self._written()

    def fail(self, error: Object) -> list[bytes]:
        """A failed answer; nothing follows it."""
        if not self._answer:
            self._start(chat.parse_chat_delta({}))
        self._answer |= {"status": "failed", "error": error_event(error)}
        self._answer["output"] = [one.item for one in self._items if one.item["status"] == "completed"]
        self._emit("response.failed", response=self._answer)
        return self._written()

    def _written(self) -> list[bytes]:
        out, self._out = self._out, []
        return [encode_named_event(one) for one in out]


def _part_of(kind: str, written: str) -> Object:
    if kind == "text":
        return {"type": "output_text", "text": written, "annotations": []}
    return {"type": _PARTS[kind], "refusal" if kind == "refusal" else "text": written}
