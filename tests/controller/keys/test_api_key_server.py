# SPDX-License-Identifier: Apache-2.0
"""The admin API of virtual keys."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio
from aiohttp.test_utils import TestClient, TestServer

from controller.keys.api_key_server import KeysApi
from controller.keys.api_key_store import AUDIT_FILE, KeyAdmin, KeyStoreFile
from tests.controller.keys.test_api_key_store import CONFIG, NOON_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

TOKEN = "an-admin-token-0123"  # noqa: S105 - of a test
MINE = {"authorization": f"Bearer {TOKEN}"}


@pytest_asyncio.fixture
async def client(tmp_path: Path) -> AsyncIterator[TestClient[Any, Any]]:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "all.yaml").write_text(CONFIG)
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    api = KeysApi(KeyAdmin(KeyStoreFile(tmp_path / "config"), lambda: NOON_S), tmp_path / "token")
    async with TestClient(TestServer(api.app()), headers=MINE) as made:
        yield made


async def test_the_life_of_a_key(client: TestClient[Any, Any], tmp_path: Path) -> None:
    answer = await client.post("/v1/keys", json={"name": "web", "tenant": "acme", "expiresIn": "1h"})
    assert (answer.status, answer.headers["cache-control"]) == (201, "no-store")
    made = await answer.json()
    assert made["key"].startswith("sk-")
    assert (made["status"], made["expiresAt"]) == ("active", "2026-11-23T13:00:00Z")
    listed = (await (await client.get("/v1/keys")).json())["keys"]
    assert listed == [{name: value for name, value in made.items() if name != "key"}]
    rotated = await (await client.post("/v1/keys/web/rotate", json={"overlap": "10m"})).json()
    assert rotated["key"] != made["key"]
    assert rotated["previous"] == {"until": "2026-11-23T12:10:00Z"}
    again = await (await client.post(f"/v1/keys/{made['id']}/rotate")).json()
    assert "previous" not in again
    updated = await (await client.patch("/v1/keys/web", json={"models": ["llama"]})).json()
    assert (updated["models"], updated["expiresAt"]) == (["llama"], made["expiresAt"])
    assert (await (await client.post("/v1/keys/web/revoke")).json())["status"] == "revoked"
    assert (await (await client.get("/v1/keys/web")).json())["status"] == "revoked"
    assert (await client.delete("/v1/keys/web")).status == 200
    assert (await client.get("/v1/keys/web")).status == 404
    audit = [json.loads(line) for line in (tmp_path / "config" / AUDIT_FILE).read_text().splitlines()]
    assert [one["action"] for one in audit] == ["create", "rotate", "rotate", "update", "revoke", "delete"]
    assert {one["actor"] for one in audit} == {"api 127.0.0.1"}


@pytest.mark.parametrize(
    "given", ["", f"Basic {TOKEN}", "Bearer", "Bearer ", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", "Bearer \xe9"]
)
async def test_without_the_token_nothing_is_answered(client: TestClient[Any, Any], given: str) -> None:
    for method, path in (("GET", "/v1/keys"), ("POST", "/v1/keys"), ("DELETE", "/v1/keys/web"), ("GET", "/other")):
        answer = await client.request(method, path, headers={"authorization": given})
        assert answer.status == 401


async def test_a_replaced_token_holds_at_once_and_a_missing_one_opens_nothing(
    client: TestClient[Any, Any], tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("another-admin-token")
    assert (await client.get("/v1/keys")).status == 401
    assert (await client.get("/v1/keys", headers={"authorization": "Bearer another-admin-token"})).status == 200
    for content in ("", "short"):
        (tmp_path / "token").write_text(content)
        assert (await client.get("/v1/keys", headers={"authorization": f"Bearer {content}"})).status == 503
    (tmp_path / "token").unlink()
    assert (await client.get("/v1/keys")).status == 503


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/v1/keys", b"", 400),
        ("POST", "/v1/keys", b"[" * 100_000, 400),
        ("POST", "/v1/keys", b"\xff", 400),
        ("POST", "/v1/keys", b'{"name": "web"}', 400),
        ("POST", "/v1/keys", b'{"name": "web", "tenant": "a", "id": "0"}', 400),
        ("POST", "/v1/keys", b'{"name": "ops", "tenant": "a"}', 409),
        ("POST", "/v1/keys", b" " * 2_000_000, 413),
        ("POST", "/v1/keys/none/rotate", b"{}", 404),
        ("POST", "/v1/keys/none/rotate", b'{"overlap": "soon"}', 400),
        ("POST", "/v1/keys/none/rotate", b'{"other": "1h"}', 400),
        ("PATCH", "/v1/keys/none", b"{}", 404),
        ("PATCH", "/v1/keys/none", b'{"tenant": "b"}', 400),
        ("GET", "/v1/keys/%00%0a", None, 404),
        ("PUT", "/v1/keys", None, 405),
        ("GET", "/other", None, 404),
    ],
)
async def test_whatever_is_asked_is_answered_in_one_form(
    client: TestClient[Any, Any], method: str, path: str, body: bytes | None, status: int
) -> None:
    answer = await client.request(method, path, data=None if body is None else io.BytesIO(body))
    assert answer.status == status
    error = (await answer.json())["error"]
    assert error["code"] == status
    assert error["message"]


async def test_a_broken_store_is_an_error_of_the_server(client: TestClient[Any, Any], tmp_path: Path) -> None:
    (tmp_path / "config" / "keys.json").write_text("{")
    answer = await client.get("/v1/keys")
    assert answer.status == 500
    assert "put a good copy there" in (await answer.json())["error"]["message"]
