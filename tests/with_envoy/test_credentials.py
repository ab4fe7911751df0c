# SPDX-License-Identifier: Apache-2.0
"""API keys through a real Envoy: given in all ways, followed, expired, good for some models, and nowhere to be read."""

from __future__ import annotations

import hashlib
import stat
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import httpx
import msgspec
import openai
import pytest
import pytest_asyncio

from bench.stack.loopback_stack import ALIAS, EngineFlags, Stack, running_stack
from tests.waiting import eventually
from tests.with_envoy.test_admission import edit, metric, spec_of
from tests.with_envoy.test_bad_input import upgraded

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = pytest.mark.asyncio(loop_scope="module")

PLAIN, HASHED, FILED, SOON, DATED = "sk-plain-0123", "sk-hashed-0123", "sk-filed-0123", "sk-soon-0123", "sk-dated-0123"
LORA_ONLY = "sk-lora-0123"
# the sizes at which SHA-256 needs another block of 64 bytes
LONG = [f"{'k' * (size - 4)}-end" for size in (55, 56, 63, 64, 119, 120, 512)]


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("keys") / "filed"
    file.write_text(f"{FILED}\n")
    file.chmod(0o644)
    return file


def keys(file: Path) -> list[dict[str, Any]]:
    # the configuration is in a folder of the stack's
    relative = f"../../../{file.parent.name}/{file.name}"
    return [
        {"name": "plain", "key": PLAIN, "tenant": "acme"},
        {"name": "hashed", "keySHA256": digest(HASHED).upper(), "tenant": "acme"},
        {"name": "filed", "keyFile": relative, "tenant": "bell"},
        {"name": "dated", "key": DATED, "tenant": "bell", "expiresAt": "2001-01-01T00:00:00Z"},
        {"name": "lora-only", "key": LORA_ONLY, "tenant": "lora"},
        *({"name": f"long-{number}", "keySHA256": digest(key), "tenant": "long"} for number, key in enumerate(LONG)),
    ]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory, key_file: Path) -> AsyncIterator[Stack]:
    """With keys of each kind, and a bundle that is followed."""
    async with running_stack(
        tmp_path_factory.mktemp("credentials") / "stack",
        EngineFlags(count=1, speed=20.0, stream_headers="first-token", adapters=("sql",)),
        gateway={
            "authentication": {"apiKeys": keys(key_file)},
            "tenants": [{"name": "lora", "models": ["sql"]}],
        },
        headers={"authorization": f"Bearer {PLAIN}"},
        extproc_flags=["--debug", "--decision-log", str(key_file.parent / "decisions"), "--decision-sample", "1"],
        watch=True,
    ) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def http(stack: Stack) -> AsyncIterator[httpx.AsyncClient]:
    """One connection, which stays open."""
    limits = httpx.Limits(max_connections=1)
    async with httpx.AsyncClient(base_url=stack.url, timeout=30, limits=limits) as one:
        yield one


async def test_load_balancers_need_no_key_for_health_and_nobody_else_gets_by(http: httpx.AsyncClient) -> None:
    assert (await http.get("/healthz")).text == "ok\n"
    for path in ("/healthz/", "/healthz/x", "/v1/models", "/HEALTHZ"):
        assert (await http.get(path)).status_code == 401
    # whatever the method
    assert (await http.post("/healthz", content=b"{}")).status_code == 200


async def test_a_request_for_an_upgrade_is_answered_where_extproc_must_decide(stack: Stack) -> None:
    body = b'{"model": "llama", "messages": []}'
    status, told = await upgraded(stack, "POST /v1/chat/completions", f"x-api-key: {PLAIN}", body=body)
    assert status == 404
    assert "without the header 'upgrade'" in told


async def answer(http: httpx.AsyncClient, model: str = ALIAS, **headers: str) -> httpx.Response:
    body = {"model": model, "max_tokens": 1, "messages": [{"role": "user", "content": "hello"}]}
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return await http.post("/v1/chat/completions", json=body, headers=named)


async def status(http: httpx.AsyncClient, key: str) -> int:
    return (await answer(http, authorization=f"Bearer {key}")).status_code


@pytest.mark.parametrize("key", [PLAIN, HASHED, FILED, *LONG], ids=len)
async def test_a_key_is_known_however_it_is_given(http: httpx.AsyncClient, key: str) -> None:
    assert await status(http, key) == 200


@pytest.mark.parametrize("key", [DATED, digest(PLAIN), digest(HASHED), "sk-plain-0124", "x" * 5000, "Bearer"])
async def test_other_keys_are_refused(http: httpx.AsyncClient, key: str) -> None:
    refused = await answer(http, authorization=f"Bearer {key}")
    assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"authorization": PLAIN}, 200),
        ({"authorization": f"bEARER  {PLAIN}"}, 200),
        ({"x_api_key": PLAIN}, 200),
        ({"authorization": "", "x_api_key": PLAIN}, 200),
        ({"authorization": f"Bearer {PLAIN}", "x_api_key": "another"}, 200),
        ({"authorization": "Bearer another", "x_api_key": PLAIN}, 401),
        ({"authorization": f"Basic {PLAIN}"}, 401),
        ({"x_attache_client": "plain"}, 401),
        ({}, 401),
    ],
)
async def test_where_a_key_may_stand(http: httpx.AsyncClient, headers: dict[str, str], expected: int) -> None:
    assert (await answer(http, **headers)).status_code == expected


async def test_a_caller_meets_only_the_models_that_are_its_own(stack: Stack) -> None:
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key=LORA_ONLY, max_retries=0) as client:
        assert [one.id async for one in client.models.list()] == ["sql"]
        assert (await client.models.retrieve("sql")).id == "sql"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve(ALIAS)
        asked: list[Any] = [{"role": "user", "content": "hello"}]
        assert (await client.chat.completions.create(model="sql", messages=asked, max_tokens=1)).choices
        with pytest.raises(openai.PermissionDeniedError) as caught:
            await client.chat.completions.create(model=ALIAS, messages=asked, max_tokens=1)
    assert (caught.value.code, caught.value.param) == ("model_not_allowed", "model")
    body = f'{{"model": "sql", "m\\u006fdel": "{ALIAS}", "messages": []}}'
    async with httpx.AsyncClient(timeout=60) as http:
        hidden = await http.post(
            f"{stack.url}/v1/chat/completions", content=body, headers={"authorization": f"Bearer {LORA_ONLY}"}
        )
    assert hidden.status_code == 403


async def test_changes_of_keys_hold_on_connections_that_are_open(
    stack: Stack, http: httpx.AsyncClient, key_file: Path
) -> None:
    assert await status(http, FILED) == 200
    replacement = key_file.with_suffix(".new")
    replacement.write_text("sk-of-the-next-month")
    replacement.replace(key_file)

    async def is_revoked() -> bool:
        return await status(http, FILED) == 401

    await eventually(is_revoked)
    assert await status(http, "sk-of-the-next-month") == 200

    # a file that turns bad changes nothing
    replacement.write_text("short")
    replacement.replace(key_file)
    await eventually(lambda: is_said(stack, "its last keys stay"))
    assert await status(http, "sk-of-the-next-month") == 200

    expires_at = (datetime.now(UTC) + timedelta(seconds=20)).isoformat()
    soon = {"name": "soon", "key": SOON, "tenant": "acme", "expiresAt": expires_at}
    gateway: Any = spec_of(stack, "GatewayConfig")
    edit(stack, "GatewayConfig", authentication={"apiKeys": [*gateway["authentication"]["apiKeys"], soon]})

    async def is_known() -> bool:
        return await status(http, SOON) == 200

    async def has_expired() -> bool:
        return await status(http, SOON) == 401

    await eventually(is_known)
    await eventually(has_expired)
    async with httpx.AsyncClient(timeout=60) as admin:
        stats = (await admin.get(f"{stack.admin}/stats", params={"filter": "listener_modified|cx_total$"})).text
    # nobody had to connect again
    assert "listener_manager.listener_modified: 0" in stats


async def is_said(stack: Stack, what: str) -> bool:
    return what in (stack.directory / "bundle.log").read_text()


async def read_all(directory: Path) -> dict[Path, str]:
    """All files, none of which was moved to its place meanwhile."""
    found: dict[Path, str] = {}

    def none_is_gone() -> bool:
        found.clear()
        try:
            found.update((file, file.read_text()) for file in directory.rglob("*") if file.is_file())
        except FileNotFoundError:
            return False
        return True

    await eventually(none_is_gone)
    return found


class LoggedUsage(msgspec.Struct, frozen=True):
    """A line of the decision log: who asked for what, and the tokens in it once it is over."""

    kind: str
    tenant: str
    api_key: str
    request_id: str
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


async def test_usage_is_counted_by_tenant_and_logged_by_request(
    stack: Stack, http: httpx.AsyncClient, key_file: Path
) -> None:
    answered = await answer(http, authorization=f"Bearer {HASHED}")
    usage = answered.json()["usage"]

    def logged() -> list[LoggedUsage]:
        whole, _, _ = key_file.with_name("decisions").read_bytes().rpartition(b"\n")
        return [msgspec.json.decode(line, type=LoggedUsage) for line in whole.splitlines()]

    def of_the_request() -> list[LoggedUsage]:
        return [one for one in logged() if one.request_id == answered.headers["x-request-id"]]

    async def is_over() -> bool:
        return len(of_the_request()) == 2

    await eventually(is_over)
    decision, outcome = of_the_request()
    assert (decision.kind, outcome.kind) == ("decision", "outcome")
    assert (decision.tenant, decision.api_key) == (outcome.tenant, outcome.api_key) == ("acme", "hashed")
    assert (outcome.prompt_tokens, outcome.completion_tokens) == (usage["prompt_tokens"], usage["completion_tokens"])

    async def is_counted() -> bool:
        ours = [one for one in logged() if one.tenant == "acme"]
        prompt, output = sum(one.prompt_tokens or 0 for one in ours), sum(one.completion_tokens or 0 for one in ours)
        return (
            await metric(stack, "attache_tenant_prompt_tokens_total", tenant="acme") == prompt
            and await metric(stack, "attache_tenant_output_tokens_total", tenant="acme") == output
        )

    await eventually(is_counted)


async def test_keys_are_nowhere_to_be_read(stack: Stack, http: httpx.AsyncClient, key_file: Path) -> None:
    for key in (PLAIN, HASHED, FILED, DATED, LORA_ONLY):
        await status(http, key)
    async with httpx.AsyncClient(timeout=60) as pages:
        shown = [(await pages.get(f"{stack.admin}/config_dump", params={"include_eds": ""})).text]
        shown.append((await pages.get(f"{stack.metrics}/metrics")).text)
        asked = {"model": ALIAS, "messages": [{"role": "user", "content": "hello"}]}
        explained = await pages.post(f"{stack.metrics}/debug/explain/v1/chat/completions", json=asked)
        assert explained.status_code == 200
        shown.append(explained.text)
    written = await read_all(stack.directory / "envoy")
    logs = [*stack.directory.glob("*.log"), key_file.with_name("decisions")]
    assert written
    assert {file.stem for file in logs} >= {"envoy", "extproc", "bundle"}
    shown += [*written.values(), *(file.read_text() for file in logs)]
    for key in (PLAIN, HASHED, FILED, DATED, LORA_ONLY, *LONG):
        assert not [text for text in shown if key in text]
    assert await is_said(stack, "every user of this machine can read the key in it")
    by_name = {file.name: file for file in written}
    assert stat.S_IMODE(by_name["keys.json"].stat().st_mode) == 0o600
    assert stat.S_IMODE(by_name["lds.json"].stat().st_mode) == 0o644
