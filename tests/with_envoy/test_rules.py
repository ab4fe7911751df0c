# SPDX-License-Identifier: Apache-2.0
"""What rules of ModelRoutes decide, through a real Envoy and several workers of extproc."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

import pytest
import pytest_asyncio

from tests.with_envoy.test_fallback import PATH, Engine, Gateway, document, running, server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

pytestmark = pytest.mark.asyncio(loop_scope="module")

SPLIT: Final = [{"modelServerName": "a"}, {"modelServerName": "b"}, {"modelServerName": "c", "weight": 0}]


def rules(name: str, *listed: Mapping[str, object]) -> dict[str, object]:
    return document("ModelRoute", name, {"modelName": name, "rules": listed})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    log: list[tuple[str, str]] = []
    engines = {name: Engine(name, log) for name in ("a1", "b1", "c1")}
    for one in engines.values():
        await one.start()
    documents = [
        *(server(name[0], f"{name[0]}/model", [engine]) for name, engine in engines.items()),
        rules("sticky", {"targetModels": SPLIT, "sticky": "Session"}),
        rules(
            "body",
            {
                "modelMatch": {"body": {"response_format.type": {"text": "json_schema"}}},
                "targetModels": [{"modelServerName": "a"}],
            },
            {"modelMatch": {"inputTokens": {"atLeast": 10_000}}, "targetModels": [{"modelServerName": "b"}]},
            {"targetModels": [{"modelServerName": "c"}]},
        ),
        rules(
            "set",
            {
                "targetModels": [{"modelServerName": "a", "set": {"seed": 7}}],
                "set": {"temperature": 0.25},
                "maxOutputTokens": 40,
                "fallback": [{"modelServerName": "b"}],
            },
        ),
    ]
    async with running(tmp_path_factory.mktemp("rules") / "stack", documents, engines, log, workers=2) as found:
        yield found
    for one in engines.values():
        await one.stop()


async def served(gateway: Gateway, model: str, headers: Mapping[str, str], **fields: object) -> str:
    """The engine that had the request."""
    gateway.log.clear()
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}], **fields}
    answer = await gateway.http.post(gateway.url + PATH, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    ((name, _),) = gateway.log
    return name


async def test_rules_hold_by_what_the_body_says(gateway: Gateway) -> None:
    long = [{"role": "user", "content": "word " * 9_000}]
    schema = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}}
    assert await served(gateway, "body", {}, **schema) == "a1"
    assert await served(gateway, "body", {}, **schema, messages=long) == "a1"
    assert await served(gateway, "body", {}, messages=long) == "b1"
    for fields in ({}, {"response_format": {"type": "text"}}, {"response_format": "json_schema"}):
        assert await served(gateway, "body", {}, **fields) == "c1"


def got(engine: Engine) -> dict[str, object]:
    """The last body."""
    found: dict[str, object] = json.loads(engine.got[-1])
    return found


async def test_an_engine_reads_what_the_rule_sets_and_so_does_its_fallback(gateway: Gateway) -> None:
    a1, b1 = gateway.engines["a1"], gateway.engines["b1"]
    for content in ("hi", "x" * 200_000):
        messages = [{"role": "user", "content": content}]
        fields = {"messages": messages, "temperature": 2, "max_tokens": 1000, "user": "é"}
        assert await served(gateway, "set", {}, **fields) == "a1"
        sent = {**fields, "temperature": 0.25, "max_tokens": 40, "seed": 7}
        assert got(a1) == {**sent, "model": "a/model"}
        a1.does = 503
        answer = await gateway.ask("set", **fields)
        a1.does = 200
        assert answer.status_code == 200
        assert answer.headers["x-attache-served-by"] == "default/b"
        assert "x-attache-degraded" not in answer.headers
        assert got(b1) == {**sent, "model": "b/model"}


async def test_a_session_stays_with_its_server_whichever_worker_decides(gateway: Gateway) -> None:
    places = {}
    for name in map(str, range(16)):
        found = {await served(gateway, "sticky", {"x-session-id": name}) for _ in range(6)}
        assert len(found) == 1
        places[name] = found.pop()
    assert set(places.values()) == {"a1", "b1"}
    # new connections come to other workers
    for name, place in places.items():
        assert await served(gateway, "sticky", {"x-session-id": name, "connection": "close"}) == place
    assert {await served(gateway, "sticky", {}) for _ in range(40)} == {"a1", "b1"}
