# SPDX-License-Identifier: Apache-2.0
"""Envoy with our bundle, extproc, and engines that answer what a test wants and tell what reached them."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import httpx
import msgspec
from aiohttp import web

from bench.stack.loopback_stack import documents, envoy_command
from bench.stack.processes import Processes, free_ports
from controller.bundle.sync import write_bundle_once
from extproc.api.config_loader import load_directory
from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

TOKEN_KINDS = ("prompt", "completion", "cached")


class Engine:
    """Answers with the pieces that the test wants, each written once the one before has left for sure."""

    def __init__(self) -> None:
        self.pieces: Sequence[bytes] = (b"{}",)
        self.headers: dict[str, str] = {}
        self.is_plain = False
        # for clients that accept it
        self.compresses = False
        self.status = 200
        # a text in requests to which it answers 400
        self.refuses = ""
        # before each piece but the first, or before a plain answer
        self.pause_s = 0.002
        # after the pieces of a stream: its end, nothing until the client has left, or a connection that is cut
        self.then: Literal["end", "hang", "cut"] = "end"
        self.requests = 0
        self.asked: dict[str, Any] = {}
        self.body = b""
        self.asked_headers: dict[str, str] = {}

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.requests += 1
        self.body = await request.read()
        self.asked = json.loads(self.body)
        self.asked_headers = {name.lower(): value for name, value in request.headers.items()}
        if self.refuses and self.refuses in self.body.decode():
            return web.json_response({"error": {"message": "It is refused.", "code": 400}}, status=400)
        if self.is_plain:
            await asyncio.sleep(self.pause_s)
            plain = web.Response(
                body=b"".join(self.pieces), status=self.status, content_type="application/json", headers=self.headers
            )
            if self.compresses:
                plain.enable_compression()
            return plain
        response = web.StreamResponse(
            status=self.status, headers={"content-type": "text/event-stream; charset=utf-8", **self.headers}
        )
        if self.compresses:
            response.enable_compression()
        await response.prepare(request)
        for piece in self.pieces:
            await response.write(piece)
            # pieces written together may arrive as one
            await asyncio.sleep(self.pause_s)
        while self.then == "hang" and request.transport is not None:  # noqa: ASYNC110 - the client sets no event
            await asyncio.sleep(0.01)
        if self.then == "cut" and request.transport is not None:
            request.transport.abort()
        return response


class Gateway(msgspec.Struct, frozen=True):
    """Envoy's URL, a client, the file of extproc's decisions and outcomes, extproc's process, the engine behind, and
    where extproc's pages are.
    """

    url: str
    http: httpx.AsyncClient
    decisions: Path
    engine: Engine
    extproc: int
    metrics: str

    def outcomes(self) -> list[dict[str, int | None]]:
        """Tokens by answer, in the order in which Envoy reported them."""
        lines = [json.loads(line) for line in self.decisions.read_text().splitlines()]
        return [{kind: one[f"{kind}_tokens"] for kind in TOKEN_KINDS} for one in lines if one["kind"] == "outcome"]

    async def logged(self, field: str) -> list[dict[str, Any]]:
        """Lines of the decision log that have the field, once there is one: they may come after the answer."""

        def found() -> list[dict[str, Any]]:
            lines = [json.loads(line) for line in self.decisions.read_text().splitlines()]
            return [one for one in lines if field in one]

        async def is_there() -> bool:
            return bool(found())

        await eventually(is_there)
        return found()

    async def outcomes_since(self, before: int, answers: int = 1) -> list[dict[str, int | None]]:
        """Those of ``answers`` answers after the first ``before``."""

        async def reported() -> bool:
            return len(self.outcomes()) >= before + answers

        await eventually(reported)
        return self.outcomes()[before:]


@asynccontextmanager
async def gateway_on(
    directory: Path,
    *,
    gateway: Mapping[str, object] | None = None,
    more: Mapping[str, object] | None = None,
    route: Mapping[str, object] | None = None,
    headers: Mapping[str, str] | None = None,
    others: Sequence[Engine] = (),
    program: Sequence[str] = ("-m", "extproc"),
    envoy_options: Sequence[str] = (),
) -> AsyncIterator[Gateway]:
    """All of it in ``directory``. ``gateway``, ``more`` and ``route``: overrides of the documents. ``headers``: of
    clients. ``others``: more engines of the same ModelServer. ``program``: what Python runs as extproc.
    ``envoy_options``: beyond the usual ones.
    """
    listen, admin, extproc, metrics = free_ports(4)
    engine = Engine()
    config, bundle = directory / "config", directory / "envoy"
    config.mkdir()
    addresses = {"listen": f"127.0.0.1:{listen}", "admin": f"127.0.0.1:{admin}", "extproc": f"127.0.0.1:{extproc}"}
    decisions = directory / "decisions.jsonl"
    command = [sys.executable, *program, "--config", str(config), "--listen", f"127.0.0.1:{extproc}"]
    command += ["--decision-log", str(decisions), "--decision-sample", "1"]
    async with (
        AsyncExitStack() as engines,
        Processes(directory) as processes,
        httpx.AsyncClient(timeout=30, headers=headers) as http,
    ):
        text = documents(
            [await engines.enter_async_context(served(one)) for one in (engine, *others)],
            gateway={**addresses, "accessLogFlush": "20ms", **(gateway or {})},
            more={"scrapeInterval": "0s", **(more or {})},
            route=route,
            adapters=("sql",),
        )
        (config / "a.yaml").write_text(text)
        write_bundle_once(load_directory(config), bundle, str(bundle))
        extproc_pid = await processes.start("extproc", [*command, "--metrics", f"127.0.0.1:{metrics}"])
        await processes.start("envoy", envoy_command(bundle, *envoy_options))

        async def answers(url: str) -> bool:
            try:
                return (await http.get(url)).status_code == 200
            except httpx.TransportError:
                return False

        await processes.wait_ready("extproc", lambda: answers(f"http://127.0.0.1:{metrics}/readyz"))
        await processes.wait_ready("envoy", lambda: answers(f"http://127.0.0.1:{listen}/v1/models/llama"))
        yield Gateway(f"http://127.0.0.1:{listen}", http, decisions, engine, extproc_pid, f"http://127.0.0.1:{metrics}")


@asynccontextmanager
async def served(engine: Engine) -> AsyncIterator[str]:
    """Its address, while it is served."""
    app = web.Application()
    app.add_routes([web.post("/{path:.*}", engine.answer)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
