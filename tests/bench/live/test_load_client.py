# SPDX-License-Identifier: Apache-2.0
"""The client against a stand-in that answers as it is told."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import pytest
from aiohttp import web

from bench.live.load_client import LoadClient, read_stream
from bench.workload.sessions import Session, SessionTurn, Workload, single_piece, text_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from bench.reporting.request_results import RequestResult

Handler = "Callable[[web.Request], Awaitable[web.StreamResponse]]"


class StandIn:
    def __init__(self) -> None:
        self.asked: list[list[dict[str, str]]] = []
        self.status = 200
        self.cut = False
        self.wait_s = 0.0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.asked.append((await request.json())["messages"])
        if self.status != 200:
            return web.Response(status=self.status, text="no")
        response = web.StreamResponse()
        await response.prepare(request)
        await asyncio.sleep(self.wait_s)
        await response.write(b'data: {"choices":[{"delta":{"content":"hello"}}]}\n\n')
        if self.cut:
            assert request.transport is not None
            request.transport.abort()
            return response
        usage = {"prompt_tokens": 10, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 4}}
        await response.write(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response


@pytest.fixture
async def stand_in() -> AsyncIterator[tuple[StandIn, LoadClient, list[RequestResult]]]:
    one = StandIn()
    app = web.Application()
    app.add_routes([web.post("/v1/chat/completions", one.handle)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    seen: list[RequestResult] = []
    yield one, LoadClient(f"http://127.0.0.1:{port}", "m", speed=1.0, on_result=seen.append), seen
    await runner.cleanup()


def talk(*texts: str) -> Workload:
    return Workload(
        "w",
        (Session(0.0, tuple(SessionTurn(single_piece(text, 2), 5) for text in texts), single_piece("be brief", 2)),),
    )


async def test_a_turn_follows_the_answer_before_it(stand_in: tuple[StandIn, LoadClient, list[RequestResult]]) -> None:
    server, client, seen = stand_in
    server.wait_s = 0.2
    results = await client.send(talk("one", "two"))
    assert [message["content"] for message in server.asked[1]] == [
        text_of("be brief", 2),
        text_of("one", 2),
        "hello",
        text_of("two", 2),
    ]
    assert results == seen
    assert [(one.prompt_tokens, one.cached_tokens, one.output_tokens, one.error) for one in results] == [
        (10, 4, 1, "")
    ] * 2
    first, second = results
    assert first.first_token_at_s - first.due_at_s >= 0.2
    assert second.due_at_s >= first.last_token_at_s


async def test_a_refusal_and_a_cut_stream_are_errors_and_end_their_conversation(
    stand_in: tuple[StandIn, LoadClient, list[RequestResult]],
) -> None:
    server, client, _ = stand_in
    server.status = 503
    (refused,) = await client.send(talk("one", "two"))
    assert refused.error == "503 no"
    server.status, server.cut = 200, True
    (cut,) = await client.send(talk("one", "two"))
    assert cut.error


async def test_nobody_there_is_an_error_too() -> None:
    (result,) = await LoadClient("http://127.0.0.1:9", "m", speed=1.0, on_result=lambda _: None).send(talk("one"))
    assert "ClientConnectorError" in result.error


def test_a_stream_is_read_whole_or_known_to_be_cut() -> None:
    events = (
        b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
        b'data: {"choices":[{"delta":{"content":"ab "}}]}\n\ndata: {"choices":[{"delta":{"content":"cd"}}]}\n\n'
        b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":2,"prompt_tokens_details":null}}\n\n'
    )
    cut = read_stream(events)
    assert (cut.text, cut.usage.prompt_tokens, cut.is_complete) == ("ab cd", 5, False)
    assert read_stream(events + b"data: [DONE]\n\n").is_complete
