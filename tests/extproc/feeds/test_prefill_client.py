# SPDX-License-Identifier: Apache-2.0
"""Prefill legs against an engine that is slow, refuses, talks nonsense, or goes away."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from typing import TYPE_CHECKING, Final

import pytest

from extproc.api.config_loader import load_snapshot
from extproc.core.core import Core
from extproc.core.effects import AbortDecode, Prefill
from extproc.feeds import prefill_client
from extproc.feeds.engine_http import EngineCredentials
from extproc.feeds.prefill_client import PrefillClient
from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from extproc.core.request_record import PrefillResult

OK: Final = b'{"kv_transfer_params": {"a": 1}}'


def answer(body: bytes = OK, status: str = "200 OK", more: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n{more}\r\n".encode() + body


class Engine:
    """Answers each request with the next of ``answers``, the last one for ever. None: it hangs; b"": it hangs up."""

    def __init__(self, *answers: bytes | None) -> None:
        self.answers = list(answers)
        self.requests: list[bytes] = []
        self.connections = self.gone = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(
                    (
                        int(line.split(b":")[1])
                        for line in head.lower().split(b"\r\n")
                        if line.startswith(b"content-length")
                    ),
                    0,
                )
                self.requests.append(head + await reader.readexactly(length))
                found = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
                if found is None:
                    await reader.read()
                    break
                if not found:
                    break
                writer.write(found)
                await writer.drain()
        self.gone += 1
        writer.close()


class Scene:
    def __init__(self, port: int, **more: object) -> None:
        self.address = f"127.0.0.1:{port}"
        server = {"apiVersion": "attache.dev/v1alpha1", "kind": "ModelServer", "metadata": {"name": "llama"}}
        document = {**server, "spec": {"model": "m", "endpoints": [{"address": self.address}], **more}}
        snapshot = load_snapshot({"a.yaml": json.dumps(document).encode()})
        core = Core(snapshot, rng=random.Random(0), ticket_prefix="t")
        self.results: list[PrefillResult] = []
        self.clock = asyncio.get_running_loop().time
        self.prefills = PrefillClient(
            core, EngineCredentials({"KEY": "s3cret"}, self.clock), clock=self.clock, deliver=self.results.append
        )

    def start(
        self,
        ticket: str = "t-1",
        *,
        timeout_s: float = 30.0,
        body: bytes = b'{"max_tokens": 1}',
        query_port: int = 0,
        is_beside: bool = False,
        **more: str,
    ) -> None:
        """``more``: headers."""
        headers = {"x-request-id": "r-1", "authorization": "Bearer of-the-client", **more}
        path = "/v1/completions"
        ask = Prefill(ticket, "default/llama", self.address, path, body, headers, timeout_s, query_port, is_beside)
        self.prefills.start_prefill(ask)

    def abort(self, *bodies: bytes) -> None:
        self.prefills.abort_decode(AbortDecode("t-1", "default/llama", self.address, bodies))

    async def result(self, count: int = 1) -> PrefillResult:
        await eventually(lambda: _is(len(self.results) >= count))
        return self.results[-1]


async def _is(value: bool) -> bool:
    return value


@contextlib.asynccontextmanager
async def scene_of(engine: Engine, **more: object) -> AsyncIterator[Scene]:
    """``more``: of the ModelServer's spec."""
    server = await asyncio.start_server(engine.serve, "127.0.0.1", 0, limit=1 << 22)
    scene = Scene(server.sockets[0].getsockname()[1], **more)
    try:
        yield scene
    finally:
        await scene.prefills.close()
        server.close()


async def test_an_answer_comes_back_as_it_is_and_the_connection_is_kept() -> None:
    engine = Engine(answer(), answer(b'{"error": 1}', "400 Bad Request"))
    async with scene_of(engine) as scene:
        scene.start()
        found = await scene.result()
        assert (found.status, found.body, found.failure) == (200, OK, "")
        assert 0 < found.answered_at_s <= scene.clock()
        scene.start("t-2")
        found = await scene.result(2)
        assert (found.ticket, found.status, found.body) == ("t-2", 400, b'{"error": 1}')
        assert engine.connections == 1
        assert b"POST /v1/completions HTTP/1.1\r\n" in engine.requests[0]
        assert b"x-request-id: r-1\r\n" in engine.requests[0]
        assert engine.requests[0].endswith(b'\r\n\r\n{"max_tokens": 1}')


async def test_the_engines_key_stands_in_for_the_clients() -> None:
    for more, key in (({}, "of-the-client"), ({"connection": {"apiKeyEnv": "KEY"}}, "s3cret")):
        engine = Engine(answer())
        async with scene_of(engine, **more) as scene:
            scene.start()
            await scene.result()
            assert engine.requests[0].lower().count(b"authorization:") == 1
            assert f"authorization: bearer {key}\r\n".encode() in engine.requests[0].lower()


async def test_a_large_prompt_arrives_whole() -> None:
    engine, body = Engine(answer()), b'{"prompt": "%b"}' % (b"x" * 3_000_000)
    async with scene_of(engine) as scene:
        scene.start(body=body)
        assert (await scene.result()).status == 200
        assert engine.requests[0].endswith(body)


async def test_a_kept_connection_that_the_engine_closes_is_no_failure() -> None:
    engine = Engine(answer(), b"", answer())
    async with scene_of(engine) as scene:
        scene.start()
        await scene.result()
        scene.start("t-2")
        assert (await scene.result(2)).status == 200
        assert engine.connections == 2


@pytest.mark.parametrize(
    ("given", "failure"),
    [
        (b"", "unreachable"),
        (b"SSH-2.0-OpenSSH\r\n", "unreadable"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{", "timeout"),
        (answer(b"", "307 Temporary Redirect", "location: http://127.0.0.1:1/\r\n"), "unreadable"),
        (answer(b"x" * (prefill_client.MOST_ANSWER_BYTES + 1)), "unreadable"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + b"10000\r\n" + b"x" * 65536 + b"\r\n", "timeout"),
        (None, "timeout"),
    ],
)
async def test_what_cannot_be_used_is_a_failure(given: bytes | None, failure: str) -> None:
    async with scene_of(Engine(given)) as scene:
        scene.start(timeout_s=1.0)
        found = await scene.result()
        assert found.failure == failure
        assert found.detail
        assert not found.body


async def test_nobody_at_the_address() -> None:
    async with scene_of(Engine(None)) as scene:
        scene.address = "127.0.0.1:1"
        scene.start()
        found = await scene.result()
        assert found.failure == "unreachable"
        assert found.detail.endswith(": cannot connect: Connection refused")


async def test_a_client_that_leaves_ends_the_call_and_there_is_no_result() -> None:
    engine = Engine(None)
    async with scene_of(engine) as scene:
        scene.start()
        await eventually(lambda: _is(bool(engine.requests)))
        scene.prefills.cancel_prefill("t-1")
        await eventually(lambda: _is(engine.gone == 1))
        assert not scene.results
        # one that is unknown, or is over
        scene.prefills.cancel_prefill("t-1")


async def test_one_beside_its_request_has_a_result_in_any_case() -> None:
    for after_s in (0.0, 0.01):
        engine = Engine(None)
        async with scene_of(engine) as scene:
            scene.start(is_beside=True)
            await eventually(lambda engine=engine: _is(bool(engine.requests)))  # type: ignore[misc]
            scene.prefills.cancel_prefill("t-1", after_s=after_s)
            assert (await scene.result()).failure == "left"
            await eventually(lambda engine=engine: _is(engine.gone == 1))  # type: ignore[misc]
            assert not scene.prefills._of_engines
            assert scene.prefills._held_bytes == 0
    # one that ends in time
    async with scene_of(Engine(answer())) as scene:
        scene.start(is_beside=True)
        scene.prefills.cancel_prefill("t-1", after_s=30.0)
        assert (await scene.result()).status == 200
    # at the end of the process nobody asks
    async with scene_of(Engine(None)) as scene:
        scene.start(is_beside=True)
    assert not scene.results


async def test_a_decode_engine_is_asked_to_end_a_request_until_that_is_over() -> None:
    engine = Engine(answer(b"", "500 Internal Server Error"), b"", answer(b""))
    async with scene_of(engine, connection={"apiKeyEnv": "KEY"}) as scene:
        scene.abort(b'{"rid": "a"}', b'{"rid": "a_0"}')
        await eventually(lambda: _is(len(engine.requests) >= 6))
        scene.prefills.cancel_prefill("t-1")
        await eventually(lambda: _is(not scene.prefills._tasks))
        assert b"POST /abort_request HTTP/1.1\r\n" in engine.requests[0]
        assert b"authorization: bearer s3cret\r\n" in engine.requests[0].lower()
        assert [one.rpartition(b"\r\n\r\n")[2] for one in engine.requests[:2]] == [b'{"rid": "a"}', b'{"rid": "a_0"}']
        assert not scene.results


async def test_and_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_client, "_MOST_ABORTS", 2)
    engine = Engine(answer(b""))
    async with scene_of(engine) as scene:
        scene.abort(b"{}")
        await eventually(lambda: _is(not scene.prefills._tasks))
        assert len(engine.requests) == 2
        # nor if its ModelServer has gone
        scene.prefills._core.pools.clear()
        scene.abort(b"{}")
        await eventually(lambda: _is(not scene.prefills._tasks))
        assert len(engine.requests) == 2


async def test_bounds_hold_for_each_engine_for_all_and_for_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(None)
    for name, value, words in (
        ("_MOST_OF_ENGINE", 1, "at this engine"),
        ("_MOST", 1, "prefills run"),
        ("_MOST_HELD_BYTES", 20, "bytes"),
    ):
        async with scene_of(engine) as scene:
            with monkeypatch.context() as patch:
                patch.setattr(prefill_client, name, value)
                scene.start()
                scene.start("t-2")
                found = await scene.result()
            assert (found.ticket, found.failure) == ("t-2", "not_asked")
            assert words in found.detail
            # what ends makes room
            scene.prefills.cancel_prefill("t-1")
            await eventually(lambda scene=scene: _is(not scene.prefills._tasks))  # type: ignore[misc]
            assert scene.prefills._held_bytes == 0
            assert not scene.prefills._of_engines


async def test_a_result_may_begin_the_next_try_which_can_be_cancelled() -> None:
    async with scene_of(Engine(answer(b"", "500 Internal Server Error"), None)) as scene:

        def deliver(result: PrefillResult) -> None:
            scene.results.append(result)
            scene.start(result.ticket)

        scene.prefills._deliver = deliver
        scene.start()
        await scene.result()
        await eventually(lambda: _is(scene.prefills._of_engines == {scene.address: 1}))
        scene.prefills.cancel_prefill("t-1")
        await eventually(lambda: _is(not scene.prefills._tasks))
        assert not scene.prefills._of_engines
        assert len(scene.results) == 1


async def test_a_server_that_left_the_configuration_is_not_asked() -> None:
    async with scene_of(Engine(answer())) as scene:
        scene.prefills._core.pools.clear()
        scene.start()
        assert (await scene.result()).failure == "not_asked"


async def test_our_own_fault_is_a_result_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async with scene_of(Engine(answer())) as scene:
        monkeypatch.setattr(scene.prefills._http, "post", None)
        scene.start()
        found = await scene.result()
        assert found.failure == "not_asked"
        assert "our own code fails" in found.detail


@pytest.mark.parametrize(
    ("more", "headers", "words"),
    [
        ({}, {"traceparent": "a\x01b"}, "control character"),
        ({"connection": {"apiKeyEnv": "OTHER"}}, {}, "OTHER is not set"),
        ({"connection": {"apiKeyFile": "nowhere/key"}}, {}, "nowhere/key"),
        ({"connection": {"tls": {"caFile": "nowhere/ca.pem", "serverName": "a"}}}, {}, "nowhere/ca.pem"),
    ],
)
async def test_what_cannot_be_sent_is_no_fault_of_the_engine(
    more: dict[str, object], headers: dict[str, str], words: str
) -> None:
    engine = Engine(answer())
    async with scene_of(engine, **more) as scene:
        scene.start(**headers)
        found = await scene.result()
        assert found.failure == "not_asked"
        assert words in found.detail
        assert not engine.requests


RANKS: Final = b'{"0": {"engine_id": "e", "worker_addr": {}}, "1": {"engine_id": "f", "worker_addr": {}}}'


@contextlib.asynccontextmanager
async def bootstrap_of(*answers: bytes | None) -> AsyncIterator[tuple[Engine, int]]:
    """A server that answers queries, and its port."""
    engine = Engine(*answers)
    async with await asyncio.start_server(engine.serve, "127.0.0.1", 0) as server:
        yield engine, server.sockets[0].getsockname()[1]


async def test_an_engines_id_is_asked_for_once_in_a_while_and_its_rank_prefills(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine(answer())
    async with bootstrap_of(answer(RANKS)) as (bootstrap, port), scene_of(engine) as scene:
        for number in range(8):
            scene.start(f"t-{number}", query_port=port)
            await scene.result(number + 1)
        assert len(bootstrap.requests) == 1
        assert bootstrap.requests[0].startswith(b"GET /query HTTP/1.1\r\n")
        assert b"authorization" not in bootstrap.requests[0].lower()
        found = {one.engine_id for one in scene.results}
        assert found == {"e", "f"}
        for result, request in zip(scene.results, engine.requests, strict=True):
            assert b"x-data-parallel-rank: %d\r\n" % "ef".index(result.engine_id) in request.lower()
        monkeypatch.setattr(scene.prefills._ids, "_clock", lambda: scene.clock() + prefill_client._KNOWN_S)
        scene.start("t-9", query_port=port)
        await scene.result(9)
        assert len(bootstrap.requests) == 2


def named(name: bytes) -> bytes:
    """By a bootstrap server."""
    return answer(b'{"0": {"engine_id": "%b"}}' % name)


@pytest.mark.parametrize(
    ("first", "queries"),
    [
        # there may be another engine by now
        (answer(b"", "503 Service Unavailable"), 2),
        (answer(b"", "502 Bad Gateway"), 2),
        (b"", 2),
        # a client can cause these at will
        (answer(b"", "400 Bad Request"), 1),
        (answer(b"", "404 Not Found"), 1),
        (answer(b"", "429 Too Many Requests"), 1),
        (answer(b"", "500 Internal Server Error"), 1),
        (answer(b"x" * (prefill_client.MOST_ANSWER_BYTES + 1)), 1),
    ],
)
async def test_the_id_is_asked_for_again_after_a_prefill_that_found_no_engine(first: bytes, queries: int) -> None:
    engine = Engine(first, answer())
    async with bootstrap_of(named(b"e"), named(b"f")) as (bootstrap, port), scene_of(engine) as scene:
        if not first:
            # a second connection is no failure
            engine.answers.insert(0, first)
        scene.start("t-1", query_port=port)
        await scene.result()
        scene.start("t-2", query_port=port)
        found = await scene.result(2)
        assert (found.status, found.engine_id) == (200, "f" if queries == 2 else "e")
        assert len(bootstrap.requests) == queries
        # a single rank need not be named
        assert b"x-data-parallel-rank" not in engine.requests[-1].lower()


async def test_many_prefills_wait_for_one_query_and_a_client_that_leaves_ends_it_for_nobody_else() -> None:
    engine = Engine(answer())
    async with scene_of(engine) as scene:
        queries, may_answer = 0, asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal queries
            await reader.readuntil(b"\r\n\r\n")
            queries += 1
            await may_answer.wait()
            writer.write(named(b"e"))
            await writer.drain()
            writer.close()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            for number in range(50):
                scene.start(f"t-{number}", query_port=port)
            await eventually(lambda: _is(queries > 0))
            # the one that began it
            scene.prefills.cancel_prefill("t-0")
            await eventually(lambda: _is("t-0" not in scene.prefills._tasks))
            may_answer.set()
            await scene.result(49)
        assert queries == 1
        assert {(one.status, one.engine_id) for one in scene.results} == {(200, "e")}
        assert not scene.prefills._ids._asking


async def test_a_bootstrap_server_that_hangs_is_waited_for_once_in_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_client, "_QUERY_TIMEOUT_S", 0.3)
    engine = Engine(answer())
    async with bootstrap_of(None, named(b"e")) as (bootstrap, port), scene_of(engine) as scene:
        now = scene.clock()
        monkeypatch.setattr(scene.prefills._ids, "_clock", lambda: now)
        for number in range(1, 9):
            scene.start(f"t-{number}", query_port=port)
            found = await scene.result(number)
            assert found.failure == "unreachable"
            assert "no answer to /query" in found.detail
        assert len(bootstrap.requests) == 1
        assert not engine.requests
        now += prefill_client._FAILED_S
        scene.start("t-9", query_port=port)
        assert (await scene.result(9)).engine_id == "e"


async def test_ids_are_kept_of_each_port_and_no_longer_than_they_are_known() -> None:
    async with (
        bootstrap_of(named(b"e")) as (_, one),
        bootstrap_of(named(b"f")) as (_, other),
        scene_of(Engine(answer())) as scene,
    ):
        for number, (port, name) in enumerate(((one, "e"), (other, "f")), 1):
            scene.start(f"t-{number}", query_port=port)
            assert (await scene.result(number)).engine_id == name
        assert len(scene.prefills._ids._known) == 2
        ids, later = scene.prefills._ids, scene.clock() + prefill_client._KNOWN_S
        ids._clock = lambda: later
        scene.start("t-3", query_port=one)
        await scene.result(3)
        assert list(ids._known) == [(scene.address, one)]


async def test_a_query_that_nobody_waits_for_ends_with_the_process() -> None:
    async with bootstrap_of(None) as (bootstrap, port), scene_of(Engine(answer())) as scene:
        scene.start(query_port=port)
        await eventually(lambda: _is(bool(bootstrap.requests)))
        scene.prefills.cancel_prefill("t-1")
        await scene.prefills.close()
        assert not scene.prefills._ids._asking
        await eventually(lambda: _is(bootstrap.gone == 1))


@pytest.mark.parametrize(
    ("given", "failure"),
    [
        (b"", "unreachable"),
        (None, "unreachable"),
        (answer(b"{}"), "unreadable"),
        (answer(RANKS, "404 Not Found"), "unreadable"),
        (answer(b" " * (1024 * 1024 + 1)), "unreadable"),
        (answer(b"", "307 Temporary Redirect", "location: http://127.0.0.1:1/\r\n"), "unreadable"),
    ],
)
async def test_an_engine_whose_id_is_unknown_prefills_nothing(
    given: bytes | None, failure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if given is None:
        monkeypatch.setattr(prefill_client, "_QUERY_TIMEOUT_S", 0.3)
    engine = Engine(answer())
    async with bootstrap_of(given) as (_, port), scene_of(engine) as scene:
        scene.start(query_port=port)
        found = await scene.result()
        assert found.failure == failure
        assert found.detail
        assert not engine.requests
