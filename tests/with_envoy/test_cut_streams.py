# SPDX-License-Identifier: Apache-2.0
"""A client that leaves a stream pays for what the engine has made until then, wherever it leaves."""

from __future__ import annotations

import asyncio
import json
import time
from collections import defaultdict
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, Final

import httpx
import msgspec
import pytest
import pytest_asyncio
from aiohttp import web

from controller.usage.rows import UsageRow, parse_usage_line
from extproc.api.usage_log import UsageLine
from tests.waiting import eventually
from tests.with_envoy.stand_in import Gateway, gateway_on

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


pytestmark = pytest.mark.asyncio(loop_scope="module")

CHUNKS: Final = 20
# of each case's budget
MOST: Final = 1_000
NOW: Final = time.time  # noqa: TID251 - rows are made at an edge
USAGE: Final = {"prompt_tokens": 5, "completion_tokens": 0, "total_tokens": 5}


class Form(msgspec.Struct, frozen=True):
    """An API: ``head`` comes before the first of ``chunks``, each of which is a token."""

    path: str
    asks: dict[str, object]
    head: bytes
    chunks: list[bytes]


def event(name: str, **data: object) -> bytes:
    return f"event: {name}\ndata: {json.dumps({'type': name, **data})}\n\n".encode()


def chat(delta: dict[str, object]) -> bytes:
    return b"data: %s\n\n" % json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}).encode()


MESSAGE: Final = {"usage": {"input_tokens": 20, "output_tokens": 1}}
# Tokens before the first chunk, where the bytes are all that is known: those that begin a message are taken for one.
BEFORE_CHUNKS: Final = {"messages": 1}
TEXTS: Final = [f"word {number}" for number in range(CHUNKS)]
HELLO: Final[dict[str, object]] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 100}
FORMS: Final = {
    "chats": Form(
        "/v1/chat/completions", HELLO, chat({"role": "assistant", "content": ""}), [chat({"content": x}) for x in TEXTS]
    ),
    "messages": Form(
        "/v1/messages",
        HELLO,
        event("message_start", message=MESSAGE)
        + event("content_block_start", index=0, content_block={"type": "text", "text": ""}),
        [event("content_block_delta", index=0, delta={"type": "text_delta", "text": x}) for x in TEXTS],
    ),
    "responses": Form(
        "/v1/responses",
        {"input": "hello", "max_output_tokens": 100},
        event("response.created", response={"status": "in_progress"}),
        [event("response.output_text.delta", delta=x) for x in TEXTS],
    ),
}
# waits: the engine writes a chunk when its client has got the one before
CASES: Final = [f"{form}-{way}-{cut}" for form, way, cut in product(FORMS, ("waits", "hurries"), range(CHUNKS + 1))]
KEYS: Final = [{"name": case, "key": f"sk-{case}-0123", "tenant": case} for case in [*CASES, "ready"]]
BUDGET: Final = {"name": "own", "window": "Month", "max": {"outputTokens": MOST}}


class Engine:
    """``made``: content chunks written of each case. ``turns``: how many it may write."""

    def __init__(self) -> None:
        self.made: defaultdict[str, int] = defaultdict(int)
        self.turns: defaultdict[str, asyncio.Semaphore] = defaultdict(partial(asyncio.Semaphore, 0))

    async def answer(self, request: web.Request) -> web.StreamResponse:
        case = request.headers.get("x-case", "")
        if not case:
            return web.json_response({"choices": [], "usage": USAGE})
        name, way, _ = case.split("-")
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(FORMS[name].head)
        for chunk in FORMS[name].chunks:
            await (self.turns[case].acquire() if way == "waits" else asyncio.sleep(0.002))
            try:
                await response.write(chunk)
            except ConnectionError:
                return response
            self.made[case] += 1
        # it has not come to its end: nothing but the client ends it
        while request.transport is not None:  # noqa: ASYNC110 - the client sets no event
            await asyncio.sleep(0.01)
        return response


class Cuts(msgspec.Struct, frozen=True):
    """All cases have been asked. ``got``: how many content chunks the client of each has read. ``rows``: of each."""

    gateway: Gateway
    engine: Engine
    got: dict[str, int]
    rows: dict[str, UsageRow]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cuts(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cuts]:
    """All at once."""
    directory = tmp_path_factory.mktemp("cuts")
    file = directory / "usage.log"
    engine = Engine()
    app = web.Application()
    app.add_routes([web.post("/{path:.*}", engine.answer)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    spec = {"usageLog": {"path": str(file)}, "authentication": {"apiKeys": KEYS}}
    async with gateway_on(
        directory,
        gateway=spec,
        more={"endpoints": [{"address": f"127.0.0.1:{runner.addresses[0][1]}"}]},
        route={"budgets": [BUDGET]},
        headers={"authorization": "Bearer sk-ready-0123"},
    ) as gateway:
        limits = httpx.Limits(max_connections=len(CASES))
        async with httpx.AsyncClient(base_url=gateway.url, timeout=120, limits=limits) as http:
            got = dict(zip(CASES, await asyncio.gather(*(cut(http, engine, case) for case in CASES)), strict=True))
        rows: dict[str, UsageRow] = {}

        def are_written() -> bool:
            rows.update(rows_of(file))
            return rows.keys() == set(CASES)

        await eventually(are_written)
        for case in CASES:
            # those that wait for clients who have left
            engine.turns[case].release()
        yield Cuts(gateway, engine, got, rows)
    await runner.cleanup()


async def cut(http: httpx.AsyncClient, engine: Engine, case: str) -> int:
    """Read as many chunks as the case says and close the connection; how many have come by then."""
    name, _, number = case.split("-")
    form, most = FORMS[name], int(number)
    got = b""
    headers = {"authorization": f"Bearer sk-{case}-0123", "x-case": case}
    asks: dict[str, Any] = {"model": "llama", "stream": True, **form.asks}
    wholes = [form.head + b"".join(form.chunks[:count]) for count in range(CHUNKS + 1)]
    async with http.stream("POST", form.path, json=asks, headers=headers) as answer:
        assert answer.status_code == 200
        asked = 0
        async for piece in answer.aiter_raw():
            got += piece
            if len(got) >= len(wholes[most]):
                break
            if len(got) == len(wholes[asked]):
                asked += 1
                engine.turns[case].release()
    assert wholes[-1].startswith(got)
    return sum(len(one) <= len(got) for one in wholes) - 1


def rows_of(file: Path) -> dict[str, UsageRow]:
    """By the case."""
    lines = file.read_bytes().rpartition(b"\n")[0].splitlines()
    # of a request that only asked whether it is ready there is none
    found = [
        parse_usage_line(line, NOW())
        for line in lines
        if msgspec.json.decode(line, type=UsageLine, strict=False).client != "ready"
    ]
    rows = {row.tenant: row for row in found}
    assert len(rows) == len(found)
    return rows


async def test_a_client_that_leaves_pays_for_each_chunk_that_the_engine_made(cuts: Cuts) -> None:
    """The engine writes nothing before its client has the chunk before: none is on its way when the client leaves."""
    waiting = [case for case in CASES if "-waits-" in case]
    assert len(waiting) == len(FORMS) * (CHUNKS + 1)
    expected = {case: int(case.rpartition("-")[2]) for case in waiting}
    assert {case: cuts.got[case] for case in waiting} == expected
    expected |= {f"{name}-waits-0": tokens for name, tokens in BEFORE_CHUNKS.items()}
    assert {case: cuts.rows[case].output for case in waiting} == expected
    assert {case: cuts.rows[case].ended for case in waiting} == dict.fromkeys(waiting, "client")
    assert [case for case in waiting if not cuts.rows[case].is_estimated] == []


async def test_of_an_engine_that_hurries_nothing_is_paid_that_it_did_not_make(cuts: Cuts) -> None:
    """Chunks that Envoy has got and the client has not are paid for; those that Envoy did not take are not."""
    hurrying = [case for case in CASES if "-hurries-" in case]
    paid = {
        case: (
            cuts.got[case],
            cuts.rows[case].output,
            max(cuts.engine.made[case], BEFORE_CHUNKS.get(case.partition("-")[0], 0)),
        )
        for case in hurrying
    }
    assert {case: found for case, found in paid.items() if sorted(found) != list(found)} == {}
    assert max(made for *_, made in paid.values()) > 0


async def test_budgets_are_charged_what_the_rows_say(cuts: Cuts) -> None:
    async with httpx.AsyncClient(base_url=cuts.gateway.url, timeout=60) as http:

        async def is_charged(case: str) -> bool:
            # it may write one token, and writes none
            body = {"model": "llama", "messages": [], "max_tokens": 1}
            headers = {"authorization": f"Bearer sk-{case}-0123"}
            answer = await http.post("/v1/chat/completions", json=body, headers=headers)
            left = MOST - cuts.rows[case].output - 1
            return answer.headers["x-attache-budget-remaining"].startswith(f'"own";r={left};')

        for case in CASES:
            await eventually(partial(is_charged, case))
