# SPDX-License-Identifier: Apache-2.0
"""Broken requests at random through Envoy, extproc and engines: python -m tests.fuzz bodies --minutes 10

Valid requests of every endpoint are broken in bytes, in JSON's structure, in headers and on the way, and sent by many
clients at once. Beside them an innocent client asks five times a second. At the end, no request may be in flight, no
process may have ended, and the log of extproc may hold no exception.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import itertools
import json
import random
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import aiohttp
import h2.config
import h2.connection
import h2.events
import msgspec

from bench.stack.loopback_stack import ALIAS, EngineFlags, running_stack
from bench.stack.processes import rss_bytes
from tests.fuzz.mutants import FuzzCase, mutant

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence

    from bench.stack.loopback_stack import Stack

_READ_BYTES: Final = 65_536
_ASIDE: Final = frozenset({"connection", "expect"})
# Short answers: 4,096 tokens is all that an engine holds.
FLAGS: Final = EngineFlags(count=3, speed=100.0, kv_blocks=256, stream_headers="first-token", adapters=("sql",))
# Limits and queues that are never reached: each request passes through them.
ROUTE: Final = {"rateLimits": [{"per": "Tenant", "requests": 10**12, "totalTokens": 10**15}]}
SERVER: Final[Mapping[str, object]] = {"flowControl": {}}
_INNOCENT_PAUSE_S: Final = 0.2
_WATCHED: Final = ("extproc", "envoy")
_MIB: Final = 1024 * 1024
# Lines of errors, and the last ones of tracebacks.
_EXCEPTIONS: Final = re.compile(r"^(?:\S+ \S+ ERROR .*|[\w.]+(?:Error|Exception)\b.*)$", re.MULTILINE)
# Requests that clients left end a little later.
_QUIET_S: Final = 15.0


class FuzzResponse(msgspec.Struct):
    """``status``: 0 if there was none. ``is_whole``: the answer was ended as its protocol ends one."""

    status: int = 0
    content_type: str = ""
    body: bytes = b""
    is_whole: bool = False


async def send(host: str, port: int, case: FuzzCase) -> FuzzResponse | None:
    """The answer; None if the client of this case leaves before it has one."""
    async with _connection(host, port) as (reader, writer):
        if case.transport == "http2":
            return await _Http2(reader, writer).exchange(f"{host}:{port}", case)
        return await _http1(reader, writer, f"{host}:{port}", case)


@contextlib.asynccontextmanager
async def _connection(host: str, port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def _http1(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, authority: str, case: FuzzCase
) -> FuzzResponse | None:
    lines = [f"{case.method} {case.path} HTTP/1.1", f"host: {authority}", "connection: close"]
    lines += [f"{name}: {value}" for name, value in case.headers]
    if case.transport == "chunked":
        lines.append("transfer-encoding: chunked")
    elif case.body or case.method == "POST":
        lines.append(f"content-length: {len(case.body)}")
    # the gateway may answer, and close, before it has read all
    with contextlib.suppress(ConnectionError):
        writer.write(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"))
        for piece in _pieces(case):
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece) if case.transport == "chunked" else piece)
            await writer.drain()
            if case.leaves == "in the body":
                return None
        if case.transport == "chunked":
            writer.write(b"0\r\n\r\n")
        await writer.drain()
    if case.leaves == "after the body":
        return None
    received = bytearray()
    with contextlib.suppress(ConnectionError):
        while piece := await reader.read(_READ_BYTES):
            received += piece
            if case.leaves == "in the answer":
                return None
    return _parsed(bytes(received), has_body=case.method != "HEAD")


def _pieces(case: FuzzCase) -> Iterator[bytes]:
    start = 0
    for length in case.pieces:
        yield case.body[start : start + length]
        start += length


def _parsed(received: bytes, *, has_body: bool) -> FuzzResponse:
    head, _, body = received.partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    words = lines[0].split(" ")
    if len(words) < 2 or not words[1].isdigit():
        return FuzzResponse(body=received)
    if words[1] == "100":
        return _parsed(body, has_body=has_body)
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
    answer = FuzzResponse(int(words[1]), headers.get("content-type", ""), body, is_whole=True)
    if headers.get("transfer-encoding") == "chunked" and has_body:
        answer.body, answer.is_whole = _joined(body)
    elif "content-length" in headers and has_body:
        answer.is_whole = len(body) == int(headers["content-length"])
    return answer


def _joined(chunked: bytes) -> tuple[bytes, bool]:
    """The content of a chunked body, and whether its last chunk came."""
    parts: list[bytes] = []
    while True:
        size, found, rest = chunked.partition(b"\r\n")
        if not found:
            return b"".join(parts), False
        length = int(size.partition(b";")[0], 16)
        if not length:
            return b"".join(parts), True
        parts.append(rest[:length])
        chunked = rest[length + 2 :]


def _as_bytes(headers: Iterable[tuple[str, str]]) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]


class _Http2:
    """One connection with one request."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        # what is broken is to be sent as it is
        settings = h2.config.H2Configuration(
            client_side=True,
            header_encoding=None,
            validate_outbound_headers=False,
            normalize_outbound_headers=False,
        )
        self._connection = h2.connection.H2Connection(settings)

    async def exchange(self, authority: str, case: FuzzCase) -> FuzzResponse | None:
        http = self._connection
        http.initiate_connection()
        pseudo = [(":method", case.method), (":path", case.path), (":scheme", "http"), (":authority", authority)]
        http.send_headers(1, _as_bytes([*pseudo, *(one for one in case.headers if one[0] not in _ASIDE)]))
        for piece in _pieces(case):
            for start in range(0, len(piece), http.max_outbound_frame_size):
                http.send_data(1, piece[start : start + http.max_outbound_frame_size])
            await self._flush()
            if case.leaves == "in the body":
                return None
        if case.trailers:
            http.send_headers(1, _as_bytes(case.trailers), end_stream=True)
        else:
            http.end_stream(1)
        await self._flush()
        return None if case.leaves == "after the body" else await self._answer(case)

    async def _answer(self, case: FuzzCase) -> FuzzResponse | None:
        answer, body = FuzzResponse(), bytearray()
        with contextlib.suppress(ConnectionError):
            while received := await self._reader.read(_READ_BYTES):
                if case.leaves == "in the answer":
                    return None
                for event in self._connection.receive_data(received):
                    match event:
                        case h2.events.ResponseReceived():
                            headers = dict(event.headers)
                            answer.status = int(headers[b":status"])
                            answer.content_type = headers.get(b"content-type", b"").decode("latin-1")
                        case h2.events.DataReceived():
                            body += event.data
                            self._connection.acknowledge_received_data(event.flow_controlled_length, 1)
                        case h2.events.StreamEnded():
                            answer.is_whole = True
                        case h2.events.StreamReset() if not answer.is_whole:
                            answer.body = bytes(body)
                            return answer
                if answer.is_whole:
                    break
                await self._flush()
        answer.body = bytes(body)
        return answer

    async def _flush(self) -> None:
        with contextlib.suppress(ConnectionError):
            self._writer.write(self._connection.data_to_send())
            await self._writer.drain()


def fault_of(case: FuzzCase, answer: FuzzResponse) -> str:
    """In words; empty if the answer is one that a client of OpenAI's API can read, and the request's own doing."""
    if not answer.status:
        return "no answer"
    if answer.status >= 500:
        return f"{answer.status}: the gateway or an engine has failed"
    if not answer.is_whole:
        return f"{answer.status}: the answer is cut"
    if case.method == "HEAD":
        return ""
    if answer.status >= 400:
        return _fault_of_refusal(answer)
    return "" if answer.status == 200 else f"{answer.status}: neither an answer nor a refusal"


def _fault_of_refusal(answer: FuzzResponse) -> str:
    if not answer.content_type.startswith("application/json"):
        return f"{answer.status}: the content type of the refusal is {answer.content_type!r}"
    try:
        error = json.loads(answer.body)["error"]
        is_readable = bool(error["message"]) and isinstance(error["message"], str) and isinstance(error["type"], str)
    except (ValueError, KeyError, TypeError):
        is_readable = False
    return "" if is_readable else f"{answer.status}: the refusal is no error object"


class FuzzSettings(msgspec.Struct, frozen=True):
    """``seconds``: how long. ``cases``: how many at most. ``patience_s``: no answer takes longer, from the first byte
    sent.
    """

    seconds: float = 60.0
    cases: int | None = None
    first_seed: int = 0
    clients: int = 16
    patience_s: float = 20.0


class Offender(msgspec.Struct, frozen=True):
    """A case with what was wrong with its answer; the body is in base64."""

    seed: int
    why: str
    method: str
    path: str
    headers: tuple[tuple[str, str], ...]
    transport: str
    body: str
    answer: str = ""


class FuzzReport(msgspec.Struct):
    """What was seen. ``statuses``: answers by status; ``left``: by where their clients hung up. ``memory_mib``: of each
    process, at the beginning, every minute and at the end.
    """

    cases: int = 0
    seconds: float = 0.0
    statuses: Counter[str] = msgspec.field(default_factory=Counter)
    longest_s: float = 0.0
    innocent: int = 0
    innocent_longest_s: float = 0.0
    offenders: list[Offender] = msgspec.field(default_factory=list)
    faults: list[str] = msgspec.field(default_factory=list)
    memory_mib: dict[str, list[int]] = msgspec.field(default_factory=dict)

    @property
    def is_clean(self) -> bool:
        """Whether nothing was wrong."""
        return not self.offenders and not self.faults


async def fuzz(stack: Stack, settings: FuzzSettings) -> FuzzReport:
    """Send cases for a while, and check what is left behind."""

    async def send_all(report: FuzzReport) -> None:
        seeds = seeds_of(settings)
        async with asyncio.TaskGroup() as clients:
            for _ in range(settings.clients):
                clients.create_task(_send_all(stack, seeds, settings, report))

    return await beside_honest(stack, settings, send_all)


async def beside_honest(
    stack: Stack, settings: FuzzSettings, work: Callable[[FuzzReport], Awaitable[None]]
) -> FuzzReport:
    """Run ``work`` while an innocent client asks, note memory, and check what is left behind."""
    report = FuzzReport()
    clock = asyncio.get_running_loop().time
    began_at_s = clock()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=settings.patience_s)) as http:
        _note_memory(stack, report)
        async with asyncio.TaskGroup() as beside:
            others = [
                beside.create_task(_ask_innocently(stack, http, report)),
                beside.create_task(_note_memory_every_minute(stack, report)),
            ]
            await work(report)
            for other in others:
                other.cancel()
        report.seconds = clock() - began_at_s
        await _check_leftovers(stack, http, report)
        _note_memory(stack, report)
    return report


def seeds_of(settings: FuzzSettings) -> Iterator[int]:
    """One for each case, until the time is over."""
    clock = asyncio.get_running_loop().time
    ends_at_s = clock() + settings.seconds
    for number in itertools.count():
        if clock() >= ends_at_s or number == settings.cases:
            return
        yield settings.first_seed + number


async def _send_all(stack: Stack, seeds: Iterator[int], settings: FuzzSettings, report: FuzzReport) -> None:
    clock, address = asyncio.get_running_loop().time, urlsplit(stack.url)
    for seed in seeds:
        case, answer, why = mutant(seed, random.Random(seed)), None, ""
        began_at_s = clock()
        try:
            async with asyncio.timeout(settings.patience_s):
                answer = await send(str(address.hostname), address.port or 0, case)
        except TimeoutError:
            why = f"no whole answer within {settings.patience_s:g} s"
        except OSError as error:
            why = f"no connection: {error}"
        report.cases += 1
        report.longest_s = max(report.longest_s, clock() - began_at_s)
        if answer is not None:
            report.statuses[str(answer.status)] += 1
            why = fault_of(case, answer)
        elif not why:
            report.statuses[f"left {case.leaves}"] += 1
        if why:
            report.offenders.append(_offender(case, why, b"" if answer is None else answer.body))


def _offender(case: FuzzCase, why: str, answer: bytes) -> Offender:
    return Offender(
        seed=case.seed,
        why=why,
        method=case.method,
        path=case.path,
        headers=case.headers,
        transport=case.transport,
        body=base64.b64encode(case.body).decode(),
        answer=answer[:2000].decode("latin-1"),
    )


async def _ask_innocently(stack: Stack, http: aiohttp.ClientSession, report: FuzzReport) -> None:
    clock = asyncio.get_running_loop().time
    for number in itertools.count():
        messages = [{"role": "user", "content": f"innocent {number}"}]
        body = {"model": ALIAS, "messages": messages, "max_tokens": 2}
        began_at_s = clock()
        try:
            async with http.post(f"{stack.url}/v1/chat/completions", json=body) as answer:
                text = await answer.text()
                if answer.status != 200:
                    report.faults.append(f"an innocent client got {answer.status}: {text[:300]}")
        except (aiohttp.ClientError, TimeoutError) as error:
            report.faults.append(f"an innocent client was not served: {error!r}")
        report.innocent += 1
        report.innocent_longest_s = max(report.innocent_longest_s, clock() - began_at_s)
        await asyncio.sleep(_INNOCENT_PAUSE_S)


async def _note_memory_every_minute(stack: Stack, report: FuzzReport) -> None:
    while True:
        await asyncio.sleep(60)
        _note_memory(stack, report)


def _note_memory(stack: Stack, report: FuzzReport) -> None:
    for name in _WATCHED:
        if stack.processes.is_running(name):
            report.memory_mib.setdefault(name, []).append(rss_bytes(stack.pids[name]) // _MIB)


async def _check_leftovers(stack: Stack, http: aiohttp.ClientSession, report: FuzzReport) -> None:
    """Nothing is in flight, no process has ended, and extproc's log holds no exception."""
    report.faults += [f"{name} has ended" for name in _WATCHED if not stack.processes.is_running(name)]
    clock = asyncio.get_running_loop().time
    deadline_s = clock() + _QUIET_S
    left = await _in_flight(stack, http)
    # extproc reports on request only
    while left and clock() < deadline_s:
        await asyncio.sleep(0.2)
        left = await _in_flight(stack, http)
    if left:
        report.faults.append(f"{left:g} requests or streams are in flight after all clients have left")
    log = (stack.directory / "extproc.log").read_text(errors="replace")
    report.faults += [f"extproc.log: {line}" for line in _EXCEPTIONS.findall(log)]


async def _in_flight(stack: Stack, http: aiohttp.ClientSession) -> float:
    async with http.get(f"{stack.metrics}/metrics") as answer:
        page = await answer.text()
    counted = re.findall(r"^attache_(?:in_flight\{.*\}|open_streams) (\S+)$", page, re.MULTILINE)
    return sum(float(number) for number in counted)


def report_text(report: FuzzReport) -> str:
    """The report as lines."""
    lines = [
        f"{report.cases} requests in {report.seconds:.0f} s, the longest {report.longest_s:.2f} s",
        "answers: " + ", ".join(f"{status}: {count}" for status, count in sorted(report.statuses.items())),
        f"an innocent client beside them: {report.innocent} requests, the longest {report.innocent_longest_s:.2f} s",
    ]
    for name, sizes in report.memory_mib.items():
        lines.append(f"resident memory of {name}, by minute, in MiB: {', '.join(map(str, sizes))}")
    for why, count in Counter(one.why for one in report.offenders).most_common(20):
        lines.append(f"WRONG, {count} times: {why}")
    lines += [f"WRONG: {fault}" for fault in report.faults[:20]]
    return "\n".join(lines)


async def _run(settings: FuzzSettings) -> FuzzReport:
    with tempfile.TemporaryDirectory(prefix="attache-fuzz-") as directory:
        async with running_stack(Path(directory) / "stack", FLAGS, route=ROUTE, more=SERVER) as stack:
            return await fuzz(stack, settings)


def main(words: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 1 if something was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz bodies", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="how long (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first request; the next has the next (%(default)s)")
    parser.add_argument("--cases", type=int, metavar="N", help="stop after N requests: with --seed, to see one again")
    parser.add_argument("--clients", type=int, default=16, help="at the same time (%(default)s)")
    default = Path("fuzz-offenders.jsonl")
    parser.add_argument("--offenders", type=Path, default=default, metavar="FILE", help="written if there are any")
    options = parser.parse_args(words)
    report = asyncio.run(
        _run(
            FuzzSettings(
                seconds=60 * options.minutes, cases=options.cases, first_seed=options.seed, clients=options.clients
            )
        )
    )
    print(report_text(report))
    if report.offenders:
        options.offenders.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in report.offenders))
        print(f"requests with wrong answers are in {options.offenders}")
    return 0 if report.is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
