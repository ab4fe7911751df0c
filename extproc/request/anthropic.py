# SPDX-License-Identifier: Apache-2.0
"""Bodies of Anthropic's Messages API: as an InferenceRequest, and as the chat that vLLM renders.

Engines turn such a request into a chat and render that (vLLM's ``entrypoints/anthropic``). The prompt is written in the
same order: tools, system, messages, a user's tool results before the text beside them. Blocks that vLLM leaves out
count as they are, as another engine may render them. What clients move from turn to turn without a change of the prompt
is left out: ``cache_control``, and the line by which Claude Code marks each request. Text has the same form as in
``openai.py``, so that a conversation is found in the caches whichever API it comes by.
"""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any, Final

import msgspec

from extproc.request.inference_request import (
    ABSENT,
    LARGE_BYTES,
    MEDIA_TOKENS,
    ChatTemplateFields,
    InferenceRequest,
    Media,
    OutputTokens,
    chat_template_texts,
    is_given,
    make_request,
)
from extproc.request.json_rewrite import span_of
from extproc.wire_names import Api

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

# vLLM leaves system blocks out that begin so: they have a hash of each request.
BILLING: Final = "x-anthropic-billing-header"
_QUOTE: Final = ord('"')
_MEDIA: Final = frozenset({"image", "document"})
_RESULT: Final = "tool_result"
_KNOWN: Final = frozenset({"text", "thinking", "tool_use", _RESULT, *_MEDIA})
_BILLING: Final = BILLING.encode()
_LIST: Final = ord("[")
_CACHE_CONTROL: Final = b'"cache_control"'
_HEADINGS: Final = {role: f"\n{role}\n".encode() for role in ("user", "assistant", "system")}
_objects: Final = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])


class _Message(msgspec.Struct, gc=False):
    role: str
    content: msgspec.Raw = ABSENT


class _Messages(ChatTemplateFields, kw_only=True, gc=False):
    messages: list[_Message]
    system: msgspec.Raw = ABSENT
    tools: msgspec.Raw = ABSENT
    max_tokens: OutputTokens = None


class _Block(msgspec.Struct, gc=False):
    """A block of a message's content."""

    type: str = ""
    text: msgspec.Raw = ABSENT
    thinking: msgspec.Raw = ABSENT
    source: msgspec.Raw = ABSENT
    id: msgspec.Raw = ABSENT
    name: msgspec.Raw = ABSENT
    input: msgspec.Raw = ABSENT
    tool_use_id: msgspec.Raw = ABSENT
    content: msgspec.Raw = ABSENT
    # of documents
    title: msgspec.Raw = ABSENT
    context: msgspec.Raw = ABSENT


class _Source(msgspec.Struct, gc=False):
    type: str = ""


def parse_messages(body: bytes) -> InferenceRequest:
    """POST /v1/messages."""
    request = _decoder.decode(body)
    prompt = _Prompt(chat_template_texts(request))
    prompt.add_tools(request.tools)
    prompt.add_system(request.system)
    for message in request.messages:
        prompt.add_message(message)
    contents = None
    if len(body) >= LARGE_BYTES:
        found = [message.content for message in request.messages if message.content]
        contents = span_of(body, found[0], found[-1]) if found else None
    return make_request(Api.MESSAGES, request, prompt.text(), request.max_tokens, contents, media=prompt.media())


def parse_count_tokens(body: bytes) -> InferenceRequest:
    """POST /v1/messages/count_tokens: the engine computes nothing, so there is no prompt to cache and no answer."""
    request = _decoder.decode(body)
    return make_request(Api.COUNT_TOKENS, request, b"", None, None, answers=0)


class _Prompt:
    """The prompt as it is written, part by part."""

    def __init__(self, parts: Iterable[msgspec.Raw]) -> None:
        self._parts: list[bytes | memoryview] = [memoryview(part) for part in parts]
        self._media_tokens = self._media_bytes = 0

    def text(self) -> bytes:
        return b"".join(self._parts)

    def media(self) -> Media:
        return Media(self._media_tokens, self._media_bytes)

    def add_tools(self, tools: msgspec.Raw) -> None:
        view = memoryview(tools)
        if _CACHE_CONTROL in bytes(view):
            # another value than a list of tools stays: the engine reports the mistake
            with contextlib.suppress(msgspec.DecodeError):
                view = memoryview(msgspec.json.encode([_without_cache_control(one) for one in _objects.decode(view)]))
        self._parts.append(view)

    def add_system(self, system: msgspec.Raw) -> None:
        if not is_given(system):
            return
        blocks = _blocks_of(system)
        if blocks is None:
            self._add_texts(b"\nsystem\n", [system])
        else:
            self._add_texts(b"\nsystem\n", (block.text for block in blocks if not _is_billing(block.text)))

    def add_message(self, message: _Message) -> None:
        heading = _HEADINGS.get(message.role) or f"\n{message.role}\n".encode()
        blocks = _blocks_of(message.content)
        if blocks is None:
            self._add_texts(heading, [message.content])
            return
        results = [block for block in blocks if block.type == _RESULT]
        for result in results:
            self._add_result(result)
        if len(results) == len(blocks) and results:
            return
        texts = [block.text for block in blocks if block.text]
        thoughts = [block.thinking for block in blocks if block.thinking]
        if thoughts:
            self._add_texts(b"\nthinking\n", thoughts)
        self._add_texts(heading, texts)
        for block in blocks:
            self._add_media(block)
            if block.type == "tool_use":
                self._parts += (memoryview(block.name), memoryview(block.input), memoryview(block.id))

    def _add_result(self, result: _Block) -> None:
        blocks = _blocks_of(result.content)
        if blocks is None:
            self._add_texts(b"\ntool\n", [result.content])
        else:
            self._add_texts(b"\ntool\n", (block.text for block in blocks if block.text))
            for block in blocks:
                self._add_media(block)
        self._parts.append(memoryview(result.tool_use_id))

    def _add_texts(self, heading: bytes, texts: Iterable[msgspec.Raw]) -> None:
        """Texts under a heading, as one JSON string."""
        self._parts += (heading, b'"')
        for text in texts:
            view = memoryview(text)
            is_string = len(view) > 1 and view[0] == _QUOTE
            self._parts.append(view[1:-1] if is_string else view)
        self._parts.append(b'"')

    def _add_media(self, block: _Block) -> None:
        if block.type not in _MEDIA or not block.source:
            return
        view = memoryview(block.source)
        self._parts += (view, memoryview(block.title), memoryview(block.context))
        if not (block.type == "document" and _is_text(block.source)):
            self._media_tokens += MEDIA_TOKENS["image"]
            self._media_bytes += view.nbytes


def _blocks_of(content: msgspec.Raw) -> list[_Block] | None:
    """None for text, and for a value that is no list of blocks, which the engine refuses. The text of a block of
    another type is all of it.
    """
    view = memoryview(content)
    if not view or view[0] != _LIST:
        return None
    try:
        blocks = _blocks.decode(view)
        if any(block.type not in _KNOWN for block in blocks):
            for block, fields in zip(blocks, _objects.decode(view), strict=True):
                if block.type not in _KNOWN:
                    block.text = msgspec.Raw(msgspec.json.encode(_without_cache_control(fields)))
    except msgspec.DecodeError:
        return None
    return blocks


def _is_text(source: msgspec.Raw) -> bool:
    """Whether a document is its own text, or blocks of it."""
    try:
        return _source.decode(source).type in {"text", "content"}
    except msgspec.DecodeError:
        return False


def _is_billing(text: msgspec.Raw) -> bool:
    return bytes(memoryview(text)[1 : 1 + len(_BILLING)]) == _BILLING


def _without_cache_control(one: dict[str, msgspec.Raw]) -> dict[str, msgspec.Raw]:
    return {name: value for name, value in one.items() if name != "cache_control"}


def equivalent_chat(body: dict[str, Any], request: InferenceRequest) -> dict[str, Any] | None:
    """The chat of OpenAI's form that ``body``, decoded, contains or is equivalent to; None if the prompt is no chat.

    Raises ValueError if the body is not of its API.
    """
    match request.api:
        case None:
            return None
        case api if api.spec.prompt == "anthropic messages":
            return to_openai_chat(body)
        case api:
            return body if api.spec.prompt == "messages" else None


def to_openai_chat(body: Mapping[str, Any]) -> dict[str, Any]:
    """The chat, without pictures. Raises ValueError for what is no such body."""
    try:
        chat: dict[str, Any] = {"messages": [*_system(body.get("system")), *_messages(body["messages"])]}
        if body.get("tools"):
            chat["tools"] = [_tool(tool) for tool in body["tools"]]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the body is not one of the Messages API: {error}") from None
    if "chat_template_kwargs" in body:
        chat["chat_template_kwargs"] = body["chat_template_kwargs"]
    return chat


def _system(system: Any) -> Iterator[dict[str, Any]]:  # noqa: ANN401 - JSON
    if isinstance(system, str):
        text = system
    else:
        texts = [block["text"] for block in system or [] if block.get("text")]
        text = "".join([one for one in texts if not one.startswith(BILLING)])
    if text:
        yield {"role": "system", "content": text}


def _messages(messages: list[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for message in messages:
        role, content = message["role"], message["content"]
        if isinstance(content, str):
            yield {"role": role, "content": content}
            continue
        if role == "user":
            yield from (_result(block) for block in content if block["type"] == "tool_result")
        rest = _without_results(role, content)
        if len(rest) > 1:
            yield rest


def _without_results(role: str, blocks: list[Mapping[str, Any]]) -> dict[str, Any]:
    """The message of all blocks but results of tools; only the role if there are no others."""
    message: dict[str, Any] = {"role": role}
    texts, calls, thoughts = [], [], []
    for block in blocks:
        match block["type"]:
            case "text":
                texts.append(block["text"])
            case "thinking":
                thoughts.append(block["thinking"])
            case "tool_use":
                function = {"name": block["name"], "arguments": json.dumps(block["input"])}
                calls.append({"id": block["id"], "type": "function", "function": function})
    if thoughts:
        message["reasoning"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    if texts:
        message["content"] = texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]
    return message


def _result(block: Mapping[str, Any]) -> dict[str, Any]:
    content = block.get("content") or ""
    if not isinstance(content, str):
        content = "\n".join([part["text"] for part in content if part["type"] == "text"])
    return {"role": "tool", "tool_call_id": block.get("tool_use_id", ""), "content": content}


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    schema = {"type": "object", **tool["input_schema"]}
    function = {"name": tool["name"], "description": tool.get("description"), "parameters": schema}
    return {"type": "function", "function": function}


_decoder: Final = msgspec.json.Decoder(_Messages)
_blocks: Final = msgspec.json.Decoder(list[_Block])
_source: Final = msgspec.json.Decoder(_Source)
