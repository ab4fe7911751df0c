# SPDX-License-Identifier: Apache-2.0
"""Pictures of the console over a core without engines: ``python -m tools.console_pictures [FOLDER]`` (needs Chromium).

Its requests, reports and failures are made up, and its clock stands still: so what a test reads in the page can be
compared with what the API answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import shutil
import sys
import tempfile
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Final

from extproc.api.config_loader import load_snapshot
from extproc.api.status_page_contents import CONSOLE_PATH, ConfigReport
from extproc.console.pages import ConsolePages, ConsoleWorkerInfo
from extproc.core.core import Core
from extproc.core.effects import Decision
from extproc.core.peer_events import EngineReported
from extproc.core.request_record import BUNDLE, Outcome, RequestHead
from extproc.endpoints.breaker import CLOSED
from extproc.endpoints.breaker_ranks import set_breaker
from extproc.endpoints.health import EngineFailure
from extproc.engines.metrics import EngineReport
from extproc.listen_sockets import listen
from extproc.metrics.request_metrics import Metrics
from extproc.runtime.admin_pages import ExplainPage, serve_pages
from extproc.runtime.demand_watch import DemandWatchServer
from extproc.streams.request import StreamRequest
from extproc.streams.stream_dependencies import GatewayOptions, StreamContext
from extproc.wire_names import TENANT
from tools.chromium import Page, browser_page

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from aiohttp.typedefs import Middleware

    from extproc.api.config_snapshot import Snapshot
    from extproc.core.effects import Effect, RequestEffect

FOLDER: Final = Path(__file__).parent.parent / "docs" / "images"
UNIX_S: Final = 1_800_000_000.0
_OBJECT: Final = {"apiVersion": "attache.dev/v1alpha1"}
# of sixty requests at once
_ENGINES_BUSY_FROM: Final = 30
_SIZE: Final = (1280, 860)
_PHONE: Final = (360, 740)
_QUEUE: Final = {
    "flowControl": {"saturation": {"queueDepth": None, "kvUsage": None, "maxWait": None, "maxRequests": 6}}
}

# By tenant.
_KEYS: Final[dict[str, dict[str, object]]] = {
    "research": {"user": "ann", "expiresAt": "2027-03-01T00:00:00Z", "models": ["large"]},
    "search": {"budgets": [{"window": "Month", "max": {"tokens": 10_000_000}}]},
    "support": {"expiresAt": "2026-01-01T00:00:00Z"},
}


class Gateway:
    """A core with the shell around its streams, at the time ``now``."""

    def __init__(self, snapshot: Snapshot, *, name: str = "demo") -> None:
        """``name``: of the process."""
        self.now = 1_000.0
        self.core = Core(snapshot, rng=random.Random(1), ticket_prefix=name)
        core = self.core
        self.metrics = Metrics(
            lambda: list(core.pools.values()), lambda: UNIX_S, self.clock, gates=lambda: core.admission.gates
        )
        self.metrics.objectives.set_source(self.core.objective_classes)
        self.context = StreamContext(core, self.metrics, self.clock, self._perform, 77)
        self.waiting: dict[str, StreamRequest] = {}
        self.report = ConfigReport(files=dict(snapshot.digests))

    def clock(self) -> float:
        """The time, which others set."""
        return self.now

    def _perform(self, effects: list[Effect], own: RequestEffect | None = None) -> None:
        for effect in effects if own is None else (own, *effects):
            self.metrics.count_effect(effect)
            held = self.waiting.pop(effect.ticket, None) if isinstance(effect, Decision) else None
            if held is not None and isinstance(effect, Decision):
                held.resume(effect)

    def send(self, tenant: str, model: str, content: str = "hello", *, most: int | None = None) -> StreamRequest:
        """A request of ``tenant``: it is decided, or waits."""
        head = RequestHead("POST", "/v1/chat/completions", {TENANT: tenant}, has_body=True, is_trusted=True)
        body = {"model": model, "messages": [{"role": "user", "content": content}], "stream": True}
        if most is not None:
            body["max_tokens"] = most
        request = StreamRequest(self.context)
        if request.submit(self.core.builder.build_by_model(head, json.dumps(body).encode()), BUNDLE, self.now) is None:
            self.waiting[request.ticket] = request
        return request

    def end(self, request: StreamRequest, *, ttft_s: float = 0.2, seconds: float = 2.0, status: int = 200) -> None:
        """Its engine has answered."""
        if request.sent is None:
            raise ValueError("the request waits")
        request.on_stream_closed()
        assignment = request.sent
        tokens = round(assignment.input_tokens)
        outcome = Outcome(
            request.ticket, status, assignment.endpoint.address, seconds, ttft_s, tokens, 120, round(0.6 * tokens)
        )
        self._perform(self.core.on_outcome(outcome, self.now))

    def engine_reports(self, server: str, address: str, **values: float) -> None:
        """The engine's metrics are read."""
        report = EngineReport(**values)  # type: ignore[arg-type]  # numbers of the report
        self._perform(self.core.on_engine_report(EngineReported(server, address, report), self.now))

    def tick(self) -> None:
        """Requests whose turn has come go."""
        self._perform(self.core.tick(self.now))

    @contextlib.asynccontextmanager
    async def served(
        self, port: int, place: ConsoleWorkerInfo | None = None, *, guard: Middleware | None = None
    ) -> AsyncIterator[str]:
        """The URL of its pages. ``guard``: who may see which."""

        async def no_tokens(_: object) -> None:
            return None

        place = place or ConsoleWorkerInfo(("127.0.0.1", port), has_explain=True)
        console = ConsolePages(
            self.core,
            self.metrics,
            clock=self.clock,
            wall_clock=lambda: UNIX_S + self.now,
            is_ready=lambda: True,
            report=lambda: self.report,
            place=place,
        )
        runner = await serve_pages(
            listen(f"127.0.0.1:{port}"),
            self.metrics.registry,
            is_ready=lambda: True,
            report=lambda: self.report,
            loads=self.core.engine_loads_by_pool,
            demand=DemandWatchServer(self.core, self.clock),
            explain=ExplainPage(self.core, no_tokens, self.clock, GatewayOptions()),
            others=console.routes(),
            guard=guard,
        )
        try:
            yield f"http://127.0.0.1:{port}{CONSOLE_PATH}"
        finally:
            await runner.cleanup()


def snapshot_of(
    servers: dict[str, dict[str, object]],
    routes: dict[str, dict[str, object]],
    gateway: dict[str, object] | None = None,
) -> Snapshot:
    """A directory of these ModelServers and ModelRoutes, and of a GatewayConfig."""
    return load_snapshot(
        {
            f"{name}.yaml": json.dumps({**_OBJECT, "kind": kind, "metadata": {"name": name}, "spec": spec}).encode()
            for kind, named in (
                ("ModelServer", servers),
                ("ModelRoute", routes),
                ("GatewayConfig", {} if gateway is None else {"gateway": gateway}),
            )
            for name, spec in named.items()
        }
    )


def demo_gateway(*, tenants: tuple[str, ...] = ("search", "support", "research")) -> Gateway:
    """Two models, a queue, limits, an engine that fails and one that is silent."""

    def engines(network: int, count: int) -> list[dict[str, str]]:
        return [{"address": f"10.0.{network}.{number}:8000"} for number in range(1, count + 1)]

    rules = [
        {"modelMatch": {"headers": {"x-plan": {"exact": "free"}}}, "targetModels": [{"modelServerName": "qwen"}]},
        {"targetModels": [{"modelServerName": "llama", "weight": 90}, {"modelServerName": "qwen", "weight": 10}]},
    ]
    limits = [{"per": "Tenant", "unit": "minute", "requests": 60, "outputTokens": 40_000}]
    gateway = Gateway(
        snapshot_of(
            {
                "llama": {"model": "meta-llama/Llama-3.1-8B-Instruct", "endpoints": engines(1, 8), **_QUEUE},
                "qwen": {"model": "Qwen/Qwen3-32B", "endpoints": engines(2, 4)},
            },
            {
                "chat": {
                    "modelName": "chat",
                    "loraAdapters": ["sql", "legal"],
                    "rules": rules,
                    "rateLimits": limits,
                    "slo": [{"name": "interactive", "ttft": "500ms", "e2e": "8s", "share": 0.6}],
                },
                "large": {"modelName": "large", "rules": [{"targetModels": [{"modelServerName": "qwen"}]}]},
            },
            {
                "authentication": {
                    "apiKeys": [
                        {"name": f"{name}-web", "tenant": name, "keySHA256": sha256(name.encode()).hexdigest(), **more}
                        for name, more in _KEYS.items()
                    ]
                }
            },
        )
    )
    draws = random.Random(2)
    gateway.metrics.recent.on_viewed(gateway.now)
    running: list[StreamRequest] = []

    def end_one() -> None:
        first_s = draws.uniform(0.08, 0.9)
        one = draws.choice([each for each in running if each.sent is not None])
        running.remove(one)
        gateway.end(one, ttft_s=first_s, seconds=first_s + draws.uniform(0.5, 6))

    for number in range(90):
        gateway.now += draws.uniform(0.05, 0.6)
        if number % 20 == 0:
            _report(gateway, draws)
        gateway.metrics.recent.on_viewed(gateway.now)
        tenant = tenants[min(len(tenants) - 1, int(draws.expovariate(1.2)))]
        model = draws.choice(["chat", "chat", "chat", "large"])
        request = gateway.send(tenant, model, "word " * draws.randrange(40, 4_000), most=400)
        running.append(request)
        if number % 3:
            end_one()
    pool = gateway.core.pools["default/llama"]
    table, row = pool.table, pool.table.row_of("10.0.1.3:8000")
    if row is not None:
        table.healths[row].reasons.add(EngineFailure.ERROR)
        opened = CLOSED
        for ago_s in (14, 12, 9, 2):
            opened = opened.after_opening(pool.name, gateway.now - ago_s, needed=3)
        set_breaker(table, row, opened)
    for number in range(60):
        gateway.now += 0.04
        running.append(gateway.send(draws.choice(tenants), "chat", "word " * draws.randrange(40, 400), most=400))
        if number > _ENGINES_BUSY_FROM:
            end_one()
            gateway.tick()
    _report(gateway, draws)
    gateway.now += 0.6
    return gateway


def _report(gateway: Gateway, draws: random.Random) -> None:
    for name, pool in gateway.core.pools.items():
        for address in pool.table.active_addresses:
            if address != "10.0.2.4:8000":
                gateway.engine_reports(
                    name,
                    address,
                    waiting=float(draws.randrange(3)),
                    running=float(draws.randrange(2, 9)),
                    kv_usage=draws.uniform(0.2, 0.9),
                    tpot_s=draws.uniform(0.012, 0.03),
                )


async def wait_until(page: Page, condition: str, *, patience_s: float = 120.0) -> None:
    """Wait until a JavaScript expression holds; raises TimeoutError that names it."""
    try:
        async with asyncio.timeout(patience_s):
            while not await page.run(f"Boolean({condition})"):  # noqa: ASYNC110 - it happens in another process
                await asyncio.sleep(0.1)
    except TimeoutError as error:
        raise TimeoutError(f"not true within {patience_s:g} s in the page: {condition}") from error


async def draw(folder: Path, program: str, port: int) -> None:
    """Engines in the light, requests in the dark, and both on a phone."""
    with tempfile.TemporaryDirectory() as profile:
        async with demo_gateway().served(port) as url, browser_page(program, Path(profile)) as page:
            for name, tab, size, dark in (
                ("console-light", "engines", _SIZE, False),
                ("console-dark", "requests", _SIZE, True),
                ("console-phone", "tenants", _PHONE, True),
            ):
                await page.show("about:blank", width=size[0], height=size[1], dark=dark)
                await page.show(f"{url}#{tab}", width=size[0], height=size[1], dark=dark)
                await wait_until(page, f"document.querySelector('#panel-{tab} tbody tr') !== null")
                (folder / f"{name}.png").write_bytes(await page.picture())


def main(words: list[str]) -> int:
    """Write the pictures."""
    from bench.stack.processes import free_ports  # noqa: PLC0415 - tests bring their own port

    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        print("there is no chromium; apt-get install chromium", file=sys.stderr)
        return 2
    asyncio.run(draw(Path(words[0]) if words else FOLDER, program, free_ports(1)[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
