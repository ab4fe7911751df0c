# SPDX-License-Identifier: Apache-2.0
"""The agent's HTTP server: pages for the kubelet, for Prometheus, and calls that change adapters."""

from __future__ import annotations

import contextlib
import hmac
from typing import TYPE_CHECKING, Any, Final

import msgspec
from aiohttp import web

from controller.agents.runtime.adapter_loader import LoadRefused
from controller.agents.runtime.metrics import CONTENT_TYPE
from extproc.browser_security import add_browser_protection, is_cross_site
from extproc.page_server import PageServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from controller.agents.runtime.agent import EngineAgent

_MOST_BYTES: Final = 64 * 1024
# A drain is the longest call; its caller disconnects when the pod's grace period ends.
_END_S: Final = 5.0


class _Load(msgspec.Struct, frozen=True):
    lora_name: str
    lora_path: str = ""


class _Unload(msgspec.Struct, frozen=True):
    lora_name: str


class _RepositoryLoad(msgspec.Struct, frozen=True):
    parameters: dict[str, Any] = {}


class _ListedAdapter(msgspec.Struct, frozen=True):
    id: str
    state: str
    path: str = ""
    is_declared: bool = False
    is_pinned: bool = False
    is_in_use: bool = False
    idle_s: float | None = None
    message: str = ""


class _Listed(msgspec.Struct, frozen=True):
    data: list[_ListedAdapter]
    limit: int
    object: str = "list"


class AgentServer:
    """Handlers of the agent's paths."""

    def __init__(self, agent: EngineAgent, clock: Callable[[], float]) -> None:
        self._agent = agent
        self._clock = clock

    def application(self) -> web.Application:
        """Its routes."""
        app = web.Application(client_max_size=_MOST_BYTES)
        app.add_routes(
            [
                web.get("/ready", self._ready),
                web.get("/live", self._live),
                web.get("/started", self._started),
                web.get("/drain", self._drain),
                web.post("/drain", self._drain),
                web.delete("/drain", self._changing(self._serve_again)),
                web.get("/metrics", self._metrics),
                web.get("/v1/adapters", self._guarded(self._list)),
                web.post("/v1/load_lora_adapter", self._changing(self._load)),
                web.post("/v1/unload_lora_adapter", self._changing(self._unload)),
                web.post("/v2/repository/models/{name}/load", self._changing(self._load_model)),
                web.post("/v2/repository/models/{name}/unload", self._changing(self._unload_model)),
            ]
        )
        return app

    async def _ready(self, _: web.Request) -> web.StreamResponse:
        return _page(self._agent.why_not_ready())

    async def _live(self, _: web.Request) -> web.StreamResponse:
        return _page(self._agent.watch.why_not_alive())

    async def _started(self, _: web.Request) -> web.StreamResponse:
        is_starting = self._agent.watch.health.phase == "starting"
        return _page(self._agent.watch.why_not_ready() if is_starting else "")

    async def _drain(self, request: web.Request) -> web.StreamResponse:
        if is_cross_site(request):
            return _error(403, "a link does not drain an engine")
        await self._agent.drainer.start_drain()
        drain = await self._agent.drainer.wait_until_drained()
        if drain is None:
            return _error(409, "the drain was taken back")
        found = {
            "outcome": drain.outcome,
            "seconds": round(drain.ended_at_s - drain.began_at_s, 3),
            "running": drain.load.running,
            "waiting": drain.load.waiting,
        }
        return web.json_response(found)

    async def _serve_again(self, _: web.Request) -> web.StreamResponse:
        return web.json_response({"was_draining": await self._agent.drainer.cancel()})

    async def _metrics(self, _: web.Request) -> web.StreamResponse:
        return web.Response(body=(await self._agent.metrics_page()).encode(), headers={"Content-Type": CONTENT_TYPE})

    async def _list(self, _: web.Request) -> web.StreamResponse:
        loader, now_s = self._agent.loader, self._clock()
        shelf = await loader.engine_adapters()
        declared = self._agent.file.declared
        listed = [
            _ListedAdapter(
                id=one.name,
                # gateways send nothing to one that leaves; who asks for its load keeps it
                state="unloading" if one.name in loader.idle_to_unload else "loaded",
                path=one.path,
                is_declared=one.name in declared,
                is_pinned=one.name in shelf.pinned,
                is_in_use=one.is_in_use,
                idle_s=round(max(now_s - one.used_at_s, 0.0), 3),
            )
            for one in shelf.loaded.values()
        ]
        others = dict.fromkeys([*declared, *loader.adapters_being_loaded, *loader.failures])
        for name in (name for name in others if name not in shelf.loaded):
            failure = loader.failures.get(name)
            is_broken = failure is not None and not failure.is_busy
            state = "loading" if name in loader.adapters_being_loaded else "failed" if is_broken else "absent"
            listed.append(
                _ListedAdapter(
                    id=name,
                    state=state,
                    is_declared=name in declared,
                    is_pinned=name in shelf.pinned,
                    message="" if failure is None else failure.message,
                )
            )
        body = msgspec.json.encode(_Listed(listed, shelf.limit))
        return web.Response(body=body, content_type="application/json")

    async def _load(self, request: web.Request) -> web.StreamResponse:
        wanted = msgspec.json.decode(await request.read(), type=_Load)
        return await self._loaded(wanted.lora_name, wanted.lora_path)

    async def _unload(self, request: web.Request) -> web.StreamResponse:
        wanted = msgspec.json.decode(await request.read(), type=_Unload)
        return await self._unloaded(wanted.lora_name)

    async def _load_model(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        wanted = msgspec.json.decode(body, type=_RepositoryLoad) if body else _RepositoryLoad()
        return await self._loaded(request.match_info["name"], str(wanted.parameters.get("uri", "")))

    async def _unload_model(self, request: web.Request) -> web.StreamResponse:
        return await self._unloaded(request.match_info["name"])

    async def _loaded(self, name: str, source: str) -> web.StreamResponse:
        if self._agent.is_draining:
            raise LoadRefused(503, "the engine is being drained")
        evicted = await self._agent.loader.load(name, source)
        return web.json_response({"id": name, "state": "loaded", "evicted": list(evicted)})

    async def _unloaded(self, name: str) -> web.StreamResponse:
        await self._agent.loader.unload(name)
        return web.json_response({"id": name, "state": "unloaded"})

    def _changing(self, handle: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> Any:  # noqa: ANN401
        async def checked(request: web.Request) -> web.StreamResponse:
            if not self._is_allowed(request):
                answer = _error(401, "a bearer token is needed: that of the agent's --token-file")
                answer.headers["WWW-Authenticate"] = "Bearer"
                return answer
            return await self._guarded(handle)(request)

        return checked

    def _guarded(
        self, handle: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def guarded(request: web.Request) -> web.StreamResponse:
            if not self._agent.settings.dialect.adapters and "adapter" in request.path:
                return _error(501, f"{self._agent.settings.dialect.name} loads no adapters while it runs")
            try:
                return await handle(request)
            except msgspec.DecodeError as error:
                return _error(400, str(error))
            except LoadRefused as refused:
                answer = _error(refused.status, str(refused))
                if refused.retry_after_s:
                    answer.headers["Retry-After"] = str(refused.retry_after_s)
                return answer

        return guarded

    def _is_allowed(self, request: web.Request) -> bool:
        file = self._agent.settings.token_file
        if file is None:
            return True
        try:
            token = file.read_bytes().strip()
        except OSError:
            return False
        given = request.headers.get("Authorization", "").encode()
        return bool(token) and hmac.compare_digest(given, b"Bearer " + token)


@contextlib.asynccontextmanager
async def serve_agent(server: AgentServer, host: str, port: int) -> AsyncIterator[None]:
    """Listens inside the context, and ends with the answers under way; raises OSError if the port is taken."""
    app = server.application()
    add_browser_protection(app, host)
    runner = PageServer(app, end_s=_END_S)
    await runner.setup()
    try:
        await runner.listen((host, port))
        yield
    finally:
        await runner.cleanup()


def _page(problem: str) -> web.Response:
    return web.Response(status=503 if problem else 200, text=f"{problem or 'ok'}\n")


def _error(status: int, message: str) -> web.Response:
    """In OpenAI's shape."""
    kind = "invalid_request_error" if 400 <= status < 500 else "service_unavailable_error"
    error = {"message": message, "type": kind, "param": None, "code": status}
    return web.json_response({"error": error}, status=status)
