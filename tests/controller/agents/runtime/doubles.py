# SPDX-License-Identifier: Apache-2.0
"""An engine that does what a test says, a downloader without a network, and the agent beside them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any

import httpx
from aiohttp import web

from bench.stack.processes import free_ports
from controller.agents.runtime.adapter_files import DownloadFailed
from controller.agents.runtime.agent import EngineAgent
from controller.agents.runtime.declared_adapters import SourcePolicy
from controller.agents.runtime.drain import DrainSettings
from controller.agents.runtime.engine_client import EngineClient
from controller.agents.runtime.engine_health import HealthSettings
from controller.agents.runtime.server import AgentServer, serve_agent
from controller.agents.runtime.settings import AdapterSettings, AgentSettings, WarmUpSettings
from extproc.engines.dialects import DIALECTS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def free_port() -> int:
    return free_ports(1)[0]


class FakeEngine:
    """Speaks vLLM's dialect. ``hangs``: accepts questions and answers none; ``garbage``: answers what is no answer."""

    def __init__(self, port: int | None = None) -> None:
        self.port = port or free_port()
        self.hangs = False
        self.garbage = False
        self.refused_paths: list[str] = []
        # paths that answer 200, and nothing of which there is to check
        self.other_paths: list[str] = []
        # paths of GET that answer 200
        self.pages: list[str] = []
        # fields without which a question is refused
        self.needs: set[str] = set()
        self.has_metrics = True
        self.running = 0
        self.waiting = 0
        self.tokens = 100
        self.slow_s = 0.0
        # adapters: path by name; how many fit; which have requests
        self.adapters: dict[str, str] = {}
        self.most_adapters = 0
        self.in_use: list[str] = []
        self.load_s = 0.0
        self.refuses_load = ""
        # what was asked
        self.asked: list[str] = []
        self.prompts: list[str] = []
        self.calls: list[tuple[str, str]] = []
        self.open_questions = 0
        self.most_open = 0
        self.loads_at_once = 0
        self.most_loads_at_once = 0
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application(middlewares=[self._behave])
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/metrics", self._metrics),
                web.get("/v1/models", self._models),
                web.post("/v1/completions", self._complete),
                web.post("/v1/chat/completions", self._complete),
                web.post("/v1/embeddings", self._complete),
                *(web.post(path, self._answer_other) for path in self.other_paths),
                *(web.get(path, self._page) for path in self.pages),
                web.post("/v1/load_lora_adapter", self._load),
                web.post("/v1/unload_lora_adapter", self._unload),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def start_again(self) -> None:
        """A new process: its adapters are gone."""
        await self.stop()
        self.adapters = {}
        await self.start()

    @web.middleware
    async def _behave(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self.asked.append(request.path)
        self.open_questions += 1
        self.most_open = max(self.most_open, self.open_questions)
        try:
            if self.hangs:
                await asyncio.Event().wait()
            if self.garbage:
                return web.Response(text="<html>It works!</html>")
            await asyncio.sleep(self.slow_s)
            return await handler(request)
        finally:
            self.open_questions -= 1

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _metrics(self, _: web.Request) -> web.Response:
        if not self.has_metrics:
            return web.Response(status=404)
        names = ",".join(sorted(self.in_use))
        now_s = time.time()  # noqa: TID251 - as vLLM does
        return web.Response(
            text=f'vllm:num_requests_running{{engine="0",model_name="m"}} {self.running}\n'
            f'vllm:num_requests_waiting{{engine="0",model_name="m"}} {self.waiting}\n'
            f'vllm:generation_tokens_total{{engine="0",model_name="m"}} {self.tokens}\n'
            f'vllm:lora_requests_info{{max_lora="{self.most_adapters}",running_lora_adapters="{names}",'
            f'waiting_lora_adapters=""}} {now_s}\n'
        )

    async def _models(self, _: web.Request) -> web.Response:
        data = [{"id": "m", "root": "/models/m", "parent": None}]
        data += [{"id": name, "root": path, "parent": "m"} for name, path in self.adapters.items()]
        return web.json_response({"data": data})

    async def _complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        if request.path in self.refused_paths:
            return web.json_response({"detail": "Not Found"}, status=404)
        if not self.needs <= body.keys():
            return web.json_response({"message": "no bootstrap room"}, status=400)
        self.prompts.append(str(body.get("prompt", body.get("messages", ""))))
        return web.json_response({"choices": [{"text": "x"}], "data": [{"embedding": [0.0]}]})

    async def _answer_other(self, request: web.Request) -> web.Response:
        body = await (request.post() if request.content_type == "multipart/form-data" else request.json())
        return web.json_response({}, status=200 if body["model"] == "m" else 404)

    async def _page(self, request: web.Request) -> web.Response:
        return web.json_response({}, status=404 if request.path in self.refused_paths else 200)

    async def _load(self, request: web.Request) -> web.Response:
        body = await request.json()
        name = body["lora_name"]
        self.calls.append(("load", name))
        self.loads_at_once += 1
        self.most_loads_at_once = max(self.most_loads_at_once, self.loads_at_once)
        await asyncio.sleep(self.load_s)
        self.loads_at_once -= 1
        if self.refuses_load:
            return _error(400, self.refuses_load)
        if name in self.adapters:
            return _error(400, f"The lora adapter '{name}' has already been loaded.")
        if self.most_adapters and len(self.adapters) >= self.most_adapters:
            return _error(400, f"Maximum number of loaded LoRA adapters is {self.most_adapters}.")
        self.adapters[name] = body["lora_path"]
        return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")

    async def _unload(self, request: web.Request) -> web.Response:
        name = (await request.json())["lora_name"]
        self.calls.append(("unload", name))
        if name in self.in_use:
            raise AssertionError(f"{name} was unloaded while in use")
        if self.adapters.pop(name, None) is None:
            return _error(404, f"The lora adapter '{name}' cannot be found.")
        return web.Response(text="Success")


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "BadRequestError", "code": status}}, status=status)


class FakeDownloads:
    """Makes a directory for each URI. ``fails``: messages for the next downloads, which then fail."""

    def __init__(self, root: Path) -> None:
        self.fetched: list[str] = []
        self.fails: list[str] = []
        self.gate: asyncio.Event | None = None
        self._root = root

    async def fetch(self, uri: str, link: Path) -> None:
        self.fetched.append(uri)
        if self.gate is not None:
            await self.gate.wait()
        if self.fails:
            raise DownloadFailed(self.fails.pop(0))
        self._make(link)

    def _make(self, link: Path) -> None:
        target = self._root / f"files-{len(self.fetched)}"
        target.mkdir()
        link.unlink(missing_ok=True)
        link.symlink_to(target)


class Beside:
    """A running agent: its parts, and a client of its server."""

    def __init__(
        self, agent: EngineAgent, http: httpx.AsyncClient, downloads: FakeDownloads, ending: asyncio.Event
    ) -> None:
        self.agent = agent
        self.http = http
        self.downloads = downloads
        # set: as SIGTERM does
        self.ending = ending
        self.running: asyncio.Task[None] | None = None

    async def status(self, path: str) -> int:
        return (await self.http.get(path)).status_code

    async def is_ready(self) -> bool:
        return await self.status("/ready") == 200

    async def load(self, name: str, source: str = "", **headers: str) -> httpx.Response:
        body = {"lora_name": name, "lora_path": source}
        return await self.http.post("/v1/load_lora_adapter", json=body, headers=headers)

    async def unload(self, name: str) -> httpx.Response:
        return await self.http.post("/v1/unload_lora_adapter", json={"lora_name": name})

    async def metric(self, name: str) -> float:
        page = (await self.http.get("/metrics")).text
        return next(float(line.split()[-1]) for line in page.splitlines() if line.startswith(f"attache_agent_{name}"))


@contextlib.asynccontextmanager
async def beside(
    engine: FakeEngine,
    tmp_path: Path,
    *,
    health: HealthSettings | None = None,
    drain: DrainSettings | None = None,
    warm_up: WarmUpSettings | None = None,
    adapters: dict[str, Any] | None = None,
    token_file: Path | None = None,
    **more: Any,  # noqa: ANN401 - fields of AgentSettings
) -> AsyncIterator[Beside]:
    """The agent with a server on a port of its own; times are short. ``adapters``: fields of AdapterSettings."""
    url = f"http://127.0.0.1:{engine.port}"
    cache = tmp_path / "cache"
    own = {"keep_s": 0.0, "policy": SourcePolicy((cache,)), "cache": cache, "links": cache / "adapters"}
    settings = AgentSettings(
        engine=url,
        dialect=more.pop("dialect", DIALECTS["vLLM"]),
        metrics_url=f"{url}/metrics",
        health=health or HealthSettings(failures=3, probe_timeout_s=5.0, dead_after_s=30.0),
        drain=drain or DrainSettings(settle_s=0.0, timeout_s=30.0),
        warm_up=warm_up or WarmUpSettings(),
        adapters=AdapterSettings(**{**own, **(adapters or {})}),
        probe_interval_s=0.02,
        metrics_interval_s=0.05,
        token_file=token_file,
        **more,
    )
    downloads = FakeDownloads(tmp_path)
    port = free_port()
    ending = asyncio.Event()
    loop = asyncio.get_running_loop()
    unix_clock = time.time  # noqa: TID251 - engines tell Unix times
    async with EngineClient(url, settings.dialect) as client:
        agent = EngineAgent(settings, client, downloads, clock=loop.time, unix_clock=unix_clock, follow_s=0.05)
        async with (
            serve_agent(AgentServer(agent, loop.time), "127.0.0.1", port),
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30, trust_env=False) as http,
        ):
            found = Beside(agent, http, downloads, ending)
            found.running = asyncio.create_task(agent.run_until(ending))
            try:
                yield found
            finally:
                found.running.cancel()
                await asyncio.gather(found.running, return_exceptions=True)
