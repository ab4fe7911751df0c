# SPDX-License-Identifier: Apache-2.0
"""The inference APIs as vLLM serves them: the fields that are read, and answers byte by byte, streamed and whole."""

from __future__ import annotations

import json
from array import array
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import msgspec
from aiohttp import web

from bench.engine.text import Message, count_tokens, render_chat, tokens_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from bench.engine.request import Request, Token

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

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


def refused(message: str, *, status: int = 400, kind: str = "BadRequestError") -> web.Response:
    """An answer with nothing but an error object."""
    return web.Response(
        body=error_body(message, status=status, kind=kind), status=status, content_type="application/json"
    )


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
