# SPDX-License-Identifier: Apache-2.0
"""Clients of one API and engines of another, through a real Envoy: answers, streams, failures, and what is charged."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

import anthropic
import httpx
import openai
import pytest
import pytest_asyncio
import yaml
from aiohttp import web

from bench.stack.loopback_stack import FileReady, envoy_command
from bench.stack.processes import Processes, free_ports, ports_in_a_row
from controller.bundle.envoy_admin_client import begin_drain
from controller.usage.rows import UsageRow, parse_usage_line
from extproc.wire_names import (
    CUT_MARK,
    DROPPED_FIELDS,
    ENGINE_ANSWERED,
    ENGINE_ATTEMPTS,
    ENGINE_HOST,
    LIMIT_MARK,
    SERVED_BY,
    TRANSLATE,
    TRANSLATED_SOCKET,
    TRANSLATOR_SOCKET,
)
from tests.waiting import eventually
from tests.with_envoy.test_fallback import document, route

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence
    from pathlib import Path

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT: Final = "/v1/chat/completions"
MESSAGES: Final = "/v1/messages"
RESPONSES: Final = "/v1/responses"
HELLO: Final[Any] = [{"role": "user", "content": "hi"}]
PIXEL: Final = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
USED: Final = {"prompt_tokens": 10, "completion_tokens": 4, "total_tokens": 14}
TOOL: Final = {"name": "weather", "description": "d", "input_schema": {"type": "object", "properties": {}}}
FUNCTION: Final[Any] = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def completion(message: Mapping[str, object], finish: str = "stop") -> dict[str, object]:
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish}
    first = {"id": "chatcmpl-1f", "object": "chat.completion", "created": 5, "model": "m"}
    return {**first, "choices": [choice], "usage": USED}


def chunk(delta: Mapping[str, object], finish: str | None = None) -> dict[str, object]:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return {"id": "chatcmpl-1f", "object": "chat.completion.chunk", "created": 5, "model": "m", "choices": [choice]}


def call(index: int, town: str) -> dict[str, object]:
    function = {"name": "weather", "arguments": json.dumps({"town": town})}
    return {"index": index, "id": f"call_{index}", "type": "function", "function": function}


CALLS: Final = [call(0, "Berlin"), call(1, "Paris")]
MESSAGE: Final = {
    "id": "msg_1f",
    "type": "message",
    "role": "assistant",
    "model": "m",
    "content": [{"type": "text", "text": "hello"}],
    "stop_reason": "end_turn",
    "stop_sequence": None,
    "usage": {"input_tokens": 7, "cache_read_input_tokens": 3, "output_tokens": 4},
}
MESSAGE_EVENTS: Final = (
    {"type": "message_start", "message": {**MESSAGE, "content": [], "stop_reason": None}},
    {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "hel"}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "lo"}},
    {"type": "content_block_stop", "index": 0},
    {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 4}},
    {"type": "message_stop"},
)


class Engine:
    """``does``: what it does with requests, a status or a word. ``headers``: of its answers. ``got``: path, headers and
    body of each. ``ended``: requests whose client left.
    ``goes_on``: lets a stream go on that waits in its middle. ``written``: bytes of a flood.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.does: int | str = "answer"
        self.headers: dict[str, str] = {}
        self.got: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.ended = self.written = 0
        self.goes_on = asyncio.Event()
        self.address = ""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/{path:.*}", self._answer)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, max_field_size=64 << 10)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.address = f"127.0.0.1:{runner.addresses[0][1]}"
        yield
        await runner.cleanup()

    def be_good(self) -> None:
        self.does, self.headers = "answer", {}
        self.got.clear()
        self.goes_on.set()

    async def _answer(self, http: web.Request) -> web.StreamResponse:
        body = await http.json()
        self.got.append((http.path_qs, {name.lower(): value for name, value in http.headers.items()}, body))
        if http.path != self.path:
            return web.Response(status=404)
        try:
            return await self._work(http, body)
        except asyncio.CancelledError:
            self.ended += 1
            raise

    async def _work(self, http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if isinstance(self.does, int):
            error = {"type": "invalid_request_error", "message": f"no, {self.does}"}
            whole = {"type": "error", "error": error} if self.path == MESSAGES else {"error": error}
            return web.json_response(whole, status=self.does, headers=self.headers)
        if self.does == "hang":
            await asyncio.sleep(600)
        if self.does == "nonsense":
            return web.json_response({"choices": "none"})
        if self.does == "stall":
            answer = web.StreamResponse(headers={"content-type": "application/json"})
            await answer.prepare(http)
            await answer.write(b'{"choices":')
            await asyncio.sleep(600)
        if not body.get("stream"):
            return web.json_response(self._whole(), headers=self.headers)
        answer = web.StreamResponse(headers={"content-type": "text/event-stream", **self.headers})
        await answer.prepare(http)
        events = self._events(body)
        # long ones are of about the same length in all APIs
        flood = b"data: %b\n\n" % json.dumps(chunk({"content": "a" * 4000})).encode() * 40
        while self.does == "flood":
            await answer.write(flood)
            self.written += len(flood)
        for at, event in enumerate(events):
            if at == len(events) // 2:
                await self.goes_on.wait()
                if self.does == "cut":
                    assert http.transport is not None
                    http.transport.abort()
                    return answer
            await answer.write(event)
        return answer

    def _whole(self) -> object:
        if self.path == MESSAGES:
            return MESSAGE
        if self.does == "call":
            return completion({"content": None, "tool_calls": CALLS}, "tool_calls")
        return completion({"content": "hello"})

    def _events(self, body: dict[str, Any]) -> list[bytes]:
        if self.path == MESSAGES:
            return [f"event: {one['type']}\ndata: {json.dumps(one)}\n\n".encode() for one in MESSAGE_EVENTS]
        if self.does == "call":
            # both at once: a piece of one, then of the other
            parts = [{"tool_calls": [one]} for one in CALLS]
            chunks = [chunk({"role": "assistant"}), *map(chunk, parts), chunk({}, "tool_calls")]
        else:
            chunks = [chunk({"role": "assistant", "content": "hel"}), chunk({"content": "lo"}), chunk({}, "stop")]
        if body.get("stream_options", {}).get("include_usage"):
            chunks.append({**chunk({}), "choices": [], "usage": USED})
        return [*(f"data: {json.dumps(one)}\n\n".encode() for one in chunks), b"data: [DONE]\n\n"]


def model_server(name: str, at: Engine, **spec: object) -> dict[str, object]:
    policy = {"outlierDetection": {"consecutiveFailures": 1000}, "retry": {"attempts": 1}, "timeout": "3s"}
    engine = {"endpoints": [{"address": at.address}], "scrapeInterval": "0s"}
    return document("ModelServer", name, {"model": "m", **engine, "trafficPolicy": policy, **spec})


class Gateway:
    """``url``: of Envoy. ``bundle``: where its files are."""

    def __init__(self, directory: Path, engines: Mapping[str, Engine]) -> None:
        self.directory = directory
        self.bundle = directory / "envoy"
        self.log = directory / "usage.log"
        self.engines = engines
        self.pids: dict[str, int] = {}
        self.processes: Processes
        metrics = ports_in_a_row(2)
        envoy, admin = free_ports(2)
        ports = {"envoy": envoy, "admin": admin, "metrics": metrics, "metrics2": metrics + 1}
        self.addresses = {name: f"127.0.0.1:{port}" for name, port in ports.items()}
        self.url = f"http://{self.addresses['envoy']}"
        self.http = httpx.AsyncClient(timeout=60)
        self.chat = openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="key-of-acme", max_retries=0)
        self.claude = anthropic.AsyncAnthropic(base_url=self.url, auth_token="key-of-acme", max_retries=0)  # noqa: S106

    async def post(self, path: str, model: str, headers: Mapping[str, str] | None = None, **body: object) -> Any:  # noqa: ANN401
        whole = {"model": model, "messages": HELLO, "max_tokens": 9, **body}
        return await self.http.post(self.url + path, json=whole, headers={**KEYED, **(headers or {})})

    def lines(self) -> list[bytes]:
        return self.log.read_bytes().splitlines() if self.log.exists() else []

    async def row(self, answer: httpx.Response) -> UsageRow:
        """Of the answered request."""
        return await self.row_of_id(answer.headers["x-request-id"])

    async def row_of_id(self, identifier: str) -> UsageRow:
        found: list[UsageRow] = []

        def is_there() -> bool:
            found[:] = [row for line in self.lines() if (row := parse_usage_line(line, 4e9)).request_id == identifier]
            return bool(found)

        await eventually(is_there)
        return found[0]

    async def metric(self, name: str, having: str = "") -> float:
        """Summed over both workers, and over all labels. ``having``: only where this is among them."""
        total = 0.0
        for at in ("metrics", "metrics2"):
            page = (await self.http.get(f"http://{self.addresses[at]}/metrics")).text
            total += sum(
                float(one.rpartition(" ")[2]) for one in page.splitlines() if one.startswith(name) and having in one
            )
        return total


KEYED: Final = {"authorization": "Bearer key-of-acme"}
SPEC: Final = {
    "authentication": {"apiKeys": [{"name": "acme", "tenant": "acme", "key": "key-of-acme"}]},
    "servedHeader": "x-served",
    "failureMode": "Open",
}


@asynccontextmanager
async def running(directory: Path, documents: Sequence[Mapping[str, object]], gateway: Gateway) -> AsyncIterator[None]:
    config = directory / "config"
    config.mkdir()
    at = gateway.addresses
    spec = {
        "admin": at["admin"],
        "listen": at["envoy"],
        "extproc": f"unix:{directory}/e",
        "extprocWorkers": 2,
        "usageLog": {"path": str(gateway.log)},
        **SPEC,
    }
    (config / "attache.yaml").write_text(yaml.safe_dump_all([*documents, document("GatewayConfig", "gateway", spec)]))
    python = [sys.executable, "-m", "attache"]
    listens = ["--listen", f"unix:{directory}/e", "--metrics", at["metrics"], "--workers", "2"]
    commands = {
        "extproc": [*python, "extproc", "--config", str(config), *listens],
        "bundle": [*python, "bundle", "--config", str(config), "--out", str(gateway.bundle), "--watch"],
        "translate": [*python, "translate", "--bundle", str(gateway.bundle), "--drain", "5s"],
    }

    async def answers(url: str) -> bool:
        try:
            return (await gateway.http.get(url, headers=KEYED)).status_code == 200
        except httpx.TransportError:
            return False

    async with gateway.http, gateway.chat, gateway.claude, Processes(directory) as processes:
        gateway.processes = processes
        for name, command in commands.items():
            gateway.pids[name] = await processes.start(name, command)
        await processes.wait_ready("extproc", lambda: answers(f"http://{at['metrics']}/readyz"))
        await processes.wait_ready("bundle", FileReady(gateway.bundle / "bootstrap.json"))
        await eventually((gateway.bundle / TRANSLATOR_SOCKET).is_socket)
        drain = ("--drain-time-s", "1", "--drain-strategy", "immediate")
        gateway.pids["envoy"] = await processes.start("envoy", [*envoy_command(gateway.bundle), *drain])
        await processes.wait_ready("envoy", lambda: answers(f"{gateway.url}/v1/models"))
        yield


async def read_all(answer: httpx.Response, pieces: list[str]) -> None:
    async for piece in answer.aiter_text():
        pieces.append(piece)  # noqa: PERF401 - those before an error are kept


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    """Two workers of extproc: the one that decides a request need not be the one that hears of its end."""
    directory = tmp_path_factory.mktemp("t")
    engines = {"chat": Engine(CHAT), "messages": Engine(MESSAGES)}
    gateway = Gateway(directory, engines)
    chat, messages = engines.values()
    async with chat.running(), messages.running():
        own: Any = {"translation": "Lenient", "pricing": [{"perMillion": {"input": "1000", "output": "2000"}}]}
        names = ("chat", "strict", "patient", "never", "messages", "behind")
        documents = [
            model_server("chat", chat, apis=["ChatCompletions"], **own),
            model_server("strict", chat, apis=["ChatCompletions", "Embeddings"], **{**own, "translation": "Strict"}),
            model_server("patient", chat, apis=["ChatCompletions"], **own, trafficPolicy={"timeout": "120s"}),
            model_server("never", chat, apis=["ChatCompletions"]),
            model_server("messages", messages, apis=["Messages", "CountTokens"], **own),
            document("ModelServer", "empty", {"model": "m", "endpoints": []}),
            *(route(name, {"targetModels": [{"modelServerName": name}]}) for name in names[:-1]),
            route(
                "behind",
                {"targetModels": [{"modelServerName": "empty"}], "fallback": [{"modelServerName": "messages"}]},
            ),
        ]
        async with running(directory, documents, gateway):
            yield gateway


@pytest.fixture
def gateway(stack: Gateway) -> Gateway:
    for one in stack.engines.values():
        one.be_good()
    return stack


async def test_a_client_of_anthropic_reads_answers_of_an_engine_that_has_chat(gateway: Gateway) -> None:
    whole = await gateway.claude.messages.create(model="chat", messages=HELLO, max_tokens=9, system="be kind")
    assert [one.text for one in whole.content if one.type == "text"] == ["hello"]
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (10, 4)
    path, headers, body = gateway.engines["chat"].got[-1]
    assert path == CHAT
    assert body["messages"][0] == {"role": "system", "content": "be kind"}
    assert body["model"] == "m"
    assert "anthropic-version" not in headers
    assert not [name for name in headers if name.startswith(("x-attache", "x-gateway", "x-envoy"))]
    async with gateway.claude.messages.stream(model="chat", messages=HELLO, max_tokens=9) as stream:
        final = await stream.get_final_message()
    assert [one.text for one in final.content if one.type == "text"] == ["hello"]
    assert (final.usage.output_tokens, final.stop_reason) == (4, "end_turn")


@pytest.mark.parametrize("asks", [True, False])
async def test_a_client_of_openai_reads_answers_of_an_engine_that_has_messages(gateway: Gateway, *, asks: bool) -> None:
    whole = await gateway.chat.chat.completions.create(model="messages", messages=HELLO, max_tokens=9)
    assert whole.choices[0].message.content == "hello"
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (10, 4)
    path, headers, _ = gateway.engines["messages"].got[-1]
    assert (path, headers["anthropic-version"]) == (MESSAGES, "2023-06-01")
    more: Any = {"stream_options": {"include_usage": True}} if asks else {}
    stream = await gateway.chat.chat.completions.create(model="messages", messages=HELLO, stream=True, **more)
    chunks = [one async for one in stream]
    assert "".join(one.choices[0].delta.content or "" for one in chunks if one.choices) == "hello"
    # usage is requested for the gateway's own sake, and kept from clients that did not ask for it
    assert [one.usage.total_tokens for one in chunks if one.usage] == ([14] if asks else [])


async def test_a_client_of_responses_reads_answers_of_both(gateway: Gateway) -> None:
    for model in ("chat", "messages"):
        whole = await gateway.chat.responses.create(model=model, input="hi")
        assert (whole.output_text, whole.status) == ("hello", "completed")
        async with gateway.chat.responses.stream(model=model, input="hi") as stream:
            final = await stream.get_final_response()
        assert final.output_text == "hello"
        assert final.usage is not None
        assert (final.usage.input_tokens, final.usage.output_tokens) == (10, 4)


async def test_tools_that_are_called_side_by_side(gateway: Gateway) -> None:
    gateway.engines["chat"].does = "call"
    asked: Any = {"model": "chat", "messages": HELLO, "max_tokens": 9, "tools": [TOOL]}
    whole = await gateway.claude.messages.create(**asked)
    async with gateway.claude.messages.stream(**asked) as stream:
        streamed = await stream.get_final_message()
    both: tuple[Any, ...] = (whole, streamed)
    for one in both:
        assert one.stop_reason == "tool_use"
        calls = [(block.id, block.name, block.input) for block in one.content if block.type == "tool_use"]
        assert calls == [("call_0", "weather", {"town": "Berlin"}), ("call_1", "weather", {"town": "Paris"})]
    # their results, in one message of the user
    results = [{"type": "tool_result", "tool_use_id": f"call_{at}", "content": "rain"} for at in range(2)]
    turns: Any = [*HELLO, {"role": "assistant", "content": whole.model_dump()["content"]}]
    gateway.engines["chat"].does = "answer"
    await gateway.claude.messages.create(**{**asked, "messages": [*turns, {"role": "user", "content": results}]})
    body = gateway.engines["chat"].got[-1][2]
    assert [one["tool_call_id"] for one in body["messages"] if one["role"] == "tool"] == ["call_0", "call_1"]


async def test_an_image(gateway: Gateway) -> None:
    source: Any = {"type": "base64", "media_type": "image/png", "data": PIXEL}
    content: Any = [{"type": "image", "source": source}, {"type": "text", "text": "what is it?"}]
    await gateway.claude.messages.create(model="chat", messages=[{"role": "user", "content": content}], max_tokens=9)
    part = gateway.engines["chat"].got[-1][2]["messages"][0]["content"][0]
    assert part == {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}


async def test_what_has_no_counterpart_is_named_or_refused(gateway: Gateway) -> None:
    more: Any = {"top_k": 3, "service_tier": "auto", "metadata": {"user_id": "u"}, "container": None}
    lenient = await gateway.post(MESSAGES, "messages", **more)
    assert (lenient.status_code, lenient.headers.get(DROPPED_FIELDS)) == (200, None), "it takes messages as they are"
    asked: Any = {"logit_bias": {"1": 1}, "seed": 3}
    lenient = await gateway.post(CHAT, "messages", **asked)
    assert lenient.status_code == 200
    assert "logit_bias" in lenient.headers[DROPPED_FIELDS]
    strict = await gateway.post(MESSAGES, "strict", context_management={"edits": []})
    assert strict.status_code == 400
    assert strict.json()["type"] == "error"
    assert "context_management" in strict.json()["error"]["message"]
    assert (await gateway.row(strict)).input == 0
    refused = await gateway.post(MESSAGES, "chat", container="c_1")
    assert refused.status_code == 400


async def test_where_nothing_is_translated_other_apis_get_404(gateway: Gateway) -> None:
    refused = await gateway.post(MESSAGES, "never")
    assert refused.status_code == 404
    assert f"write to {CHAT}" in refused.json()["error"]["message"]
    # and so do APIs that have no translation
    other = await gateway.http.post(
        f"{gateway.url}/v1/completions", json={"model": "chat", "prompt": "a"}, headers=KEYED
    )
    assert other.status_code == 404
    assert gateway.engines["chat"].got == []


@pytest.mark.parametrize("status", [400, 429, 503])
async def test_errors_of_an_engine_have_the_form_of_the_client(gateway: Gateway, status: int) -> None:
    for name, path in (("chat", MESSAGES), ("messages", CHAT)):
        engine = gateway.engines[name]
        engine.does, engine.headers = status, {"retry-after": "0"}
        cases: tuple[dict[str, Any], ...] = ({}, {"stream": True})
        for more in cases:
            engine.got.clear()
            answer = await gateway.post(path, name, **more)
            assert answer.status_code == status
            error = answer.json()["error"]
            assert error["message"] == f"no, {status}"
            assert (answer.json().get("type") == "error") is (path == MESSAGES)
            # what Envoy tries again, it tries again
            assert len(engine.got) == (1 if status == 400 else 2)
            assert answer.headers["retry-after"] == "0"
            row = await gateway.row(answer)
            assert (row.status, row.attempts, row.endpoint, row.server) == (
                status,
                len(engine.got),
                engine.address,
                f"default/{name}",
            )
            assert (row.input, row.output) == (0, 0)


async def test_a_stream_that_is_cut_ends_with_an_error_and_no_clean_end(gateway: Gateway) -> None:
    for name, path in (("chat", MESSAGES), ("messages", CHAT)):
        gateway.engines[name].does = "cut"
        body = {"model": name, "messages": HELLO, "max_tokens": 9, "stream": True}
        async with gateway.http.stream("POST", gateway.url + path, json=body, headers=KEYED) as answer:
            identifier = answer.headers["x-request-id"]
            pieces = list[str]()
            with pytest.raises(httpx.RemoteProtocolError):
                await read_all(answer, pieces)
        text = "".join(pieces)
        assert "hel" in text
        assert "error" in text.rstrip().rpartition("\n\n")[2]
        assert CUT_MARK.decode() not in text
        row = await gateway.row_of_id(identifier)
        assert (row.ended, row.endpoint) == ("engine", gateway.engines[name].address)


async def test_a_time_limit_ends_what_hangs(gateway: Gateway) -> None:
    gateway.engines["chat"].does = "hang"
    before = gateway.engines["chat"].ended
    answer = await gateway.post(MESSAGES, "chat")
    assert answer.status_code == 504
    assert answer.json()["type"] == "error"
    row = await gateway.row(answer)
    assert (row.ended, row.endpoint) == ("timeout", gateway.engines["chat"].address)
    assert row.input > 0, "the engine has worked for it"
    await eventually(lambda: gateway.engines["chat"].ended > before)


async def test_a_time_limit_that_ends_a_stream_in_its_middle_is_no_cut_of_the_engine(gateway: Gateway) -> None:
    for name, path in (("chat", MESSAGES), ("messages", CHAT)):
        engine = gateway.engines[name]
        before = engine.ended
        engine.goes_on.clear()
        body = {"model": name, "messages": HELLO, "max_tokens": 9, "stream": True}
        async with gateway.http.stream("POST", gateway.url + path, json=body, headers=KEYED) as answer:
            identifier = answer.headers["x-request-id"]
            pieces = list[str]()
            with pytest.raises(httpx.RemoteProtocolError):
                await read_all(answer, pieces)
        text = "".join(pieces)
        assert "hel" in text
        assert "time allowed" in text.rstrip().rpartition("\n\n")[2]
        assert LIMIT_MARK.decode() not in text
        row = await gateway.row_of_id(identifier)
        assert (row.status, row.ended, row.endpoint) == (200, "timeout", engine.address)
        assert row.input > 0, "the engine has worked for it"
        await eventually(lambda engine=engine, before=before: engine.ended > before)


async def test_a_time_limit_in_the_middle_of_a_whole_answer_is_a_504(gateway: Gateway) -> None:
    gateway.engines["chat"].does = "stall"
    answer = await gateway.post(MESSAGES, "chat")
    assert answer.status_code == 504
    assert "time allowed" in answer.json()["error"]["message"]
    row = await gateway.row(answer)
    assert (row.ended, row.endpoint) == ("timeout", gateway.engines["chat"].address)


async def test_an_answer_that_is_none_is_a_502(gateway: Gateway) -> None:
    gateway.engines["chat"].does = "nonsense"
    answer = await gateway.post(MESSAGES, "chat")
    assert answer.status_code == 502
    assert answer.json()["error"]["details"]["error_code"] == "answer_untranslatable"
    assert (await gateway.row(answer)).endpoint == gateway.engines["chat"].address


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_ends_the_request_of_the_engine(gateway: Gateway, *, stream: bool) -> None:
    engine = gateway.engines["chat"]
    before, lines = engine.ended, len(gateway.lines())
    if stream:
        engine.goes_on.clear()
    else:
        engine.does = "hang"
    body = {"model": "chat", "messages": HELLO, "max_tokens": 9, "stream": stream}
    task = asyncio.create_task(gateway.http.post(gateway.url + MESSAGES, json=body, headers=KEYED))
    await eventually(lambda: bool(engine.got))
    task.cancel()
    await eventually(lambda: engine.ended > before)
    await eventually(lambda: len(gateway.lines()) > lines)
    row = parse_usage_line(gateway.lines()[-1], 4e9)
    assert (row.ended, row.server) == ("client", "default/chat")
    assert row.input > 0


async def test_a_request_has_one_row_and_its_budget_what_the_engine_counted(gateway: Gateway) -> None:
    for path, model in ((MESSAGES, "chat"), (CHAT, "messages")):
        for stream in (False, True):
            lines = len(gateway.lines())
            answer = await gateway.post(path, model, stream=stream)
            assert answer.headers["x-served"] == gateway.engines[model].address
            assert not {ENGINE_HOST, ENGINE_ATTEMPTS, ENGINE_ANSWERED, TRANSLATE} & {*answer.headers}
            row = await gateway.row(answer)
            assert (row.input, row.output, row.cost_micros) == (10, 4, 18_000)
            assert (row.cached, row.tenant) == (3 if model == "messages" else 0, "acme")
            assert (row.endpoint, row.server, row.attempts) == (gateway.engines[model].address, f"default/{model}", 1)
            assert (row.ended, row.is_failed, row.api) == (
                "whole",
                False,
                "MESSAGES" if path == MESSAGES else "CHAT",
            )
            assert len(gateway.lines()) == lines + 1


async def test_nothing_stays_in_flight(gateway: Gateway) -> None:
    async def is_settled() -> bool:
        return await gateway.metric("attache_in_flight{") == 0.0

    await gateway.post(MESSAGES, "chat")
    await eventually(is_settled)


async def test_a_fallback_gets_translated_requests_at_once_and_is_named(gateway: Gateway) -> None:
    answer = await gateway.post(CHAT, "behind")
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["message"]["content"] == "hello"
    assert answer.headers[SERVED_BY] == "default/messages"
    assert (await gateway.row(answer)).server == "default/messages"


FORGED: Final = {
    TRANSLATE: json.dumps({"client": "messages", "engine": "responses", "headers": {"x-attache-server": "server/x/y"}}),
    ENGINE_HOST: "192.0.2.1:1",
    ENGINE_ATTEMPTS: "99",
    ENGINE_ANSWERED: "via_upstream",
    "x-attache-server": "server/default/never",
    "x-gateway-destination-endpoint": "192.0.2.1:1",
    "x-envoy-max-retries": "9",
    "x-long": "a" * 9000,
    "accept-encoding": "gzip",
    "expect": "100-continue",
    "x-bytes": b"\xff\xfe".decode("latin-1"),
}


async def test_no_header_of_a_client_or_an_engine_decides_anything(gateway: Gateway) -> None:
    engine = gateway.engines["chat"]
    engine.headers = {ENGINE_HOST: "192.0.2.1:1", ENGINE_ATTEMPTS: "99", ENGINE_ANSWERED: "x", DROPPED_FIELDS: "all"}
    raw = [(name.encode(), value.encode("latin-1")) for name, value in {**KEYED, **FORGED}.items()]
    body = {"model": "chat", "messages": HELLO, "max_tokens": 9}
    answer = await gateway.http.post(gateway.url + MESSAGES, json=body, headers=raw)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-served"] == engine.address
    assert not {ENGINE_HOST, ENGINE_ATTEMPTS, ENGINE_ANSWERED, DROPPED_FIELDS} & {*answer.headers}
    _, headers, _ = engine.got[-1]
    assert headers["x-long"] == "a" * 9000
    assert not {TRANSLATE, "x-attache-server", "accept-encoding", "expect", "x-bytes"} & headers.keys()
    row = await gateway.row(answer)
    assert (row.attempts, row.endpoint) == (1, engine.address)
    # what its engines take as it is, is not sent elsewhere
    assert (await gateway.post(CHAT, "chat", headers={TRANSLATE: FORGED[TRANSLATE]})).status_code == 200


async def test_only_its_own_user_reaches_the_sockets(gateway: Gateway) -> None:
    for name in (TRANSLATOR_SOCKET, TRANSLATED_SOCKET):
        mode = (gateway.bundle / name).stat().st_mode
        assert stat.S_ISSOCK(mode)
        assert stat.S_IMODE(mode) == 0o600


async def test_a_long_prompt(gateway: Gateway) -> None:
    text = "a b " * 250_000
    answer = await gateway.post(MESSAGES, "chat", messages=[{"role": "user", "content": text}])
    assert answer.status_code == 200
    assert gateway.engines["chat"].got[-1][2]["messages"][0]["content"] == text


async def test_while_the_translator_is_away_no_engine_is_blamed(gateway: Gateway) -> None:
    # one that an earlier test has opened may close meanwhile
    opened = ("attache_breaker_transitions_total", 'to="open"')
    engine, before = gateway.engines["chat"], await gateway.metric(*opened)
    engine.does = "hang"
    body = {"model": "chat", "messages": HELLO, "max_tokens": 9}
    task = asyncio.create_task(gateway.http.post(gateway.url + MESSAGES, json={**body, "stream": False}, headers=KEYED))
    await eventually(lambda: bool(engine.got))
    os.kill(gateway.pids["translate"], signal.SIGKILL)
    answer = await task
    assert answer.status_code == 503
    assert answer.json()["type"] == "error"
    row = await gateway.row(answer)
    assert (row.ended, row.endpoint, row.input) == ("gateway", "", 0)
    engine.be_good()
    assert (await gateway.post(MESSAGES, "chat")).status_code == 503
    # others are served
    assert (await gateway.post(CHAT, "chat")).status_code == 200
    await start_translator(gateway, "translate-again")
    assert await gateway.metric(*opened) == before


async def start_translator(gateway: Gateway, name: str) -> None:
    command = [sys.executable, "-m", "attache", "translate", "--bundle", str(gateway.bundle), "--drain", "5s"]
    gateway.pids["translate"] = await gateway.processes.start(name, command)

    async def is_back() -> bool:
        return bool((await gateway.post(MESSAGES, "chat")).status_code == 200)

    await eventually(is_back)


async def test_a_translator_that_dies_in_mid_stream_blames_no_engine(gateway: Gateway) -> None:
    # far more than open a breaker, if the engine is to blame
    count, opened = 30, ("attache_breaker_transitions_total", 'to="open"')
    engine, before = gateway.engines["chat"], await gateway.metric(*opened)
    engine.goes_on.clear()
    begun = set[str]()

    async def read() -> None:
        body = {"model": "patient", "messages": HELLO, "max_tokens": 9, "stream": True}
        async with gateway.http.stream("POST", gateway.url + MESSAGES, json=body, headers=KEYED) as answer:
            async for _ in answer.aiter_text():
                begun.add(answer.headers["x-request-id"])

    tasks = [asyncio.create_task(read()) for _ in range(count)]
    await eventually(lambda: len(begun) == count)
    os.kill(gateway.pids["translate"], signal.SIGKILL)
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert [one for one in ends if not isinstance(one, httpx.TransportError)] == []
    rows = [await gateway.row_of_id(one) for one in begun]
    assert {(one.ended, one.endpoint) for one in rows} == {("gateway", engine.address)}
    assert all(one.input > 0 for one in rows), "the engine has worked for it"
    engine.be_good()
    await start_translator(gateway, "translate-once-more")
    assert await gateway.metric(*opened) == before


async def test_a_client_that_reads_nothing_holds_little_more_than_without_a_translation(gateway: Gateway) -> None:
    plain, translated = [await sent_to_nobody(gateway, path) for path in (CHAT, MESSAGES)]
    assert translated < 1.5 * plain, f"{translated} and {plain} bytes"


async def sent_to_nobody(gateway: Gateway, path: str) -> int:
    """How many bytes the engine could write of a stream of which its client reads nothing."""
    engine = gateway.engines["chat"]
    engine.does, engine.written = "flood", 0
    body = json.dumps({"model": "patient", "messages": HELLO, "max_tokens": 9, "stream": True})
    host, port = gateway.addresses["envoy"].split(":")
    _, writer = await asyncio.open_connection(host, int(port), limit=1)
    lines = [f"POST {path} HTTP/1.1", "host: a", "content-type: application/json", f"content-length: {len(body)}"]
    writer.write("\r\n".join([*lines, f"authorization: {KEYED['authorization']}", "", body]).encode())
    seen, since = -1, 0
    while since < 20:
        since = since + 1 if engine.written == seen and seen > 0 else 0
        seen = engine.written
        await asyncio.sleep(0.1)
    writer.transport.abort()
    return seen


async def test_without_extproc_the_path_that_is_served_is_named(gateway: Gateway) -> None:
    await gateway.processes.end("extproc")

    async def is_undecided() -> bool:
        return bool((await gateway.post(MESSAGES, "chat")).status_code == 400)

    await eventually(is_undecided)
    refused = await gateway.post(MESSAGES, "chat")
    assert refused.json()["type"] == "error"
    assert f"served under {CHAT} alone" in refused.json()["error"]["message"]
    other = await gateway.post(CHAT, "messages")
    assert (other.status_code, other.json()["error"]["code"]) == (400, "no_translation")
    assert (await gateway.post(CHAT, "chat")).status_code == 200
    await gateway.processes.start_again("extproc")

    async def is_back() -> bool:
        return bool((await gateway.post(MESSAGES, "chat")).status_code == 200)

    await eventually(is_back)


async def test_a_drain_lets_translated_answers_end(gateway: Gateway) -> None:
    """It is the last one: no further connection is taken."""
    engine = gateway.engines["chat"]
    engine.goes_on.clear()
    body = {"model": "chat", "messages": HELLO, "max_tokens": 9, "stream": True}
    async with gateway.http.stream("POST", gateway.url + MESSAGES, json=body, headers=KEYED) as answer:
        pieces = answer.aiter_text()
        text = await anext(pieces)
        assert begin_drain(gateway.addresses["admin"])
        connected = httpx.AsyncClient()

        async def is_closed() -> bool:
            try:
                await connected.get(f"{gateway.url}/healthz", headers={"connection": "close"})
            except httpx.TransportError:
                return True
            return False

        async with connected:
            await eventually(is_closed)
        engine.goes_on.set()
        text += "".join([piece async for piece in pieces])
    assert "message_stop" in text
