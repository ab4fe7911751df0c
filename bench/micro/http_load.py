# SPDX-License-Identifier: Apache-2.0
"""A client that costs next to nothing: prepared requests on keep-alive connections.

Each connection sends its next request as soon as the answer to the last one is whole.
"""

from __future__ import annotations

import asyncio
import json
import time
from functools import partial
from typing import TYPE_CHECKING, Final, cast

import msgspec

from bench.engine.fake_tokenizer import BYTES_PER_TOKEN
from bench.micro.grpc_load import GrpcConnection, grpc_call_frames
from bench.micro.instant_engine import INFER_CALL, LAST_CHUNK, content_length, is_chunked
from bench.stack.loopback_stack import ALIAS
from bench.workload.sessions import text_of

if TYPE_CHECKING:
    from collections.abc import Sequence

CHAT_PATH: Final = "/v1/chat/completions"
_HEAD: Final = "HTTP/1.1\r\nhost: gateway\r\ncontent-type: application/json\r\n"


class WireRequest(msgspec.Struct, frozen=True):
    """A request as it goes over the wire, but for headers that depend on what is measured. ``is_call``: of gRPC, with
    ``body`` as its message.
    """

    body: bytes
    path: str = CHAT_PATH
    is_call: bool = False

    def wire_bytes(self, extra_headers: str = "") -> bytes:
        """Head and body, or frames; ``extra_headers``: whole lines, each with its line end."""
        if self.is_call:
            return grpc_call_frames(self.path, self.body, extra_headers)
        head = f"POST {self.path} {_HEAD}{extra_headers}content-length: {len(self.body)}\r\n\r\n"
        return head.encode() + self.body


def chat_requests(prompt_bytes: int, *, count: int, model: str = ALIAS) -> list[WireRequest]:
    """Chats. Half of each prompt is a system prompt that a quarter of the chats share; the rest is its own."""
    half = prompt_bytes // 2 // BYTES_PER_TOKEN
    made = []
    for number in range(count):
        messages = [
            {"role": "system", "content": text_of(f"system/{number % 4}", half)},
            {"role": "user", "content": text_of(f"user/{number}", half)},
        ]
        made.append(WireRequest(json.dumps({"model": model, "messages": messages}).encode()))
    return made


def infer_path(model: str) -> str:
    """Of the Open Inference Protocol."""
    return f"/v2/models/{model}/infer"


def tensor_requests(size: int, *, count: int, model: str = ALIAS) -> list[WireRequest]:
    """Requests of the Open Inference Protocol, each with one tensor of about ``size`` bytes of text."""
    made = []
    for number in range(count):
        data = [(number + at) % 10 for at in range(size // 3)]
        tensor = {"name": "x", "shape": [1, len(data)], "datatype": "INT32", "data": data}
        made.append(WireRequest(json.dumps({"inputs": [tensor]}).encode(), infer_path(model)))
    return made


def grpc_tensor_requests(size: int, *, count: int, model: str = ALIAS) -> list[WireRequest]:
    """The same as calls of gRPC, each with one tensor of ``size`` bytes."""
    tensor = _field(1, b"x") + _field(2, b"UINT8") + _field(3, _varint(size))
    head = _field(1, model.encode()) + _field(5, tensor)
    return [WireRequest(head + _field(7, bytes([number]) * size), INFER_CALL, is_call=True) for number in range(count)]


def _field(number: int, data: bytes) -> bytes:
    """Of protobuf, with a length."""
    return bytes([number << 3 | 2]) + _varint(len(data)) + data


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])


class _LoadConnection(asyncio.Protocol):
    def __init__(self, load: RequestLoad, first: int) -> None:
        self._load = load
        self._next = first
        self._received = b""
        self._sent_at_s = 0.0
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._send()

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, found, body = self._received.partition(b"\r\n\r\n")
        if not found or not _is_whole(head, body):
            return
        self._received = b""
        refused = b"" if head.startswith(b"HTTP/1.1 200") else head[:300]
        if self._load.on_response(self._load.clock() - self._sent_at_s, refused=refused):
            self._send()
        elif self._transport is not None:
            self._transport.close()

    def connection_lost(self, _: Exception | None) -> None:
        self._load.on_connection_closed()

    def _send(self) -> None:
        assert self._transport is not None
        self._sent_at_s = self._load.clock()
        self._transport.write(self._load.requests[self._next % len(self._load.requests)])
        self._next += 1


def _is_whole(head: bytes, body: bytes) -> bool:
    if is_chunked(head):
        return body.endswith(LAST_CHUNK)
    return len(body) >= content_length(head)


class RequestLoad:
    """``connections`` of them, each with one request at a time. ``taken_s``: from each request to its whole answer.
    ``calls``: the requests are calls of gRPC. ``by_gateway``: the gateway answers by itself.
    """

    def __init__(
        self, requests: Sequence[bytes], *, connections: int, calls: bool = False, by_gateway: bool = False
    ) -> None:
        self.requests = requests
        self.by_gateway = by_gateway
        self._connect = GrpcConnection if calls else _LoadConnection
        self.taken_s: list[float] = []
        self.clock = time.perf_counter  # the event loop's own clock may count whole milliseconds
        self._is_over = False
        self._refused = b""
        self._connections = connections
        self._open = 0
        self._all_closed = asyncio.Event()

    async def run(self, host: str, port: int, *, seconds: float, patience_s: float = 30.0) -> float:
        """Answers a second, over about ``seconds``. Raises RuntimeError if an answer is not 200.

        ``patience_s``: with the last answers.
        """
        began_s = self.clock()
        for number in range(self._connections):
            self._open += 1
            await asyncio.get_running_loop().create_connection(partial(self._connect, self, number * 7), host, port)
        await asyncio.sleep(seconds)
        self._is_over = True
        async with asyncio.timeout(patience_s):
            await self._all_closed.wait()
        if self._refused:
            msg = f"an answer was not 200: {self._refused!r}"
            raise RuntimeError(msg)
        return len(self.taken_s) / (self.clock() - began_s)

    def on_response(self, taken_s: float, *, refused: bytes) -> bool:
        """Count a whole answer; returns whether its connection may send the next request. ``refused``: its head, if it
        is not good.
        """
        self._refused = self._refused or refused
        self.taken_s.append(taken_s)
        return not self._is_over and not self._refused

    def on_connection_closed(self) -> None:
        """Count a connection as closed."""
        self._open -= 1
        if not self._open:
            self._all_closed.set()
