# SPDX-License-Identifier: Apache-2.0
"""Tokens by the engines' POST /tokenize."""

from __future__ import annotations

import asyncio
import json
import random
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer, unused_port

from extproc.api.config_loader import load_snapshot
from extproc.core.core import Core
from extproc.core.request_record import RequestHead
from extproc.feeds.engine_http import EngineCredentials
from extproc.feeds.tokenizers import EngineTokenizer, Tokenizers
from extproc.metrics.request_metrics import Metrics
from tests.extproc.breakers import trip

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

# the engines share the test's event loop: on a busy machine they need more than the usual 200 ms
CONFIG = """
apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {name: llama}
spec: {model: base, endpoints: [%s], tokenizer: {%s}}
---
apiVersion: attache.dev/v1alpha1
kind: ModelRoute
metadata: {name: llama}
spec: {modelName: llama, rules: [{targetModels: [{modelServerName: llama}]}]}
"""


class Engine:
    """Tokenizes everything to one token, its own."""

    def __init__(self, token: int, status: int = 200, *, text: str = "", location: str = "") -> None:
        """``text``: the whole answer, if not empty."""
        self.asked = 0
        self.body: dict[str, Any] = {}
        self._text = text or json.dumps({"tokens": [token]})
        self._status = status
        self._headers = {"location": location} if location else {}

    async def tokenize(self, request: web.Request) -> web.Response:
        self.asked += 1
        self.body = await request.json()
        return web.Response(text=self._text, status=self._status, headers=self._headers)


@pytest.fixture
async def servers() -> AsyncIterator[list[TestServer]]:
    started: list[TestServer] = []
    yield started
    for one in started:
        await one.close()


async def start(servers: list[TestServer], engine: Engine) -> str:
    app = web.Application()
    app.router.add_post("/tokenize", engine.tokenize)
    server = TestServer(app)
    await server.start_server()
    servers.append(server)
    return f"127.0.0.1:{server.port}"


def core_with(*addresses: str, tokenizer: str = "timeout: 30s") -> Core:
    config = CONFIG % (", ".join(f"{{address: '{one}'}}" for one in addresses), tokenizer)
    return Core(load_snapshot({"a.yaml": config.encode()}), rng=random.Random(0), ticket_prefix="t")


async def tokens(core: Core) -> Sequence[int] | None:
    body = json.dumps({"model": "llama", "prompt": "hi"}).encode()
    arrival = core.builder.build_by_model(RequestHead("POST", "/v1/completions", {}, has_body=True), body)
    tokenizer = EngineTokenizer(EngineCredentials({}, lambda: 0.0))
    try:
        return await tokenizer.tokens(arrival)
    finally:
        await tokenizer.close()


async def test_the_least_busy_engine_is_asked(servers: list[TestServer]) -> None:
    core = core_with(await start(servers, Engine(1)), await start(servers, Engine(2)))
    core.pools["default/llama"].table.in_flight[0] = 1
    assert await tokens(core) == [2]


async def test_a_burst_is_spread_over_engines_without_requests(servers: list[TestServer]) -> None:
    core = core_with(await start(servers, Engine(1)), await start(servers, Engine(2)))
    found = await asyncio.gather(*(tokens(core) for _ in range(40)))
    assert {tuple(one or ()) for one in found} == {(1,), (2,)}


async def test_an_engine_that_is_gone_is_not_the_only_one_to_be_asked(servers: list[TestServer]) -> None:
    core = core_with(f"127.0.0.1:{unused_port()}", await start(servers, Engine(2)))
    core.pools["default/llama"].table.in_flight[1] = 1
    assert await tokens(core) == [2]


async def test_an_engine_that_fails_is_asked_if_there_is_no_other(servers: list[TestServer]) -> None:
    failing, good = Engine(1), Engine(2)
    core = core_with(await start(servers, failing), await start(servers, good))
    table = core.pools["default/llama"].table
    table.in_flight[1] = 5
    trip(table, 0, 0.0)
    assert await tokens(core) == [2]
    assert failing.asked == 0
    trip(table, 1, 0.0)
    assert await tokens(core) == [1]


async def test_what_one_engine_refuses_no_other_is_asked(servers: list[TestServer]) -> None:
    other = Engine(2)
    core = core_with(await start(servers, Engine(1, status=400)), await start(servers, other))
    core.pools["default/llama"].table.in_flight[1] = 1
    with pytest.raises(ValueError, match="400"):
        await tokens(core)
    assert other.asked == 0


async def test_a_pool_without_an_engine_that_is_there() -> None:
    core = core_with(f"127.0.0.1:{unused_port()}")
    with pytest.raises(ConnectionError, match="cannot connect: Connection refused"):
        await tokens(core)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"chat_template": "{{ x }}"}, [7]),
        ({"documents": [{}]}, None),
        ({"input_ids": [1]}, None),
        ({"prompt_token_ids": [1]}, None),
        ({"prompt_token_ids_b64": "AQAAAA=="}, None),
    ],
)
async def test_a_chat_is_tokenized_with_all_that_its_template_gets_or_not_at_all(
    servers: list[TestServer], fields: dict[str, object], expected: list[int] | None
) -> None:
    engine = Engine(7)
    core = core_with(await start(servers, engine))
    body = json.dumps({"model": "llama", "messages": [], **fields}).encode()
    arrival = core.builder.build_by_model(RequestHead("POST", "/v1/chat/completions", {}, has_body=True), body)
    tokenizer = EngineTokenizer(EngineCredentials({}, lambda: 0.0))
    found = await tokenizer.tokens(arrival)
    await tokenizer.close()
    assert found == expected
    assert found is None or fields.items() <= engine.body.items()


async def test_a_body_of_the_messages_api_is_tokenized_as_the_chat_that_engines_make_of_it(
    servers: list[TestServer],
) -> None:
    engine = Engine(7)
    core = core_with(await start(servers, engine))
    asked = {"model": "llama", "max_tokens": 1, "system": "be short", "messages": [{"role": "user", "content": "hi"}]}
    head = RequestHead("POST", "/v1/messages", {}, has_body=True)
    arrival = core.builder.build_by_model(head, json.dumps(asked).encode())
    tokenizer = EngineTokenizer(EngineCredentials({}, lambda: 0.0))
    try:
        assert list(await tokenizer.tokens(arrival) or []) == [7]
    finally:
        await tokenizer.close()
    said = [{"role": "system", "content": "be short"}, {"role": "user", "content": "hi"}]
    assert engine.body == {"model": "base", "messages": said}


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_a_redirect_is_not_followed_and_the_next_engine_is_asked(servers: list[TestServer], status: int) -> None:
    trap = Engine(9)
    location = f"http://{await start(servers, trap)}/tokenize"
    core = core_with(await start(servers, Engine(1, status, location=location)), await start(servers, Engine(2)))
    core.pools["default/llama"].table.in_flight[1] = 1
    assert await tokens(core) == [2]
    assert trap.asked == 0


@pytest.mark.parametrize(
    "text",
    [
        '{"tokens":[-1]}',
        '{"tokens":[4294967296]}',
        '{"tokens":["a"]}',
        '{"tokens":' + "[" * 100_000,
        '{"tokens":[' + "1," * 50_000 + "1]}",
        '{"tokens":[' + "1, " * 400_000 + "1]}",
        "<html>",
    ],
)
async def test_what_one_engine_answers_oddly_another_one_is_asked(servers: list[TestServer], text: str) -> None:
    core = core_with(await start(servers, Engine(1, text=text)), await start(servers, Engine(2)))
    core.pools["default/llama"].table.in_flight[1] = 1
    assert await tokens(core) == [2]


@pytest.mark.parametrize("text", ['{"tokens":[-1]}', '{"tokens":[4294967296]}', '{"tokens":' + "[" * 100_000, "{}"])
async def test_without_good_tokens_the_approximate_index_decides(
    servers: list[TestServer], text: str, caplog: pytest.LogCaptureFixture
) -> None:
    core = core_with(await start(servers, Engine(1, text=text)))
    metrics = Metrics(core.pools.values, lambda: 0.0, lambda: 0.0)
    tokenizers = Tokenizers(metrics, EngineCredentials({}, lambda: 0.0))
    body = json.dumps({"model": "llama", "prompt": "hi"}).encode()
    arrival = core.builder.build_by_model(RequestHead("POST", "/v1/completions", {}, has_body=True), body)
    try:
        assert [await tokenizers.tokens_of(arrival) for _ in range(3)] == [None] * 3
    finally:
        await tokenizers.close()
    assert sum("using the approximate index" in one.getMessage() for one in caplog.records) == 1


async def test_a_model_server_that_is_made_again_asks_its_own_engines(servers: list[TestServer]) -> None:
    old, new = Engine(1), Engine(2)
    tokenizers = Tokenizers(Metrics(list, lambda: 0.0, lambda: 0.0), EngineCredentials({}, lambda: 0.0))
    body = json.dumps({"model": "llama", "prompt": "hi"}).encode()
    found = []
    for engine in (old, new):
        core = core_with(await start(servers, engine))
        arrival = core.builder.build_by_model(RequestHead("POST", "/v1/completions", {}, has_body=True), body)
        found.append(await tokenizers.tokens_of(arrival))
    await tokenizers.close()
    assert found == [[1], [2]]


async def test_the_path_of_a_tokenizer_is_relative_to_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    words = {"type": "WordLevel", "vocab": {"hi": 7}, "unk_token": "hi"}
    (tmp_path / "model" / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": words}))
    core = core_with("127.0.0.1:1", tokenizer="path: model")
    access = EngineCredentials({}, lambda: 0.0, tmp_path)
    tokenizers = Tokenizers(Metrics(core.pools.values, lambda: 0.0, lambda: 0.0), access)
    body = json.dumps({"model": "llama", "prompt": "hi"}).encode()
    arrival = core.builder.build_by_model(RequestHead("POST", "/v1/completions", {}, has_body=True), body)
    assert await tokenizers.tokens_of(arrival) == [7]
    await tokenizers.close()


async def test_what_nobody_has_foreseen_stops_no_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    core = core_with("127.0.0.1:1")
    tokenizers = Tokenizers(Metrics(core.pools.values, lambda: 0.0, lambda: 0.0), EngineCredentials({}, lambda: 0.0))

    async def fail(_self: object, _arrival: object) -> None:
        raise RecursionError("of this test")

    monkeypatch.setattr(EngineTokenizer, "tokens", fail)
    body = json.dumps({"model": "llama", "prompt": "hi"}).encode()
    arrival = core.builder.build_by_model(RequestHead("POST", "/v1/completions", {}, has_body=True), body)
    assert [await tokenizers.tokens_of(arrival) for _ in range(3)] == [None] * 3
    await tokenizers.close()
    assert [bool(one.exc_info) for one in caplog.records] == [True], "once, with its traceback"
