# SPDX-License-Identifier: Apache-2.0
"""A model server that counts its calls, takes the same time for each, and fails as a test says; and the batcher before
it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from typing import TYPE_CHECKING, Any

import httpx
import msgspec
from aiohttp import web

from bench.stack.processes import free_ports
from controller.agents.runtime.batcher import Batcher, serve_batcher
from controller.agents.runtime.batching.queue import BatchLimits
from controller.agents.runtime.metrics import BatchCounters
from controller.agents.runtime.settings import BatcherSettings
from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from bench.stack.processes import Processes

PREDICT = "/v1/models/m:predict"
INFER = "/v2/models/m/infer"


class ModelServer:
    """Answers the double of each number. ``poison``: a number that it refuses with ``poison_status``. ``hangs``: calls
    with several rows get no answer. ``drops``: it leaves negative numbers out. ``headers``: of its answers.
    """

    def __init__(self) -> None:
        self.port = free_ports(1)[0]
        self.call_s = 0.0
        # calls are computed while it is set
        self.gate = asyncio.Event()
        self.gate.set()
        # streams end once it is set
        self.release = asyncio.Event()
        self.poison: float | None = None
        self.poison_status = 400
        self.hangs = False
        self.drops = False
        self.headers: dict[str, str] = {}
        self.answer_bytes = 0
        # the number of rows of each call, and its headers
        self.rows: list[int] = []
        self.seen: list[dict[str, str]] = []
        self.bodies: list[bytes] = []
        self.cancelled = 0
        self._turn = asyncio.Lock()
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        app = web.Application(client_max_size=2**30)
        app.add_routes(
            [
                web.post("/v1/models/{model}:predict", self._predict),
                web.post("/v2/models/{model}/infer", self._infer),
                web.route("*", "/echo{path:.*}", self._echo),
                web.get("/stream", self._stream),
            ]
        )
        self._runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=0.01, auto_decompress=False
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()

    async def stop(self) -> None:
        """As if it was killed."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _compute(self, request: web.Request, values: list[Any]) -> web.Response | list[Any]:
        self.rows.append(len(values))
        self.seen.append({name.lower(): value for name, value in request.headers.items()})
        try:
            await self.gate.wait()
            async with self._turn:
                await asyncio.sleep(self.call_s)
            if self.hangs and len(values) > 1:
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        numbers = [one[0] if isinstance(one, list) else one for one in values]
        if self.poison in numbers:
            return web.json_response({"error": "poison"}, status=self.poison_status)
        pad = "x" * self.answer_bytes
        return [f"{2 * one}{pad}" if pad else 2 * one for one in numbers if not (self.drops and one < 0)]

    async def _predict(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.read())
        asked = json.loads(self.bodies[-1])
        found = await self._compute(request, asked["instances"])
        if isinstance(found, web.Response):
            return found
        return web.json_response({"predictions": found}, headers=self.headers)

    async def _infer(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.read())
        if "Inference-Header-Content-Length" in request.headers:
            self.rows.append(1)
            return web.Response(body=self.bodies[-1])
        asked = json.loads(self.bodies[-1])
        found = await self._compute(request, asked["inputs"][0]["data"])
        if isinstance(found, web.Response):
            return found
        output = {"name": "y", "datatype": "FP64", "shape": [len(found)], "data": found}
        return web.json_response({"model_name": "m", "id": asked.get("id", "own"), "outputs": [output]})

    async def _echo(self, request: web.Request) -> web.Response:
        headers = {"Content-Encoding": "gzip"} if "Content-Encoding" in request.headers else {}
        headers["X-Seen"] = f"{request.method} {request.raw_path} {request.headers.get('Host')}"
        return web.Response(status=207, body=await request.read(), headers=headers)

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        await answer.write(b"data: 1\n\n")
        await self.release.wait()
        await answer.write(b"data: 2\n\n")
        return answer


class Agent(msgspec.Struct, frozen=True):
    """The address of its batcher, and the URL of its pages."""

    batcher: str
    pages: str


async def start_agent(processes: Processes, name: str, engine: str, *more: str) -> Agent:
    """A process that joins requests before the engine at a URL, once it listens."""
    pages, port = free_ports(2)
    words = ["--dialect", "MLServer", "--model", "m", "--listen", f"127.0.0.1:{pages}"]
    words += ["--batch-listen", f"127.0.0.1:{port}", "--engine", engine, "--settle", "0", *more]
    await processes.start(name, [sys.executable, "-m", "attache", "agent", *words])
    agent = Agent(f"127.0.0.1:{port}", f"http://127.0.0.1:{pages}")
    async with httpx.AsyncClient(timeout=60, trust_env=False) as http:

        async def listens() -> bool:
            try:
                return (await http.get(f"http://{agent.batcher}/")).status_code > 0
            except httpx.TransportError:
                return False

        await processes.wait_ready(name, listens)
    return agent


class Batched:
    """A batcher, its engine and a client."""

    def __init__(self, batcher: Batcher, counters: BatchCounters, engine: ModelServer, http: httpx.AsyncClient) -> None:
        self.batcher = batcher
        self.counters = counters
        self.engine = engine
        self.http = http

    async def predict(self, *instances: object, **more: Any) -> httpx.Response:  # noqa: ANN401 - httpx's arguments
        return await self.http.post(PREDICT, json={"instances": instances}, **more)

    async def behind_a_call(self, *requests: Any) -> list[httpx.Response]:  # noqa: ANN401 - coroutines
        """The answers to ``requests``, which come while the engine computes another one."""
        self.engine.gate.clear()
        first = asyncio.create_task(self.predict(0))
        await eventually(lambda: bool(self.engine.rows))
        answers = asyncio.gather(*requests)

        def all_have_come() -> bool:
            counted, left = self.counters.requests, self.counters.delays.histogram().count
            placed = left + self.batcher.queue.waiting_count + counted["passed"] + counted["refused"]
            return placed == 1 + len(requests)

        await eventually(all_have_come)
        self.engine.gate.set()
        await first
        return await answers


@contextlib.asynccontextmanager
async def batched(limits: BatchLimits | None = None, timeout_s: float = 100.0) -> AsyncIterator[Batched]:
    """All of it. By default requests wait until the engine has answered the one before, up to 32."""
    engine, counters = ModelServer(), BatchCounters()
    await engine.start()
    (port,) = free_ports(1)
    settings = BatcherSettings("127.0.0.1", port, engine.url, limits or BatchLimits(max_delay_s=100.0), timeout_s)
    try:
        async with (
            serve_batcher(settings, counters, asyncio.get_running_loop().time) as batcher,
            httpx.AsyncClient(
                base_url=f"http://127.0.0.1:{port}",
                timeout=100,
                trust_env=False,
                limits=httpx.Limits(max_connections=None),
            ) as http,
        ):
            yield Batched(batcher, counters, engine, http)
    finally:
        await engine.stop()
