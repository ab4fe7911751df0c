# SPDX-License-Identifier: Apache-2.0
"""A V2 server that loads models as MLServer does, and computes nothing, for pods whose image is MLServer's

Models are the files ``model-settings.json`` below ``MODELS_DIR``. They are loaded and unloaded by the calls of V2's
repository; with ``MLSERVER_LOAD_MODELS_AT_STARTUP``, which is true by default, all of them at first. One whose files
are missing, or have a file named ``broken``, cannot be loaded. Answers have their inputs as outputs.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from aiohttp import web

from bench.engine.tensor_api import TensorRoutes
from bench.engine.vllm_command_line import listen_host

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_SETTINGS: Final = "model-settings.json"


class FakeMlServer:
    """``ready``: the models that are loaded. ``loads``: how often each was. ``most``: the most that were loaded at a
    time. ``cut``: how often a model with requests was unloaded. ``load_s`` and ``infer_s``: how long these take.
    """

    def __init__(self, repository: Path, *, load_s: float = 0.0, infer_s: float = 0.0) -> None:
        self.repository, self.load_s, self.infer_s = repository, load_s, infer_s
        self.ready: set[str] = set()
        self.loads: Counter[str] = Counter()
        self.most = self.cut = 0
        self._running: Counter[str] = Counter()
        self._finished: Counter[str] = Counter()
        self._runner: web.AppRunner | None = None

    async def start(self, host: str, port: int, metrics_port: int) -> None:
        """Listen, until ``stop``. The metrics may have the same port."""
        app = web.Application(middlewares=[self._count])
        # a model that is not loaded is answered 404, as by MLServer
        tensors = TensorRoutes(self.ready.__contains__, lambda: None)
        app.add_routes(
            [
                web.get("/v2/health/live", self._live),
                web.get("/metrics", self._metrics),
                web.post("/v2/repository/index", self._index),
                web.post("/v2/repository/models/{name}/load", self._load),
                web.post("/v2/repository/models/{name}/unload", self._unload),
                *tensors.routes,
            ]
        )
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        for each in sorted({port, metrics_port}):
            await web.TCPSite(self._runner, host, each).start()

    async def stop(self) -> None:
        """What was loaded is gone, as that of a process."""
        self.ready.clear()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def load(self, name: str) -> str:
        """Load a model; returns why it cannot be, empty if it is."""
        self.loads[name] += 1
        files = self._models().get(name)
        if files is None:
            return f"Model {name} not found"
        if not files.exists() or (files.is_dir() and (files / "broken").exists()):
            return f"Invalid URI specified for model {name} ({files})"
        self.ready.add(name)
        self.most = max(self.most, len(self.ready))
        return ""

    def load_all(self) -> None:
        """As at a start."""
        for name in self._models():
            self.load(name)

    def _models(self) -> dict[str, Path]:
        """The files of each model, by the name in its settings."""
        found: dict[str, Path] = {}
        for path in sorted(self.repository.glob(f"*/{_SETTINGS}")):
            settings: dict[str, Any] = json.loads(path.read_text())
            found[settings["name"]] = Path((settings.get("parameters") or {}).get("uri") or path.parent)
        return found

    @web.middleware
    async def _count(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        name = request.match_info.get("model", "")
        if not request.path.endswith("/infer") or name not in self.ready:
            return await handler(request)
        self._running[name] += 1
        try:
            await asyncio.sleep(self.infer_s)
            answer = await handler(request)
        finally:
            self._running[name] -= 1
        self._finished[name] += 1
        return answer

    async def _live(self, _: web.Request) -> web.Response:
        return web.json_response({})

    async def _metrics(self, _: web.Request) -> web.Response:
        lines = [f'model_infer_request_success_total{{model="{name}"}} {n}' for name, n in self._finished.items()]
        running = sum(self._running.values())
        return web.Response(
            text="\n".join([*lines, f'rest_server_requests_in_progress{{method="POST"}} {running}', ""])
        )

    async def _index(self, _: web.Request) -> web.Response:
        states = {True: "READY", False: "UNAVAILABLE"}
        return web.json_response([{"name": name, "state": states[name in self.ready]} for name in self._models()])

    async def _load(self, http: web.Request) -> web.Response:
        await asyncio.sleep(self.load_s)
        problem = self.load(http.match_info["name"])
        return web.json_response({"error": problem}, status=400) if problem else web.Response()

    async def _unload(self, http: web.Request) -> web.Response:
        name = http.match_info["name"]
        self.cut += bool(self._running[name])
        if name not in self.ready:
            return web.json_response({"error": f"Model {name} not found"}, status=404)
        self.ready.discard(name)
        return web.Response()


async def _serve(environment: dict[str, str]) -> None:
    server = FakeMlServer(Path(environment.get("MODELS_DIR", ".")))
    if environment.get("MLSERVER_LOAD_MODELS_AT_STARTUP", "true") != "false":
        server.load_all()
    ports = [int(environment.get(f"MLSERVER_{name}_PORT", 0)) for name in ("HTTP", "METRICS")]
    await server.start(listen_host(), ports[0] or 8080, ports[1] or 8082)
    await asyncio.Event().wait()


if __name__ == "__main__":
    try:
        asyncio.run(_serve(dict(os.environ)))
    except KeyboardInterrupt:
        sys.exit(0)
