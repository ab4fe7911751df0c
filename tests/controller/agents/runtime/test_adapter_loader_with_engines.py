# SPDX-License-Identifier: Apache-2.0
"""Adapters of simulated engines behind agents, as processes."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import random
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from aiohttp import web

from tests.controller.agents.runtime.pods import Pod
from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from bench.stack.orphan_reaper import ProcessGuard

ADAPTERS = 10
SLOTS = 2
REQUESTS = 40


@pytest.fixture(params=[2])
async def pods(guard: ProcessGuard, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[list[Pod]]:
    for number in range(ADAPTERS):
        (tmp_path / f"a{number}").mkdir()
    found = [Pod(guard) for _ in range(request.param)]
    async with contextlib.AsyncExitStack() as stack:
        for pod in found:
            await stack.enter_async_context(pod.http)
            limits = ("--max-loras", str(SLOTS), "--lora-overflow", "refuse", "--lora-load-time", "0.02")
            await stack.enter_async_context(pod.engine("--speed", "5", "--enable-lora", *limits))
            await stack.enter_async_context(pod.agent("--allow-path", str(tmp_path), "--keep-adapter", "0.1"))
        for pod in found:
            await eventually(pod.is_ready)
        yield found


async def test_ten_adapters_over_two_engines_that_hold_two_each(pods: list[Pod], tmp_path: Path) -> None:
    chance = random.Random(15)
    loads = 0

    async def one(pod: Pod, name: str) -> None:
        """As a gateway does: load it, send the request, and once more if it was evicted before the request came."""
        nonlocal loads
        for _ in range(1000):
            answer = await pod.load(name, str(tmp_path / name))
            if answer.status_code == 503:
                await asyncio.sleep(0.05)
                continue
            assert answer.status_code == 200, answer.text
            loads += 1
            served = await pod.complete(name, 20)
            if served.status_code == 200:
                return
            assert served.status_code == 404, served.text
        raise AssertionError(f"{name} was never served")

    async def client(number: int) -> None:
        await asyncio.sleep(0.02 * number)
        await one(chance.choice(pods), f"a{chance.randrange(ADAPTERS)}")

    await asyncio.gather(*(client(number) for number in range(REQUESTS)))
    for pod in pods:
        listed = (await pod.ask("/v1/adapters")).json()
        assert len(listed["data"]) <= SLOTS
        loaded = await pod.metric('agent_adapter_loads_total{result="loaded"}')
        evicted = await pod.metric('agent_adapter_unloads_total{reason="evicted"}')
        assert loaded - evicted == len(listed["data"])
        assert evicted > 0


@pytest.mark.parametrize("pods", [1], indirect=True)
async def test_the_simulated_engines_refusals_are_understood(pods: list[Pod], tmp_path: Path) -> None:
    (pod,) = pods
    for name in ("missing", "rank-64"):
        (tmp_path / name).mkdir()
        refused = await pod.load(name, str(tmp_path / name))
        assert refused.status_code == 502, refused.text
        assert name in refused.json()["error"]["message"]
    for number in range(3):
        await asyncio.sleep(0.2)  # longer than --keep-adapter
        assert (await pod.load(f"a{number}", str(tmp_path / f"a{number}"))).status_code == 200
    names = [one["id"] for one in (await pod.ask("/v1/adapters")).json()["data"] if one["state"] == "loaded"]
    assert sorted(names) == ["a1", "a2"]


@contextlib.asynccontextmanager
async def served(files: dict[str, bytes]) -> AsyncIterator[str]:
    """The URL of a server with these files."""

    async def get(request: web.Request) -> web.Response:
        content = files.get(request.match_info["name"])
        return web.Response(status=404) if content is None else web.Response(body=content)

    app = web.Application()
    app.add_routes([web.get("/{name}", get)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def archive(**files: str) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(f"{name}.json")
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text.encode()))
    return made.getvalue()


@pytest.mark.slow
async def test_adapters_come_by_the_downloader(guard: ProcessGuard, tmp_path: Path) -> None:
    pod = Pod(guard)
    cache, file = tmp_path / "cache", tmp_path / "adapters.json"
    async with (
        pod.http,
        served({"sql.tar": archive(adapter_config='{"r": 8}')}) as url,
        pod.engine("--enable-lora", "--max-loras", "2"),
    ):
        file.write_text(json.dumps({"sql": {"uri": f"{url}/sql.tar", "pinned": True}}))
        async with pod.agent("--adapters", str(file), "--weights-cache", str(cache)):
            # ready: the pinned adapter was downloaded, unpacked and loaded
            await eventually(pod.is_ready)
            listed = (await pod.ask("/v1/adapters")).json()["data"]
            assert [(one["id"], one["state"], one["is_pinned"]) for one in listed] == [("sql", "loaded", True)]
            assert (Path(listed[0]["path"]) / "adapter_config.json").read_text() == '{"r": 8}'
            assert (await pod.complete("sql", 2)).status_code == 200
            refused = await pod.load("other", f"{url}/other.tar")
            assert refused.status_code == 502
            assert "could not be downloaded" in refused.json()["error"]["message"]
