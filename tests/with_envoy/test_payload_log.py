# SPDX-License-Identifier: Apache-2.0
"""What routes log of requests and answers through a real Envoy: whole, redacted, and at the cost of no request."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import signal
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pytest
import pytest_asyncio
from aiohttp import web

from bench.stack.processes import free_ports
from tests.waiting import eventually
from tests.with_envoy.stand_in import gateway_on

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.with_envoy.stand_in import Gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT: Final = "/v1/chat/completions"
CANARY: Final = "sk-canary0123456789"
REDACT: Final = {"paths": ["$.metadata"], "patterns": ["sk-[a-z0-9]+"]}
PLAIN: Final = b'{"choices": [{"message": {"content": "it is sk-canary0123456789"}}]}'
PIECES: Final = tuple(
    b"data: " + json.dumps({"choices": [{"index": 0, "delta": {"content": piece}}]}).encode() + b"\n\n"
    for piece in ("it is sk-ca", "nary012345", "6789.")
)
DONE: Final = b"data: [DONE]\n\n"
REQUEST, RESPONSE = (f"org.kubeflow.serving.inference.{kind}" for kind in ("request", "response"))


class Log:
    """The file, and the gateway that writes it."""

    def __init__(self, file: Path, gateway: Gateway) -> None:
        self.file = file
        self.gateway = gateway

    def events(self, request_id: str) -> list[dict[str, Any]]:
        found = [json.loads(line) for line in self.file.read_text().splitlines()] if self.file.exists() else []
        return [one for one in found if one.get("requestid") == request_id]

    async def pair(self, request_id: str, number: int = 2) -> list[dict[str, Any]]:
        await eventually(lambda: len(self.events(request_id)) == number)
        return self.events(request_id)

    async def ask(self, *pieces: bytes, plain: bool = False, **fields: object) -> tuple[str, bytes]:
        """The request's id, and what the client got."""
        engine = self.gateway.engine
        engine.pieces, engine.is_plain, engine.then = pieces, plain, "end"
        answer = await self.gateway.http.post(f"{self.gateway.url}{CHAT}", json=body(stream=not plain, **fields))
        assert answer.status_code == 200
        return answer.headers["x-request-id"], answer.content


def body(**fields: object) -> dict[str, object]:
    """A request with secrets in it."""
    messages = [{"role": "user", "content": f"my key is {CANARY}, keep it"}]
    return {"model": "llama", "messages": messages, "metadata": {"card": "4111"}, **fields}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def log(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Log]:
    directory = tmp_path_factory.mktemp("payload-log")
    file = directory / "payload.log"
    gateway = {"payloadLog": {"path": str(file)}, "messageTimeout": "1s"}
    async with gateway_on(directory, gateway=gateway, route={"payloadLog": {"redact": REDACT}}) as running:
        yield Log(file, running)


async def test_a_plain_answer_and_its_request_are_two_events_of_one_ticket(log: Log) -> None:
    request_id, got = await log.ask(PLAIN, plain=True)
    assert got == PLAIN
    request, answer = await log.pair(request_id)
    assert (request["type"], answer["type"]) == (REQUEST, RESPONSE)
    decision = json.loads(log.gateway.decisions.read_text().splitlines()[-1])
    assert request["id"] == answer["id"] == request["ticket"] == decision["ticket"]
    assert (request["inferenceservicename"], request["namespace"], request["route"]) == (
        "llama",
        "default",
        "default/llama",
    )
    assert (request["endpoint"], request["model"], answer["status"]) == (CHAT, "llama", 200)
    assert request["data"]["messages"][0]["content"] == "my key is [redacted], keep it"
    assert request["data"]["metadata"] == "[redacted]"
    assert answer["data"]["choices"][0]["message"]["content"] == "it is [redacted]"
    assert request["time"] <= answer["time"]
    assert log.file.stat().st_mode & 0o777 == 0o600


async def test_a_streamed_answer_passes_unchanged_and_is_logged_as_one_object(log: Log) -> None:
    request_id, got = await log.ask(*PIECES, DONE)
    assert got == b"".join((*PIECES, DONE))
    _, answer = await log.pair(request_id)
    assert answer["data"]["choices"] == [{"index": 0, "delta": {"content": "it is [redacted]."}}]
    assert answer["bytes"] == len(got)


async def test_no_secret_is_in_the_file(log: Log) -> None:
    request_id, _ = await log.ask(PLAIN, plain=True)
    await log.pair(request_id)
    assert CANARY not in log.file.read_text()
    assert "4111" not in log.file.read_text()


async def test_huge_bodies_pass_and_are_logged_without_their_content(log: Log) -> None:
    huge = json.dumps({"choices": [{"message": {"content": "x" * 3_000_000}}]}).encode()
    request_id, got = await log.ask(huge, plain=True, user="u" * 1_000_000)
    assert got == huge
    request, answer = await log.pair(request_id)
    assert (request["omitted"], answer["omitted"]) == ("too-long", "too-long")
    assert answer["bytes"] == len(huge)
    assert "data" not in answer


async def test_an_answer_that_is_garbage_passes_and_is_logged_without_its_content(log: Log) -> None:
    garbage = b"\x00\xff" * 100
    request_id, got = await log.ask(garbage, plain=True)
    assert got == garbage
    _, answer = await log.pair(request_id)
    assert (answer["omitted"], answer["bytes"]) == ("not-json", 200)


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "streamed"])
async def test_an_encoded_answer_passes_and_is_logged_without_its_content(log: Log, plain: bool) -> None:
    packed = gzip.compress(PLAIN)
    log.gateway.engine.headers = {"content-encoding": "GZIP"}
    try:
        request_id, got = await log.ask(packed, plain=plain)
    finally:
        log.gateway.engine.headers = {}
    assert got == PLAIN
    _, answer = await log.pair(request_id)
    assert (answer["omitted"], answer["bytes"], "data" in answer) == ("encoded", len(packed), False)


async def test_pieces_of_a_secret_are_not_in_the_file(log: Log) -> None:
    pieces = [{"token": one, "bytes": list(one.encode())} for one in ("sk-", "apart", "apart2")]
    whole = {"choices": [{"message": {"content": "sk-apartapart2"}, "logprobs": {"content": pieces}}]}
    request_id, _ = await log.ask(json.dumps(whole).encode(), plain=True, logprobs=True)
    _, answer = await log.pair(request_id)
    assert answer["data"]["choices"][0]["logprobs"] == "[not searchable]"
    assert "apart" not in log.file.read_text()


async def test_what_a_client_got_that_left_is_logged(log: Log) -> None:
    engine = log.gateway.engine
    engine.pieces, engine.is_plain, engine.then = PIECES[:2], False, "hang"
    async with log.gateway.http.stream("POST", f"{log.gateway.url}{CHAT}", json=body(stream=True)) as answer:
        got = b""
        async for piece in answer.aiter_raw():
            got += piece
            if len(got) == sum(map(len, PIECES[:2])):
                break
    _, logged = await log.pair(answer.headers["x-request-id"])
    assert logged["data"]["choices"][0]["delta"]["content"] == "it is [redacted]"


async def test_an_extproc_that_hangs_holds_up_an_answer_that_is_logged_for_its_time_limit_alone(log: Log) -> None:
    engine, gateway = log.gateway.engine, log.gateway
    engine.pieces, engine.is_plain, engine.then = (*(PIECES[0] for _ in range(400)), DONE), False, "end"
    try:
        async with gateway.http.stream("POST", f"{gateway.url}{CHAT}", json=body(stream=True), timeout=120) as answer:
            pieces = answer.aiter_raw()
            got = await anext(pieces)
            os.kill(gateway.extproc, signal.SIGSTOP)
            async for piece in pieces:
                got += piece
    finally:
        os.kill(gateway.extproc, signal.SIGCONT)
    assert got == PIECES[0] * 400 + DONE


@pytest.mark.parametrize("mode", ["Open", "Close"])
async def test_an_extproc_that_dies_costs_no_answer_that_is_logged(tmp_path: Path, mode: str) -> None:
    gateway = {"payloadLog": {"path": str(tmp_path / "payload.log")}, "failureMode": mode}
    async with gateway_on(tmp_path, gateway=gateway, route={"payloadLog": {}}) as running:
        running.engine.pieces = (*(PIECES[0] for _ in range(400)), DONE)
        request = running.http.stream("POST", f"{running.url}{CHAT}", json=body(stream=True), timeout=120)
        async with request as answer:
            pieces = answer.aiter_raw()
            got = await anext(pieces)
            os.kill(running.extproc, signal.SIGKILL)
            async for piece in pieces:
                got += piece
    assert got == PIECES[0] * 400 + DONE


async def test_routes_that_log_nothing_have_no_event(tmp_path: Path) -> None:
    file = tmp_path / "payload.log"
    async with gateway_on(tmp_path, gateway={"payloadLog": {"path": str(file)}}) as running:
        other = Log(file, running)
        _, got = await other.ask(*PIECES, DONE)
    assert got == b"".join((*PIECES, DONE))
    assert not file.exists()


class Sink:
    """An HTTP service that takes events; while it is ill, it hangs, refuses, cuts connections and answers garbage."""

    def __init__(self) -> None:
        self.is_ill = False
        self.events: list[tuple[dict[str, str], bytes]] = []
        self.calls = 0

    async def take(self, request: web.Request) -> web.StreamResponse:
        self.calls += 1
        content = await request.read()
        match self.calls % 4 if self.is_ill else None:
            case 0:
                await asyncio.sleep(3600)
            case 1:
                return web.Response(status=503)
            case 2 if request.transport is not None:
                request.transport.abort()
            case 3 if request.transport is not None:
                request.transport.write(b"\x00garbage\r\n\r\n")  # type: ignore[attr-defined]
                request.transport.close()
            case _:
                self.events.append(({name.lower(): value for name, value in request.headers.items()}, content))
        return web.Response(status=202)


async def sample(gateway: Gateway, result: str) -> float:
    """A count of events."""
    page = (await gateway.http.get(f"{gateway.metrics}/metrics")).text
    name = f'attache_payload_events_total{{result="{result}"}} '
    return next((float(line.removeprefix(name)) for line in page.splitlines() if line.startswith(name)), 0.0)


async def test_a_service_gets_cloud_events_and_one_that_is_ill_costs_no_request(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    sink = Sink()
    app = web.Application()
    app.add_routes([web.post("/events", sink.take)])
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    gateway = {"payloadLog": {"url": f"http://127.0.0.1:{port}/events"}}
    try:
        async with gateway_on(tmp_path, gateway=gateway, route={"payloadLog": {"redact": REDACT}}) as running:
            one = Log(tmp_path / "none", running)
            request_id, _ = await one.ask(*PIECES, DONE, user="a\u2028b")
            await eventually(lambda: len(sink.events) == 2)
            (headers, request), (answer_headers, answer) = sorted(sink.events, key=lambda one: one[0]["ce-type"])
            assert (headers["ce-type"], answer_headers["ce-type"]) == (REQUEST, RESPONSE)
            assert headers["ce-specversion"] == "1.0"
            assert headers["ce-requestid"] == request_id
            assert headers["ce-id"] == answer_headers["ce-id"]
            assert headers["ce-inferenceservicename"] == "llama"
            assert headers["content-type"] == "application/json"
            assert CANARY.encode() not in request + answer
            assert msgspec.json.decode(request)["user"] == "a\u2028b"
            sink.is_ill = True
            for _ in range(20):
                _, got = await one.ask(*PIECES, DONE)
                assert got == b"".join((*PIECES, DONE))

            async def has_failed() -> bool:
                return await sample(running, "failed") >= 8

            await eventually(has_failed)
            sink.is_ill, before = False, len(sink.events)
            await eventually(lambda: len(sink.events) > before)
    finally:
        await runner.cleanup()
