# SPDX-License-Identifier: Apache-2.0
"""Some seconds of the fuzzer over request bodies: ``python -m tests.fuzz bodies`` runs it for as long as is wanted."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import httpx
import msgspec
import pytest

from bench.stack.loopback_stack import running_stack
from tests.fuzz.bodies import FLAGS, ROUTE, SERVER, FuzzResponse, FuzzSettings, fault_of, fuzz, report_text, send
from tests.fuzz.mutants import FuzzCase, mutant

if TYPE_CHECKING:
    from pathlib import Path


async def test_broken_requests_are_refused_as_openai_does_and_leave_nothing_behind(tmp_path: Path) -> None:
    async with running_stack(tmp_path / "stack", FLAGS, route=ROUTE, more=SERVER) as stack:
        report = await fuzz(stack, FuzzSettings(seconds=60, cases=1500, first_seed=20_000, clients=8))
        seen = msgspec.json.encode(report.offenders[:10]).decode()
        assert report.is_clean, report_text(report) + seen
        assert report.cases == 1500
        assert report.statuses["200"] > 100
        assert report.statuses["400"] > 100
        assert report.innocent > 0

        # what the fuzzer found first: a compressed body, or one that only says so
        body = {"model": "llama", "prompt": "hello", "max_tokens": 1}
        async with httpx.AsyncClient(timeout=60) as http:
            headers = {"content-encoding": "gzip"}
            answer = await http.post(f"{stack.url}/v1/completions", json=body, headers=headers)
            assert answer.status_code == 200, answer.text
            escaped = await http.post(f"{stack.url}/v1/completions%2f", json=body)
        assert escaped.status_code == 400
        assert "path" in escaped.json()["error"]["message"]


def test_a_seed_is_always_the_same_request() -> None:
    cases = [mutant(seed, random.Random(seed)) for seed in range(300)]
    assert cases == [mutant(seed, random.Random(seed)) for seed in range(300)]
    assert {case.transport for case in cases} == {"length", "chunked", "http2"}
    assert all(sum(case.pieces) == len(case.body) for case in cases)
    assert len({case.body for case in cases}) > 200


CASE = FuzzCase(seed=0, method="POST", path="/", headers=(), body=b"")
ERROR = b'{"error": {"message": "no", "type": "x"}}'


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (FuzzResponse(), "no answer"),
        (FuzzResponse(500, "application/json", ERROR, is_whole=True), "has failed"),
        (FuzzResponse(200, "application/json", b"{}"), "cut"),
        (FuzzResponse(400, "text/plain", ERROR, is_whole=True), "content type"),
        (FuzzResponse(400, "application/json", b"no", is_whole=True), "no error object"),
        (
            FuzzResponse(400, "application/json", b'{"error": {"message": "", "type": "x"}}', is_whole=True),
            "no error object",
        ),
        (FuzzResponse(302, "", b"", is_whole=True), "neither"),
        (FuzzResponse(400, "application/json; charset=utf-8", ERROR, is_whole=True), ""),
        (FuzzResponse(200, "", b"", is_whole=True), ""),
    ],
)
def test_what_is_wrong_with_an_answer_is_said(answer: FuzzResponse, says: str) -> None:
    fault = fault_of(CASE, answer)
    assert says in fault
    assert bool(fault) == bool(says)


@pytest.mark.parametrize("transport", ["length", "chunked", "http2"])
async def test_an_answer_without_an_end_is_noticed(transport: str) -> None:
    async def cut(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if transport != "http2":
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(cut, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        answer = await send(host, port, msgspec.structs.replace(CASE, transport=transport))
    assert answer is not None
    assert fault_of(CASE, answer)
