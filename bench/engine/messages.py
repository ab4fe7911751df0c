# SPDX-License-Identifier: Apache-2.0
"""Anthropic's Messages API as vLLM serves it: the request as a chat, the answer in events, errors in its own form."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from bench.engine.api import Job, Tokens
from bench.engine.text import Message, count_tokens, render_chat

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from bench.engine.request import Request, Token

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_BILLING = "x-anthropic-billing-header"


class Block(msgspec.Struct):
    """A block of content, of which text and images count."""

    type: str
    text: str | None = None
    thinking: str | None = None
    source: dict[str, Any] | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[Block] | None = None


class Said(msgspec.Struct):
    """One message."""

    role: str
    content: str | list[Block]


class ToolChoice(msgspec.Struct):
    """Whether and which tool is to be used."""

    type: str
    name: str | None = None


class CountRequest(msgspec.Struct, kw_only=True):
    """POST /v1/messages/count_tokens."""

    model: str
    messages: list[Said]
    system: str | list[Block] | None = None
    tools: list[dict[str, Any]] = []
    tool_choice: ToolChoice | None = None


class MessagesRequest(CountRequest, kw_only=True):
    """POST /v1/messages."""

    max_tokens: Tokens
    stream: bool = False
    stop_sequences: list[str] | None = None


def messages_job(body: MessagesRequest) -> Job:
    """A job whose answer is the use of a tool where the client says that there must be one."""
    prompt = render_chat(list(_chat(body)))
    return Job(
        model=body.model,
        prompt=prompt,
        max_tokens=body.max_tokens,
        is_streamed=body.stream,
        wants_usage=True,
        options={"tool": _tool(body), "prompt_tokens": count_tokens(prompt)},
    )


async def count(http: web.Request) -> web.Response:
    """The handler: tokens as this engine counts them."""
    try:
        body = msgspec.json.decode(await http.read(), type=CountRequest)
    except msgspec.DecodeError as error:
        return _error(400, "BadRequestError", str(error))
    return web.json_response({"input_tokens": count_tokens(render_chat(list(_chat(body))))})


def in_its_form(handler: Handler) -> Handler:
    """``handler`` with errors as clients of this API read them; the type is vLLM's."""

    async def handle(http: web.Request) -> web.StreamResponse:
        answer = await handler(http)
        if not isinstance(answer, web.Response) or answer.status < 400 or not isinstance(answer.body, bytes):
            return answer
        error = json.loads(answer.body)["error"]
        return _error(answer.status, error["type"], error["message"])

    return handle


class MessagesFormat:
    """Messages: named events, with usage in the first and in the last but one."""

    def __init__(self, key: str, created: int, model: str, *, tool: str, prompt_tokens: int) -> None:
        """``tool``: the answer is its use; ``prompt_tokens``: all that the prompt has."""
        del created
        self._tool = tool
        self._prompt_tokens = prompt_tokens
        self._head = {"id": f"msg_{key}", "type": "message", "role": "assistant", "model": model}

    def opening(self) -> bytes:
        usage = {"input_tokens": self._prompt_tokens, "output_tokens": 0}
        start: dict[str, Any] = {
            **self._head,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }
        block = self._use({}) if self._tool else {"type": "text", "text": ""}
        opened = _named("message_start", message=start) + _named("content_block_start", index=0, content_block=block)
        return opened + (_delta("input_json_delta", partial_json='{"text": "') if self._tool else b"")

    def chunk(self, token: Token) -> bytes:
        if self._tool:
            return _delta("input_json_delta", partial_json=token.text)
        return _delta("text_delta", text=token.text)

    def closing(self, request: Request, *, wants_usage: bool) -> bytes:
        del wants_usage  # always there
        end = _delta("input_json_delta", partial_json='"}') if self._tool else b""
        told = _named("message_delta", delta={"stop_reason": self._reason}, usage=_usage(request))
        return end + _named("content_block_stop", index=0) + told + _named("message_stop")

    def whole(self, request: Request) -> bytes:
        text = request.answer.decode()
        block = self._use({"text": text}) if self._tool else {"type": "text", "text": text}
        answer = {**self._head, "content": [block], "stop_reason": self._reason, "usage": _usage(request)}
        return json.dumps(answer, separators=(",", ":")).encode()

    @property
    def _reason(self) -> str:
        return "tool_use" if self._tool else "max_tokens"

    def _use(self, given: dict[str, Any]) -> dict[str, Any]:
        return {"type": "tool_use", "id": "toolu_1", "name": self._tool, "input": given}


def _usage(request: Request) -> dict[str, int]:
    """As in vLLM, input is what was not cached, and what is not known of caches is left out."""
    cached = request.cached_tokens or 0
    usage = {"input_tokens": request.prompt_tokens - cached, "output_tokens": request.produced}
    return {**usage, "cache_creation_input_tokens": 0, "cache_read_input_tokens": cached} if cached else usage


def _tool(body: CountRequest) -> str:
    choice = body.tool_choice
    if choice is None or choice.type not in {"any", "tool"} or not body.tools:
        return ""
    return choice.name or str(body.tools[0].get("name"))


def _chat(body: CountRequest) -> Iterator[Message]:
    """In the order of vLLM: tools, system, and a user's tool results before the text beside them."""
    if body.tools:
        plain = [{name: value for name, value in tool.items() if name != "cache_control"} for tool in body.tools]
        yield Message("tools", json.dumps(plain))
    if body.system:
        yield Message("system", _text(body.system))
    for said in body.messages:
        blocks = said.content if isinstance(said.content, list) else []
        results = [block for block in blocks if block.type == "tool_result"]
        for result in results:
            yield Message("tool", _text(result.content or ""))
        if not results or len(results) < len(blocks):
            yield Message(said.role, _text(said.content))


def _text(content: str | list[Block]) -> str:
    if isinstance(content, str):
        return content
    return "".join(_text_of(block) for block in content)


def _text_of(block: Block) -> str:
    match block.type:
        case "text":
            text = block.text or ""
            return "" if text.startswith(_BILLING) else text
        case "thinking":
            return block.thinking or ""
        case "tool_use":
            return json.dumps({"name": block.name, "arguments": block.input})
        case "image":
            # as many tokens as a small picture has, other ones for another picture
            # cut first: a picture of megabytes, a thousand times over, would take all memory
            return (json.dumps(block.source)[:1024] * 1024)[:1024]
        case _:
            return ""


def _named(name: str, **fields: Any) -> bytes:  # noqa: ANN401 - JSON
    event = json.dumps({"type": name, **fields}, separators=(",", ":"))
    return f"event: {name}\ndata: {event}\n\n".encode()


def _delta(kind: str, **fields: str) -> bytes:
    return _named("content_block_delta", index=0, delta={"type": kind, **fields})


def _error(status: int, kind: str, message: str) -> web.Response:
    return web.json_response({"type": "error", "error": {"type": kind, "message": message}}, status=status)
