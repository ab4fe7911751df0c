# SPDX-License-Identifier: Apache-2.0
"""REST requests of V1 and V2 count as in flight until their answers are over."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import httpx
import pytest
import yaml
from aiohttp import web

from bench.stack.loopback_stack import EngineFlags, running_stack
from tests.waiting import eventually
from tests.with_envoy.test_protocols import INFER, counted, route, server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


@asynccontextmanager
async def gated(gate: asyncio.Event) -> AsyncIterator[str]:
    """An engine that answers when ``gate`` is set."""

    async def answer(http: web.Request) -> web.Response:
        await http.read()
        await gate.wait()
        return web.json_response({"model_name": "slow", "outputs": [], "predictions": []})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(("protocol", "path"), [("V2", "/v2/models/slow/infer"), ("V1", "/v1/models/slow:predict")])
async def test_a_request_is_in_flight_until_its_answer_is_over(tmp_path: Path, protocol: str, path: str) -> None:
    gate = asyncio.Event()
    gate.set()
    async with (
        gated(gate) as address,
        running_stack(tmp_path, EngineFlags(count=1), watch=True) as stack,
        httpx.AsyncClient(base_url=stack.url, timeout=60) as http,
    ):
        file = stack.config / "attache.yaml"
        new = file.with_suffix(".new")
        own = [server("slow", protocol, "slow", address), route("slow", slow=1)]
        new.write_text(f"{file.read_text()}\n---\n{yaml.safe_dump_all(own)}")
        new.replace(file)

        async def is_served() -> bool:
            return (await http.post(path, json={**INFER, "instances": [1.0]})).status_code == 200

        await eventually(is_served)
        gate.clear()
        calls = [asyncio.create_task(http.post(path, json={**INFER, "instances": [1.0]})) for _ in range(12)]

        async def are(count: int) -> bool:
            return await counted(stack, "attache_in_flight") == count

        try:
            await eventually(lambda: are(12))
            await asyncio.sleep(0.5)
            assert await are(12)
        finally:
            gate.set()
            assert {one.status_code for one in await asyncio.gather(*calls)} == {200}
        await eventually(lambda: are(0))
