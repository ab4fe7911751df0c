# SPDX-License-Identifier: Apache-2.0
"""HTTPRoutes whose extproc is gone, callers with keys, and limits that hold on every path."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from tests.with_envoy.http_stand import Servers, backend, chat, document, ref, route, rule, stand

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from tests.with_envoy.http_stand import Stand

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = "/v1/chat/completions"
CUT = {"type": "URLRewrite", "urlRewrite": {"path": {"type": "ReplacePrefixMatch", "replacePrefixMatch": "/"}}}


def model_route(name: str, listener: str, **more: object) -> dict[str, object]:
    """Each listener has a model called ``m``."""
    return document(
        "ModelRoute",
        name,
        {
            "modelName": "m",
            "parentRefs": [{"name": "gateway", "sectionName": listener}],
            "rules": [{"targetModels": [{"modelServerName": name}]}],
            **more,
        },
    )


def rewrite(kind: str, **path: str) -> dict[str, object]:
    return {"type": "URLRewrite", "urlRewrite": {"path": {"type": kind, **path}}}


def documents(addresses: Mapping[str, str], **limits: object) -> list[dict[str, Any]]:
    def server(name: str, *engines: str) -> dict[str, object]:
        endpoints = [{"address": addresses[one]} for one in engines]
        return document("ModelServer", name, {"model": f"real-{name}", "scrapeInterval": "0s", "endpoints": endpoints})

    return [
        backend("a", addresses["a"]),
        server("left", "engine-1", "engine-2"),
        server("right", "engine-3"),
        model_route("left", "left", **limits),
        model_route("right", "right"),
        route(
            "all",
            rule("/a", ref("a")),
            rule("/cors", ref("a"), filters=[{"type": "CORS", "cors": {"allowOrigins": ["https://app.test"]}}]),
            rule("/team", ref("left", "ModelServer"), filters=[CUT]),
            rule("/shared", ref("left", "ModelServer"), ref("a")),
            rule("/ask", ref("left", "ModelServer"), filters=[rewrite("ReplaceFullPath", replaceFullPath=CHAT)]),
            rule("/talk", ref("left", "ModelServer"), filters=[rewrite("ReplacePrefixMatch", replacePrefixMatch=CHAT)]),
            sections=["left"],
        ),
    ]


LISTENERS = [
    {"name": "left", "address": "left"},
    {"name": "right", "address": "right"},
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def servers() -> AsyncIterator[Servers]:
    """One server and three engines."""
    found = Servers()
    await found.start("a", "engine-1", "engine-2", "engine-3")
    yield found
    await found.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def opened(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stand]:
    """Failure mode Open, and extproc has been killed."""
    gateway = {"listeners": LISTENERS, "failureMode": "Open"}
    directory = tmp_path_factory.mktemp("open")
    async with stand(directory, servers, documents(servers.addresses), gateway, ("left", "right")) as one:
        await one.processes.end("extproc")
        yield one


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def closed(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stand]:
    """Failure mode Close, and extproc has been killed."""
    gateway = {"listeners": LISTENERS, "failureMode": "Close"}
    directory = tmp_path_factory.mktemp("closed")
    async with stand(directory, servers, documents(servers.addresses), gateway, ("left", "right")) as one:
        await one.processes.end("extproc")
        yield one


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def keyed(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stand]:
    """Callers have keys, and one model has a limit of two requests an hour."""
    keys = {"apiKeys": [{"name": "alice", "tenant": "acme", "key": "alices-own-key"}]}
    gateway = {"listeners": LISTENERS, "authentication": keys}
    limited = documents(servers.addresses, rateLimits=[{"requests": 2, "unit": "hour"}])
    directory = tmp_path_factory.mktemp("keyed")
    async with stand(directory, servers, limited, gateway, ("left", "right")) as one:
        yield one


async def test_without_extproc_envoy_balances_over_the_engines_of_the_chosen_server(opened: Stand) -> None:
    content = chat("hello", "whatever")

    found = Counter(
        [(await opened.served("/team" + CHAT, port="left", method="POST", content=content)).server for _ in range(40)]
    )
    other = await opened.served("/team/metrics", port="left")

    assert set(found) == {"engine-1", "engine-2"}
    assert other.path == "/metrics"
    assert other.server in found


async def test_without_extproc_clients_steer_no_engine_of_a_chosen_server(opened: Stand) -> None:
    steering = json.dumps({"model": "x", "kv_transfer_params": {"remote_host": "evil"}})
    internal = json.dumps({"model": "x", "cache_salt": "mine"})

    refused = await opened.ask("/team" + CHAT, port="left", method="POST", content=steering)
    told = await opened.served("/team" + CHAT, port="left", method="POST", content=internal)
    as_it_is = await opened.served("/a" + CHAT, port="left", method="POST", content=steering)

    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "kv_transfer_params"
    assert told.body == '{"model": "x"}'
    assert as_it_is.body == steering


async def test_without_extproc_each_listener_has_its_own_models(opened: Stand) -> None:
    left = {(await opened.served(CHAT, port="left", method="POST", content=chat("hi"))).server for _ in range(10)}
    right = {(await opened.served(CHAT, port="right", method="POST", content=chat("hi"))).server for _ in range(10)}
    told = await opened.served(CHAT, port="right", method="POST", content=chat("hi"))
    listed = await opened.ask("/v1/models", port="right")

    assert left <= {"engine-1", "engine-2"}
    assert right == {"engine-3"}
    assert '"model":"real-right"' in told.body
    assert [one["id"] for one in listed.json()["data"]] == ["m"]


async def test_without_extproc_what_it_would_decide_is_answered_503_and_the_rest_goes_on(closed: Stand) -> None:
    refused = await closed.ask("/team" + CHAT, port="left", method="POST", content=chat("hello"))
    shares = Counter([(await closed.ask("/shared", port="left")).status_code for _ in range(40)])

    assert (await closed.served("/a", port="left", method="POST", content="x")).server == "a"
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "no_picker"
    assert set(shares) == {200, 503}


async def test_callers_show_their_keys_to_every_backend(keyed: Stand) -> None:
    without = [(await keyed.ask(path, port="left")).status_code for path in ("/a", "/team/x", "/nothing")]
    told = await keyed.served("/a", port="left", headers={"authorization": "Bearer alices-own-key"})

    assert without == [401, 401, 401]
    assert told.server == "a"
    assert not [name for name in told.headers if name.startswith("x-attache")]


async def test_browsers_ask_without_keys(keyed: Stand) -> None:
    asks = {"origin": "https://app.test", "access-control-request-method": "GET"}

    answer = await keyed.ask("/cors", port="left", method="OPTIONS", headers=asks)
    refused = await keyed.ask("/cors", port="left", headers=asks)

    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "https://app.test")
    # the browser lets its script read why
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "https://app.test")


async def test_the_limits_of_a_model_hold_on_every_path(keyed: Stand) -> None:
    async def status(path: str, port: str = "left") -> int:
        headers = {"authorization": "Bearer alices-own-key"}
        answer = await keyed.ask(path, port=port, method="POST", content=chat("hello"), headers=headers)
        return answer.status_code

    assert [await status("/team" + CHAT), await status(CHAT)] == [200, 200]
    paths = ("/team" + CHAT, CHAT, "/ask", "/ask/anything", "/talk")
    assert [await status(path) for path in paths] == [429] * len(paths)
    assert await status(CHAT, port="right") == 200
    assert await status("/a" + CHAT) == 200
