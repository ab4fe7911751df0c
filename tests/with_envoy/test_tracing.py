# SPDX-License-Identifier: Apache-2.0
"""Traces as a collector gets them: their tree, who decides what is sampled, and a collector that fails."""

from __future__ import annotations

import asyncio
import json
import os
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import msgspec
import pytest
import pytest_asyncio
import yaml
from aiohttp import web

from bench.stack.processes import Processes, free_ports
from controller.bundle.sync import write_bundle_once
from extproc.api.config_loader import load_directory
from tests.otlp import Collector, Span, collector
from tests.programs import not_tested
from tests.waiting import eventually
from tests.with_envoy.stand_in import Gateway, gateway_on
from tools.otelcol import BINARY

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

KEY = "canary-of-a-key-0123456789"
PROMPT = "canary-of-a-prompt"
TENANT = "acme"
SERVER, CLIENT, INTERNAL = 2, 3, 1
# Of clocks that two processes read.
TOLERANCE_NS = 50_000_000
ROOT, OWN, DECIDE = "chat llama", "async envoy.service.ext_proc.v3.ExternalProcessor.Process egress", "attache.decide"
USAGE = {
    "prompt_tokens": 20,
    "completion_tokens": 7,
    "prompt_tokens_details": {"cached_tokens": 12},
}


class Engines:
    """Two engines that answer alike. ``refusals``: so many requests to come are answered 503."""

    def __init__(self) -> None:
        self.addresses: list[str] = []
        self.asked: list[dict[str, str]] = []
        self.refusals = 0

    async def answer(self, request: web.Request) -> web.Response:
        await request.read()
        self.asked.append({name.lower(): value for name, value in request.headers.items()})
        if self.refusals:
            self.refusals -= 1
            return web.Response(status=503)
        choice = {"index": 0, "message": {"role": "assistant", "content": PROMPT}, "finish_reason": "stop"}
        return web.json_response({"choices": [choice], "usage": USAGE})


@asynccontextmanager
async def engines() -> AsyncIterator[Engines]:
    found = Engines()
    app = web.Application()
    app.add_routes([web.post("/v1/{path:.*}", found.answer)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    for _ in range(2):
        await web.TCPSite(runner, "127.0.0.1", 0).start()
    found.addresses = [f"127.0.0.1:{port}" for _, port in runner.addresses]
    try:
        yield found
    finally:
        await runner.cleanup()


class Scene(msgspec.Struct, frozen=True):
    """A gateway with its engines and its collector."""

    directory: Path
    gateway: Gateway
    engines: Engines
    collector: Collector

    async def ask(self, headers: Mapping[str, str] | None = None, **fields: object) -> httpx.Response:
        """One request on a connection of its own, with canaries wherever a client can write."""
        body = {
            "model": "llama",
            "messages": [{"role": "user", "content": PROMPT}, {"role": "system", "content": [PROMPT]}],
            "user": PROMPT,
            "stop": [PROMPT],
            "metadata": {PROMPT: PROMPT},
            "tools": [{"type": "function", "function": {"name": PROMPT, "description": PROMPT}}],
            "prompt_cache_key": PROMPT,
            **fields,
        }
        sent = {"authorization": f"Bearer {KEY}", "cookie": PROMPT, "x-secret": KEY, **(headers or {})}
        async with httpx.AsyncClient(timeout=60) as http:
            return await http.post(
                f"{self.gateway.url}/v1/chat/completions?key={KEY}&prompt={PROMPT}", json=body, headers=sent
            )

    async def change(self, tracing: Mapping[str, object], clients: str = "Untrusted") -> None:
        """Another GatewayConfig; returns when Envoy and extproc use it."""
        file = self.directory / "config" / "a.yaml"
        documents = list(yaml.safe_load_all(file.read_text()))
        spec = documents[-1]["spec"]
        wanted = {"tracing": dict(tracing), "clients": clients}
        if wanted == {"tracing": spec["tracing"], "clients": spec.get("clients", "Untrusted")}:
            return
        spec.update(wanted)
        before = await self.stat("listener_manager.lds.update_success")
        file.with_suffix(".draft").write_text(yaml.safe_dump_all(documents))
        file.with_suffix(".draft").rename(file)
        bundle = self.directory / "envoy"
        await asyncio.to_thread(lambda: write_bundle_once(load_directory(file.parent), bundle, str(bundle)))

        async def is_used() -> bool:
            return await self.stat("listener_manager.lds.update_success") > before

        await eventually(is_used)

    async def set_runtime(self, name: str, value: int) -> None:
        """A setting of Envoy's runtime."""
        async with httpx.AsyncClient() as http:
            answer = await http.post(f"{self.admin}/runtime_modify?{name}={value}")
            assert answer.status_code == 200

    @property
    def admin(self) -> str:
        """The URL of Envoy's admin interface."""
        documents = list(yaml.safe_load_all((self.directory / "config" / "a.yaml").read_text()))
        return f"http://{documents[-1]['spec']['admin']}"

    async def stat(self, name: str) -> int:
        """One of Envoy's counters and gauges."""
        async with httpx.AsyncClient() as http:
            text = (await http.get(f"{self.admin}/stats?format=json&filter=^{name}$")).text
        return sum(one["value"] for one in json.loads(text)["stats"] if one.get("name") == name)

    async def spans_of(self, answer: httpx.Response) -> dict[str, list[Span]]:
        """All spans of the request of ``answer``, by name."""
        request_id = answer.headers["x-request-id"]

        def root() -> Span | None:
            ours = (one for one in self.collector.spans if one.attributes.get("guid:x-request-id") == request_id)
            return next(ours, None)

        await self.collector.until(root)
        found = root()
        assert found is not None
        await self.collector.until(lambda: {OWN, DECIDE} <= self.collector.trace(found.trace).keys())
        return self.collector.trace(found.trace)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scene(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Scene]:
    """Everything is sampled, unless a test changes it."""
    directory = tmp_path_factory.mktemp("tracing")
    async with collector() as collecting, engines() as behind:
        endpoints = [{"address": one} for one in behind.addresses]
        gateway = {
            "tracing": every_request(collecting),
            "authentication": {"apiKeys": [{"name": "app", "key": KEY, "tenant": TENANT}]},
        }
        async with gateway_on(
            directory,
            gateway=gateway,
            more={"endpoints": endpoints},
            headers={"authorization": f"Bearer {KEY}"},
            envoy_options=("--config-yaml", "admin: {allow_paths: [{prefix: /runtime_modify}]}"),
        ) as running:
            made = Scene(directory, running, behind, collecting)
            # not every 5 s
            await made.set_runtime("tracing.opentelemetry.flush_interval_ms", 100)
            await made.set_runtime("tracing.opentelemetry.min_flush_spans", 1)
            yield made


def every_request(collecting: Collector, **more: object) -> dict[str, object]:
    return {"endpoint": collecting.grpc, "samplingPercent": 100, "resource": {"zone": "z1"}, **more}


def is_inside(inner: Span, outer: Span) -> bool:
    return outer.start_ns - TOLERANCE_NS <= inner.start_ns <= inner.end_ns <= outer.end_ns + TOLERANCE_NS


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_request_is_one_tree_of_spans(scene: Scene) -> None:
    await scene.change(every_request(scene.collector))
    answer = await scene.ask()
    assert answer.status_code == 200
    found = await scene.spans_of(answer)
    (root,), (own,), (one_try,), (decide,) = found[ROOT], found[OWN], found["try"], found[DECIDE]
    (parse,), (pick,) = found["parse"], found["pick"]
    assert sum(map(len, found.values())) == 6
    parents = {one.id: one.parent for spans in found.values() for one in spans}
    assert (parents[root.id], parents[own.id], parents[one_try.id]) == ("", root.id, root.id)
    assert (parents[decide.id], parents[parse.id], parents[pick.id]) == (own.id, decide.id, decide.id)
    assert (root.kind, one_try.kind, decide.kind) == (SERVER, CLIENT, INTERNAL)
    for inner, outer in ((own, root), (one_try, root), (decide, own), (parse, decide), (pick, decide)):
        assert is_inside(inner, outer), (inner, outer)
    assert parse.end_ns <= pick.start_ns + TOLERANCE_NS
    # the engine goes on below the try
    assert scene.engines.asked[-1]["traceparent"] == f"00-{root.trace}-{one_try.id}-01"


async def test_spans_say_what_was_asked_and_used(scene: Scene) -> None:
    await scene.change(every_request(scene.collector))
    found = await scene.spans_of(await scene.ask())
    (root,), (pick,), (decide,) = found[ROOT], found["pick"], found[DECIDE]
    served = root.attributes["server.address"], root.attributes["server.port"]
    wanted: dict[str, Any] = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": "llama",
        "gen_ai.response.model": "meta-llama/Llama-3.1-8B-Instruct",
        "gen_ai.usage.input_tokens": 20,
        "gen_ai.usage.output_tokens": 7,
        "gen_ai.usage.cache_read.input_tokens": 12,
        "attache.server": "default/llama",
        "attache.route": "default/llama",
        "attache.tenant": TENANT,
        "attache.queue_ms": 0,
    }
    assert {name: root.attributes.get(name) for name in wanted} == wanted
    assert "error.type" not in root.attributes
    assert "{}:{}".format(*served) == pick.attributes["attache.pick.endpoint"]
    assert root.attributes["attache.ticket"] == decide.attributes["attache.ticket"]
    assert len(pick.attributes["attache.pick.best"]) == 2
    assert root.attributes["http.url"] == f"{scene.gateway.url}/v1/chat/completions"
    assert (root.resource["service.name"], root.resource["zone"]) == ("attache", "z1")
    assert (pick.resource["service.name"], pick.resource["zone"]) == ("attache-extproc", "z1")


async def test_each_try_has_a_span(scene: Scene) -> None:
    await scene.change(every_request(scene.collector))
    scene.engines.refusals = 1
    answer = await scene.ask()
    assert answer.status_code == 200
    found = await scene.spans_of(answer)
    first, second = sorted(found["try"], key=lambda one: one.start_ns)
    assert (first.attributes["http.status_code"], second.attributes["http.status_code"]) == ("503", "200")
    assert first.attributes["upstream_address"] != second.attributes["upstream_address"]
    assert first.parent == second.parent == found[ROOT][0].id
    # each engine is told which of the two it serves
    tries = [one["traceparent"].split("-")[2] for one in scene.engines.asked[-2:]]
    assert tries == [first.id, second.id]


async def test_a_refusal_has_its_reason(scene: Scene) -> None:
    await scene.change(every_request(scene.collector))
    answer = await scene.ask(model="unknown")
    assert answer.status_code == 404
    found = await scene.spans_of(answer)
    (root,), (decide,) = found["POST"], found[DECIDE]
    assert root.attributes["error.type"] == "404"
    assert (decide.attributes["error.type"], decide.is_error) == ("unknown_model", True)
    assert "try" not in found


async def test_the_decision_log_names_the_trace(scene: Scene) -> None:
    await scene.change(every_request(scene.collector))
    answer = await scene.ask()
    found = await scene.spans_of(answer)
    lines = [json.loads(line) for line in scene.gateway.decisions.read_text().splitlines()]
    ours = [one for one in lines if one["kind"] == "decision" and one["request_id"] == answer.headers["x-request-id"]]
    assert [one["trace_id"] for one in ours] == [found[ROOT][0].trace]


async def test_no_span_has_a_prompt_or_a_key(scene: Scene) -> None:
    await scene.change(every_request(scene.collector))
    for stream in (False, True):
        await scene.spans_of(await scene.ask(stream=stream))
    sent = b"".join(scene.collector.requests)
    assert b"gen_ai.usage.input_tokens" in sent
    assert PROMPT.encode() not in sent
    assert KEY.encode() not in sent


FORGED_TRACE, FORGED_SPAN = "0123456789abcdef0123456789abcdef", "0123456789abcdef"
FORCING = {
    "traceparent": f"00-{FORGED_TRACE}-{FORGED_SPAN}-01",
    "tracestate": "vendor=1",
    "baggage": "user=1",
    "b3": f"{FORGED_TRACE}-{FORGED_SPAN}-1",
    "x-b3-traceid": FORGED_TRACE,
    "x-b3-spanid": FORGED_SPAN,
    "x-b3-sampled": "1",
    "x-b3-flags": "1",
    "x-client-trace-id": "forced",
    "x-envoy-force-trace": "true",
    # of Envoy's own ids, one that says that the request is traced
    "x-request-id": "a1b2c3d4-0000-9000-8000-000000000000",
    "x-envoy-external-address": "10.0.0.1",
}


async def test_clients_that_are_not_trusted_cannot_have_themselves_traced(scene: Scene) -> None:
    await scene.change(every_request(scene.collector, samplingPercent=0))
    before = len(scene.engines.asked)
    for name, value in [*FORCING.items(), ("", "")]:
        await scene.ask({name: value} if name else FORCING)
    asked = scene.engines.asked[before:]
    assert len(asked) == len(FORCING) + 1
    # engines are told that nothing is sampled, and nothing of what the client wrote
    assert {one["traceparent"][-2:] for one in asked} == {"00"}
    assert not [(name, value) for one in asked for name, value in one.items() if FORGED_TRACE in value]
    assert not any({"baggage", "b3", "x-b3-sampled"} & one.keys() for one in asked)
    assert not any(one.get("tracestate") for one in asked)
    # spans come in order: those of a request that is sampled come behind all others
    await scene.change(every_request(scene.collector))
    await scene.spans_of(await scene.ask())
    traces = {one["traceparent"].split("-")[1] for one in asked}
    assert not [one for one in scene.collector.spans if one.trace in {*traces, FORGED_TRACE}]


async def test_traces_of_trusted_clients_are_continued(scene: Scene) -> None:
    over_http = {"endpoint": scene.collector.http, "protocol": "http", "samplingPercent": 0}
    await scene.change(over_http, clients="Trusted")
    headers = {name: FORCING[name] for name in ("traceparent", "tracestate", "baggage")}
    found = await scene.spans_of(await scene.ask(headers))
    assert (found[ROOT][0].trace, found[ROOT][0].parent) == (FORGED_TRACE, FORGED_SPAN)
    assert found["pick"][0].trace == FORGED_TRACE
    asked = scene.engines.asked[-1]
    assert (asked["tracestate"], asked["baggage"]) == ("vendor=1", "user=1")
    # and so is the decision that a trace is not kept
    await scene.change({**over_http, "samplingPercent": 100}, clients="Trusted")
    dropped = "f" * 32
    await scene.ask({"traceparent": f"00-{dropped}-{FORGED_SPAN}-00"})
    await scene.spans_of(await scene.ask())
    assert scene.engines.asked[-2]["traceparent"].startswith(f"00-{dropped}-")
    assert not [one for one in scene.collector.spans if one.trace == dropped]


class Silent(asyncio.Protocol):
    """Takes connections and never answers."""


async def test_a_collector_that_is_down_or_silent_holds_no_request(scene: Scene) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Silent, "127.0.0.1", 0)
    silent = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    log = scene.directory / "extproc.log"
    for endpoint in (f"127.0.0.1:{free_ports(1)[0]}", silent):
        for protocol in ("grpc", "http"):
            await scene.change(every_request(scene.collector, endpoint=endpoint, protocol=protocol))
            answers = await asyncio.gather(*(scene.ask() for _ in range(40)))
            assert {one.status_code for one in answers} == {200}
            assert await scene.stat("cluster.attache-collector.upstream_rq_active") <= 64

            async def is_logged(line: str = f"the collector at {endpoint} does not take spans") -> bool:
                return line in log.read_text()

            await eventually(is_logged)
    server.close()
    await scene.change(every_request(scene.collector))
    # what was waiting is lost; what comes now is not
    await scene.spans_of(await scene.ask())
    assert "Traceback" not in log.read_text()


def otelcol() -> str:
    """The binary of an OpenTelemetry Collector; without one the test is skipped, loudly."""
    found = os.environ.get("ATTACHE_OTELCOL") or str(BINARY)
    if not Path(found).is_file():
        not_tested("OTELCOL", f"there is no {found}; build one with `make otelcol`, or set ATTACHE_OTELCOL")
    return found


async def test_a_real_collector_takes_whole_trees_by_grpc_and_by_http(scene: Scene, tmp_path: Path) -> None:
    """It sends on what it has understood."""
    binary = otelcol()
    by_grpc, by_http = (f"127.0.0.1:{port}" for port in free_ports(2))
    configuration = {
        "receivers": {"otlp": {"protocols": {"grpc": {"endpoint": by_grpc}, "http": {"endpoint": by_http}}}},
        "exporters": {"otlp_http": {"endpoint": f"http://{scene.collector.http}", "compression": "none"}},
        "service": {
            "telemetry": {"metrics": {"level": "none"}},
            "pipelines": {"traces": {"receivers": ["otlp"], "exporters": ["otlp_http"]}},
        },
    }
    (tmp_path / "otelcol.yaml").write_text(yaml.safe_dump(configuration))
    log = tmp_path / "otelcol.log"
    async with Processes(tmp_path) as processes:
        await processes.start("otelcol", [binary, "--config", f"file:{tmp_path}/otelcol.yaml"])

        async def is_ready() -> bool:
            return "Everything is ready" in await asyncio.to_thread(log.read_text)

        await processes.wait_ready("otelcol", is_ready)
        for protocol, endpoint in (("grpc", by_grpc), ("http", by_http)):
            await scene.change(every_request(scene.collector, endpoint=endpoint, protocol=protocol))
            before = len(scene.collector.requests)
            scene.engines.refusals = 1
            found = await scene.spans_of(await scene.ask())
            spans = {one.id: one for named in found.values() for one in named}
            names = {name: len(named) for name, named in found.items()}
            assert names == {ROOT: 1, OWN: 1, DECIDE: 1, "parse": 1, "pick": 1, "try": 2}
            (root,) = (one for one in spans.values() if not one.parent)
            assert root.name == ROOT
            # one tree, each span inside its parent
            assert [one for one in spans.values() if one is not root and not is_inside(one, spans[one.parent])] == []
            parents = {(one.name, spans[one.parent].name) for one in spans.values() if one is not root}
            assert parents == {(OWN, ROOT), ("try", ROOT), (DECIDE, OWN), ("parse", DECIDE), ("pick", DECIDE)}
            assert sorted(one.attributes["http.status_code"] for one in found["try"]) == ["200", "503"]
            sent = b"".join(scene.collector.requests[before:])
            assert PROMPT.encode() not in sent
            assert KEY.encode() not in sent
        await scene.change(every_request(scene.collector))
