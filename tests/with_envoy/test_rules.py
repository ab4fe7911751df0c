# SPDX-License-Identifier: Apache-2.0
"""What rules of ModelRoutes decide, through a real Envoy and several workers of extproc."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

import pytest
import pytest_asyncio

from tests.waiting import eventually
from tests.with_envoy.test_fallback import PATH, Engine, Gateway, document, running, server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from pathlib import Path

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


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mirrored(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mirrored]:
    log: list[tuple[str, str]] = []
    engines = {name: Engine(name, log) for name in ("a1", "c1", "d1", "d2")}
    for one in engines.values():
        await one.start()
    engines["d1"].does = engines["d2"].does = 500
    limits = [{"per": "Route", "requests": 1000, "unit": "hour"}]
    documents = [
        server("a", "a/model", [engines["a1"]]),
        server("c", "c/model", [engines["c1"]]),
        server("d", "d/model", [engines["d1"], engines["d2"]]),
        *(
            document(
                "ModelRoute",
                name,
                {
                    "modelName": name,
                    "rateLimits": limits,
                    "rules": [
                        {
                            "targetModels": [{"modelServerName": "a"}],
                            "mirror": {"modelServerName": to, "maxOutputTokens": 5},
                            **more,
                        }
                    ],
                },
            )
            for name, to, more in (
                ("good", "c", {}),
                ("ill", "d", {}),
                ("never", "c", {"mirror": {"modelServerName": "c", "percent": 0}}),
                ("chained", "c", {"fallback": [{"modelServerName": "d"}]}),
            )
        ),
    ]
    directory = tmp_path_factory.mktemp("mirrored")
    usage = directory / "usage.log"
    spec = {"usageLog": {"path": str(usage)}}
    async with running(directory / "stack", documents, engines, log, spec) as found:
        yield Mirrored(found, usage)
    for one in engines.values():
        await one.stop()


class Mirrored:
    """``usage``: the usage log."""

    def __init__(self, gateway: Gateway, usage: Path) -> None:
        self.gateway = gateway
        self.usage = usage

    async def got(self, name: str) -> dict[str, object]:
        """What the engine gets next."""
        engine = self.gateway.engines[name]
        await eventually(lambda: bool(engine.got))
        return got(engine)

    def forget(self) -> None:
        for one in self.gateway.engines.values():
            one.got.clear()
            one.headers.clear()


@pytest.mark.parametrize("model", ["good", "chained"])
async def test_a_copy_goes_to_the_mirror_and_its_answer_to_nobody(mirrored: Mirrored, model: str) -> None:
    gateway = mirrored.gateway
    for content, stream in (("hi", False), ("x" * 200_000, False), ("hi", True)):
        mirrored.forget()
        fields = {"messages": [{"role": "user", "content": content}], "max_tokens": 100, "stream": stream}
        answer = await gateway.ask(model, **fields)
        assert answer.status_code == 200
        assert answer.json()["model"] == model
        sent = await mirrored.got("c1")
        usage = {"stream_options": {"include_usage": True}} if stream else {}
        assert sent == {**fields, **usage, "model": "c/model", "max_tokens": 5}
        assert got(gateway.engines["a1"]) == {**fields, **usage, "model": "a/model"}
        (to_engine,), (to_mirror,) = (gateway.engines[name].headers for name in ("a1", "c1"))
        for headers in (to_engine, to_mirror):
            assert not [name for name in headers if name.startswith(("x-attache", "x-gateway"))]


async def test_a_mirror_that_fails_harms_nobody_and_is_asked_once(mirrored: Mirrored) -> None:
    mirrored.forget()
    assert (await mirrored.gateway.ask("ill")).status_code == 200
    await eventually(lambda: bool(mirrored.gateway.engines["d1"].got or mirrored.gateway.engines["d2"].got))
    # another copy comes after all attempts of the first one
    assert (await mirrored.gateway.ask("good")).status_code == 200
    await mirrored.got("c1")
    assert len(mirrored.gateway.engines["d1"].got) + len(mirrored.gateway.engines["d2"].got) == 1


async def test_no_client_can_order_a_copy(mirrored: Mirrored) -> None:
    mirrored.forget()
    order = '{"server":"default/c"}'
    headers = {"x-attache-mirror": order, "x-attache-mirrored": "1", "x-attache-server": "attache-mirror"}
    assert await served(mirrored.gateway, "never", headers) == "a1"
    # copies are made before answers come, so one that was ordered would come before the copy of this request
    assert (await mirrored.gateway.ask("good")).status_code == 200
    await mirrored.got("c1")
    assert len(mirrored.gateway.engines["c1"].got) == 1


async def test_nobody_is_charged_for_a_copy(mirrored: Mirrored) -> None:
    gateway, name = mirrored.gateway, "attache_tenant_requests_total"

    async def by_tenant() -> dict[str, float]:
        found = dict[str, float]()
        for labels, value in (await gateway.values(name)).items():
            for label in labels:
                found[label] = found.get(label, 0.0) + value
        return found

    before = await by_tenant()
    answers = [await gateway.ask("good") for _ in range(4)]
    left = {one.headers["x-ratelimit-remaining-requests"] for one in answers}
    assert len(left) == 4
    assert int(max(left)) - int(min(left)) == 3

    async def are_counted() -> bool:
        after = await by_tenant()
        return all(after.get(tenant, 0.0) - before.get(tenant, 0.0) == 4 for tenant in ("anonymous", "(mirror)"))

    await eventually(are_counted)
    await eventually(lambda: b"default/a" in mirrored.usage.read_bytes())
    assert not [word for word in (b"server/default/c", b"c/model", b"(mirror)") if word in mirrored.usage.read_bytes()]
