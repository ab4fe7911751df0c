# SPDX-License-Identifier: Apache-2.0
"""Which modules a request visits on its way: every call between modules of extproc.

``python -m bench.micro.walk`` runs extproc in this process, sends it requests over gRPC as Envoy does, and watches
the calls under the functions that receive a message and close a stream. It prints the calls between modules of one
request in their order, then counts a request: calls between modules, how often each module is entered from another
one, and all Python calls.

``--root DIR`` looks at another checkout's extproc, ``--entry NAME`` (several times) at other functions than those of
Exchange.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import queue
import signal
import socket
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import grpc
import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

_ENTRIES: Final = ("Exchange.receive", "Exchange.close")
_PICK: Final = "pick"
_METHOD: Final = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
_WARM_UP: Final = 30
_WATCHED: Final = 20
_CONFIGURATION: Final = """
apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {name: llama}
spec: {model: meta-llama/Llama-3.1-8B-Instruct, scrapeInterval: 0s, endpoints: [%s]}
---
apiVersion: attache.dev/v1alpha1
kind: ModelRoute
metadata: {name: llama}
spec: {modelName: llama, rules: [{targetModels: [{modelServerName: llama}]}]}
"""


class Call(msgspec.Struct, frozen=True):
    """A call from one module into another. ``depth``: how many such calls it is inside of."""

    caller: str
    callee: str
    function: str
    depth: int


class Walk(msgspec.Struct):
    """What happened under one call of an entry: its name, calls between modules, and Python calls of any kind."""

    entry: str
    calls: list[Call]
    python_calls: int = 0
    c_calls: int = 0


class Watcher:
    """A profile function for ``sys.setprofile``: keeps the walks of one thread while it is told to."""

    def __init__(self, entries: tuple[str, ...]) -> None:
        self.is_on = False
        self.walks: list[Walk] = []
        self._entries = entries
        self._walk: Walk | None = None
        self._root: FrameType | None = None
        self._depth = 0

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """One event of the interpreter."""
        if self._walk is None:
            if self.is_on and event == "call" and _is_ours(frame) and frame.f_code.co_qualname in self._entries:
                self._walk, self._root = Walk(frame.f_code.co_qualname, []), frame
        elif event == "c_call":
            self._walk.c_calls += 1
        elif event == "call":
            self._walk.python_calls += 1
            if _crosses(frame):
                self._walk.calls.append(
                    Call(_module(frame.f_back), _module(frame), frame.f_code.co_qualname, self._depth)
                )
                self._depth += 1
        elif event == "return":
            if frame is self._root:
                self.walks.append(self._walk)
                self._walk, self._root, self._depth = None, None, 0
            elif _crosses(frame):
                self._depth -= 1


def _module(frame: FrameType | None) -> str:
    return "" if frame is None else str(frame.f_globals.get("__name__", "?"))


def _is_ours(frame: FrameType | None) -> bool:
    return _module(frame).startswith("extproc.")


def _crosses(frame: FrameType) -> bool:
    """Whether a call goes from one module to another and extproc has a part in it."""
    caller, callee = _module(frame.f_back), _module(frame)
    return caller != callee and (_is_ours(frame) or _is_ours(frame.f_back))


class Client:
    """Sends requests over gRPC as our bundle's Envoy does: headers, answer, body, answer, end."""

    def __init__(self, port: int, prompt_bytes: int) -> None:
        self._messages: Any = importlib.import_module("extproc.streams.messages")
        self._port = port
        self._prompt_bytes = prompt_bytes

    def run(self, watcher: Watcher) -> None:
        """Warm up, be watched, then end this process's server by a signal."""
        try:
            with grpc.insecure_channel(f"127.0.0.1:{self._port}") as channel:
                grpc.channel_ready_future(channel).result(timeout=60)
                for number in range(_WARM_UP + _WATCHED):
                    watcher.is_on = number >= _WARM_UP
                    self._ask(channel, number)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    def _ask(self, channel: grpc.Channel, number: int) -> None:
        outgoing: queue.SimpleQueue[object] = queue.SimpleQueue()
        call = channel.stream_stream(
            _METHOD,
            request_serializer=self._messages.ProcessingRequest.SerializeToString,
            response_deserializer=self._messages.ProcessingResponse.FromString,
        )(_until_none(outgoing), metadata=(("x-attache-bundle", "1"),))
        for message, kind in ((self._head(), "request_headers"), (self._body(number), "request_body")):
            outgoing.put(message)
            answer: Any = next(call)
            assert answer.WhichOneof("response") == kind, answer
        outgoing.put(None)
        assert not list(call)

    def _head(self) -> object:
        message = self._messages.ProcessingRequest()
        pairs = {
            ":method": "POST",
            ":path": "/v1/chat/completions",
            ":authority": "gateway",
            "content-type": "application/json",
            "x-request-id": "5d2c1e0a",
        }
        for name, value in pairs.items():
            message.request_headers.headers.headers.add(key=name, raw_value=value.encode())
        return message

    def _body(self, number: int) -> object:
        text = f"question {number % 4} " * (self._prompt_bytes // 11)
        message = self._messages.ProcessingRequest()
        body = {"model": "llama", "messages": [{"role": "user", "content": text}]}
        message.request_body.body = json.dumps(body).encode()
        message.request_body.end_of_stream = True
        return message


def _until_none(outgoing: queue.SimpleQueue[object]) -> Iterator[object]:
    while (message := outgoing.get()) is not None:
        yield message


def watch(root: Path, entries: tuple[str, ...], *, endpoints: int, prompt_bytes: int) -> list[Walk]:
    """Run the extproc of ``root`` until the client has asked all; the walks of the last requests."""
    sys.path.insert(0, str(root))
    extproc = importlib.import_module("extproc.__main__")
    watcher, port = Watcher(entries), _free_port()
    with tempfile.TemporaryDirectory(prefix="attache-walk-") as directory:
        addresses = ", ".join(f'{{address: "10.0.0.{number + 1}:8000"}}' for number in range(endpoints))
        (Path(directory) / "attache.yaml").write_text(_CONFIGURATION % addresses)
        client = threading.Thread(target=Client(port, prompt_bytes).run, args=(watcher,))
        client.start()
        sys.setprofile(watcher)
        try:
            listen = ["--listen", f"127.0.0.1:{port}", "--metrics", f"127.0.0.1:{_free_port()}"]
            extproc.main(["--config", directory, *listen])
        finally:
            sys.setprofile(None)
            client.join()
    return watcher.walks


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def describe(walks: list[Walk]) -> Iterator[str]:
    """The last request's calls in their order, then counts for a request."""
    parts = walks[-(len(walks) // _WATCHED) :]
    for walk in parts:
        yield f"{walk.entry}: {_numbers(walk)}"
        for call in walk.calls:
            yield f"  {'  ' * call.depth}{_short(call.caller)} -> {_short(call.callee)}.{call.function}"
    inside = [call for walk in walks for call in walk.calls if call.callee.startswith("extproc.")]
    inside = [call for call in inside if call.caller.startswith("extproc.")]
    yield ""
    for walk in parts:
        yield f"{walk.entry}: {_numbers(walk)}"
    yield f"a request, mean of {_WATCHED}:"
    entered = len({call.callee for call in inside})
    python_calls, c_calls = sum(walk.python_calls for walk in walks), sum(walk.c_calls for walk in walks)
    yield f"  {len(inside) / _WATCHED:.1f} calls between modules of extproc, {entered} modules entered"
    yield f"  {python_calls / _WATCHED:.1f} Python calls, {c_calls / _WATCHED:.1f} C calls"
    yield from _counted("entered from another module of extproc", Counter(_short(call.callee) for call in inside))
    pairs = Counter(f"{_short(call.caller)} -> {_short(call.callee)}" for call in inside)
    yield from _counted("calls between modules of extproc", pairs)
    outside = Counter(call.callee for walk in walks for call in walk.calls if not call.callee.startswith("extproc."))
    yield from _counted("calls from extproc into Python code of others", outside)


def _numbers(walk: Walk) -> str:
    """How many calls; in the walk that picks, also how many came before that."""
    total = f"{len(walk.calls)} calls between modules, {walk.python_calls} Python calls, {walk.c_calls} C calls"
    before = list(itertools.takewhile(lambda call: call.function.rpartition(".")[2] != _PICK, walk.calls))
    if len(before) == len(walk.calls):
        return total
    into = len({call.callee for call in before})
    return f"{total}; before the pick {len(before)} calls between modules, into {into} modules"


def _counted(title: str, counts: Counter[str]) -> Iterator[str]:
    yield f"{title}:"
    for name, count in counts.most_common():
        yield f"  {count / _WATCHED:5.1f}  {name}"


def _short(module: str) -> str:
    return module.removeprefix("extproc.")


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0, or 1 if no entry was called."""
    parser = argparse.ArgumentParser(
        prog="bench.micro.walk", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, default=Path.cwd(), help="the checkout; default: this directory")
    parser.add_argument("--entry", action="append", metavar="NAME", help=f"default: {' and '.join(_ENTRIES)}")
    parser.add_argument("--endpoints", type=int, default=8)
    parser.add_argument("--prompt-bytes", type=int, default=2000)
    options = parser.parse_args(arguments)
    entries = tuple(options.entry or _ENTRIES)
    walks = watch(options.root, entries, endpoints=options.endpoints, prompt_bytes=options.prompt_bytes)
    if not walks:
        print(f"nothing called {' or '.join(entries)}; name what receives a message with --entry", file=sys.stderr)
        return 1
    for line in describe(walks):
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
