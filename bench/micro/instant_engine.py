# SPDX-License-Identifier: Apache-2.0
"""Engines that answer at once, so that all that is measured is in front of them.

One process serves them all, each on a port of its own. Answers are not streamed: a gateway that sends headers and the
first bytes apart and without TCP_NODELAY would be measured by its client's delayed acknowledgements (40 ms). Only a
request that asks for it by a header gets its answer in events, one each 5 ms, as tokens come. A prefill engine answers
with the parameters of a transfer, after a pause if it is to hold requests.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import sys
from importlib.resources import files
from typing import TYPE_CHECKING, Final, cast

import uvloop

from bench.stack.loopback_stack import MODEL
from extproc.rpc.server import RpcServer
from extproc.wire_names import Api

if TYPE_CHECKING:
    from extproc.rpc.server import RpcCall

_CHOICE: Final = '{"index":0,"message":{"role":"assistant","content":"ok"},"finish_reason":"stop"}'
_USAGE: Final = (
    '{"prompt_tokens":500,"completion_tokens":1,"total_tokens":501,"prompt_tokens_details":{"cached_tokens":0}}'
)
_CHAT: Final = (
    f'{{"id":"c","object":"chat.completion","created":0,"model":"{MODEL}","choices":[{_CHOICE}],"usage":{_USAGE}}}'
).encode()
# A request with this header gets as many events.
EVENTS: Final = "x-bench-events"
_PAUSE_S: Final = 0.005
_EVENT: Final = (
    f'data: {{"id":"c","object":"chat.completion.chunk","created":0,"model":"{MODEL}",'
    '"choices":[{"index":0,"delta":{"content":" token"},"finish_reason":null}]}\n\n'
).encode()
_LAST_EVENTS: Final = (
    'data: {"id":"c","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
    f'data: {{"id":"c","choices":[],"usage":{_USAGE}}}\n\ndata: [DONE]\n\n'
).encode()
_STREAM_HEAD: Final = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
# Requests of gateways to an engine before they use it: its health, its models.
_ABOUT: Final = (
    f'{{"status":"ok","model_path":"{MODEL}","served_model_name":"{MODEL}","data":[{{"id":"{MODEL}"}}]}}'.encode()
)


INFER_CALL: Final = next(iter(Api.V2_GRPC.spec.calls.paths)) if Api.V2_GRPC.spec.calls else ""
# A ModelInferResponse of the model and 200 bytes of tensors.
_INFERRED: Final = b"\x0a\x07llama-2" + b"\x32\xc8\x01" + bytes(200)
_BLOCK_TOKENS: Final = 16
LAST_CHUNK: Final = b"0\r\n\r\n"


def _answer(body: bytes) -> bytes:
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


_ANSWER_TO_POST: Final = _answer(_CHAT)
_ANSWER_TO_GET: Final = _answer(_ABOUT)
# a whole metrics page of vLLM 0.32, as recorded
_METRICS: Final = _answer((files("bench.micro") / "vllm_metrics.txt").read_bytes())


class _EngineConnection(asyncio.Protocol):
    """One request after the other; bodies are counted, never kept. ``post``: the answer to each. ``pause_s``: before
    it.
    """

    def __init__(self, post: bytes = _ANSWER_TO_POST, pause_s: float = 0.0) -> None:
        self._post, self._pause_s = post, pause_s
        self._head = b""
        self._body_left = 0
        self._is_chunked = False
        self._answer = post
        self._events = 0
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if not (self._body_left or self._is_chunked):
            self._head += data
            head, found, data = self._head.partition(b"\r\n\r\n")
            if not found:
                return
            self._head = b""
            self._answer = _answer_to(head, self._post)
            self._is_chunked = is_chunked(head)
            self._events = _number_in(head, EVENTS)
            self._body_left = content_length(head)
        if self._is_chunked:
            self._is_chunked = not data.endswith(LAST_CHUNK)
        else:
            self._body_left -= len(data)
        if not (self._body_left or self._is_chunked):
            if self._events:
                self._transport.write(_STREAM_HEAD)
                self._send_events()
            elif self._pause_s and self._answer is self._post:
                asyncio.get_running_loop().call_later(self._pause_s, self._transport.write, self._answer)
            else:
                self._transport.write(self._answer)

    def _send_events(self) -> None:
        self._events -= 1
        self._transport.write(_chunk(_EVENT))
        if self._events:
            asyncio.get_running_loop().call_later(_PAUSE_S, self._send_events)
        else:
            self._transport.write(_chunk(_LAST_EVENTS) + LAST_CHUNK)


def _chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def _answer_to(head: bytes, post: bytes) -> bytes:
    if head.startswith(b"GET /metrics"):
        return _METRICS
    return _ANSWER_TO_GET if head.startswith(b"GET ") else post


def prefill_response(tokens: int) -> bytes:
    """The answer of a prefill engine to a prompt of so many tokens, as vLLM's NixlConnector writes it."""
    params = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [list(range(tokens // _BLOCK_TOKENS))],
        "remote_engine_id": "7c0d4c7e-6a5e-4c53-9a3c-3f3c2f2b8f10",
        "remote_request_id": "chatcmpl-1-1a2b3c4d",
        "remote_host": "127.0.0.1",
        "remote_port": 5600,
        "tp_size": 1,
    }
    return _answer(_CHAT[:-1] + b',"kv_transfer_params":' + json.dumps(params).encode() + b"}")


def is_chunked(head: bytes) -> bool:
    """Whether the body ends with LAST_CHUNK instead of having its length in the headers."""
    return b"transfer-encoding: chunked" in head.lower()


def content_length(head: bytes) -> int:
    """The length that the headers give; 0 without one."""
    return _number_in(head, "content-length")


def _number_in(head: bytes, name: str) -> int:
    key = f"{name}:".encode()
    return next((int(line[len(key) :]) for line in head.split(b"\r\n") if line.lower().startswith(key)), 0)


async def _infer(call: RpcCall) -> None:
    await call.read()
    await call.write(_INFERRED)


async def serve_grpc(ports: list[int]) -> None:
    """Answer calls of the Open Inference Protocol, for ever."""
    servers = [RpcServer({INFER_CALL: _infer}) for _ in ports]
    try:
        for server, port in zip(servers, ports, strict=True):
            await server.start(socket.create_server(("127.0.0.1", port), backlog=1024))
        await asyncio.Event().wait()
    finally:
        for server in servers:
            await server.close()


async def serve(ports: list[int], *, everywhere: bool, post: bytes = _ANSWER_TO_POST, pause_s: float = 0.0) -> None:
    """Serve for ever. ``everywhere``: at all addresses of the loopback interface, which are many, and no other.
    ``post``: the answer to requests, ``pause_s`` after each.
    """
    loop, servers = asyncio.get_running_loop(), []
    for port in ports:
        listening = socket.create_server(("0.0.0.0" if everywhere else "127.0.0.1", port), backlog=1024)  # noqa: S104
        if everywhere:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo")
        servers.append(await loop.create_server(lambda: _EngineConnection(post, pause_s), sock=listening))
    try:
        await asyncio.Event().wait()
    finally:
        for server in servers:
            server.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="bench.micro.instant_engine", description=__doc__)
    parser.add_argument("--ports", required=True, help="separated by commas")
    parser.add_argument("--everywhere", action="store_true", help="at 127.0.0.0/8 instead of 127.0.0.1")
    parser.add_argument("--calls", action="store_true", help="answer calls of gRPC in place of requests")
    parser.add_argument("--prefilled", type=int, default=0, metavar="TOKENS", help="be a prefill engine")
    parser.add_argument("--pause", type=float, default=0.0, metavar="S", help="before each answer to a request")
    options = parser.parse_args()
    post = prefill_response(options.prefilled) if options.prefilled else _ANSWER_TO_POST
    numbers = [int(port) for port in options.ports.split(",")]
    if options.calls:
        sys.exit(uvloop.run(serve_grpc(numbers)))
    sys.exit(uvloop.run(serve(numbers, everywhere=options.everywhere, post=post, pause_s=options.pause)))
