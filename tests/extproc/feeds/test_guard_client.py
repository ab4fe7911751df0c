# SPDX-License-Identifier: Apache-2.0
"""Calls of guards, whatever the service does: hostile answers cost a request no more than its time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
from typing import TYPE_CHECKING, Any, Final

import pytest

from extproc.admission.guard_services_by_route import RouteGuardConfig
from extproc.api.guard_services import GuardService
from extproc.api.quantities import Duration
from extproc.core.core import Core
from extproc.core.effects import AskGuard, GuardAnswered
from extproc.core.guard_decisions import GuardFailed, GuardReply
from extproc.feeds import guard_client
from extproc.feeds.engine_http import EngineCredentials
from extproc.feeds.guard_client import GuardClient
from tests.extproc.scenes import configuration, endpoints, request
from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from extproc.core.payload_log import CloudEvent

ALLOW: Final = b'{"action": "allow"}'
HEADERS: Final = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
WHOLE: Final = HEADERS + b"content-length: %d\r\n\r\n" % len(ALLOW) + ALLOW


class Service:
    """Answers each request with ``pieces``, then does as ``then`` says."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = [WHOLE]
        self.then = "next"
        self.asked: list[tuple[bytes, bytes]] = []
        self.connections = 0
        self.left = 0
        self.url = ""
        self._writers: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.append(writer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(
                    int(one.split(b":")[1]) for one in head.split(b"\r\n") if one.lower().startswith(b"content-length")
                )
                self.asked.append((head, await reader.readexactly(length)))
                for piece in self.pieces:
                    writer.write(piece)
                    await writer.drain()
                if self.then == "hang":
                    await reader.read()
                    self.left += 1
                if self.then != "next":
                    break
        writer.close()

    def hang_up(self) -> None:
        """On all connections."""
        for writer in self._writers:
            writer.transport.abort()


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    made = Service()
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/check"
    yield made
    server.close()
    made.hang_up()
    await server.wait_closed()


class Caller:
    """What calls the service. ``environment``: of extproc."""

    def __init__(self, environment: dict[str, str] | None = None) -> None:
        self.now = 0.0
        self.guards = GuardClient(
            EngineCredentials(environment or {}, lambda: self.now), clock=lambda: self.now, source="urn:x"
        )
        config = configuration(servers={"llama": f"scrapeInterval: 0s\n{endpoints('10.0.0.1:8000')}"})
        self.core = Core(config, rng=random.Random(0), ticket_prefix="t")

    def ask(self, url: str, *, content: str = "hi", client: dict[str, str] | None = None, **fields: object) -> AskGuard:
        spec: dict[str, Any] = {"timeout": Duration("60s"), **fields}
        service = GuardService(name="pii", url=url, **spec)
        arrival = request(self.core, content, headers={"x-attache-tenant": "acme", **(client or {})})
        return AskGuard("t-1", arrival, RouteGuardConfig("pii", service, is_open=False, most_bytes=1 << 24))

    async def says(self, url: str, **fields: object) -> GuardReply | GuardFailed:
        return await self.guards.ask_guard(self.ask(url, **fields))


@pytest.fixture
async def caller() -> AsyncIterator[Caller]:
    made = Caller({"GUARD_KEY": "secret-key"})
    yield made
    await made.guards.close()


async def test_a_guard_gets_the_event_and_of_the_clients_headers_those_that_are_named(
    service: Service, caller: Caller
) -> None:
    client = {"x-team": "blue", "x-odd": 'a\u00e9"b', "authorization": "Bearer of-client", "x-other": "1"}
    reply = await caller.says(service.url, client=client, headers=("X-Team", "x-odd"), api_key_env="GUARD_KEY")
    assert isinstance(reply, GuardReply)
    assert (reply.status, reply.body) == (200, ALLOW)
    ((head, body),) = service.asked
    lines = dict(line.split(": ", 1) for line in head.decode().lower().split("\r\n")[1:] if line)
    assert {name: value for name, value in lines.items() if name.startswith("ce-")} == {
        "ce-specversion": "1.0",
        "ce-id": "t-1",
        "ce-ticket": "t-1",
        "ce-source": "urn:x",
        "ce-type": "dev.attache.guard.request",
        "ce-inferenceservicename": "llama",
        "ce-namespace": "default",
        "ce-component": "predictor",
        "ce-endpoint": "/v1/chat/completions",
        "ce-route": "default/chat",
        "ce-model": "m",
        "ce-tenant": "acme",
        "ce-api": "chat",
        "ce-bytes": str(len(body)),
    }
    assert (lines["authorization"], lines["x-team"], lines["x-odd"]) == ("bearer secret-key", "blue", "a%c3%a9%22b")
    assert "x-other" not in lines
    assert lines["content-type"] == "application/json"
    assert json.loads(body)["messages"] == [{"role": "user", "content": "hi"}]


async def test_connections_are_used_again_and_one_that_was_closed_meanwhile_costs_nothing(
    service: Service, caller: Caller
) -> None:
    for _ in range(5):
        assert isinstance(await caller.says(service.url), GuardReply)
    assert service.connections == 1
    service.hang_up()
    assert isinstance(await caller.says(service.url), GuardReply)
    service.pieces, service.then = [], "close"
    failed = await caller.says(service.url)
    assert isinstance(failed, GuardFailed)
    assert failed.why == "unreachable"


@pytest.mark.parametrize(
    ("pieces", "why"),
    [
        ([HEADERS + b"content-length: 100\r\n\r\n", b'{"action"'], "unreachable"),
        ([HEADERS + b"transfer-encoding: chunked\r\n\r\n", b"zz\r\n"], "unreachable"),
        ([b"SSH-2.0-OpenSSH\r\n\r\n"], "unreachable"),
        ([HEADERS + b"content-encoding: gzip\r\ncontent-length: 3\r\n\r\nabc"], "reply"),
        ([HEADERS + b"x: " + b"y" * 100_000 + b"\r\n\r\n"], "unreachable"),
        ([b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n"], "reply"),
    ],
)
async def test_answers_that_are_cut_or_no_http(service: Service, caller: Caller, pieces: list[bytes], why: str) -> None:
    service.pieces, service.then = pieces, "close"
    found = await caller.says(service.url)
    assert (found.why if isinstance(found, GuardFailed) else "reply") == why
    # a redirect was not followed
    assert len(service.asked) <= 2


async def test_an_answer_without_end_is_read_up_to_its_bound(service: Service, caller: Caller) -> None:
    service.pieces = [HEADERS + b"transfer-encoding: chunked\r\n\r\n", *([b"10000\r\n" + b"x" * 65536 + b"\r\n"] * 100)]
    service.then = "hang"
    found = await caller.says(service.url)
    assert isinstance(found, GuardFailed)
    assert found.why == "invalid"


async def test_a_guard_that_hangs_is_left_after_its_time(service: Service, caller: Caller) -> None:
    service.pieces, service.then = [], "hang"
    found = await caller.says(service.url, timeout=Duration("50ms"))
    assert isinstance(found, GuardFailed)
    assert (found.why, found.detail) == ("timeout", "no answer within 0.05 s")
    await eventually(lambda: service.left == 1)


async def test_a_client_that_leaves_ends_the_call(service: Service, caller: Caller) -> None:
    service.pieces, service.then = [], "hang"
    call = asyncio.create_task(caller.says(service.url))
    await eventually(lambda: len(service.asked) == 1)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await eventually(lambda: service.left == 1)
    assert caller.guards._lines["pii"].places.open == 0
    assert not caller.guards._lines["pii"]._of_callers


async def test_calls_are_bounded_and_those_beyond_wait_or_fail(
    service: Service, caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[asyncio.Task[GuardReply | GuardFailed]] = []
    monkeypatch.setattr(guard_client, "_MOST_CALLS", 8)
    monkeypatch.setattr(guard_client, "_MOST_WAITING", 4)
    service.pieces, service.then = [], "hang"
    # a caller has a quarter
    for tenants in range(1, 5):
        tenant = {"x-attache-tenant": f"tenant-{tenants}"}
        calls += [asyncio.create_task(caller.says(service.url, client=tenant)) for _ in range(3)]
        await eventually(lambda: len(service.asked) == 2 * tenants)  # noqa: B023 - called at once
        found = await caller.says(service.url, client=tenant)
        assert isinstance(found, GuardFailed)
        assert (found.why, found.detail) == ("busy", "3 requests wait for it")
    found = await caller.says(service.url)
    assert isinstance(found, GuardFailed)
    assert (found.why, found.detail) == ("busy", "12 requests wait for it")
    assert len(service.asked) == 8
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


async def test_a_dead_guard_is_not_called_for_every_request(caller: Caller, service: Service) -> None:
    dead = "http://127.0.0.1:1/"
    found = [await caller.says(dead) for _ in range(8)]
    assert [one.why for one in found if isinstance(one, GuardFailed)] == ["unreachable"] * 5 + ["paused"] * 3
    caller.now += 1.1
    assert isinstance(await caller.says(service.url), GuardReply)
    assert isinstance(await caller.says(service.url), GuardReply)


async def test_a_large_body_comes_whole(service: Service, caller: Caller) -> None:
    content = "word " * 1_000_000
    assert isinstance(await caller.says(service.url, content=content), GuardReply)
    assert json.loads(service.asked[0][1])["messages"][0]["content"] == content


async def test_a_key_file_is_read_and_one_that_is_missing_is_a_failure(service: Service, tmp_path: Path) -> None:
    made = Caller()
    try:
        (tmp_path / "key").write_text("of-a-secret\n")
        assert isinstance(await made.says(service.url, api_key_file=str(tmp_path / "key")), GuardReply)
        assert b"Bearer of-a-secret" in service.asked[0][0]
        found = await made.says(service.url, api_key_file=str(tmp_path / "none"))
        assert isinstance(found, GuardFailed)
        assert found.why == "unreachable"
    finally:
        await made.guards.close()


async def test_an_error_that_nobody_has_foreseen_is_a_failure_and_logged_with_its_traceback(
    service: Service, caller: Caller, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> CloudEvent:
        raise KeyError("of this test")

    with monkeypatch.context() as broken:
        broken.setattr(guard_client, "guard_event", fail)
        found = [await caller.says(service.url) for _ in range(9)]
    assert {(one.why, one.detail) for one in found if isinstance(one, GuardFailed)} == {
        ("internal", "an error of extproc: KeyError")
    }
    assert len(found) == 9
    assert [bool(one.exc_info) for one in caplog.records] == [True]
    assert caller.guards._lines["pii"].places.open == 0
    assert isinstance(await caller.says(service.url), GuardReply)


async def test_the_log_has_one_line_when_a_guard_fails_and_one_when_it_answers_again(
    caller: Caller, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    failed = GuardAnswered("pii", "timeout", 0.5, goes_on=False, detail="no answer within 0.5 s")
    for asked in (failed, failed, GuardAnswered("pii", "refused", 0.1, goes_on=False), failed):
        caller.guards.log_result(asked)
    assert [one.levelname for one in caplog.records] == ["WARNING", "INFO", "WARNING"]
    caplog.set_level(logging.DEBUG)
    caller.guards.log_result(GuardAnswered("pii", "refused", 0.1, goes_on=False, detail="pattern sk-", ticket="t-7"))
    assert "the guard pii refused request t-7: pattern sk-" in caplog.text
    assert "the guard pii does not answer (timeout): no answer within 0.5 s; requests are refused" in caplog.text
