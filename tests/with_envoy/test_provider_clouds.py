# SPDX-License-Identifier: Apache-2.0
"""The examples of docs/providers.md for clouds, through a real Envoy, with doubles of the clouds' servers."""

from __future__ import annotations

import re
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import openai
import pytest
import pytest_asyncio
import yaml

from tests.waiting import eventually
from tests.with_envoy.test_providers import (
    CHAT,
    CHAT_ANSWER,
    FORGED,
    KEY,
    MESSAGES,
    Attempt,
    Gateway,
    Server,
    chain,
    engine,
    running,
    tls_of,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.asyncio(loop_scope="module")

PAGE: Final = Path(__file__).parents[2] / "docs" / "providers.md"
# Of the page, by name: the path and the headers that its server gets.
SHOWN: Final = {
    "azure": (CHAT, "/openai/v1/chat/completions", {"api-key": KEY}),
    "azure-deployment": (
        CHAT,
        "/openai/deployments/my-deployment/chat/completions?api-version=2024-10-21",
        {"api-key": KEY},
    ),
    "azure-entra": (MESSAGES, "/anthropic/v1/messages", {"authorization": f"Bearer {KEY}"}),
}
# By which clients, or other attempts, would be known there.
CREDENTIALS: Final = {"authorization", "api-key", "x-api-key", "x-amz-date", "x-amz-security-token", "cookie"}


def examples() -> dict[str, dict[str, Any]]:
    """The page's ModelServers of clouds, by name."""
    texts = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    found = {one["metadata"]["name"]: one for text in texts for one in yaml.safe_load_all(text)}
    others = {"chat", "own", "elsewhere"}
    return {name: one for name, one in found.items() if name not in others}


def at_double(document: dict[str, Any], double: Server, key: Path) -> dict[str, Any]:
    """The example with another host, and its key elsewhere."""
    spec = document["spec"]
    spec["provider"] |= {"host": "localhost", "port": double.port}
    spec["connection"] = {"apiKeyFile": str(key)}
    spec["trafficPolicy"] = {"outlierDetection": {"consecutiveFailures": 1000}, "retry": {"attempts": 0}}
    return document


@asynccontextmanager
async def stack(folder: Path, **spec: object) -> AsyncIterator[Gateway]:
    """Own engines ``a`` and ``c``, and a server ``cloud``, at which all examples are."""
    log: list[Attempt] = []
    servers = {name: Server(name, log) for name in ("a", "c", "cloud")}
    context, ca = tls_of(folder)
    key = folder / "cloud.key"
    key.write_text(f"{KEY}\n")
    async with AsyncExitStack() as started:
        started.enter_context(pytest.MonkeyPatch.context()).setenv("SSL_CERT_FILE", str(ca))
        for name, one in servers.items():
            await started.enter_async_context(one.running(context if name == "cloud" else None))
        documents = [
            *(engine(name, servers[name]) for name in "ac"),
            *(at_double(one, servers["cloud"], key) for one in examples().values()),
            *(chain(*names) for name in SHOWN for names in ((name,), ("a", name, "c"))),
        ]
        gateway = Gateway(folder / "stack", servers, log, names=("a", "c", *SHOWN))
        gateway.directory.mkdir()
        async with running(gateway, documents, spec) as found:
            yield found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    async with stack(tmp_path_factory.mktemp("clouds")) as found:
        yield found


async def test_each_example_of_the_page_is_tried() -> None:
    assert examples().keys() == SHOWN.keys()


@pytest.mark.parametrize("name", SHOWN)
async def test_a_cloud_gets_its_path_and_key_and_nothing_of_the_client(gateway: Gateway, name: str) -> None:
    await gateway.heal()
    path, there, shown = SHOWN[name]
    forged = {**FORGED, "api-key": "of-the-client", "x-amz-date": "of-the-client", "x-amz-security-token": "x"}
    answer = await gateway.ask(name, f"{path}?api-version=of-the-client", headers=forged)
    assert answer.status_code == 200, answer.text
    (asked,) = gateway.log
    assert asked.path == there
    assert {header: asked.headers[header] for header in CREDENTIALS & asked.headers.keys()} == shown
    assert "of-the-client" not in str(asked)


@pytest.mark.parametrize("name", SHOWN)
async def test_other_attempts_have_neither_its_path_nor_its_key(gateway: Gateway, name: str) -> None:
    await gateway.heal()
    path, there, shown = SHOWN[name]
    for one in ("a", "cloud"):
        gateway.servers[one].status = 503
    assert await gateway.tried(f"a-{name}-c", path) == ["a", "cloud", "c"]
    assert [one.path for one in gateway.log] == [path, there, path]
    assert [CREDENTIALS & one.headers.keys() for one in gateway.log] == [set(), shown.keys(), set()]


@pytest.mark.parametrize("name", SHOWN)
async def test_a_refused_key_is_502_and_goes_on_to_a_fallback(gateway: Gateway, name: str) -> None:
    await gateway.heal()
    gateway.servers["cloud"].status, gateway.servers["cloud"].text = 401, f"no such key: {KEY}"
    answer = await gateway.ask(name, SHOWN[name][0])
    assert answer.status_code == 502
    assert KEY not in answer.text
    await gateway.heal()
    gateway.servers["cloud"].status, gateway.servers["a"].status = 401, 503
    assert await gateway.tried(f"a-{name}-c", SHOWN[name][0]) == ["a", "cloud", "c"]


async def test_openais_client_streams_from_a_deployment(gateway: Gateway) -> None:
    await gateway.heal()
    asked: Any = [{"role": "user", "content": "hi"}]
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="of-the-client", max_retries=0) as client:
        stream = await client.chat.completions.create(model="azure-deployment", messages=asked, stream=True)
        assert "".join([one.choices[0].delta.content or "" async for one in stream if one.choices]) == "hello"
    gateway.served += 1


async def test_a_token_that_is_rewritten_is_used_without_a_restart(gateway: Gateway) -> None:
    await gateway.heal()
    file = gateway.directory.parent / "cloud.key"
    for token in ("eyJ.of-the-next-hour", KEY):
        # as a program beside the gateway does it
        draft = file.with_suffix(".draft")
        draft.write_text(token)
        draft.replace(file)

        async def is_used(token: str = token) -> bool:
            await gateway.tried("azure-entra", MESSAGES)
            await gateway.tried("azure")
            return gateway.log[-1].headers["api-key"] == token

        await eventually(is_used)
        await gateway.tried("azure-entra", MESSAGES)
        assert gateway.log[-1].headers["authorization"] == f"Bearer {token}"


async def test_it_is_the_same_without_extproc(tmp_path: Path) -> None:
    async with stack(tmp_path, failureMode="Open") as gateway:
        await gateway.processes.end("extproc")

        async def is_served() -> bool:
            return (await gateway.ask("azure")).status_code == 200

        await eventually(is_served)
        for name, (path, there, shown) in SHOWN.items():
            answer = await gateway.ask(name, path)
            assert answer.status_code == 200
            if path == CHAT:
                assert answer.json()["usage"] == CHAT_ANSWER["usage"]
            assert gateway.log[-1].path == there
            assert CREDENTIALS & gateway.log[-1].headers.keys() == shown.keys()
