# SPDX-License-Identifier: Apache-2.0
"""Policies of HTTPRoutes, ModelServers and listeners through a real Envoy: whatever leads to a model is decided on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from tests.with_envoy.http_stand import Servers, chat, document, ref, route, rule, stand

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import httpx

    from tests.with_envoy.http_stand import Stand

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = "/v1/chat/completions"
TO_RED = [{"from": [{"tenants": ["red"]}]}]


def policy(name: str, *targets: dict[str, str], rules: list[dict[str, object]]) -> dict[str, object]:
    return document("ModelAccessPolicy", name, {"targetRefs": list(targets), "rules": rules})


def server(name: str, address: str) -> dict[str, object]:
    return document("ModelServer", name, {"model": name, "endpoints": [{"address": address}], "scrapeInterval": "0s"})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stand]:
    """Three servers behind paths; two of them, and one listener, not for everybody."""
    servers = Servers()
    await servers.start("free", "guarded", "routed", "backend")
    targets = [{"modelServerName": "guarded"}]
    to_team = {"kind": "HTTPRoute", "name": "team", "group": "gateway.networking.k8s.io"}
    only_models = [{"from": [{"tenants": ["red"]}], "models": ["m", "law"]}]
    documents = [
        *(server(name, servers.addresses[name]) for name in ("free", "guarded", "routed")),
        document(
            "ModelRoute", "guarded", {"modelName": "g", "loraAdapters": ["law"], "rules": [{"targetModels": targets}]}
        ),
        document("ModelRoute", "free", {"modelName": "f", "rules": [{"targetModels": [{"modelServerName": "free"}]}]}),
        route("open", rule("/free", ref("free", "ModelServer")), rule("/guarded", ref("guarded", "ModelServer"))),
        route("team", rule("/team", ref("routed", "ModelServer"))),
        policy("server", {"kind": "ModelServer", "name": "guarded"}, rules=TO_RED),
        policy("adapter", {"kind": "ModelRoute", "name": "guarded"}, rules=only_models),
        policy("route", to_team, rules=only_models),
        policy("listener", {"kind": "GatewayConfig", "name": "gateway", "sectionName": "inside"}, rules=TO_RED),
    ]
    listeners = [{"name": name, "address": name} for name in ("outside", "inside")]
    settings = {"clients": "Trusted", "listeners": listeners}
    folder = tmp_path_factory.mktemp("routes") / "stand"
    async with stand(folder, servers, documents, settings, ("outside", "inside")) as one:
        yield one
    await servers.stop()


async def ask(
    gateway: Stand, tenant: str, path: str, model: str = "m", *, port: str = "outside", content: str | None = None
) -> httpx.Response:
    headers = {"x-attache-tenant": tenant}
    text = chat("hello", model) if content is None else content
    return await gateway.ask(path + CHAT, port=port, method="POST", headers=headers, content=text)


def outcome(answer: httpx.Response) -> str:
    """The server that answered, or why none did."""
    if answer.status_code == 200:
        return str(answer.headers["x-server"])
    return f"{answer.status_code} {answer.json()['error']['code']}"


REFUSED = "403 model_not_allowed"


@pytest.mark.parametrize(
    ("path", "model", "red", "blue"),
    [
        ("/free", "m", "free", "free"),
        ("/guarded", "m", "guarded", REFUSED),
        ("/guarded", "anything", "guarded", REFUSED),
        # a model of a ModelRoute with a policy of its own, by another way
        ("/guarded", "law", "guarded", REFUSED),
        ("/guarded", "g", REFUSED, REFUSED),
        ("/free", "law", "free", REFUSED),
        ("/team", "m", "routed", REFUSED),
        ("/team", "another", REFUSED, REFUSED),
        ("", "f", "free", "free"),
        ("", "law", "guarded", REFUSED),
        ("", "g", REFUSED, REFUSED),
        ("", "unheard-of", REFUSED, REFUSED),
    ],
)
async def test_whatever_leads_to_a_model_is_decided_on(
    gateway: Stand, path: str, model: str, red: str, blue: str
) -> None:
    assert outcome(await ask(gateway, "red", path, model)) == red
    assert outcome(await ask(gateway, "blue", path, model)) == blue


async def test_a_listener_may_be_for_some(gateway: Stand) -> None:
    assert outcome(await ask(gateway, "red", "/free", port="inside")) == "free"
    assert outcome(await ask(gateway, "blue", "/free", port="inside")) == REFUSED
    assert outcome(await ask(gateway, "blue", "", "f", port="inside")) == REFUSED
    assert outcome(await ask(gateway, "blue", "", "f", port="outside")) == "free"


@pytest.mark.parametrize(
    "content",
    ["", "{", '{"messages": []}', '{"model": 7}', '{"model": "m", "messages": "x", "n": "many"}', "[]", '"law"'],
)
async def test_a_body_that_cannot_be_read_opens_nothing(gateway: Stand, content: str) -> None:
    before = len(gateway.servers.told)
    for path in ("/guarded", "/team", ""):
        answer = await ask(gateway, "blue", path, content=content)
        assert answer.status_code in {400, 403}, answer.text
    assert len(gateway.servers.told) == before
    # where nothing is guarded, engines say themselves what is wrong
    assert outcome(await ask(gateway, "blue", "/free", content=content)) == "free"


async def test_a_path_that_is_no_api_opens_nothing(gateway: Stand) -> None:
    before = len(gateway.servers.told)
    for path in ("/guarded/v1/load_lora_adapter", "/team/metrics"):
        answer = await gateway.ask(path, port="outside", headers={"x-attache-tenant": "blue"})
        assert answer.status_code == 403, answer.text
    assert len(gateway.servers.told) == before


async def test_the_list_of_models_is_that_of_the_caller_and_its_listener(gateway: Stand) -> None:
    async def listed(tenant: str, port: str) -> list[str]:
        answer = await gateway.ask("/v1/models", port=port, headers={"x-attache-tenant": tenant})
        return sorted(one["id"] for one in answer.json()["data"])

    assert await listed("red", "outside") == ["f", "law"]
    assert await listed("blue", "outside") == ["f"]
    assert await listed("blue", "inside") == []
