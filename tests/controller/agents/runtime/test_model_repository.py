# SPDX-License-Identifier: Apache-2.0
"""Models of a V2 repository (Triton, MLServer), loaded and unloaded as adapters are."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import time
from typing import TYPE_CHECKING

import httpx
import pytest
from aiohttp import web

from controller.agents.runtime.agent import EngineAgent
from controller.agents.runtime.declared_adapters import SourcePolicy
from controller.agents.runtime.drain import DrainSettings
from controller.agents.runtime.engine_client import EngineClient, EngineFailed, ModelRequest
from controller.agents.runtime.server import AgentServer, serve_agent
from controller.agents.runtime.settings import AdapterSettings, AgentSettings
from extproc.engines.dialects import DIALECTS
from extproc.engines.engine_responses import AdapterLoadProblem
from tests.controller.agents.runtime.doubles import FakeDownloads, free_port
from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


class Repository:
    """A V2 server whose models are the directories of its repository."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.ready: set[str] = set()
        self.finished: dict[str, int] = {}
        self.pending: dict[str, int] = {}
        self.port = free_port()

    def application(self) -> web.Application:
        app = web.Application()
        app.add_routes(
            [
                web.get("/v2/health/live", self.live),
                web.get("/v2/health/ready", self.live),
                web.get("/metrics", self.metrics),
                web.post("/v2/repository/index", self.index),
                web.post("/v2/repository/models/{name}/load", self.load),
                web.post("/v2/repository/models/{name}/unload", self.unload),
                web.post("/v2/models/{name}/infer", self.infer),
            ]
        )
        return app

    async def live(self, _: web.Request) -> web.Response:
        return web.Response()

    async def metrics(self, _: web.Request) -> web.Response:
        lines = [f'nv_inference_request_success{{model="{name}"}} {n}' for name, n in self.finished.items()]
        lines += [f'nv_inference_pending_request_count{{model="{name}"}} {n}' for name, n in self.pending.items()]
        return web.Response(text="\n".join(lines) + "\n")

    async def index(self, _: web.Request) -> web.Response:
        names = [one.name for one in self.directory.iterdir()] if self.directory.is_dir() else []
        return web.json_response(
            [{"name": name, "state": "READY" if name in self.ready else "UNAVAILABLE"} for name in names]
        )

    async def load(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if not (self.directory / name).is_dir():
            return web.json_response({"error": f"failed to load '{name}', no such model"}, status=400)
        self.ready.add(name)
        return web.Response()

    async def unload(self, request: web.Request) -> web.Response:
        self.ready.discard(request.match_info["name"])
        return web.Response()

    async def infer(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in self.ready:
            return web.json_response({"error": "not loaded"}, status=400)
        self.finished[name] = self.finished.get(name, 0) + 1
        return web.json_response({"outputs": [{"name": "y", "data": [1]}]})


@contextlib.asynccontextmanager
async def running_repository(server: Repository) -> AsyncIterator[None]:
    runner = web.AppRunner(server.application(), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", server.port).start()
    try:
        yield
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def beside(
    server: Repository, tmp_path: Path, probe: ModelRequest | None = None
) -> AsyncIterator[httpx.AsyncClient]:
    url = f"http://127.0.0.1:{server.port}"
    file = tmp_path / "models.json"
    settings = AgentSettings(
        engine=url,
        dialect=DIALECTS["Triton"],
        metrics_url=f"{url}/metrics",
        drain=DrainSettings(settle_s=0.0, timeout_s=30.0),
        adapters=AdapterSettings(
            file=file,
            limit=2,
            keep_s=0.0,
            policy=SourcePolicy((tmp_path / "cache",)),
            cache=tmp_path / "cache",
            links=server.directory,
        ),
        probe=probe,
        probe_interval_s=0.02,
    )
    port = free_port()
    clock = asyncio.get_running_loop().time
    unix_clock = time.time  # noqa: TID251 - the edge
    async with running_repository(server), EngineClient(url, settings.dialect) as client:
        agent = EngineAgent(
            settings, client, FakeDownloads(tmp_path), clock=clock, unix_clock=unix_clock, follow_s=0.05
        )
        async with (
            serve_agent(AgentServer(agent, clock), "127.0.0.1", port),
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30, trust_env=False) as http,
        ):
            running = asyncio.create_task(agent.run())
            try:
                yield http
            finally:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)


@pytest.fixture
def server(tmp_path: Path) -> Repository:
    (tmp_path / "models").mkdir()
    return Repository(tmp_path / "models")


async def load(http: httpx.AsyncClient, name: str, uri: str = "") -> httpx.Response:
    body = {"parameters": {"uri": uri}} if uri else None
    return await http.post(f"/v2/repository/models/{name}/load", json=body)


async def test_models_are_downloaded_into_the_repository_and_the_least_recently_used_goes(
    server: Repository, tmp_path: Path
) -> None:
    async with beside(server, tmp_path) as http:
        for name in ("a", "b"):
            assert (await load(http, name, f"hf://acme/{name}")).status_code == 200
        assert server.ready == {"a", "b"}
        # the server's own counts say which was used last
        await http.get("/v1/adapters")
        server.finished["a"] = 5
        await http.get("/v1/adapters")
        server.finished["a"] = 6
        assert (await load(http, "c", "hf://acme/c")).status_code == 200
        assert server.ready == {"a", "c"}
        # its link went with it, and a model with waiting requests stays
        assert sorted(one.name for one in server.directory.iterdir()) == ["a", "c"]
        server.pending = {"a": 1, "c": 1}
        assert (await load(http, "d", "hf://acme/d")).status_code == 503
        assert (await http.post("/v2/repository/models/c/unload")).status_code == 200
        assert server.ready == {"a"}


async def test_a_model_that_is_in_the_repository_needs_no_uri(server: Repository, tmp_path: Path) -> None:
    (server.directory / "resnet").mkdir()
    async with beside(server, tmp_path) as http:
        assert (await load(http, "resnet")).status_code == 200
        refused = await load(http, "other")
        assert refused.status_code == 502
        assert "no such model" in refused.json()["error"]["message"]
        assert (await load(http, "a%2F..%2Fb", "hf://a/b")).status_code == 400
        # its own directory is never removed
        await http.post("/v2/repository/models/resnet/unload")
        assert (server.directory / "resnet").is_dir()


async def test_declared_models_and_a_request_that_proves_that_one_answers(server: Repository, tmp_path: Path) -> None:
    (server.directory / "resnet").mkdir()
    (tmp_path / "models.json").write_text(json.dumps({"resnet": {"pinned": True}}))
    probe = ModelRequest("/v2/models/resnet/infer", {"inputs": []}, "outputs")
    async with beside(server, tmp_path, probe) as http:

        async def is_ready() -> bool:
            return (await http.get("/ready")).status_code == 200

        await eventually(is_ready)
        assert server.finished["resnet"] == 1


async def test_a_server_that_finishes_its_requests_is_drained_when_none_wait(
    server: Repository, tmp_path: Path
) -> None:
    server.pending = {"a": 1}
    async with beside(server, tmp_path) as http:
        draining = asyncio.create_task(http.get("/drain"))
        await asyncio.sleep(0.8)
        assert not draining.done()
        server.pending = {"a": 0}
        assert (await draining).json()["outcome"] == "idle"


@pytest.mark.parametrize("status", [302, 307])
async def test_an_engines_redirect_is_not_followed(status: int) -> None:
    trapped: list[str] = []

    async def answer(http: web.Request) -> web.Response:
        trapped.extend([http.path] if http.path == "/trap" else [])
        return web.Response(status=status, headers={"location": "/trap"})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner, port = web.AppRunner(app), free_port()
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    async with EngineClient(f"http://127.0.0.1:{port}", DIALECTS["vLLM"]) as client:
        assert (await client.get("/metrics", timeout_s=5)).status == status
        assert (await client.load_adapter("sql", "/sql", timeout_s=5)).problem is AdapterLoadProblem.BROKEN
    await runner.cleanup()
    assert not trapped


async def test_an_engines_answer_is_neither_unpacked_nor_read_without_end() -> None:
    packed = gzip.compress(b"0" * 50_000_000)

    async def answer(http: web.Request) -> web.StreamResponse:
        if http.path == "/packed":
            return web.Response(body=packed, headers={"content-encoding": "gzip"})
        endless = web.StreamResponse()
        await endless.prepare(http)
        while True:
            await endless.write(b"x" * 65536)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner, port = web.AppRunner(app), free_port()
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    async with EngineClient(f"http://127.0.0.1:{port}", DIALECTS["vLLM"]) as client:
        assert (await client.get("/packed", timeout_s=5)).body == packed
        with pytest.raises(EngineFailed, match="more than 4194304 bytes"):
            await client.get("/endless", timeout_s=60)
    await runner.cleanup()
