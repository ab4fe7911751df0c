# SPDX-License-Identifier: Apache-2.0
"""What of a client's body and headers reaches an engine, and what of the engine's reaches the client."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from tests.with_envoy.stand_in import Gateway, gateway_on

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    import httpx

pytestmark = pytest.mark.asyncio(loop_scope="module")

KEYS = {
    "authentication": {
        "apiKeys": [
            {"name": "acme-1", "key": "acme-secret-1", "tenant": "acme", "user": "ann"},
            {"name": "acme-2", "key": "acme-secret-2", "tenant": "acme", "user": "bob"},
            {"name": "other", "key": "other-secret", "tenant": "other"},
        ]
    }
}
STEERING = ("kv_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room", "data_parallel_rank")
# beside the model, which alone is checked against what a caller may use
CHOOSING = ("lora_path", "lora_request", "session_params", "disaggregated_params")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    async with gateway_on(tmp_path_factory.mktemp("fields")) as running:
        running.engine.is_plain = True
        yield running


async def post(gateway: Gateway, content: bytes, **headers: str) -> httpx.Response:
    return await gateway.http.post(f"{gateway.url}/v1/chat/completions", content=content, headers=headers)


def chat(**fields: object) -> bytes:
    return json.dumps({"model": "llama", "messages": [], **fields}).encode()


@pytest.mark.parametrize("name", STEERING + CHOOSING)
@pytest.mark.parametrize("escaped", [False, True])
async def test_a_client_cannot_say_where_engines_connect(gateway: Gateway, name: str, *, escaped: bool) -> None:
    body = chat(**{name: "10.0.0.9"})
    if escaped:
        body = body.replace(f'"{name}'.encode(), f'"\\u{ord(name[0]):04x}{name[1:]}'.encode())
    answer = await post(gateway, body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == name


@pytest.mark.parametrize("model", ["llama", "sql"])
async def test_what_gateways_set_is_removed(gateway: Gateway, model: str) -> None:
    fields = {"priority": -5, "cache_salt": "mine", "request_id": "r", "rid": "r", "seed": 1}
    assert (await post(gateway, chat(**fields, model=model))).status_code == 200
    assert set(gateway.engine.asked) == {"model", "messages", "seed"}


async def test_a_server_that_allows_fields_gets_them(tmp_path: Path) -> None:
    fields = {"priority": -5, "cache_salt": "mine", "data_parallel_rank": 1}
    async with gateway_on(tmp_path, more={"allowedFields": list(fields)}) as open_one:
        open_one.engine.is_plain = True
        assert (await post(open_one, chat(**fields))).status_code == 200
        assert fields.items() <= open_one.engine.asked.items()


@pytest.mark.parametrize("model", ["llama", "sql"])
async def test_an_engine_reads_each_name_once_and_plain(gateway: Gateway, model: str) -> None:
    body = (
        b'{"model": "llama", "n": 50, "max_tokens": 9000, "stream": true, "messages": [], "n": 1, "max_tokens": 5, '
        b'"\\u0073tream": false, "seed": 9007199254740993, "m\\u006fdel": "%s"}' % model.encode()
    )
    assert (await post(gateway, body)).status_code == 200
    pairs: list[tuple[str, Any]] = json.loads(gateway.engine.body, object_pairs_hook=list)
    names = [name for name, _ in pairs]
    assert sorted(names) == ["max_tokens", "messages", "model", "n", "seed", "stream"]
    assert b"\\u" not in gateway.engine.body
    assert gateway.engine.asked["n"] == 1
    assert gateway.engine.asked["max_tokens"] == 5
    assert gateway.engine.asked["stream"] is False
    assert gateway.engine.asked["seed"] == 9007199254740993


@pytest.mark.parametrize(
    "name",
    [
        "x-data-parallel-rank",
        "X-Session-Token",
        "x-prefiller-host-port",
        "x-prefiller-url",
        "x_data_parallel_rank",
        "x-override-bootstrap-host",
        "x-override-rid",
    ],
)
async def test_headers_that_engines_obey_are_removed(gateway: Gateway, name: str) -> None:
    assert (await post(gateway, chat(), **{name: "10.0.0.9:1", "x-harmless": "1"})).status_code == 200
    assert name.lower() not in gateway.engine.asked_headers
    assert gateway.engine.asked_headers["x-harmless"] == "1"


async def test_answers_have_a_request_id_and_do_not_name_the_engines_server(gateway: Gateway) -> None:
    gateway.engine.headers = {"server": "uvicorn/0.1"}
    for body in (chat(), b"not JSON"):
        answer = await post(gateway, body)
        assert answer.headers["server"] == "attache"
        assert answer.headers["x-request-id"]
    gateway.engine.headers = {}


async def test_the_engine_that_answered_is_named_only_if_wanted(gateway: Gateway, tmp_path: Path) -> None:
    assert not [name for name in (await post(gateway, chat())).headers if "served" in name]
    async with gateway_on(tmp_path, gateway={"servedHeader": "X-Served-By"}) as named:
        answer = await post(named, chat())
        assert re.fullmatch(r"127\.0\.0\.1:\d+", answer.headers["x-served-by"])


async def salt(gateway: Gateway, key: str, **fields: object) -> str | None:
    answer = await post(gateway, chat(**fields), authorization=f"Bearer {key}")
    assert answer.status_code == 200
    found: str | None = gateway.engine.asked.get("cache_salt")
    return found


async def test_tenants_get_caches_of_their_own(tmp_path: Path) -> None:
    async with gateway_on(tmp_path, gateway=KEYS, headers={"authorization": "Bearer other-secret"}) as keyed:
        keyed.engine.is_plain = True
        acme = await salt(keyed, "acme-secret-1")
        assert acme is not None
        assert len(acme) == 64
        assert await salt(keyed, "acme-secret-2", cache_salt="mine") == acme
        assert await salt(keyed, "other-secret", cache_salt=acme) not in {acme, None}


@pytest.mark.parametrize(("mode", "apart"), [("User", True), ("Header:X-Team", True), ("Shared", False)])
async def test_caches_are_divided_as_configured(tmp_path: Path, mode: str, *, apart: bool) -> None:
    configured = {**KEYS, "cacheIsolation": mode, "cacheSecret": "a secret of all replicas"}
    async with gateway_on(tmp_path, gateway=configured, headers={"authorization": "Bearer other-secret"}) as keyed:
        keyed.engine.is_plain = True
        keyed.http.headers["x-team"] = "red"
        first = await salt(keyed, "acme-secret-1")
        keyed.http.headers["x-team"] = "blue"
        second = await salt(keyed, "acme-secret-2")
        assert (first != second) is apart
        assert (first is None) is not apart
