# SPDX-License-Identifier: Apache-2.0
"""What rules of ModelRoutes decide, through a real Envoy and several workers of extproc."""

from __future__ import annotations

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
