# SPDX-License-Identifier: Apache-2.0
"""Broken answers at random to a whole extproc: ``python -m tests.fuzz feeds --minutes 10``

Engines of one model answer extproc's calls with broken pages, lists, tokens and loads, publish broken KV events over
ZeroMQ, and replay them. Redis is a real one behind a proxy that breaks some answers, with stray messages on our channel
and values of wrong types under our keys. Clients ask for that model, and beside it an innocent client asks for
another one five times a second. At the end, no request may be in flight, no process may have ended, and the log of
extproc may hold no exception.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import pytest
import yaml
import zmq
import zmq.asyncio

from bench.stack.loopback_stack import running_stack
from bench.stack.processes import Processes, free_ports
from extproc.refusals import Refusal
from extproc.replication.buses import redis_client
from tests.fuzz.bodies import FLAGS, FuzzReport, FuzzSettings, beside_honest, report_text, seeds_of
from tests.fuzz.loop import growth_of
from tests.fuzz.readers import broken_json, broken_page, http_answer, kv_payload, peer_payload
from tests.fuzz.values import broken
from tests.programs import program

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from bench.stack.loopback_stack import Stack

_ENGINES: Final = 4
_END: Final = (-1).to_bytes(8, "big", signed=True)
_EVENT_S: Final = 0.02
_STRAY_S: Final = 0.1
_READY_S: Final = 60.0
_CHANNEL: Final = "attache"
_RESP: Final = (
    *(b"$-1\r\n", b"*-1\r\n", b"*0\r\n", b"+OK\r\n", b"-ERR no\r\n", b":1\r\n", b"$3\r\n\xff\xfe\xfd\r\n", b"_\r\n"),
    *(
        b"*2\r\n:1\r\n$3\r\nnan\r\n",
        b"*5\r\n:1\r\n$1\r\n1\r\n$3\r\ninf\r\n$1\r\n1\r\n$1\r\n0\r\n",
        b"%1\r\n+a\r\n:1\r\n",
    ),
    *(
        b"-MOVED 1 127.0.0.1:1\r\n",
        b"-NOSCRIPT x\r\n",
        b"-READONLY x\r\n",
        b"-LOADING x\r\n",
        b"*1000000\r\n",
        b"\0",
        b"$9",
    ),
)


class OddEngines:
    """Engines whose every answer may be broken, one address each on one port."""

    def __init__(self, port: int, seed: int) -> None:
        self.hosts = tuple(f"127.5.9.{number + 1}" for number in range(_ENGINES))
        self.port = port
        self._rng = random.Random(seed)

    def spec(self, events: int, replay: int) -> dict[str, object]:
        """Their ModelServer. ``events`` and ``replay``: ports of their publishers."""
        return {
            "model": "m",
            "endpoints": [{"address": f"{host}:{self.port}"} for host in self.hosts],
            "scrapeInterval": "100ms",
            "kvEvents": {"port": events, "replayPort": replay},
            "flowControl": {"timeout": "2s"},
            "adapterLoading": {"slots": 2, "timeout": "2s", "adapters": [{"name": "odd-lora", "source": "/odd"}]},
            "trafficPolicy": {"timeout": "5s"},
        }

    @contextlib.asynccontextmanager
    async def running(self, events: int, replay: int) -> AsyncIterator[None]:
        """Serve and publish."""
        context = zmq.asyncio.Context()
        servers = [await asyncio.start_server(self._serve, host, self.port) for host in self.hosts]
        try:
            async with asyncio.TaskGroup() as tasks:
                own = [tasks.create_task(self._publish(context, f"tcp://{host}:{events}")) for host in self.hosts]
                own += [tasks.create_task(self._replay(context, f"tcp://{host}:{replay}")) for host in self.hosts]
                yield
                for one in own:
                    one.cancel()
        finally:
            for server in servers:
                server.close()
            context.destroy(linger=0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        rng = self._rng
        with _aborted(writer), contextlib.suppress(asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError):
            while rng.random() < 0.95:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
                if "content-length:" in head:
                    await reader.readexactly(int(head.partition("content-length:")[2].split("\r\n")[0]))
                body = self._body(head.split(" ", 2)[1])
                answer = http_answer(body, rng)
                if rng.random() < 0.2:
                    status = rng.choice((b"404 Not Found", b"503 Busy", b"500 x", b"204 x", b"307 x", b"999 x"))
                    answer = answer.replace(b"200 OK", status)
                writer.write(answer)
                await writer.drain()

    def _body(self, path: str) -> bytes:
        match path:
            case "/metrics":
                return broken_page(self._rng)
            case "/v1/models":
                return broken_json(self._rng, of="models")
            case "/tokenize":
                return broken_json(self._rng, of="tokens")
            case _:
                return broken_json(self._rng)

    async def _publish(self, context: zmq.asyncio.Context, at: str) -> None:
        socket, number, rng = context.socket(zmq.PUB), 0, self._rng
        socket.bind(at)
        while True:
            number += rng.choice((1, 1, 1, 1, 2, 50, -3))
            frames = [b"", max(0, number).to_bytes(8, "big"), kv_payload(rng)]
            if rng.random() < 0.1:
                frames = rng.choice(
                    (frames[:1], frames[1:], [*frames, b""], [b"", b"\xff" * 8, frames[2]], [b"", b"", b""])
                )
            await socket.send_multipart(frames)
            await asyncio.sleep(_EVENT_S)

    async def _replay(self, context: zmq.asyncio.Context, at: str) -> None:
        socket, rng = context.socket(zmq.ROUTER), self._rng
        socket.bind(at)
        while True:
            client, *_ = await socket.recv_multipart()
            first = rng.choice((0, 1, 5))
            messages = [[b"", number.to_bytes(8, "big"), kv_payload(rng)] for number in range(first, first + 5)]
            odd = [[b"x"], [b"", b"", b""], [b"", b"\xff" * 8, b"x"], [b"", b"1" * 9, b"x"]]
            for frames in [*messages, *rng.sample(odd, rng.randint(0, 1)), [b"", _END, b""]]:
                await socket.send_multipart([client, *frames])


class OddRedis:
    """A proxy that breaks some of a Redis' answers, and a client that writes what does not belong there."""

    def __init__(self, port: int, upstream: int, seed: int) -> None:
        self.url = f"redis://127.0.0.1:{port}"
        self._port, self._upstream = port, upstream
        self._rng = random.Random(seed)
        self._tasks: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Serve, and write."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", self._port)
        stray = asyncio.create_task(self._write_strays())
        try:
            yield
        finally:
            server.close()
            stray.cancel()
            await asyncio.gather(stray, *self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if (task := asyncio.current_task()) is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        with _aborted(writer):
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._upstream)
            asked = asyncio.create_task(_copy(reader, up_writer))
            try:
                while piece := await up_reader.read(65_536):
                    if (answer := self._broken(piece)) is None:
                        break
                    writer.write(answer)
                    await writer.drain()
            finally:
                asked.cancel()
                up_writer.transport.abort()

    def _broken(self, piece: bytes) -> bytes | None:
        """``piece``, mostly as it is; None: the connection ends here."""
        chance = self._rng.random()
        if chance < 0.03:
            return None
        if chance < 0.1:
            return self._rng.choice(_RESP) if chance < 0.07 else broken(piece, self._rng, _RESP)
        return piece

    async def _write_strays(self) -> None:
        client, failure = redis_client(f"redis://127.0.0.1:{self._upstream}", timeout_s=5.0)
        rng, task = self._rng, asyncio.current_task()
        odd = (b"", b"\xff\xfe", b"hello", b"\x91" * 999)
        try:
            # the client library swallows a cancellation while it connects
            while task is not None and not task.cancelling():
                with contextlib.suppress(failure):
                    await client.publish(_CHANNEL, peer_payload(rng) if rng.random() < 0.7 else rng.choice(odd))
                    await self._spoil_keys(client)
                await asyncio.sleep(_STRAY_S)
        finally:
            await client.aclose()

    async def _spoil_keys(self, client: Any) -> None:  # noqa: ANN401 - the library has no types
        async for key in client.scan_iter(match=f"{_CHANNEL}*", count=100):
            match self._rng.randrange(20):
                case 0:
                    await client.delete(key)
                    await client.set(key, b"\xff\xfe")
                case 1:
                    await client.delete(key)
                    await client.rpush(key, "a", "b")
                case 2:
                    odd = self._rng.choice(("nan", "inf", "-inf", "", "x", b"\xff", "9" * 400))
                    await client.hset(key, self._rng.choice(("level", "at", "claims", "shrink", "epoch")), odd)
                case 3:
                    await client.delete(key)


@contextlib.contextmanager
def _aborted(writer: asyncio.StreamWriter) -> Iterator[None]:
    """Ends a connection that either side may end before, or that is cancelled."""
    with contextlib.suppress(OSError):
        try:
            yield
        finally:
            writer.transport.abort()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """All that is sent, and then the end."""
    with contextlib.suppress(OSError):
        while piece := await reader.read(65_536):
            writer.write(piece)
            await writer.drain()
    writer.transport.abort()


def _documents(spec: object) -> str:
    """The odd model, whose route has a limit in Redis."""

    def document(kind: str, spec: object) -> dict[str, object]:
        return {"apiVersion": "attache.dev/v1alpha1", "kind": kind, "metadata": {"name": "odd"}, "spec": spec}

    limit = {"per": "Tenant", "unit": "second", "requests": 10**6, "totalTokens": 10**9, "scope": "Global"}
    rules = [{"targetModels": [{"modelServerName": "odd"}]}]
    route = {"modelName": "odd", "loraAdapters": ["odd-lora"], "rateLimits": [limit], "rules": rules}
    return yaml.safe_dump_all([document("ModelServer", spec), document("ModelRoute", route)])


def own_failure(status: int, text: str) -> str:
    """In words; empty if the gateway has not failed itself. Engines answer 500, too, and their pages hold any word,
    but none has the type of our error object.
    """
    is_ours = status == 500 and f'"{Refusal.error_type}"' in text
    return f"the gateway itself has failed: {text[:300]}" if is_ours else ""


async def _ask_all(stack: Stack, seeds: Iterator[int], settings: FuzzSettings, report: FuzzReport) -> None:
    """Ask for the odd model. Its engines fail; the gateway may not."""
    clock = asyncio.get_running_loop().time
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=settings.patience_s)) as http:
        for seed in seeds:
            rng = random.Random(seed)
            body = {
                "model": rng.choice(("odd", "odd-lora")),
                "messages": [{"role": "user", "content": f"{seed % 7} " * rng.randint(1, 500)}],
                "max_tokens": 3,
                "stream": rng.random() < 0.5,
            }
            began_at_s = clock()
            status = "the engine's answer is broken"
            try:
                async with http.post(f"{stack.url}/v1/chat/completions", json=body) as answer:
                    status = str(answer.status)
                    text = await answer.text(errors="replace")
                    if fault := own_failure(answer.status, text):
                        report.faults.append(f"seed {seed}: {fault}")
            except TimeoutError:
                report.faults.append(f"seed {seed}: no whole answer within {settings.patience_s:g} s")
            except aiohttp.ClientError:
                report.statuses["broken"] += 1
            report.cases += 1
            report.statuses[status] += 1
            report.longest_s = max(report.longest_s, clock() - began_at_s)


async def fuzz_feeds(directory: Path, redis_server: str, settings: FuzzSettings) -> FuzzReport:
    """Start everything in ``directory``, and ask for a while. ``redis_server``: its binary."""
    port, events, replay, proxy, upstream = free_ports(5)
    engines = OddEngines(port, settings.first_seed)
    redis = OddRedis(proxy, upstream, settings.first_seed)
    (directory / "redis").mkdir(parents=True)
    words = [redis_server, "--port", str(upstream), "--bind", "127.0.0.1", "--save", "", "--dir", str(directory)]
    async with Processes(directory / "redis") as processes, engines.running(events, replay), redis.running():
        await processes.start("redis", words)
        flags = ("--redis", redis.url)
        async with running_stack(directory / "stack", FLAGS, watch=True, extproc_flags=flags) as stack:
            # hidden files are not read
            fresh = stack.config / ".odd.yaml"
            fresh.write_text(_documents(engines.spec(events, replay)))
            fresh.replace(stack.config / "odd.yaml")
            await _until_known(stack)

            async def ask(report: FuzzReport) -> None:
                seeds = seeds_of(settings)
                async with asyncio.TaskGroup() as clients:
                    for _ in range(settings.clients):
                        clients.create_task(_ask_all(stack, seeds, settings, report))

            return await beside_honest(stack, settings, ask)


async def _until_known(stack: Stack) -> None:
    async with asyncio.timeout(_READY_S), aiohttp.ClientSession() as http:
        while True:
            async with http.get(f"{stack.url}/v1/models/odd") as answer:
                if answer.status == 200:
                    return
            await asyncio.sleep(0.1)


async def _run(redis_server: str, settings: FuzzSettings) -> FuzzReport:
    with tempfile.TemporaryDirectory(prefix="attache-fuzz-") as directory:
        return await fuzz_feeds(Path(directory), redis_server, settings)


def main(words: Sequence[str] | None = None) -> int:
    """Exit status: 0, 1 if something was wrong, 2 without redis-server."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz feeds", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="how long (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first answer and request (%(default)s)")
    parser.add_argument("--cases", type=int, metavar="N", help="stop after N requests")
    parser.add_argument("--clients", type=int, default=4, help="at the same time (%(default)s)")
    options = parser.parse_args(words)
    try:
        redis_server = program("redis-server")
    except (pytest.skip.Exception, pytest.fail.Exception) as missing:
        print(f"python -m tests.fuzz feeds: {missing}", file=sys.stderr)
        return 2
    settings = FuzzSettings(
        seconds=60 * options.minutes, cases=options.cases, first_seed=options.seed, clients=options.clients
    )
    report = asyncio.run(_run(redis_server, settings))
    report.faults += [f"{name}: {fault}" for name, sizes in report.memory_mib.items() if (fault := growth_of(sizes))]
    print(report_text(report))
    return 0 if report.is_clean else 1
