# SPDX-License-Identifier: Apache-2.0
"""What the manager reads from the agents of pods: bounded, and one that hangs or lies costs no other."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from aiohttp import web

from bench.stack.processes import free_ports
from controller.models import agent_model_lists
from controller.models.agent_model_lists import AgentModelLists
from controller.models.model.model_state import ReportedModel

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

GOOD = b'{"object": "list", "limit": 0, "data": [{"id": "a", "state": "failed", "message": "why", "path": ""}]}'


@pytest.fixture
async def lists(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[AgentModelLists]:
    bodies: dict[str, bytes | None] = {
        "127.0.0.2": GOOD,
        "127.0.0.3": None,
        "127.0.0.4": b"[" * 100_000,
        "127.0.0.5": b'{"data": [' + b" " * (5 << 20) + b"]}",
        "127.0.0.6": b'{"data": [{"id": 1, "state": "loaded"}]}',
    }
    (port,) = free_ports(1)

    async def answer(http: web.Request) -> web.Response:
        host = http.host.partition(":")[0]
        if host == "127.0.0.7":
            return web.Response(status=302, headers={"location": f"http://127.0.0.2:{port}/v1/adapters"})
        if bodies[host] is None:
            await asyncio.Event().wait()
        return web.Response(body=bodies[host])

    app = web.Application()
    app.router.add_get("/v1/adapters", answer)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    for host in (*bodies, "127.0.0.7"):
        await web.TCPSite(runner, host, port).start()
    monkeypatch.setattr(agent_model_lists, "AGENT_PORT", port)
    monkeypatch.setattr(agent_model_lists, "_TIMEOUT_S", 0.5)
    pods: dict[str, dict[str, Any]] = {
        f"default/{number}": {"status": {"podIP": f"127.0.0.{number}"}} for number in range(2, 9)
    }
    async with aiohttp.ClientSession() as http:
        yield AgentModelLists(http, {**pods, "default/new": {"status": {}}}.get)
    await runner.cleanup()


async def test_only_answers_of_the_right_form_and_size_count(lists: AgentModelLists) -> None:
    asked = [*(f"default/{number}" for number in range(2, 9)), "default/new", "default/gone"]
    assert await lists.fetch(asked) == {"default/2": [ReportedModel("a", "failed", "why")]}
