# SPDX-License-Identifier: Apache-2.0
"""The inference APIs as vLLM serves them: the fields that are read, and answers byte by byte, streamed and whole."""

from __future__ import annotations

import json
from array import array
from json.encoder import encode_basestring_ascii
from typing import TYPE_CHECKING, Annotated, Any, Final, Protocol

import msgspec
from aiohttp import web

from bench.engine.fake_tokenizer import Message, count_tokens, render_chat, tokens_of
from bench.engine.structured_outputs import OutputConstraint, StructureInvalid, forced_tool_call, read_output_constraint

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

    from bench.engine.request import Request, Token

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

Tokens = Annotated[int, msgspec.Meta(ge=1)]
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
Choices = Annotated[int, msgspec.Meta(ge=1, le=128)]
Json = dict[str, Any]
_RESPONSE: Final[Mapping[str, Any]] = {"parallel_tool_calls": False, "tool_choice": "auto", "tools": []}
# Of events, where their index, text and finish reason go: no text has these characters.
_INDEX, _TEXT, _REASON = "\ue000", "\ue001", "\ue002"
_BILLING = "x-anthropic-billing-header"
_STOP_REASONS: Final[Mapping[str, str]] = {"length": "max_tokens", "stop": "end_turn", "tool_calls": "tool_use"}


class StreamOptions(msgspec.Struct):
    """``stream_options`` of a streamed request."""

    include_usage: bool = False


class Function(msgspec.Struct):
    """A function that the model may call. ``parameters``: the JSON schema of its arguments."""

    name: str
    parameters: dict[str, Any] | None = None


class ChatTool(msgspec.Struct):
    """One of ``tools`` of a chat."""

    function: Function


class ChatRequest(msgspec.Struct):
    """POST /v1/chat/completions."""

    model: str
    messages: list[Message]
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    n: Choices | None = None
    response_format: Json | None = None
    tools: list[ChatTool] | None = None
    tool_choice: str | Json | None = None
    cache_salt: str | None = None


class CompletionRequest(msgspec.Struct):
    """POST /v1/completions. ``prompt``: a text or its tokens, or a list of either."""

    model: str
    prompt: str | list[TokenId | str | list[TokenId]]
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Tokens | None = 16
    n: Choices | None = None
    response_format: Json | None = None
    cache_salt: str | None = None


class ResponseTool(Function):
    """One of ``tools`` of a response; only functions have a name."""

    name: str = ""


class TextConfig(msgspec.Struct):
    """``text`` of a response."""

    format: Json | None = None


class ResponsesRequest(msgspec.Struct):
    """POST /v1/responses."""

    model: str
    input: str | list[Message]
    stream: bool = False
    max_output_tokens: Tokens | None = None
    text: TextConfig | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: str | Json | None = None
    cache_salt: str | None = None


class GenerationJob(msgspec.Struct, frozen=True):
    """The engine's work for a request of any API. ``prompts``: each gets ``choices`` answers. ``max_tokens``: of an
    answer, if the request limits it. ``structure``: that answers must have, if any. ``salt``: prompts share cached
    blocks under the same alone. ``options``: more that its format needs.
    """

    model: str
    prompts: tuple[bytes, ...]
    max_tokens: int | None
    is_streamed: bool
    wants_usage: bool
    choices: int = 1
    structure: OutputConstraint | None = None
    salt: str = ""
    options: dict[str, Any] = {}


def chat_job(body: ChatRequest) -> GenerationJob:
    """A chat as a job; raises StructureInvalid."""
    wants_usage = body.stream_options is not None and body.stream_options.include_usage
    structure = _chat_structure(body)
    return GenerationJob(
        model=body.model,
        prompts=(render_chat(body.messages),),
        max_tokens=body.max_completion_tokens or body.max_tokens,
        is_streamed=body.stream,
        wants_usage=wants_usage,
        choices=body.n or 1,
        structure=structure,
        salt=body.cache_salt or "",
        options={"structure": structure, "choices": body.n or 1},
    )


def _chat_structure(body: ChatRequest) -> OutputConstraint | None:
    functions = {tool.function.name: tool.function.parameters for tool in body.tools or ()}
    if body.tool_choice == "required":
        return forced_tool_call(functions, None)
    if isinstance(body.tool_choice, dict):
        named = body.tool_choice.get("function")
        # as in OpenAI's API, a call of a named function ends with "stop"
        return forced_tool_call(functions, named.get("name", "") if isinstance(named, dict) else "", reason="stop")
    return read_output_constraint(body.response_format)


def sglang_chat_job(body: ChatRequest) -> GenerationJob:
    """The same as SGLang reads it: given both limits, it takes the other one (``ChatCompletionRequest`` there)."""
    return msgspec.structs.replace(chat_job(body), max_tokens=body.max_tokens or body.max_completion_tokens)


def completion_job(body: CompletionRequest) -> GenerationJob:
    """A completion as a job; raises StructureInvalid."""
    wants_usage = body.stream_options is not None and body.stream_options.include_usage
    return GenerationJob(
        model=body.model,
        prompts=_prompts(body.prompt),
        max_tokens=body.max_tokens,
        is_streamed=body.stream,
        wants_usage=wants_usage,
        choices=body.n or 1,
        structure=read_output_constraint(body.response_format),
        salt=body.cache_salt or "",
        options={"choices": body.n or 1},
    )


def responses_job(body: ResponsesRequest) -> GenerationJob:
    """A response as a job; its stream always ends with usage. Raises StructureInvalid."""
    messages = [Message("user", body.input)] if isinstance(body.input, str) else body.input
    functions = {tool.name: tool.parameters for tool in body.tools or () if tool.name}
    structure: OutputConstraint | None
    if isinstance(body.tool_choice, dict):
        structure = forced_tool_call(functions, str(body.tool_choice.get("name", "")))
    elif body.tool_choice == "required":
        structure = forced_tool_call(functions, None)
    else:
        structure = read_output_constraint(None if body.text is None else body.text.format)
    return GenerationJob(
        model=body.model,
        prompts=(render_chat(messages),),
        max_tokens=body.max_output_tokens,
        is_streamed=body.stream,
        wants_usage=True,
        structure=structure,
        salt=body.cache_salt or "",
        options={"structure": structure},
    )


def _prompts(prompt: str | list[int | str | list[int]]) -> tuple[bytes, ...]:
    """A list is one prompt if it has token ids; raises StructureInvalid."""
    if isinstance(prompt, str):
        return (prompt.encode(),)
    ids = [one for one in prompt if isinstance(one, int)]
    if not prompt or 0 < len(ids) < len(prompt) or [] in prompt:
        raise StructureInvalid("prompt: write a text or token ids, or a list of texts or of lists of token ids")
    if ids:
        return (array("I", ids).tobytes(),)
    return tuple(_text_bytes(one) for one in prompt if not isinstance(one, int))


def _text_bytes(prompt: str | list[int]) -> bytes:
    """Four bytes for each token id."""
    return prompt.encode() if isinstance(prompt, str) else array("I", prompt).tobytes()


class ApiResponseFormat(Protocol):
    """How one API writes an answer.

    Made with the request's key, its time of creation in Unix seconds, and the model.
    """

    def opening(self) -> bytes:
        """The beginning of a stream, sent together with the first token."""

    def chunk(self, token: Token, index: int) -> bytes:
        """One token of a stream. ``index``: of the choice."""

    def closing(self, requests: Sequence[Request], *, wants_usage: bool) -> bytes:
        """The end of a stream; a request for each choice. ``wants_usage``: of ``stream_options.include_usage``."""

    def full_response(self, requests: Sequence[Request]) -> bytes:
        """An answer that is not streamed."""


class ChatFormat:
    """Chat completions."""

    def __init__(self, key: str, created: int, model: str, *, structure: OutputConstraint | None, choices: int) -> None:
        """``structure``: of the answers, maybe calls of a function. ``choices``: how many answers."""
        self._head = {"id": f"chatcmpl-{key}", "created": created, "model": model}
        self._chunk = {**self._head, "object": "chat.completion.chunk"}
        self._choices = choices
        self._call_key = f"chatcmpl-tool-{key}"
        self._function = "" if structure is None else structure.function
        arguments = {"tool_calls": [{"index": 0, "function": {"arguments": _TEXT}}]}
        self._event = _event_template(self._chunk, {"delta": arguments if self._function else {"content": _TEXT}})

    def opening(self) -> bytes:
        return b"".join(self._opening(index) for index in range(self._choices))

    def _opening(self, index: int) -> bytes:
        delta: dict[str, Any] = {"role": "assistant", "content": ""}
        if self._function:
            delta = {"role": "assistant", "tool_calls": [{"index": 0, **self._call(index, "")}]}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return _event({**self._chunk, "choices": [choice]})

    def _call(self, index: int, arguments: str) -> dict[str, Any]:
        function = {"name": self._function, "arguments": arguments}
        return {"id": f"{self._call_key}-{index}", "type": "function", "function": function}

    def chunk(self, token: Token, index: int) -> bytes:
        return _filled(self._event, token, index)

    def closing(self, requests: Sequence[Request], *, wants_usage: bool) -> bytes:
        return _closing(self._chunk, requests, self._choices, wants_usage=wants_usage)

    def full_response(self, requests: Sequence[Request]) -> bytes:
        choices = [
            {
                "index": index,
                "message": self._message(index, one.answer.decode()),
                "logprobs": None,
                "finish_reason": one.finish_reason,
            }
            for index, one in enumerate(requests)
        ]
        usage = chat_usage(requests, self._choices)
        return _dump({**self._head, "object": "chat.completion", "choices": choices, "usage": usage})

    def _message(self, index: int, text: str) -> dict[str, Any]:
        if self._function:
            return {"role": "assistant", "content": None, "tool_calls": [self._call(index, text)]}
        return {"role": "assistant", "content": text}


class CompletionFormat:
    """Completions."""

    def __init__(self, key: str, created: int, model: str, *, choices: int) -> None:
        """``choices``: how many answers each prompt gets."""
        self._head = {"id": f"cmpl-{key}", "object": "text_completion", "created": created, "model": model}
        self._choices = choices
        self._event = _event_template(self._head, {"text": _TEXT})

    def opening(self) -> bytes:
        return b""

    def chunk(self, token: Token, index: int) -> bytes:
        return _filled(self._event, token, index)

    def closing(self, requests: Sequence[Request], *, wants_usage: bool) -> bytes:
        return _closing(self._head, requests, self._choices, wants_usage=wants_usage)

    def full_response(self, requests: Sequence[Request]) -> bytes:
        choices = [
            {"index": index, "text": one.answer.decode(), "logprobs": None, "finish_reason": one.finish_reason}
            for index, one in enumerate(requests)
        ]
        return _dump({**self._head, "choices": choices, "usage": chat_usage(requests, self._choices)})


class ResponsesFormat:
    """Responses: named events, with usage in the last. The output is one item: a message, or a function call."""

    def __init__(self, key: str, created: int, model: str, *, structure: OutputConstraint | None) -> None:
        """``structure``: of the answer, maybe the call of a function."""
        self._head = {"id": f"resp_{key}", "object": "response", "created_at": created, "model": model}
        self._key = key
        self._function = "" if structure is None else structure.function
        self._events = 0

    def opening(self) -> bytes:
        response = {**self._head, **_RESPONSE, "status": "in_progress", "output": []}
        opened = self._named("response.created", response=response) + self._named(
            "response.in_progress", response=response
        )
        item = self._item("", "in_progress")
        if self._function:
            return opened + self._named("response.output_item.added", output_index=0, item=item)
        added = self._named("response.output_item.added", output_index=0, item={**item, "content": []})
        return opened + added + self._of_part("response.content_part.added", part=_output_text(""))

    def chunk(self, token: Token, index: int) -> bytes:
        del index  # there is one
        if self._function:
            return self._of_item("response.function_call_arguments.delta", delta=token.text)
        return self._of_part("response.output_text.delta", delta=token.text, logprobs=[])

    def closing(self, requests: Sequence[Request], *, wants_usage: bool) -> bytes:
        del wants_usage  # always there
        text = requests[0].answer.decode()
        if self._function:
            ended = self._of_item("response.function_call_arguments.done", arguments=text)
        else:
            ended = self._of_part("response.output_text.done", text=text, logprobs=[])
            ended += self._of_part("response.content_part.done", part=_output_text(text))
        item = self._item(text, "completed")
        ended += self._named("response.output_item.done", output_index=0, item=item)
        return ended + self._named("response.completed", response=self._whole(requests[0]))

    def full_response(self, requests: Sequence[Request]) -> bytes:
        cut = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        return _dump({**self._whole(requests[0]), **(cut if requests[0].finish_reason == "length" else {})})

    def _whole(self, request: Request) -> dict[str, Any]:
        usage = {
            "input_tokens": request.prompt_tokens,
            "input_tokens_details": {"cached_tokens": request.cached_tokens or 0},
            "output_tokens": request.produced,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": request.tokens,
        }
        item = self._item(request.answer.decode(), "completed")
        return {**self._head, **_RESPONSE, "status": "completed", "output": [item], "usage": usage}

    def _item(self, text: str, status: str) -> dict[str, Any]:
        if self._function:
            call = {"type": "function_call", "call_id": f"call_{self._key}", "name": self._function, "arguments": text}
            return {"id": f"fc_{self._key}", **call, "status": status}
        item = {"id": f"msg_{self._key}", "type": "message", "role": "assistant", "status": status}
        return {**item, "content": [_output_text(text)]}

    def _of_item(self, name: str, **fields: object) -> bytes:
        return self._named(name, item_id=f"fc_{self._key}", output_index=0, **fields)

    def _of_part(self, name: str, **fields: object) -> bytes:
        return self._named(name, item_id=f"msg_{self._key}", output_index=0, content_index=0, **fields)

    def _named(self, name: str, **fields: object) -> bytes:
        number, self._events = self._events, self._events + 1
        return f"event: {name}\n".encode() + _event({"type": name, "sequence_number": number, **fields})


def _output_text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": []}


def chat_usage(requests: Sequence[Request], choices: int = 1) -> dict[str, Any]:
    """The ``usage`` object: a prompt counts once, whatever its ``choices``. As in vLLM, details are null when nothing
    was cached.
    """
    firsts = requests[::choices]
    prompt, produced = sum(one.prompt_tokens for one in firsts), sum(one.produced for one in requests)
    cached = sum(one.cached_tokens or 0 for one in firsts)
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + produced,
        "completion_tokens": produced,
        "prompt_tokens_details": {"cached_tokens": cached} if cached else None,
    }


def error_body(message: str, *, status: int, kind: str, param: str | None = None) -> bytes:
    """An error object as vLLM writes it. ``param``: the field at fault."""
    return _dump({"error": {"message": message, "type": kind, "param": param, "code": status}})


def error_response(message: str, *, status: int = 400, kind: str = "BadRequestError") -> web.Response:
    """An answer with nothing but an error object."""
    return web.Response(
        body=error_body(message, status=status, kind=kind), status=status, content_type="application/json"
    )


def _closing(head: dict[str, Any], requests: Sequence[Request], choices: int, *, wants_usage: bool) -> bytes:
    usage = _event({**head, "choices": [], "usage": chat_usage(requests, choices)}) if wants_usage else b""
    return usage + b"data: [DONE]\n\n"


def _event_template(head: dict[str, Any], content: dict[str, Any]) -> str:
    """An event without what ``_filled`` adds: events are written for every token, so the rest is made once."""
    choice = {"index": _INDEX, **content, "logprobs": None, "finish_reason": _REASON}
    text = _event({**head, "choices": [choice]}).decode().replace("%", "%%")
    for mark, field in ((_INDEX, "%(index)d"), (_TEXT, "%(text)s"), (_REASON, "%(reason)s")):
        text = text.replace(json.dumps(mark), field)
    return text


def _filled(template: str, token: Token, index: int) -> bytes:
    reason = f'"{token.request.finish_reason}"' if token.is_last else "null"
    return (template % {"index": index, "text": encode_basestring_ascii(token.text), "reason": reason}).encode()


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
    cache_salt: str | None = None


def generate_job(body: GenerateRequest) -> GenerationJob:
    """Four bytes for each token id."""
    return GenerationJob(
        model=body.model or "",
        prompts=(array("I", body.token_ids).tobytes(),),
        max_tokens=body.sampling_params.max_tokens,
        is_streamed=body.stream,
        wants_usage=body.stream_options is not None and body.stream_options.include_usage,
        salt=body.cache_salt or "",
    )


class GenerateFormat:
    """Answers of tokens."""

    def __init__(self, key: str, created: int, model: str) -> None:
        del created, model
        self._head = {"request_id": f"generate-tokens-{key}"}

    def opening(self) -> bytes:
        return b""

    def chunk(self, token: Token, index: int) -> bytes:
        del index  # there is one
        return self._event([_choice(token.text, is_last=token.is_last)])

    def closing(self, requests: Sequence[Request], *, wants_usage: bool) -> bytes:
        usage = self._event([], usage=chat_usage(requests)) if wants_usage else b""
        return usage + b"data: [DONE]\n\n"

    def full_response(self, requests: Sequence[Request]) -> bytes:
        choice = _choice(requests[0].answer.decode(), is_last=True)
        return json.dumps({**self._head, "choices": [choice], "usage": chat_usage(requests)}).encode()

    def _event(self, choices: list[dict[str, Any]], **more: object) -> bytes:
        return b"data: " + json.dumps({**self._head, "choices": choices, **more}).encode() + b"\n\n"


def _choice(text: str, *, is_last: bool) -> dict[str, Any]:
    reason = "length" if is_last else None
    return {"index": 0, "logprobs": None, "finish_reason": reason, "token_ids": tokens_of(text.encode())}


class ContentBlock(msgspec.Struct):
    """A block of content, of which text and images count."""

    type: str
    text: str | None = None
    thinking: str | None = None
    source: dict[str, Any] | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[ContentBlock] | None = None


class MessageParam(msgspec.Struct):
    """One message."""

    role: str
    content: str | list[ContentBlock]


class ToolChoice(msgspec.Struct):
    """Whether and which tool is to be used."""

    type: str
    name: str | None = None


class CountTokensRequest(msgspec.Struct, kw_only=True):
    """POST /v1/messages/count_tokens."""

    model: str
    messages: list[MessageParam]
    system: str | list[ContentBlock] | None = None
    tools: list[dict[str, Any]] = []
    tool_choice: ToolChoice | None = None


class OutputConfig(msgspec.Struct):
    """``output_config`` of messages."""

    format: Json | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """POST /v1/messages."""

    max_tokens: Tokens
    stream: bool = False
    stop_sequences: list[str] | None = None
    output_config: OutputConfig | None = None
    cache_salt: str | None = None


def messages_job(body: MessagesRequest) -> GenerationJob:
    """A job; its answer is a tool call where the request requires one. Raises StructureInvalid."""
    prompt = render_chat(list(_chat(body)))
    structure = _messages_structure(body)
    return GenerationJob(
        model=body.model,
        prompts=(prompt,),
        max_tokens=body.max_tokens,
        is_streamed=body.stream,
        wants_usage=True,
        structure=structure,
        salt=body.cache_salt or "",
        options={"structure": structure, "prompt_tokens": count_tokens(prompt)},
    )


def _messages_structure(body: MessagesRequest) -> OutputConstraint | None:
    choice = body.tool_choice
    if choice is not None and choice.type in {"any", "tool"}:
        functions = {str(tool.get("name")): tool.get("input_schema") for tool in body.tools}
        return forced_tool_call(functions, choice.name)
    return read_output_constraint(None if body.output_config is None else body.output_config.format)


async def count_tokens_handler(http: web.Request) -> web.Response:
    """The handler: tokens as this engine counts them."""
    try:
        body = msgspec.json.decode(await http.read(), type=CountTokensRequest)
    except msgspec.DecodeError as error:
        return _error(400, "BadRequestError", str(error))
    return web.json_response({"input_tokens": count_tokens(render_chat(list(_chat(body))))})


def with_anthropic_errors(handler: Handler) -> Handler:
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

    def __init__(
        self, key: str, created: int, model: str, *, structure: OutputConstraint | None, prompt_tokens: int
    ) -> None:
        """``structure``: of the answer, maybe the use of a tool. ``prompt_tokens``: all that the prompt has."""
        del created
        self._tool = "" if structure is None else structure.function
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
        return _named("message_start", message=start) + _named("content_block_start", index=0, content_block=block)

    def chunk(self, token: Token, index: int) -> bytes:
        del index  # there is one
        if self._tool:
            return _delta("input_json_delta", partial_json=token.text)
        return _delta("text_delta", text=token.text)

    def closing(self, requests: Sequence[Request], *, wants_usage: bool) -> bytes:
        del wants_usage  # always there
        (request,) = requests
        told = _named("message_delta", delta={"stop_reason": _stop_reason(request)}, usage=_usage(request))
        return _named("content_block_stop", index=0) + told + _named("message_stop")

    def full_response(self, requests: Sequence[Request]) -> bytes:
        (request,) = requests
        text = request.answer.decode()
        block = self._use(_as_input(text)) if self._tool else {"type": "text", "text": text}
        answer = {**self._head, "content": [block], "stop_reason": _stop_reason(request), "usage": _usage(request)}
        return _dump(answer)

    def _use(self, given: dict[str, Any]) -> dict[str, Any]:
        return {"type": "tool_use", "id": "toolu_1", "name": self._tool, "input": given}


def _stop_reason(request: Request) -> str:
    return _STOP_REASONS[request.finish_reason]


def _as_input(text: str) -> dict[str, Any]:
    """A tool's input; empty if the answer was cut before its end."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _usage(request: Request) -> dict[str, int]:
    """As in vLLM, input counts uncached tokens, and unknown cache counts are left out."""
    cached = request.cached_tokens or 0
    usage = {"input_tokens": request.prompt_tokens - cached, "output_tokens": request.produced}
    return {**usage, "cache_creation_input_tokens": 0, "cache_read_input_tokens": cached} if cached else usage


def _chat(body: CountTokensRequest) -> Iterator[Message]:
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


def _text(content: str | list[ContentBlock]) -> str:
    if isinstance(content, str):
        return content
    return "".join(_text_of(block) for block in content)


def _text_of(block: ContentBlock) -> str:
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
