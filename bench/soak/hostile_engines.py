# SPDX-License-Identifier: Apache-2.0
"""``python -m bench.soak.hostile_engines``: engines that lie, each at an address of its own: a table of what they do.

All is bounded: no answer has more than 64 MiB or lasts longer than a minute, and events come once a second at most.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import socket
import struct
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any, Final

import msgspec
import uvloop
import zmq
import zmq.asyncio

from bench.soak.engines import metrics_page

_MOST_BYTES: Final = 64 * 1024 * 1024
_LONGEST_S: Final = 60
# Between messages that take a reader long even if it reads them well.
_RARE_S: Final = 10.0
_LONGEST_BODY: Final = 16 * 1024 * 1024
_PIECE: Final = b"x" * 65_536
_END: Final = (-1).to_bytes(8, "big", signed=True)
TRAP_HOST: Final = "127.4.0.1"
TRAPPED_PATH: Final = "/trapped"
REPLAY_OFFSET: Final = 1

# What is sent of an answer: pieces of it, with pauses where it drips.
Pieces = AsyncIterator[bytes]
# Given the port of the trap.
Answer = Callable[[int], Pieces]
_HEAD: Final = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n"
_CHAT: Final = "/v1/chat/completions"
_METRICS: Final = "/metrics"
_MODELS: Final = "/v1/models"
_LOAD: Final = "/v1/load_lora_adapter"
_LONG_REPLAY: Final = tuple((b"", number.to_bytes(8, "big"), _PIECE) for number in range(512))
# Mixed with honest ones in one ModelServer: requests that it fails can be tried elsewhere.
MIXED: Final = "resets"


class _Reset(Exception):
    """Reset the connection here."""


class HostileEngine(msgspec.Struct, frozen=True):
    """What one engine does. ``group``: as ``--hostile`` has it. ``answers``: by path, in the place of good ones.
    ``event``: the payload of a KV message, every ``event_s``. ``replay``: messages in the place of a replay; without
    any, none is offered.
    """

    group: str
    summary: str
    answers: Mapping[str, Answer] = {}
    event: Callable[[], bytes] | None = None
    event_s: float = 1.0
    replay: tuple[tuple[bytes, ...], ...] = ()

    @property
    def loads_adapters(self) -> bool:
        """Whether its ModelServer has it load an adapter."""
        return self.group == "adapters"


def _whole(body: bytes, *, status: str = "200 OK", kind: str = "application/json", more: str = "") -> Answer:
    async def pieces(_: int) -> Pieces:
        yield f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n{more}\r\n".encode() + body

    return pieces


def _made(body: Callable[[], bytes]) -> Answer:
    """A response with a large body, which is made on request."""

    async def pieces(trap: int) -> Pieces:
        async for piece in _whole(body())(trap):
            yield piece

    return pieces


def _redirect(path: str) -> Answer:
    def pieces(trap: int) -> Pieces:
        location = f"location: http://{TRAP_HOST}:{trap}{path}\r\n"
        return _whole(b"", status="307 Temporary Redirect", more=location)(trap)

    return pieces


async def _negative_chunk(_: int) -> Pieces:
    yield _HEAD + b"transfer-encoding: chunked\r\n\r\n-6\r\nvllm:n\r\n0\r\n\r\n"


async def _endless(_: int) -> Pieces:
    yield _HEAD + b"connection: close\r\n\r\n"
    for _piece in range(_MOST_BYTES // len(_PIECE)):
        yield _PIECE


async def _drip(_: int) -> Pieces:
    yield _HEAD + b"connection: close\r\n\r\n"
    for _second in range(_LONGEST_S):
        await asyncio.sleep(1)
        yield b"#"


async def _dies(_: int) -> Pieces:
    yield b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    yield b'16\r\ndata: {"choices":[]}\n\n\r\n'
    await asyncio.sleep(0.1)
    raise _Reset


async def _resets(_: int) -> Pieces:
    yield b""
    raise _Reset


async def _interim(_: int) -> Pieces:
    for _i in range(100):
        yield b"HTTP/1.1 103 Early Hints\r\nlink: </x>; rel=preload\r\n\r\n" * 100
    yield b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"


def _labels() -> bytes:
    labels = ",".join(f'l{number}="v"' for number in range(100_000))
    return f"{metrics_page(0)}vllm:lora_requests_info{{{labels}}} 1.0\n".encode()


def _many_models() -> bytes:
    return json.dumps({"object": "list", "data": [{"id": f"model-{one}" * 4} for one in range(120_000)]}).encode()


def _many_tokens() -> bytes:
    return b'{"tokens":[1' + b",1" * 4_000_000 + b"]}"


def _nested() -> bytes:
    return b'{"data":' + b"[" * 200_000 + b"]" * 200_000 + b"}"


def _stored(**fields: object) -> Callable[[], bytes]:
    """A batch with one stored block, valid but for ``fields``."""
    event = {
        "type": "BlockStored",
        "block_hashes": [1],
        "parent_block_hash": None,
        "token_ids": list(range(16)),
        "block_size": 16,
        "lora_id": None,
        "medium": "GPU",
        **fields,
    }
    return lambda: msgspec.msgpack.encode({"ts": 0.0, "events": [event], "data_parallel_rank": 0})


def _batch(events: Callable[[], list[dict[str, Any]]]) -> Callable[[], bytes]:
    return lambda: msgspec.msgpack.encode([0.0, events(), 0])


def _blocks(number: int, *, size: int = 1, medium: str = "GPU") -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": [number],
        "parent_block_hash": None,
        "token_ids": [number] * size,
        "block_size": size,
        "medium": medium,
    }


_ODD_REPLAY: Final = ((b"", bytes(8), _stored(token_ids=[-1])()), (b"", _END, b""))


def _levels() -> bytes:
    return b"\x91" * 200_000 + b"\x00"


HOSTILE: Final[Mapping[str, HostileEngine]] = {
    "negative-chunk": HostileEngine("pages", "a metrics page with a chunk of size -6", {_METRICS: _negative_chunk}),
    "labels": HostileEngine("pages", "900 KB of labels in a metrics page", {_METRICS: _made(_labels)}),
    "many-models": HostileEngine("pages", "a list of models of 6 MB", {_MODELS: _made(_many_models)}),
    "nested-models": HostileEngine("pages", "a list of models of 200,000 levels", {_MODELS: _made(_nested)}),
    "endless-page": HostileEngine("pages", "a metrics page without an end", {_METRICS: _endless}),
    "drip-page": HostileEngine("pages", "a metrics page of a byte a second", {_METRICS: _drip}),
    "redirect-page": HostileEngine("pages", "a metrics page that is elsewhere", {_METRICS: _redirect("/metrics")}),
    "redirect-tokenize": HostileEngine(
        "tokens", "/tokenize is elsewhere", {"/tokenize": _redirect("/tokenize")}, event=_stored()
    ),
    "negative-tokens": HostileEngine(
        "tokens", "tokens of -1", {"/tokenize": _whole(b'{"tokens":[-1,-1,-1]}')}, event=_stored()
    ),
    "large-tokens": HostileEngine(
        "tokens", "tokens of 2^32", {"/tokenize": _whole(b'{"tokens":[4294967296]}')}, event=_stored()
    ),
    "many-tokens": HostileEngine("tokens", "4,000,000 tokens", {"/tokenize": _made(_many_tokens)}, event=_stored()),
    "redirect-adapter": HostileEngine("adapters", "loads of adapters are elsewhere", {_LOAD: _redirect(_LOAD)}),
    "endless-adapter": HostileEngine("adapters", "an answer to a load without an end", {_LOAD: _endless}),
    "dies": HostileEngine("answers", "dies in mid-stream", {_CHAT: _dies}),
    "resets": HostileEngine("answers", "resets connections", {_CHAT: _resets}),
    "interim": HostileEngine("answers", "10,000 answers with status 103 before the answer", {_CHAT: _interim}),
    "interim-page": HostileEngine("pages", "10,000 answers with status 103 before the metrics", {_METRICS: _interim}),
    "kv-large-token": HostileEngine("kv", "a token id of 2^32", event=_stored(token_ids=[2**32] * 16)),
    "kv-negative-token": HostileEngine("kv", "a token id of -1", event=_stored(token_ids=[-1] * 16)),
    "kv-text-token": HostileEngine("kv", "a token id that is text", event=_stored(token_ids=["a"] * 16)),
    "kv-list-hash": HostileEngine("kv", "a block hash that is a list", event=_stored(block_hashes=[[1, 2]])),
    "kv-map-parent": HostileEngine("kv", "a parent that is a map", event=_stored(parent_block_hash={"a": 1})),
    "kv-infinite-size": HostileEngine("kv", "a block size without an end", event=_stored(block_size=float("inf"))),
    "kv-size-zero": HostileEngine("kv", "a block size of 0", event=_stored(block_size=0)),
    "kv-lora-number": HostileEngine("kv", "an adapter's name that is a number", event=_stored(lora_name=7)),
    "kv-levels": HostileEngine("kv", "200,000 levels", event=_levels),
    "kv-one-frame-replay": HostileEngine("kv", "a replay of one frame", event=_stored(), replay=((b"x",),)),
    "kv-no-end": HostileEngine("kv", "a replay of 32 MB without an end", event=_stored(), replay=_LONG_REPLAY),
    "kv-odd-replay": HostileEngine("kv", "a replay of odd events", event=_stored(), replay=_ODD_REPLAY),
    "kv-media": HostileEngine(
        "kv",
        "40,000 media",
        event=_batch(lambda: [_blocks(one, medium=f"m{one}") for one in range(40_000)]),
        event_s=_RARE_S,
    ),
    "kv-sizes": HostileEngine(
        "kv",
        "blocks of 2,000 sizes",
        event=_batch(lambda: [_blocks(one, size=one + 1) for one in range(2_000)]),
        event_s=_RARE_S,
    ),
}
GROUPS: Final = tuple(dict.fromkeys(one.group for one in HOSTILE.values()))


def hostile_host(name: str) -> str:
    """The address of a hostile engine."""
    return f"127.5.0.{1 + list(HOSTILE).index(name)}"


def adapter_of(name: str) -> str:
    """The adapter in a load request to a hostile engine."""
    return f"{name}-lora"


_GOOD: Final[Mapping[str, Answer]] = {
    _METRICS: _whole(metrics_page(0).encode(), kind="text/plain"),
    _MODELS: _whole(b'{"object":"list","data":[]}'),
    "/tokenize": _whole(b'{"tokens":[1,2,3]}'),
    _LOAD: _whole(b"{}"),
    _CHAT: _whole(
        b'data: {"id":"c","object":"chat.completion.chunk","model":"x","choices":[{"index":0,"delta":{"content":"x"}}]}'
        b"\n\ndata: [DONE]\n\n",
        kind="text/event-stream",
    ),
}


class HostileServer:
    """All hostile engines, and the trap that redirects lead to, on one port."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._trapped = 0

    async def run(self, names: list[str], kv_port: int) -> None:
        """Serve until cancelled. Engine n publishes its events on ``kv_port`` of its own address."""
        context = zmq.asyncio.Context()
        await asyncio.start_server(self._trap, TRAP_HOST, self._port)
        async with asyncio.TaskGroup() as tasks:
            for name in names:
                hostile = HOSTILE[name]
                await asyncio.start_server(self._serving(hostile), hostile_host(name), self._port)
                if hostile.event is not None:
                    at = f"tcp://{hostile_host(name)}"
                    tasks.create_task(_publish(context, f"{at}:{kv_port}", hostile.event, hostile.event_s))
                    if hostile.replay:
                        tasks.create_task(_replay(context, f"{at}:{kv_port + REPLAY_OFFSET}", hostile.replay))
            await asyncio.Event().wait()

    def _serving(
        self, hostile: HostileEngine
    ) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
        answers = {**_GOOD, **hostile.answers}

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with _ended(writer):
                while (path := await _request(reader)) is not None:
                    async for piece in answers.get(path, _GOOD[_CHAT])(self._port):
                        writer.write(piece)
                        await writer.drain()
                    if path in hostile.answers:
                        return

        return serve

    async def _trap(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with _ended(writer):
            path = await _request(reader)
            self._trapped += path not in {None, TRAPPED_PATH}
            async for piece in _whole(str(self._trapped).encode())(self._port):
                writer.write(piece)
            await writer.drain()


@contextlib.contextmanager
def _ended(writer: asyncio.StreamWriter) -> Iterator[None]:
    """Closes a connection at the end, or resets it. The client may disconnect before."""
    with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        try:
            yield
        except _Reset:
            one = writer.get_extra_info("socket")
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        finally:
            writer.close()


async def _request(reader: asyncio.StreamReader) -> str | None:
    """The path of the next request, whose body is read; None at the end."""
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
    except asyncio.IncompleteReadError:
        return None
    for line in head.split("\r\n"):
        if line.startswith("content-length:"):
            await reader.readexactly(min(_LONGEST_BODY, int(line[15:])))
        if line.startswith("transfer-encoding:"):
            await reader.readuntil(b"0\r\n\r\n")
    return head.split(" ", 2)[1]


async def _publish(context: zmq.asyncio.Context, at: str, event: Callable[[], bytes], event_s: float) -> None:
    publisher = context.socket(zmq.PUB)
    publisher.bind(at)
    payload, number = event(), 0
    while True:
        await publisher.send_multipart([b"kv", number.to_bytes(8, "big"), payload])
        number += 1
        await asyncio.sleep(event_s)


async def _replay(context: zmq.asyncio.Context, at: str, messages: tuple[tuple[bytes, ...], ...]) -> None:
    router = context.socket(zmq.ROUTER)
    router.bind(at)
    while True:
        client, *_ = await router.recv_multipart()
        for frames in messages:
            await router.send_multipart([client, *frames])


def main() -> int:
    """Serve until a signal."""
    parser = argparse.ArgumentParser(prog="python -m bench.soak.hostile_engines", description=__doc__)
    parser.add_argument("--port", type=int, required=True, help="on the address of each")
    parser.add_argument("--kv-port", type=int, required=True, help="of KV events there; replays are on the next one")
    parser.add_argument("names", nargs="*", choices=list(HOSTILE), metavar="NAME", help=", ".join(HOSTILE))
    options = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(HostileServer(options.port).run(options.names, options.kv_port))
    return 0


if __name__ == "__main__":
    sys.exit(main())
