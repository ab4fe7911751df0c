# SPDX-License-Identifier: Apache-2.0
"""Virtual keys through a real Envoy and two workers of extproc: made, restricted, spent, rotated and revoked."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Final

import anthropic
import httpx
import openai
import pytest
import pytest_asyncio

from bench.stack.loopback_stack import ALIAS, EngineFlags, Stack, running_stack
from controller.keys.api_key_changes import parse_key_request, parse_key_update
from controller.keys.api_key_store import KeyAdmin, KeyStoreFile
from extproc.api.key_store import KEYS_FILE
from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.asyncio(loop_scope="module")

OPS: Final = "sk-ops-0123456789"
HELLO: Final[Any] = [{"role": "user", "content": "hello"}]
CHAT: Final = {"model": ALIAS, "messages": HELLO, "max_tokens": 2}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    async with running_stack(
        tmp_path_factory.mktemp("virtual-keys") / "stack",
        EngineFlags(count=1, speed=20.0, stream_headers="first-token"),
        watch=True,
        workers=2,
        gateway={"authentication": {"apiKeys": [{"name": "ops", "key": OPS, "tenant": "ops"}], "virtualKeys": {}}},
        headers={"authorization": f"Bearer {OPS}"},
    ) as running:
        yield running


@pytest.fixture
def admin(stack: Stack) -> KeyAdmin:
    return KeyAdmin(KeyStoreFile(stack.config), time.time)  # noqa: TID251 - keys expire by the wall clock


@pytest_asyncio.fixture(loop_scope="module")
async def http(stack: Stack) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=stack.url, timeout=60) as client:
        yield client


async def status(http: httpx.AsyncClient, key: str) -> int:
    return (await http.post("/v1/chat/completions", json=CHAT, headers={"authorization": f"Bearer {key}"})).status_code


async def until(http: httpx.AsyncClient, key: str, wanted: int, of: str = "/v1/models") -> None:
    """``/v1/models`` costs the key nothing."""

    async def holds() -> bool:
        if of == "/v1/models":
            return (await http.get(of, headers={"x-api-key": key})).status_code == wanted
        # both workers: requests of one connection go to both
        return {await status(http, key) for _ in range(6)} == {wanted}

    await eventually(holds)


def asked(name: str, **fields: object) -> Any:  # noqa: ANN401 - a request
    return parse_key_request({"name": name, "tenant": "acme", **fields})


async def test_openai_through_a_key_with_a_budget_and_a_model(
    stack: Stack, http: httpx.AsyncClient, admin: KeyAdmin
) -> None:
    budget = {"window": "Month", "max": {"requests": 2}}
    made = admin.create(asked("openai", models=[ALIAS], budgets=[budget]), "test")
    await until(http, made.key, 200)
    url = f"{stack.url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key=made.key, max_retries=0) as client:
        assert [one.id for one in (await client.models.list()).data] == [ALIAS]

        with pytest.raises(openai.PermissionDeniedError) as denied:
            await client.chat.completions.create(model="other", messages=HELLO)
        assert denied.value.code == "model_not_allowed"
        granted = 0

        async def is_never() -> bool:
            nonlocal granted
            try:
                await client.chat.completions.create(model=ALIAS, messages=HELLO, max_tokens=2)
            except openai.PermissionDeniedError:
                # by a worker that has not read the file yet
                return False
            granted += 1
            return False

        with pytest.raises(openai.RateLimitError) as spent:
            await eventually(is_never)
        # workers learn a moment later what others have granted
        assert 2 <= granted <= 4
    assert spent.value.code == "insufficient_quota"
    assert "The monthly budget of this API key (2 requests) is used up." in spent.value.message
    async with openai.AsyncOpenAI(base_url=url, api_key="sk-unknown-0123", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError):
            await client.chat.completions.create(model=ALIAS, messages=HELLO)


async def test_anthropic_through_a_key_with_a_budget_and_a_model(
    stack: Stack, http: httpx.AsyncClient, admin: KeyAdmin
) -> None:
    made = admin.create(asked("anthropic", models=[ALIAS], budgets=[{"window": "Day", "max": {"requests": 1}}]), "test")
    await until(http, made.key, 200)
    async with anthropic.AsyncAnthropic(base_url=stack.url, api_key=made.key, max_retries=0) as client:
        with pytest.raises(anthropic.PermissionDeniedError) as denied:
            await client.messages.create(model="other", max_tokens=2, messages=HELLO)

        granted = 0

        async def is_never() -> bool:
            nonlocal granted
            try:
                await client.messages.create(model=ALIAS, max_tokens=2, messages=HELLO)
            except anthropic.PermissionDeniedError:
                return False
            granted += 1
            return False

        with pytest.raises(anthropic.RateLimitError) as spent:
            await eventually(is_never)
        assert 1 <= granted <= 2
    assert denied.value.body["error"]["type"] == "permission_error"  # type: ignore[index]
    assert "The daily budget of this API key (1 requests) is used up" in str(spent.value.body)
    async with anthropic.AsyncAnthropic(base_url=stack.url, api_key="sk-unknown-0123", max_retries=0) as client:
        with pytest.raises(anthropic.AuthenticationError) as unknown:
            await client.messages.create(model=ALIAS, max_tokens=2, messages=HELLO)
    assert unknown.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]


async def test_a_limit_of_a_key_holds_over_all_workers(http: httpx.AsyncClient, admin: KeyAdmin) -> None:
    made = admin.create(asked("limited"), "test")
    await until(http, made.key, 200, "chats")
    admin.update("limited", parse_key_update({"rateLimits": [{"unit": "month", "requests": 3}]}), "test")
    await until(http, made.key, 429, "chats")
    admin.update("limited", parse_key_update({"rateLimits": []}), "test")
    await until(http, made.key, 200, "chats")


async def test_a_stream_of_a_revoked_key_ends_by_itself_and_the_next_request_is_refused(
    stack: Stack, http: httpx.AsyncClient, admin: KeyAdmin
) -> None:
    made = admin.create(asked("streams"), "test")
    await until(http, made.key, 200, "chats")
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key=made.key, max_retries=0) as client:
        stream = await client.chat.completions.create(model=ALIAS, messages=HELLO, max_tokens=300, stream=True)
        chunks = [await anext(stream)]
        admin.revoke("streams", "test")
        await until(http, made.key, 401)
        # the connection of the stream is refused, too
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()
        chunks += [one async for one in stream]
    assert chunks[-1].choices[0].finish_reason == "length"
    assert len([one for one in chunks if one.choices[0].delta.content]) >= 290


async def test_a_rotated_key_overlaps_and_a_deleted_one_is_unknown(http: httpx.AsyncClient, admin: KeyAdmin) -> None:
    first = admin.create(asked("rotated"), "test")
    await until(http, first.key, 200)
    second = admin.rotate("rotated", "test", overlap_s=3600.0)
    await until(http, second.key, 200)
    assert (await http.get("/v1/models", headers={"x-api-key": first.key})).status_code == 200
    third = admin.rotate("rotated", "test", overlap_s=0.0)
    await until(http, second.key, 401)
    await until(http, first.key, 401)
    await until(http, third.key, 200, "chats")
    admin.delete("rotated", "test")
    await until(http, third.key, 401)


async def test_a_key_expires(http: httpx.AsyncClient, admin: KeyAdmin) -> None:
    made = admin.create(asked("short"), "test")
    await until(http, made.key, 200)
    record = admin.update("short", parse_key_update({"expiresIn": "2s"}), "test")
    assert record.expires_at is not None
    await until(http, made.key, 401)
    assert admin.now >= record.expires_at
    admin.update("short", parse_key_update({"expiresAt": None}), "test")
    await until(http, made.key, 200)


async def test_a_broken_file_changes_nothing_and_a_missing_one_refuses_all(
    stack: Stack, http: httpx.AsyncClient, admin: KeyAdmin
) -> None:
    made, other = admin.create(asked("kept"), "test"), admin.create(asked("other"), "test")
    await until(http, made.key, 200, "chats")
    await until(http, other.key, 200)
    file = stack.config / KEYS_FILE
    good = file.read_bytes()
    for broken in (good[: len(good) // 2], b"", good.replace(b'"KeyStore"', b'"KeyShop"')):
        file.write_bytes(broken)

        async def is_refused() -> bool:
            return bool((await http.get(f"{stack.metrics}/config")).json()["refused"])

        await eventually(is_refused)
        assert await status(http, made.key) == 200
    file.unlink()
    await until(http, made.key, 401)
    assert (await http.get("/v1/models", headers={"x-api-key": OPS})).status_code == 200
    file.write_bytes(good)
    await until(http, made.key, 200, "chats")


async def test_no_hostile_key_is_let_in(stack: Stack, http: httpx.AsyncClient, admin: KeyAdmin) -> None:
    made = admin.create(asked("hostile"), "test")
    await until(http, made.key, 200)

    host, _, port = stack.url.removeprefix("http://").partition(":")

    async def ask(*headers: str) -> int:
        """As they are: no client library would send some of them."""
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write("\r\n".join(["GET /v1/models HTTP/1.1", "host: a", *headers, "", ""]).encode())
        answered = int((await reader.readline()).split()[1])
        writer.close()
        await writer.wait_closed()
        return answered

    key = made.key
    bad = ["", " ", "Bearer", "Bearer ", key[:-1], f"{key}x", key.swapcase(), f"{key},{key}", "k" * 5_000]
    assert {one[:20]: await ask(f"authorization: {one}") for one in bad} == {one[:20]: 401 for one in bad}
    # digests are no keys
    assert await ask(f"x-api-key: {made.record.key_sha256}") == 401
    assert await ask(f"x-api-key: {'k' * 1_000_000}") == 431
    assert await ask(f"x-api-key: {key}\0") == 400
    # authorization counts first, and values of one name are one text
    assert await ask("authorization: Bearer sk-unknown-0123", f"x-api-key: {key}") == 401
    assert await ask(f"authorization: Bearer {key}", "x-api-key: sk-unknown-0123") == 200
    # nobody names himself
    assert await ask("x-attache-client: hostile") == 401
    assert await ask(f"x-api-key: {key}") == 200
