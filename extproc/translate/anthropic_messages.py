# SPDX-License-Identifier: Apache-2.0
"""Anthropic's messages, to chat and from it."""

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

# The API requires a limit; chat does not.
DEFAULT_MAX_TOKENS: Final = 4096
_SERVER_STATE: Final = "send what it refers to in the request itself"
_EFFORTS: Final = {one: one for one in ("low", "medium", "high", "xhigh", "max")}

TO_CHAT: Final[Fields] = {
    "model": FieldRule("model"),
    "messages": FieldRule(note="`messages`"),
    "system": FieldRule(note="the first of `messages`"),
    "max_tokens": FieldRule("max_tokens"),
    "stop_sequences": FieldRule("stop"),
    "stream": FieldRule("stream"),
    "temperature": FieldRule("temperature"),
    "top_p": FieldRule("top_p"),
    "top_k": FieldRule("top_k"),
    "cache_salt": FieldRule("cache_salt"),
    "tools": FieldRule(note="`tools`"),
    "tool_choice": FieldRule(note="`tool_choice`, `parallel_tool_calls`"),
    "metadata": FieldRule(note="`user`"),
    "service_tier": FieldRule("service_tier", {"auto": "auto", "standard_only": "default"}),
    "thinking": FieldRule(note="`reasoning_effort: none` if it is disabled"),
    "output_config": FieldRule(note="`response_format`, `reasoning_effort`"),
    "container": FieldRule(refused=_SERVER_STATE),
    "mcp_servers": FieldRule(refused="call the servers' tools yourself", neutral=(None, [])),
    "context_management": FieldRule(refused="shorten the conversation yourself"),
}
FROM_CHAT: Final[Fields] = {
    **chat.FIELDS,
    "messages": FieldRule(note="`system`, `messages`"),
    "max_tokens": FieldRule(note=f"`max_tokens`; {DEFAULT_MAX_TOKENS} without it"),
    "max_completion_tokens": FieldRule(note="`max_tokens`"),
    "stop": FieldRule(note="`stop_sequences`"),
    "parallel_tool_calls": FieldRule(note="`tool_choice.disable_parallel_tool_use`"),
    "user": FieldRule(note="`metadata.user_id`"),
    "service_tier": FieldRule("service_tier", {"auto": "auto", "default": "standard_only"}),
    "reasoning_effort": FieldRule(note="`output_config.effort`; `thinking` for none"),
    "response_format": FieldRule(note="`output_config.format` for a schema"),
    "store": FieldRule(refused="nothing can be stored there", neutral=(None, False)),
}
_STOP_TO_CHAT: Final = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "pause_turn": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "tool_calls",
    "refusal": "content_filter",
}
_STOP_FROM_CHAT: Final = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "function_call": "tool_use",
    "content_filter": "refusal",
}
_TIER_TO_CHAT: Final = {"standard": "default", "priority": "priority"}
_TIER_FROM_CHAT: Final = {"default": "standard", "priority": "priority"}
_TEXT: Final = frozenset(("type", "text"))
_IMAGE: Final = frozenset(("type", "source"))
_DOCUMENT: Final = frozenset(("type", "source", "title"))
_RESULT: Final = frozenset(("type", "tool_use_id", "content", "is_error"))
_TOOL: Final = frozenset(("type", "name", "description", "input_schema", "strict"))
_TOOL_NAMES: Final = {"parameters": "input_schema"}
_CHOICES: Final = {"auto": "auto", "required": "any", "none": "none"}
_ERROR_PREFIX: Final = "Error: "
_ANSWERED: Final = frozenset(("text", "thinking", "redacted_thinking", "tool_use"))


# Requests to chat


def to_chat(request: Object, dropped: DroppedFields) -> Object:
    """A request for messages as one for chat."""
    out = json_fields.apply_fields(TO_CHAT, request, dropped)
    out["messages"] = [
        *_system(request, dropped),
        *(one for message in as_objects(request.get("messages"), "messages") for one in _to_chat(message, dropped)),
    ]
    if request.get("tools"):
        out["tools"] = [_tool(one, dropped) for one in as_objects(request["tools"], "tools")]
    if request.get("tool_choice") is not None:
        _choice_to_chat(as_object(request["tool_choice"], "tool_choice"), out)
    metadata = member_object(request, "metadata")
    if metadata.get("user_id") is not None:
        out["user"] = metadata["user_id"]
    dropped.add_unknown(metadata, frozenset(("user_id",)), "metadata")
    _output_to_chat(request, out, dropped)
    return out


def _system(request: Object, dropped: DroppedFields) -> list[Object]:
    found = request.get("system")
    if not found:
        return []
    content = found if isinstance(found, str) else _texts(found, "system", dropped)
    return [{"role": "system", "content": content}]


def _texts(value: object, path: str, dropped: DroppedFields) -> str | list[Object]:
    """Blocks of text alone; a single one as a plain text, which all chat templates take."""
    parts = [_part(one, path, dropped) for one in as_objects(value, path)]
    if any(one["type"] != "text" for one in parts):
        raise Malformed(f"{path} must have text alone")
    return parts[0]["text"] if len(parts) == 1 else parts


def _to_chat(message: Object, dropped: DroppedFields) -> Iterator[Object]:
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise Malformed("messages.role must be user, assistant or system")
    if isinstance(content, str):
        yield {"role": role, "content": content}
    elif role == "assistant":
        yield _assistant(as_objects(content, "messages.content"), dropped)
    elif role == "system":
        yield {"role": role, "content": _texts(content, "messages.content", dropped)}
    else:
        yield from _user(as_objects(content, "messages.content"), dropped)


def _user(blocks: list[Object], dropped: DroppedFields) -> Iterator[Object]:
    """Results of tools are messages of their own; their images go into the user's message behind them."""
    parts: list[Object] = []
    for block in blocks:
        if json_fields.type_of(block) != "tool_result":
            parts.append(_part(block, "messages.content", dropped))
            continue
        dropped.add_unknown(block, _RESULT, "messages.content")
        content, images = _result(block, dropped)
        parts.extend(images)
        yield {"role": "tool", "tool_call_id": as_text(block.get("tool_use_id"), "tool_use_id"), "content": content}
    if parts or not blocks:
        yield {"role": "user", "content": parts}


def _result(block: Object, dropped: DroppedFields) -> tuple[str | list[Object], list[Object]]:
    """The text of a tool's result, which says if it is an error, and its other parts."""
    content = block.get("content")
    if isinstance(content, str) or content is None:
        return _marked(content or "", block), []
    parts = [_part(one, "messages.content.content", dropped) for one in as_objects(content, "tool_result.content")]
    texts = [one for one in parts if one["type"] == "text"]
    if texts and block.get("is_error"):
        texts[0] = {**texts[0], "text": _marked(texts[0]["text"], block)}
    return texts or _marked("", block), [one for one in parts if one["type"] != "text"]


def _marked(content: str, block: Object) -> str:
    if block.get("is_error") and not content.lower().startswith("error"):
        return _ERROR_PREFIX + content
    return content


def _part(block: Object, path: str, dropped: DroppedFields) -> Object:
    """A block of text, an image or a document."""
    kind, source = json_fields.type_of(block), member_object(block, "source")
    if kind == "text":
        dropped.add_unknown(block, _TEXT, path)
        return {"type": "text", "text": as_text(block.get("text"), f"{path}.text")}
    if kind == "image" and json_fields.type_of(source) in ("base64", "url"):
        dropped.add_unknown(block, _IMAGE, path)
        return {"type": "image_url", "image_url": {"url": _url(source, path)}}
    if kind == "document" and json_fields.type_of(source) in ("base64", "text"):
        dropped.add_unknown(block, _DOCUMENT, path)
        data = as_text(source.get("data"), f"{path}.source.data")
        if source["type"] == "text":
            return {"type": "text", "text": data}
        name = as_text(block.get("title"), f"{path}.title") or "document.pdf"
        return {"type": "file", "file": {"filename": name, "file_data": _url(source, path)}}
    raise json_fields.untranslatable_request_refusal(
        path, f"a block of type {kind}" + (f" with source {source.get('type')}" if source else "")
    )


def _url(source: Object, path: str) -> str:
    if source["type"] == "url":
        return as_text(source.get("url"), f"{path}.source.url")
    media = as_text(source.get("media_type"), f"{path}.source.media_type")
    return f"data:{media};base64,{as_text(source.get('data'), f'{path}.source.data')}"


def _assistant(blocks: list[Object], dropped: DroppedFields) -> Object:
    """An assistant's message, of a request or an answer."""
    texts: list[str] = []
    details: list[Object] = []
    calls: list[Object] = []
    for block in blocks:
        kind = json_fields.type_of(block)
        if kind == "text":
            dropped.add_unknown(block, _TEXT, "messages.content")
            texts.append(as_text(block.get("text"), "messages.content.text"))
        elif kind == "thinking":
            details.append(_thinking(block, len(details)))
        elif kind == "redacted_thinking":
            data = as_text(block.get("data"), "messages.content.data")
            details.append({"index": len(details), "type": chat.ENCRYPTED_DETAIL, "data": data})
        elif kind == "tool_use":
            calls.append(_call(block))
        else:
            _part({**block, "source": {}}, "messages.content", dropped)
    out: Object = {"role": "assistant", "content": json_fields.join_texts(texts) if texts else None}
    if calls:
        out["tool_calls"] = calls
    return chat.with_reasoning(out, details)


def _thinking(block: Object, at: int) -> Object:
    found = {"index": at, "type": chat.TEXT_DETAIL, "text": as_text(block.get("thinking"), "messages.content.thinking")}
    signature = as_text(block.get("signature"), "messages.content.signature")
    return {**found, "signature": signature} if signature else found


def _call(block: Object) -> Object:
    function = {
        "name": as_text(block.get("name"), "tool_use.name"),
        "arguments": json_fields.compact_json(block.get("input") or {}),
    }
    return {"id": as_text(block.get("id"), "tool_use.id"), "type": "function", "function": function}


def _tool(tool: Object, dropped: DroppedFields) -> Object:
    kind = json_fields.type_of(tool)
    if kind not in ("", "custom"):
        raise json_fields.untranslatable_request_refusal("tools", f"one of type {kind}")
    dropped.add_unknown(tool, _TOOL, "tools")
    function = {"name": as_text(tool.get("name"), "tools.name"), "parameters": member_object(tool, "input_schema")}
    more = {name: tool[name] for name in ("description", "strict") if tool.get(name) is not None}
    return {"type": "function", "function": {**function, **more}}


def _choice_to_chat(choice: Object, out: Object) -> None:
    kind = json_fields.type_of(choice)
    if kind == "tool":
        out["tool_choice"] = {"type": "function", "function": {"name": as_text(choice.get("name"), "tool_choice.name")}}
    elif kind in ("auto", "any", "none"):
        out["tool_choice"] = "required" if kind == "any" else kind
    else:
        raise Malformed("tool_choice.type must be auto, any, none or tool")
    if choice.get("disable_parallel_tool_use"):
        out["parallel_tool_calls"] = False


def _output_to_chat(request: Object, out: Object, dropped: DroppedFields) -> None:
    config, thinking = member_object(request, "output_config"), member_object(request, "thinking")
    dropped.add_unknown(config, frozenset(("effort", "format")), "output_config")
    if config.get("effort") is not None:
        out["reasoning_effort"] = config["effort"]
    if json_fields.type_of(thinking) == "disabled":
        out["reasoning_effort"] = "none"
    dropped.add_unknown(thinking, frozenset(("type",)), "thinking")
    if config.get("format") is not None:
        schema = member_object(as_object(config["format"], "output_config.format"), "schema")
        out["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": schema, "strict": True},
        }


# Requests from chat


def from_chat(request: Object, dropped: DroppedFields) -> Object:
    """A request for chat as one for messages."""
    out = json_fields.apply_fields(FROM_CHAT, request, dropped)
    limits = (request.get(name) for name in ("max_completion_tokens", "max_tokens"))
    out["max_tokens"] = next((one for one in limits if one is not None), DEFAULT_MAX_TOKENS)
    if request.get("stop") is not None:
        stop = request["stop"]
        out["stop_sequences"] = [stop] if isinstance(stop, str) else stop
    if request.get("user") is not None:
        out["metadata"] = {"user_id": request["user"]}
    messages = chat.messages_of(request, dropped)
    leading = next((at for at, one in enumerate(messages) if not _is_system(one)), len(messages))
    system = _system_blocks(messages[:leading], dropped)
    if system:
        out["system"] = system
    out["messages"] = list(_from_chat(messages[leading:], dropped))
    if request.get("tools"):
        tools = chat.tool_functions(request, dropped)
        out["tools"] = [{_TOOL_NAMES.get(name, name): one for name, one in tool.items()} for tool in tools]
    _choice_from_chat(request, out)
    _output_from_chat(request, out, dropped)
    return out


def _is_system(message: Object) -> bool:
    return message.get("role") in ("system", "developer")


def _system_blocks(messages: list[Object], dropped: DroppedFields) -> str | list[Object]:
    if len(messages) == 1 and isinstance(messages[0].get("content"), str):
        return messages[0]["content"]  # type: ignore[no-any-return]
    found: list[Object] = []
    for message in messages:
        found.extend(_blocks(message.get("content"), dropped))
    return found


def _from_chat(messages: list[Object], dropped: DroppedFields) -> Iterator[Object]:
    """Results of tools that follow each other are one message of the user."""
    results: list[Object] = []
    for message in messages:
        role, content = message.get("role"), message.get("content")
        if role == "tool":
            found = {
                "type": "tool_result",
                "tool_use_id": as_text(message.get("tool_call_id"), "messages.tool_call_id"),
            }
            results.append({**found, "content": _content(content, dropped)})
            continue
        if results:
            yield {"role": "user", "content": results}
            results = []
        if role == "assistant":
            yield {"role": "assistant", "content": _assistant_blocks(message, dropped) or ""}
        elif role in ("user", "system", "developer"):
            yield {"role": "user" if role == "user" else "system", "content": _content(content, dropped)}
        else:
            raise Malformed("messages.role must be system, developer, user, assistant or tool")
    if results:
        yield {"role": "user", "content": results}


def _content(content: object, dropped: DroppedFields) -> str | list[Object]:
    return content if isinstance(content, str) else _blocks(content, dropped)


def _blocks(content: object, dropped: DroppedFields) -> list[Object]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return [_block(one, dropped) for one in as_objects(content, "messages.content")]


def _block(found: Object, dropped: DroppedFields) -> Object:
    kind = json_fields.type_of(found)
    path = "messages.content"
    if kind in ("text", "refusal"):
        dropped.add_unknown(found, frozenset(("type", kind)), path)
        return {"type": "text", "text": as_text(found.get(kind), f"{path}.{kind}")}
    if kind == "image_url":
        image = member_object(found, "image_url")
        dropped.add_unknown(found, frozenset(("type", "image_url")), path)
        if image.get("detail") not in (None, "auto"):
            dropped.add(f"{path}.image_url.detail")
        return {"type": "image", "source": _source(as_text(image.get("url"), f"{path}.image_url.url"))}
    file = member_object(found, "file")
    if kind == "file" and file.get("file_data") is not None:
        out = {"type": "document", "source": _source(as_text(file["file_data"], f"{path}.file.file_data"))}
        return {**out, "title": file["filename"]} if file.get("filename") else out
    raise json_fields.untranslatable_request_refusal(path, f"a part of type {kind}")


def _source(url: str) -> Object:
    if not url.startswith("data:"):
        return {"type": "url", "url": url}
    head, comma, data = url[5:].partition(",")
    media, is_base64 = head.removesuffix(";base64"), head.endswith(";base64")
    if not comma or not is_base64:
        raise Malformed("a data: URL must be data:TYPE;base64,DATA")
    return {"type": "base64", "media_type": media, "data": data}


def _assistant_blocks(message: Object, dropped: DroppedFields | None) -> list[Object]:
    """Blocks of an assistant's message. Of a request (``dropped``), reasoning without signature is left out: engines
    refuse it.
    """
    found = [_thinking_block(one) for one in chat.reasoning_pieces(message)]
    if dropped is not None:
        signed = [one for one in found if one.get("signature") or one["type"] == "redacted_thinking"]
        if len(signed) < len(found):
            dropped.add("messages.reasoning_content")
        found = signed
    content = message.get("content")
    blocks = _blocks(content, dropped or DroppedFields())
    found += [one for one in blocks if one["text"]] if all(one["type"] == "text" for one in blocks) else blocks
    if message.get("refusal"):
        found.append({"type": "text", "text": as_text(message["refusal"], "messages.refusal")})
    found += [_tool_use(one, is_answer=dropped is None) for one in as_objects(message.get("tool_calls"), "tool_calls")]
    return found


def _thinking_block(detail: Object) -> Object:
    if json_fields.type_of(detail) == chat.ENCRYPTED_DETAIL:
        return {"type": "redacted_thinking", "data": as_text(detail.get("data"), "reasoning_details.data")}
    return {
        "type": "thinking",
        "thinking": as_text(detail.get("text"), "reasoning_details.text"),
        "signature": as_text(detail.get("signature"), "reasoning_details.signature"),
    }


def _tool_use(call: Object, *, is_answer: bool) -> Object:
    function = member_object(call, "function")
    written = function.get("arguments")
    given = json_fields.parse_tool_arguments(written)
    if given is None and not is_answer:
        raise Malformed("messages.tool_calls.function.arguments must be a JSON object in a text")
    return {
        "type": "tool_use",
        "id": as_text(call.get("id"), "tool_calls.id"),
        "name": as_text(function.get("name"), "tool_calls.function.name"),
        # of an answer that was cut: its reader learns that they are invalid, and what they were
        "input": {"arguments": written} if given is None else given,
    }


def _choice_from_chat(request: Object, out: Object) -> None:
    choice = chat.tool_choice(request)
    found: Object = {"type": _CHOICES[choice or "auto"]} if not isinstance(choice, dict) else {"type": "tool"}
    if isinstance(choice, dict):
        found["name"] = choice["name"]
    is_single = request.get("parallel_tool_calls") is False and bool(out.get("tools")) and choice != "none"
    if is_single:
        found["disable_parallel_tool_use"] = True
    if is_single or choice is not None:
        out["tool_choice"] = found


def _output_from_chat(request: Object, out: Object, dropped: DroppedFields) -> None:
    config: Object = {}
    effort, form = request.get("reasoning_effort"), request.get("response_format")
    if effort == "none":
        out["thinking"] = {"type": "disabled"}
    elif effort is not None:
        if isinstance(effort, str) and effort in _EFFORTS:
            config["effort"] = effort
        else:
            dropped.add("reasoning_effort")
    kind = as_object(form, "response_format").get("type") if form is not None else "text"
    if kind == "json_schema":
        schema = member_object(as_object(form, "response_format"), "json_schema")
        dropped.add_unknown(schema, frozenset(("name", "schema", "strict")), "response_format.json_schema")
        config["format"] = {"type": "json_schema", "schema": member_object(schema, "schema")}
    elif kind != "text":
        dropped.add("response_format")
    if config:
        out["output_config"] = config


# Answers


def answer_to_chat(answer: Object) -> Object:
    """A whole message as a completion."""
    reason = as_text(answer.get("stop_reason"), "stop_reason")
    message = _assistant(_answered(as_objects(answer.get("content"), "content")), DroppedFields())
    choice: Object = {"index": 0, "message": message, "finish_reason": _STOP_TO_CHAT.get(reason, "stop")}
    if answer.get("stop_sequence"):
        choice["stop_reason"] = answer["stop_sequence"]
    return {
        **_first(answer, "chat.completion"),
        "choices": [choice],
        "usage": _usage_to_chat(member_object(answer, "usage")),
    }


def _answered(blocks: list[Object]) -> list[Object]:
    """Without blocks of tools that the provider ran itself, which chat clients did not ask for."""
    return [one for one in blocks if json_fields.type_of(one) in _ANSWERED]


def _first(message: Object, kind: str) -> Object:
    """What a completion and each of its chunks begin with. Messages have no time of their own."""
    return {
        "id": json_fields.with_id_prefix(message.get("id"), "chatcmpl-"),
        "object": kind,
        "created": 0,
        "model": as_text(message.get("model"), "model"),
        **_tier_to_chat(member_object(message, "usage")),
    }


def _usage_to_chat(usage: Object) -> Object:
    cached, written = as_count(usage.get("cache_read_input_tokens")), as_count(usage.get("cache_creation_input_tokens"))
    return chat.make_usage(
        prompt=as_count(usage.get("input_tokens")) + cached + written,
        completion=as_count(usage.get("output_tokens")),
        cached=cached,
        written=written,
        reasoning=as_count(member_object(usage, "output_tokens_details").get("thinking_tokens")),
    )


def _tier_to_chat(usage: Object) -> Object:
    tier = usage.get("service_tier")
    return {"service_tier": _TIER_TO_CHAT[tier]} if isinstance(tier, str) and tier in _TIER_TO_CHAT else {}


def answer_from_chat(answer: Object) -> Object:
    """A whole completion as a message."""
    found = chat.parse_chat_delta(answer)
    message = member_object((as_objects(answer.get("choices"), "choices") or [{}])[0], "message")
    blocks = _assistant_blocks(message, None)
    for block, call in zip((one for one in blocks if one["type"] == "tool_use"), found.calls, strict=False):
        block["id"] = call.id
    reason = _stop_reason(found.finish, found.stop, calls=bool(found.calls), refused=bool(found.refusal))
    return {
        **_message(found, blocks),
        "stop_reason": reason,
        "stop_sequence": found.stop if reason == "stop_sequence" else None,
        "usage": _usage_from_chat(found.usage, found.service_tier),
    }


def _message(found: chat.ChatDelta, blocks: list[Object]) -> Object:
    return {
        "id": json_fields.with_id_prefix(found.id, "msg_"),
        "type": "message",
        "role": "assistant",
        "model": found.model,
        "content": blocks,
    }


def _stop_reason(finish: str, stop: str, *, calls: bool, refused: bool) -> str:
    if refused:
        return "refusal"
    reason = _STOP_FROM_CHAT.get(finish, "end_turn")
    if reason == "end_turn":
        # engines end forced calls with "stop", and agents go by the reason
        return "tool_use" if calls else "stop_sequence" if stop else reason
    return reason


def _usage_from_chat(found: Object | None, tier: str = "") -> Object:
    tokens = chat.token_usage(found)
    out: Object = {
        "input_tokens": max(tokens.prompt - tokens.cached - tokens.written, 0),
        "cache_creation_input_tokens": tokens.written,
        "cache_read_input_tokens": tokens.cached,
        "output_tokens": tokens.completion,
        "output_tokens_details": {"thinking_tokens": tokens.reasoning},
    }
    return {**out, "service_tier": _TIER_FROM_CHAT[tier]} if tier in _TIER_FROM_CHAT else out


# Streams


class ToChunks:
    """Events of messages as chunks."""

    more_follows = False

    def __init__(self) -> None:
        self.ended = False
        self._first: Object = {}
        self._usage: Object = {}
        self._blocks = self._calls = self._details = 0
        self._kept = 0  # characters of arguments that came with the beginnings of their calls
        self._open: dict[int, Object] = {}

    def chunks(self, event: Object) -> list[Object]:
        """Those that ``event`` becomes: none for pings and what chat has no place for."""
        kind = json_fields.type_of(event)
        if kind == "error":
            return [{"error": event.get("error") or event}]
        if kind == "message_start":
            return self._start(as_object(event.get("message"), "message"))
        if not self._first:
            if kind == "ping":
                return []
            raise Malformed("an event came before message_start")
        return self._of_answer(kind, event)

    def _of_answer(self, kind: str, event: Object) -> list[Object]:
        out: list[Object] = []
        if kind == "content_block_delta":
            out = self._delta(as_index(event.get("index"), "index"), as_object(event.get("delta"), "delta"))
        elif kind == "content_block_start":
            out = self._block(
                as_index(event.get("index"), "index"), as_object(event.get("content_block"), "content_block")
            )
        elif kind == "content_block_stop":
            out = self._stop(event)
        elif kind == "message_delta":
            out = self._finish(event)
        elif kind == "message_stop":
            self.ended = True
            out = [chat.make_usage_chunk(self._first, _usage_to_chat(self._usage))]
        return out

    def _start(self, message: Object) -> list[Object]:
        if self._first:
            return []  # some proxies send it twice
        self._first = _first(message, "chat.completion.chunk")
        self._usage = dict(member_object(message, "usage"))
        return [chat.make_chunk(self._first, {"role": "assistant", "content": ""})]

    def _block(self, at: int, block: Object) -> list[Object]:
        kind = json_fields.type_of(block)
        self._blocks += 1
        if self._blocks > chat.MOST_BLOCKS:
            raise Malformed(f"an answer has more than {chat.MOST_BLOCKS} blocks")
        state = self._open[at] = {"type": kind}
        if kind == "tool_use":
            call = _call(block)
            state["call"], self._calls = self._calls, self._calls + 1
            # engines that send the arguments here send no deltas
            state["input"] = call["function"]["arguments"]
            self._kept += len(state["input"])
            if self._kept > MOST_EVENT_BYTES:
                raise Malformed("the answer has more than 16 MiB of arguments")
            function = {"name": call["function"]["name"], "arguments": ""}
            return self._chunk({"tool_calls": [{**call, "index": state["call"], "function": function}]})
        if kind in ("thinking", "redacted_thinking"):
            state["detail"], self._details = self._details, self._details + 1
        if kind == "redacted_thinking":
            return self._detail(state, {"type": chat.ENCRYPTED_DETAIL, "data": as_text(block.get("data"), "data")})
        for name in ("text", "thinking"):
            if kind == name and block.get(name):
                return self._delta(at, {"type": f"{name}_delta", name: block[name]})
        return []

    def _delta(self, at: int, delta: Object) -> list[Object]:
        state = self._open.get(at)
        if state is None:
            raise Malformed("a content_block_delta came without its content_block_start")
        kind = json_fields.type_of(delta)
        if kind == "text_delta":
            return self._chunk({"content": as_text(delta.get("text"), "delta.text")})
        if kind == "input_json_delta" and "call" in state:
            written = as_text(delta.get("partial_json"), "delta.partial_json")
            return self._arguments(state, written) if written else []
        if kind == "thinking_delta" and "detail" in state:
            written = as_text(delta.get("thinking"), "delta.thinking")
            more = {"reasoning_content": written}
            return self._detail(state, {"type": chat.TEXT_DETAIL, "text": written}, more)
        if kind == "signature_delta" and "detail" in state:
            signature = as_text(delta.get("signature"), "delta.signature")
            return self._detail(state, {"type": chat.TEXT_DETAIL, "signature": signature}) if signature else []
        return []

    def _arguments(self, state: Object, written: str) -> list[Object]:
        state.pop("input", None)
        return self._chunk({"tool_calls": [{"index": state["call"], "function": {"arguments": written}}]})

    def _detail(self, state: Object, detail: Object, more: Object | None = None) -> list[Object]:
        return self._chunk({**(more or {}), "reasoning_details": [{"index": state["detail"], **detail}]})

    def _stop(self, event: Object) -> list[Object]:
        state = self._open.pop(as_index(event.get("index"), "index"), {})
        return self._arguments(state, state["input"]) if "input" in state else []

    def _finish(self, event: Object) -> list[Object]:
        delta = as_object(event.get("delta"), "delta")
        self._usage.update({name: one for name, one in member_object(event, "usage").items() if one is not None})
        reason = as_text(delta.get("stop_reason"), "delta.stop_reason")
        if not reason:
            return []
        more = {"stop_reason": delta["stop_sequence"]} if delta.get("stop_sequence") else {}
        return [chat.make_chunk(self._first, {}, _STOP_TO_CHAT.get(reason, "stop"), **more)]

    def _chunk(self, delta: Object) -> list[Object]:
        return [chat.make_chunk(self._first, delta)]


class FromChunks:
    """Chunks as events of messages.

    Text and thinking end where the next block begins. Tool calls end with the answer, as engines may write several at a
    time.
    """

    def __init__(self, *, include_usage: bool) -> None:
        del include_usage  # messages always have it
        self._started = False
        self._blocks = 0
        self._current: tuple[str, int] | None = None  # kind of the open block of text or thinking, and of which detail
        self._calls: dict[int, int] = {}
        self._finish = self._stop = ""
        self._refused = False
        self._usage: Object | None = None

    def events(self, found: Object) -> list[bytes]:
        """Those that a chunk becomes."""
        piece = chat.parse_chat_delta(found)
        out: list[Object] = []
        if not self._started:
            self._started = True
            message = _message(piece, [])
            usage = _usage_from_chat(piece.usage, piece.service_tier)
            message = {**message, "stop_reason": None, "stop_sequence": None, "usage": usage}
            out.append({"type": "message_start", "message": message})
        for detail in piece.details:
            self._on_detail(detail, out)
        if piece.reasoning:
            self._write(out, ("thinking", 0), {"type": "thinking_delta", "thinking": piece.reasoning})
        if piece.text or piece.refusal:
            self._refused = self._refused or bool(piece.refusal)
            self._write(out, ("text", 0), {"type": "text_delta", "text": piece.text + piece.refusal})
        for call in piece.calls:
            self._on_call(call, out)
        self._finish, self._stop = piece.finish or self._finish, piece.stop or self._stop
        self._usage = piece.usage or self._usage
        return [encode_named_event(one) for one in out]

    def _on_detail(self, detail: Object, out: list[Object]) -> None:
        at = as_index(detail.get("index"), "reasoning_details.index")
        block = _thinking_block(detail)
        if block["type"] == "redacted_thinking":
            self._close(out)
            self._open(out, block)
            out.append({"type": "content_block_stop", "index": self._blocks - 1})
            return
        if block["thinking"]:
            self._write(out, ("thinking", at), {"type": "thinking_delta", "thinking": block["thinking"]})
        if block["signature"]:
            self._write(out, ("thinking", at), {"type": "signature_delta", "signature": block["signature"]})

    def _on_call(self, call: chat.ToolCallDelta, out: list[Object]) -> None:
        if call.at not in self._calls:
            self._close(out)
            self._calls[call.at] = self._blocks
            self._open(out, {"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
        if call.arguments:
            delta = {"type": "input_json_delta", "partial_json": call.arguments}
            out.append({"type": "content_block_delta", "index": self._calls[call.at], "delta": delta})

    def _write(self, out: list[Object], kind: tuple[str, int], delta: Object) -> None:
        if self._current != kind:
            self._close(out)
            empty = {"text": ""} if kind[0] == "text" else {"thinking": "", "signature": ""}
            self._open(out, {"type": kind[0], **empty})
            self._current = kind
        out.append({"type": "content_block_delta", "index": self._blocks - 1, "delta": delta})

    def _open(self, out: list[Object], block: Object) -> None:
        if self._blocks >= chat.MOST_BLOCKS:
            raise Malformed(f"an answer has more than {chat.MOST_BLOCKS} blocks")
        out.append({"type": "content_block_start", "index": self._blocks, "content_block": block})
        self._blocks += 1

    def _close(self, out: list[Object]) -> None:
        if self._current is not None:
            out.append({"type": "content_block_stop", "index": self._blocks - 1})
            self._current = None

    def finish(self) -> list[bytes]:
        """The end of a whole answer."""
        out: list[Object] = []
        self._close(out)
        out.extend({"type": "content_block_stop", "index": at} for at in self._calls.values())
        reason = _stop_reason(self._finish, self._stop, calls=bool(self._calls), refused=self._refused)
        stop = self._stop if reason == "stop_sequence" else None
        usage = _usage_from_chat(self._usage)
        out.append({"type": "message_delta", "delta": {"stop_reason": reason, "stop_sequence": stop}, "usage": usage})
        out.append({"type": "message_stop"})
        return [encode_named_event(one) for one in out]

    def fail(self, error: Object) -> list[bytes]:
        """An error; nothing follows it."""
        return [encode_named_event(json_fields.anthropic_error(error))]
