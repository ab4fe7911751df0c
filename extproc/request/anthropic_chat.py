# SPDX-License-Identifier: Apache-2.0
"""A body of the Messages API as the chat that vLLM makes of it, for tokenizers: messages and tools in OpenAI's form."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

# vLLM leaves system blocks out that begin so: they have a hash of each request.
BILLING: Final = "x-anthropic-billing-header"


def chat_of(body: Mapping[str, Any]) -> dict[str, Any]:
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
        said = _said(role, content)
        if len(said) > 1:
            yield said


def _said(role: str, blocks: list[Mapping[str, Any]]) -> dict[str, Any]:
    """What blocks say beside the results of tools; only the role if that is nothing."""
    said: dict[str, Any] = {"role": role}
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
        said["reasoning"] = "".join(thoughts)
    if calls:
        said["tool_calls"] = calls
    if texts:
        said["content"] = texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]
    return said


def _result(block: Mapping[str, Any]) -> dict[str, Any]:
    content = block.get("content") or ""
    if not isinstance(content, str):
        content = "\n".join([part["text"] for part in content if part["type"] == "text"])
    return {"role": "tool", "tool_call_id": block.get("tool_use_id", ""), "content": content}


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    schema = {"type": "object", **tool["input_schema"]}
    function = {"name": tool["name"], "description": tool.get("description"), "parameters": schema}
    return {"type": "function", "function": function}
