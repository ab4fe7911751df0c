# SPDX-License-Identifier: Apache-2.0
"""Fallback to other ModelServers through a real Envoy, with engines that fail in every way."""

from __future__ import annotations

import asyncio
import json
import math
import sys
from collections import Counter
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import anthropic
import httpx
import httpx2
import openai
import pytest
import pytest_asyncio
import yaml
from aiohttp import web

from bench.stack.loopback_stack import envoy_command
from bench.stack.processes import Processes, free_ports, ports_in_a_row
from controller.bundle.sync import write_bundle_once
from controller.usage.rows import parse_usage_line
from extproc.api.config_loader import load_directory
from extproc.api.spec import API_VERSION
from tests.waiting import PATIENCE_S, eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
    from pathlib import Path

    from controller.usage.rows import UsageRow

pytestmark = pytest.mark.asyncio(loop_scope="module")

USAGE: Final = {"prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 12}
PATH: Final = "/v1/chat/completions"
ALL: Final = ["connect", "timeout", "overloaded", "server-error", "context-window"]
WHOLE: Final = {"object": "chat.completion", "choices": [], "usage": USAGE}


class Engine:
    """``does``: what it does with the next request, a status or a word; ``got``: the bodies and headers it got.
    ``says``: its answer, if it is another; ``pages``: what it answers to GET, by path.
    """

    def __init__(self, name: str, log: list[tuple[str, str]]) -> None:
        self.name = name
        self.does: int | str = 200
        self.says: Callable[[web.Request], Awaitable[web.StreamResponse]] | None = None
        self.pages: dict[str, str] = {}
        self.takes_s = 0.0
        self.got: list[bytes] = []
        self.headers: list[Mapping[str, str]] = []
        self.running = self.most = 0
        self._log = log
        self._runner: web.AppRunner | None = None
        self.address = ""

    async def start(self) -> None:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.address = f"127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _answer(self, http: web.Request) -> web.StreamResponse:
        if http.method != "POST":
            page = self.pages.get(http.path)
            return web.Response(status=404) if page is None else web.Response(text=page)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            return await self._work(http)
        finally:
            self.running -= 1

    async def _work(self, http: web.Request) -> web.StreamResponse:
        body = await http.read()
        self.got.append(body)
        self.headers.append({name.lower(): value for name, value in http.headers.items()})
        self._log.append((self.name, json.loads(body)["model"]))
        await asyncio.sleep(self.takes_s)
        if self.says is not None:
            return await self.says(http)
        transport = http.transport
        assert transport is not None
        if self.does == "reset":
            transport.abort()
            return web.Response()
        if self.does == "hang":
            await asyncio.sleep(30)
        if self.does == "cut":
            answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await answer.prepare(http)
            await answer.write(
                b'data: {"id":"1","object":"chat.completion.chunk","created":1,"model":"x","choices":[]}\n\n'
            )
            await asyncio.sleep(0.05)
            transport.abort()
            return answer
        status = self.does if isinstance(self.does, int) else 200
        return web.json_response({**WHOLE, "model": self.name} if status == 200 else {"error": {}}, status=status)


class Gateway:
    """``log``: the engines in the order of attempts, each with the model's name in the body that it got."""

    def __init__(self, engines: Mapping[str, Engine], log: list[tuple[str, str]], ports: Mapping[str, int]) -> None:
        self.engines = engines
        self.log = log
        self.url = f"http://127.0.0.1:{ports['envoy']}"
        self.metrics = f"http://127.0.0.1:{ports['metrics']}"
        self.http = httpx.AsyncClient(timeout=30)
        self.asked = 0
        self.processes: Processes

    async def ask(self, model: str = "m", **fields: object) -> httpx.Response:
        self.log.clear()
        self.asked += 1
        body = {"model": model, "messages": [{"role": "user", "content": "hi"}], **fields}
        return await self.http.post(self.url + PATH, json=body)

    async def values(self, family: str) -> dict[tuple[str, ...], float]:
        page = (await self.http.get(f"{self.metrics}/metrics")).text
        found = {}
        for line in page.splitlines():
            if line.startswith(family + "{"):
                labels, _, value = line[len(family) + 1 :].rpartition("} ")
                found[tuple(one.split('"')[1] for one in labels.split('",') if '"' in one)] = float(value)
        return found

    async def heal(self) -> None:
        """All engines serve again, and none is avoided."""
        for one in self.engines.values():
            one.does, one.says, one.takes_s, one.most = 200, None, 0.0, 0

        async def all_told() -> bool:
            return sum((await self.values("attache_answers_total")).values()) >= self.asked

        # what an outcome says later would count again
        await eventually(all_told)
        for name in sorted({name[0] for name in self.engines}):
            answer = await self.http.post(f"{self.metrics}/breakers/reset?server=default/{name}")
            assert answer.status_code == 200, answer.text


def document(kind: str, name: str, spec: Mapping[str, object]) -> dict[str, object]:
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": {"name": name}, "spec": spec}


def server(name: str, model: str, engines: Sequence[Engine], **more: object) -> dict[str, object]:
    listed = [{"address": one.address} for one in engines]
    # what Envoy ejects is for other tests
    policy = {"outlierDetection": {"consecutiveFailures": 1000}}
    spec = {"model": model, "endpoints": listed, "scrapeInterval": "0s", "trafficPolicy": policy, **more}
    return document("ModelServer", name, spec)


def route(name: str, rule: Mapping[str, object]) -> dict[str, object]:
    return document("ModelRoute", name, {"modelName": name, "rules": [rule]})


@asynccontextmanager
async def running(
    directory: Path,
    documents: Sequence[Mapping[str, object]],
    engines: Mapping[str, Engine],
    log: list[tuple[str, str]],
    gateway: Mapping[str, object] | None = None,
    *,
    workers: int = 1,
) -> AsyncIterator[Gateway]:
    """The metrics are those of the first of ``workers``."""
    ports = dict(zip(("envoy", "admin"), free_ports(2), strict=True))
    ports |= {"extproc": ports_in_a_row(workers), "metrics": ports_in_a_row(workers)}
    spec = {
        "listen": f"127.0.0.1:{ports['envoy']}",
        "admin": f"127.0.0.1:{ports['admin']}",
        "extproc": f"127.0.0.1:{ports['extproc']}",
        "extprocWorkers": workers,
        **(gateway or {}),
    }
    config, bundle = directory / "config", directory / "envoy"
    config.mkdir(parents=True)
    (config / "attache.yaml").write_text(yaml.safe_dump_all([*documents, document("GatewayConfig", "gateway", spec)]))
    write_bundle_once(load_directory(config), bundle, str(bundle.resolve()), config)
    extproc = [sys.executable, "-m", "extproc", "--config", str(config), "--listen", str(spec["extproc"])]
    if workers > 1:
        extproc += ["--workers", str(workers)]
    async with Processes(directory) as processes, aiohttp.ClientSession() as http:

        async def answers(url: str) -> bool:
            try:
                async with http.get(url) as response:
                    return response.status == 200
            except aiohttp.ClientError:
                return False

        found = Gateway(engines, log, ports)
        found.processes = processes
        await processes.start("extproc", [*extproc, "--metrics", f"127.0.0.1:{ports['metrics']}", "--grace", "0s"])
        await processes.wait_ready("extproc", lambda: answers(f"{found.metrics}/readyz"))
        await processes.start("envoy", envoy_command(bundle))
        await processes.wait_ready("envoy", lambda: answers(f"http://127.0.0.1:{ports['admin']}/ready"))
        await processes.wait_ready("envoy", lambda: answers(f"{found.url}/v1/models"))
        async with found.http:
            yield found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    log: list[tuple[str, str]] = []
    engines = {name: Engine(name, log) for name in ("a1", "a2", "b1", "b2", "c1")}
    for one in engines.values():
        await one.start()
    fallback = [{"modelServerName": "b"}, {"modelServerName": "c", "degraded": True}]
    documents = [
        server("a", "big/model", [engines["a1"], engines["a2"]]),
        server("b", "a-model-with-a-longer-name", [engines["b1"], engines["b2"]]),
        server("c", "s", [engines["c1"]]),
        route("m", {"targetModels": [{"modelServerName": "a"}], "fallback": fallback, "retry": {"idleTimeout": "1s"}}),
        # for bodies that take an engine long to read
        route("long", {"targetModels": [{"modelServerName": "a"}], "fallback": fallback}),
        *(route(name, {"targetModels": [{"modelServerName": name}]}) for name in ("b", "c")),
    ]
    async with running(tmp_path_factory.mktemp("fallback") / "stack", documents, engines, log) as found:
        yield found
    for one in engines.values():
        await one.stop()


async def test_its_own_engines_serve_it(gateway: Gateway) -> None:
    answer = await gateway.ask()
    assert answer.status_code == 200
    assert answer.headers["x-attache-served-by"] == "default/a"
    assert "x-attache-degraded" not in answer.headers
    assert gateway.log in ([("a1", "big/model")], [("a2", "big/model")])


@pytest.mark.parametrize("failure", [503, 429, 500, 529, "reset", "hang"])
async def test_each_failure_goes_down_the_list(gateway: Gateway, failure: int | str) -> None:
    await gateway.heal()
    for name in ("a1", "a2", "b1", "b2"):
        gateway.engines[name].does = failure
    answer = await gateway.ask()
    assert answer.status_code == 200, answer.text
    order = [name for name, _ in gateway.log]
    assert (set(order[:2]), set(order[2:4]), order[4:]) == ({"a1", "a2"}, {"b1", "b2"}, ["c1"])
    models = [model for _, model in gateway.log]
    assert models == ["big/model"] * 2 + ["a-model-with-a-longer-name"] * 2 + ["s"]
    assert answer.headers["x-attache-served-by"] == "default/c"
    assert answer.headers["x-attache-degraded"] == "model"


async def test_refusals_of_clients_are_never_retried(gateway: Gateway) -> None:
    await gateway.heal()
    for status in (400, 404, 413, 422):
        for one in gateway.engines.values():
            one.does = status
        answer = await gateway.ask()
        assert answer.status_code == status
        assert len(gateway.log) == 1
        assert gateway.log[0][0].startswith("a")
        assert answer.headers["x-attache-served-by"] == "default/a"


async def test_there_are_no_more_attempts_than_listed(gateway: Gateway) -> None:
    await gateway.heal()
    for one in gateway.engines.values():
        one.does = 503
    answer = await gateway.ask()
    assert answer.status_code == 503
    assert Counter(name for name, _ in gateway.log) == dict.fromkeys(gateway.engines, 1)


async def test_a_request_over_which_its_engines_fail_leaves_the_others_where_they_are(gateway: Gateway) -> None:
    await gateway.heal()

    async def fails_over_one(http: web.Request) -> web.Response:
        is_ill = b"poison" in await http.read()
        return web.json_response({"error": {}} if is_ill else WHOLE, status=500 if is_ill else 200)

    for name in ("a1", "a2"):
        gateway.engines[name].says = fails_over_one

    async def passed_on() -> float:
        return sum((await gateway.values("attache_fallbacks_total")).values())

    before = await passed_on()
    for number in range(4):
        answer = await gateway.ask(messages=[{"role": "user", "content": f"{number} poison"}])
        assert answer.status_code == 200
        assert [name[0] for name, _ in gateway.log] == ["a", "a", "b"]

        async def is_told(number: int = number) -> bool:
            return await passed_on() == before + number + 1

        await eventually(is_told)
        assert (await gateway.ask()).headers["x-attache-served-by"] == "default/a"


async def test_a_long_body_is_right_at_each_attempt(gateway: Gateway) -> None:
    await gateway.heal()
    for name in ("a1", "a2", "b1"):
        gateway.engines[name].does = 503
    for one in gateway.engines.values():
        one.got.clear()
        one.headers.clear()
    body = {"messages": [{"role": "user", "content": "x" * int(15.9 * 2**20)}], "model": "long", "seed": 7}
    answer = await gateway.ask(**body)
    assert answer.status_code == 200, answer.text
    assert gateway.log[-1][0] == "b2"
    got = [one for engine in gateway.engines.values() for one in engine.got]
    assert len(got) == len(gateway.log)
    for one in got:
        assert {**json.loads(one), "model": "long"} == body
    headers = [one for engine in gateway.engines.values() for one in engine.headers]
    assert not any(name.startswith("x-attache") for one in headers for name in one)


async def test_nothing_is_in_flight_in_the_end(gateway: Gateway) -> None:
    await gateway.heal()
    for name in ("a1", "a2"):
        gateway.engines[name].does = "reset"
    for _ in range(3):
        # no more at once than Envoy's budget for retries and the fallback's allow
        for answer in await asyncio.gather(*(gateway.ask() for _ in range(8))):
            assert answer.status_code == 200

    async def is_idle() -> bool:
        found = await gateway.values("attache_in_flight")
        return bool(found) and not any(found.values())

    await eventually(is_idle)


async def test_the_order_is_the_same_without_extproc(tmp_path: Path) -> None:
    log: list[tuple[str, str]] = []
    engines = {name: Engine(name, log) for name in ("a1", "a2", "b1")}
    for one in engines.values():
        await one.start()
    fallback = [{"modelServerName": "b", "degraded": True}]
    documents = [
        server("a", "big/model", [engines["a1"], engines["a2"]]),
        server("b", 'a "quoted" model', [engines["b1"]]),
        route("m", {"targetModels": [{"modelServerName": "a"}], "fallback": fallback}),
    ]
    async with running(tmp_path / "stack", documents, engines, log, {"failureMode": "Open"}) as gateway:
        await gateway.processes.end("extproc")

        async def is_served() -> bool:
            return (await gateway.ask()).status_code == 200

        await eventually(is_served)
        assert (await gateway.ask()).headers["x-attache-served-by"] == "default/a"
        engines["a1"].does = engines["a2"].does = 503
        answer = await gateway.ask(seed=7)
        assert answer.status_code == 200
        # two further attempts at its own, by Envoy's choice
        assert [name[0] for name, _ in log] == ["a", "a", "a", "b"]
        assert [model for _, model in log] == ["big/model"] * 3 + ['a "quoted" model']
        assert json.loads(engines["b1"].got[-1])["seed"] == 7
        assert answer.headers["x-attache-served-by"] == "default/b"
        assert answer.headers["x-attache-degraded"] == "model"
        engines["a1"].does = engines["a2"].does = 400
        assert (await gateway.ask()).status_code == 400
        assert len(log) == 1
    for one in engines.values():
        await one.stop()


async def test_a_stream_that_breaks_is_neither_continued_nor_ended(gateway: Gateway) -> None:
    await gateway.heal()
    for name in ("a1", "a2"):
        gateway.engines[name].does = "cut"
    gateway.log.clear()
    messages: Any = [{"role": "user", "content": "hi"}]
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        stream = await client.chat.completions.create(model="m", messages=messages, stream=True)
        with pytest.raises((openai.APIError, httpx2.RemoteProtocolError)):
            async for _ in stream:
                pass
    async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key="none", max_retries=0) as claude:
        events = await claude.messages.create(model="m", messages=messages, max_tokens=9, stream=True)
        with pytest.raises((anthropic.APIError, httpx2.RemoteProtocolError)):
            async for _ in events:
                pass
    assert [name[0] for name, _ in gateway.log] == ["a", "a"]


async def test_answers_of_a_fallback_are_as_long_as_it_gives(tmp_path: Path) -> None:
    log: list[tuple[str, str]] = []
    engines = {name: Engine(name, log) for name in ("a1", "b1", "c1")}
    for one in engines.values():
        await one.start()
    fallback = [
        {"modelServerName": "b", "degrade": {"maxOutputTokens": 64}, "degraded": True},
        {"modelServerName": "c", "degrade": {"maxOutputTokens": 8}},
    ]
    documents = [
        server("a", "the same", [engines["a1"]]),
        server("b", 'a "longer" name; with, marks', [engines["b1"]]),
        server("c", "the same", [engines["c1"]]),
        route("m", {"targetModels": [{"modelServerName": "a"}], "fallback": fallback}),
    ]
    try:
        async with running(tmp_path / "stack", documents, engines, log) as gateway:
            for asked, got in (
                ({}, [{}, {"max_completion_tokens": 64}, {"max_completion_tokens": 8}]),
                ({"max_tokens": 1000}, [{"max_tokens": 1000}, {"max_tokens": 64}, {"max_tokens": 8}]),
                ({"max_tokens": 20, "seed": 7}, [{"max_tokens": 20}, {"max_tokens": 20}, {"max_tokens": 8}]),
                ({"max_tokens": 1}, [{"max_tokens": 1}] * 3),
            ):
                await gateway.heal()
                for one in engines.values():
                    one.got.clear()
                engines["a1"].does = 503
                degraded = (await gateway.ask(**asked)).headers.get("x-attache-degraded")
                assert degraded == ("model, max_tokens" if asked.get("max_tokens", 65) > 64 else "model")
                await gateway.heal()
                engines["a1"].does = engines["b1"].does = "reset"
                answer = await gateway.ask(**asked)
                assert answer.status_code == 200
                degraded = answer.headers.get("x-attache-degraded")
                assert degraded == ("max_tokens" if asked.get("max_tokens", 65) > 8 else None)
                for one, limits in zip(engines.values(), got, strict=True):
                    read = json.loads(one.got[-1])
                    assert {name: value for name, value in read.items() if "max_" in name} == limits
                    assert read["messages"] == [{"role": "user", "content": "hi"}]
                    assert read.get("seed") == asked.get("seed")
                assert [model for _, model in log] == ["the same", 'a "longer" name; with, marks', "the same"]
    finally:
        for one in engines.values():
            await one.stop()


def price(micros: int) -> list[object]:
    """Of a token, read or written."""
    return [{"perMillion": {"input": str(micros), "output": str(micros)}}]


async def test_a_request_costs_what_the_model_that_answered_costs(tmp_path: Path) -> None:
    """Its header, its row, and the metrics."""
    log: list[tuple[str, str]] = []
    engines = {name: Engine(name, log) for name in ("a1", "b1", "c1")}
    for one in engines.values():
        await one.start()
    fallback = [{"modelServerName": "b", "on": ALL}, {"modelServerName": "c", "on": ALL, "degraded": True}]
    documents = [
        server("a", "big/model", [engines["a1"]], pricing=price(1)),
        server("b", "small", [engines["b1"]], pricing=price(7)),
        server("c", "tiny", [engines["c1"]], pricing=price(50)),
        route("m", {"targetModels": [{"modelServerName": "a"}], "fallback": fallback}),
    ]
    lines = tmp_path / "usage.log"
    gateway_spec = {"usageLog": {"path": str(lines), "costHeader": True}}

    async def refuses(_: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"code": "context_length_exceeded"}}, status=400)

    try:
        async with running(tmp_path / "stack", documents, engines, log, gateway_spec) as gateway:
            costs = []
            for failing in ({}, {"a1": 503}, {"a1": "reset", "b1": 503}, {"a1": 400}):
                await gateway.heal()
                for name, does in failing.items():
                    engines[name].does = does
                    engines[name].says = refuses if does == 400 else None
                answer = await gateway.ask()
                assert answer.status_code == 200, answer.text
                costs.append((answer.headers["x-attache-served-by"], answer.headers["x-attache-cost-micros"]))
            expected = [("default/a", 12), ("default/b", 84), ("default/c", 600), ("default/b", 84)]
            assert costs == [(name, str(cost)) for name, cost in expected]

            def rows() -> list[UsageRow]:
                found = lines.read_bytes().splitlines() if lines.exists() else []
                return [parse_usage_line(one, math.inf) for one in found]

            await eventually(lambda: len(rows()) >= len(expected))
            assert [(one.server, one.cost_micros) for one in rows()] == expected
            assert [one.served_model for one in rows()] == ["big/model", "small", "tiny", "small"]
            assert [one.attempts for one in rows()] == [1, 2, 3, 2]
            assert [one.is_degraded for one in rows()] == [False, False, True, False]

            async def spent() -> bool:
                found = await gateway.values("attache_cost_micros_total")
                by_server = {
                    name: sum(cost for labels, cost in found.items() if name in labels) for name, _ in expected
                }
                return by_server == {"default/a": 12, "default/b": 168, "default/c": 600}

            await eventually(spent)
            tokens = await gateway.values("attache_tenant_prompt_tokens_total")
            assert {labels[0]: count for labels, count in tokens.items()} == {
                "default/a": 10,
                "default/b": 20,
                "default/c": 10,
            }
    finally:
        for one in engines.values():
            await one.stop()


async def test_if_all_of_its_engines_fail_the_fallback_gets_no_more_than_the_budget(tmp_path: Path) -> None:
    """At 50 requests a second: a fallback that can carry them serves them all, and a slow one is not run over."""
    log: list[tuple[str, str]] = []
    engines = {name: Engine(name, log) for name in ("a1", "b1")}
    for one in engines.values():
        await one.start()
    # more than 50 a second of 50 ms are at once, also where this machine is slow
    budget = 20
    rule = {"targetModels": [{"modelServerName": "a"}], "fallback": [{"modelServerName": "b"}]}
    documents = [
        server("a", "big/model", [engines["a1"]]),
        server("b", "small", [engines["b1"]]),
        route("m", {**rule, "retry": {"minConcurrency": budget}}),
    ]
    try:
        async with running(tmp_path / "stack", documents, engines, log) as gateway:
            assert (await gateway.ask()).status_code == 200

            async def load(seconds: float) -> Counter[tuple[int, str]]:
                """By status and who has answered; empty: extproc itself."""
                asked = []
                for _ in range(int(50 * seconds)):
                    asked.append(asyncio.create_task(gateway.ask()))
                    await asyncio.sleep(0.02)
                answers = await asyncio.gather(*asked)
                return Counter((one.status_code, one.headers.get("x-attache-served-by", "")) for one in answers)

            engines["a1"].does, engines["b1"].takes_s = 503, 0.05
            assert set(await load(4)) == {(200, "default/b")}, f"{engines['b1'].most} at once"
            engines["b1"].takes_s, engines["b1"].most = 1.0, 0
            found = await load(4)
            # the others get the refusal of their own
            served = found.pop((200, "default/b"))
            assert {status for status, _ in found} == {503}
            assert served >= budget
            assert engines["b1"].most <= 1.2 * budget

            async def is_idle() -> bool:
                return not any((await gateway.values("attache_in_flight")).values())

            await eventually(is_idle)
            counted = await gateway.values("attache_fallbacks_total")
            assert {reason for labels in counted for reason in labels} >= {"failed", "no_endpoint"}
    finally:
        for one in engines.values():
            await one.stop()


async def test_a_key_reaches_the_engines_of_its_own_model_server_alone(tmp_path: Path) -> None:
    log: list[tuple[str, str]] = []
    engines = {name: Engine(name, log) for name in ("a1", "b1", "c1")}
    for one in engines.values():
        await one.start()
    for name in ("a", "b"):
        (tmp_path / f"{name}.key").write_text(f"sk-of-{name}")
    keyed = {name: {"apiKeyFile": str(tmp_path / f"{name}.key")} for name in ("a", "b")}
    documents = [
        *(server(name, name, [engines[f"{name}1"]], connection=keyed[name]) for name in ("a", "b")),
        server("c", "c", [engines["c1"]]),
        *(
            route(name, {"targetModels": [{"modelServerName": first}], "fallback": [{"modelServerName": to}]})
            for name, first, to in (("a-c", "a", "c"), ("c-a", "c", "a"))
        ),
        route(
            "a-c-b",
            {
                "targetModels": [{"modelServerName": "a"}],
                "fallback": [{"modelServerName": "c"}, {"modelServerName": "b"}],
            },
        ),
        route(
            "c-b-a",
            {
                "targetModels": [{"modelServerName": "c"}],
                "fallback": [{"modelServerName": "b"}, {"modelServerName": "a"}],
            },
        ),
    ]
    own, of_a, of_b = "Bearer of-the-client", "Bearer sk-of-a", "Bearer sk-of-b"

    async def keys(gateway: Gateway, model: str, **headers: str) -> list[tuple[str, str | None]]:
        """Of each attempt, all of which fail but the last: the engine, and the key that it got."""
        await gateway.heal()
        for one in engines.values():
            one.headers.clear()
        *failing, last = model.split("-")
        for name in failing:
            engines[f"{name}1"].does = 503
        gateway.http.headers = httpx.Headers(headers)
        assert (await gateway.ask(model)).status_code == 200
        assert log[-1][0] == f"{last}1"
        return [(name, engines[name].headers[-1].get("authorization")) for name, _ in log]

    try:
        async with running(tmp_path / "stack", documents, engines, log) as gateway:
            for headers in ({}, {"authorization": own}):
                assert await keys(gateway, "a-c", **headers) == [("a1", of_a), ("c1", None)]
                assert await keys(gateway, "a-c-b", **headers) == [("a1", of_a), ("c1", None), ("b1", of_b)]
                first = headers.get("authorization")
                assert await keys(gateway, "c-a", **headers) == [("c1", first), ("a1", of_a)]
                assert await keys(gateway, "c-b-a", **headers) == [("c1", first), ("b1", of_b), ("a1", of_a)]
    finally:
        for one in engines.values():
            await one.stop()


async def test_without_extproc_a_key_stays_with_its_model_server_too(tmp_path: Path) -> None:
    log: list[tuple[str, str]] = []
    engines = {name: Engine(name, log) for name in ("a1", "c1")}
    for one in engines.values():
        await one.start()
    (tmp_path / "a.key").write_text("sk-of-a")
    documents = [
        server("a", "a", [engines["a1"]], connection={"apiKeyFile": str(tmp_path / "a.key")}),
        server("c", "c", [engines["c1"]]),
        route("m", {"targetModels": [{"modelServerName": "a"}], "fallback": [{"modelServerName": "c"}]}),
    ]
    try:
        async with running(tmp_path / "stack", documents, engines, log, {"failureMode": "Open"}) as gateway:
            await gateway.processes.end("extproc")

            async def is_served() -> bool:
                return (await gateway.ask()).status_code == 200

            await eventually(is_served)
            engines["a1"].does = 503
            assert (await gateway.ask()).status_code == 200
            assert engines["a1"].headers[-1]["authorization"] == "Bearer sk-of-a"
            assert "authorization" not in engines["c1"].headers[-1]
    finally:
        for one in engines.values():
            await one.stop()


async def test_two_workers_send_a_fallback_no_more_than_one_budget(tmp_path: Path) -> None:
    log: list[tuple[str, str]] = []
    engines = {name: Engine(name, log) for name in ("a1", "b1")}
    for one in engines.values():
        await one.start()
    budget = 20
    rule = {"targetModels": [{"modelServerName": "a"}], "fallback": [{"modelServerName": "b"}]}
    documents = [
        server("a", "big/model", [engines["a1"]]),
        server("b", "small", [engines["b1"]]),
        route("m", {**rule, "retry": {"minConcurrency": budget}}),
    ]
    try:
        async with running(tmp_path / "stack", documents, engines, log, workers=2) as gateway:
            host, _, port = gateway.metrics.rpartition(":")
            pages = [f"{host}:{int(port) + worker}" for worker in range(2)]

            async def at_once() -> list[float]:
                """By worker, the requests that it has sent to the fallback without an attempt."""
                found = []
                for page in pages:
                    text = (await gateway.http.get(f"{page}/metrics")).text
                    lines = [one for one in text.splitlines() if one.startswith("attache_fallbacks_total{")]
                    found.append(sum(float(one.rpartition(" ")[2]) for one in lines if "no_endpoint" in one))
                return found

            async def both_avoid_it() -> bool:
                await asyncio.gather(*(gateway.ask() for _ in range(4)))
                return min(await at_once()) >= 3

            engines["a1"].does = 503
            await eventually(both_avoid_it)
            engines["b1"].takes_s, engines["b1"].most = 1.0, 0
            before = await at_once()
            asked = []
            for _ in range(200):
                asked.append(asyncio.create_task(gateway.ask()))
                await asyncio.sleep(0.02)
            assert {answer.status_code for answer in await asyncio.gather(*asked)} == {200, 503}
            assert budget / 2 < engines["b1"].most <= 1.2 * budget
            assert all(now > then for now, then in zip(await at_once(), before, strict=True))
    finally:
        for one in engines.values():
            await one.stop()


async def test_one_tenants_failures_leave_a_part_of_the_budget_to_others(tmp_path: Path) -> None:
    log: list[tuple[str, str]] = []
    engines = {name: Engine(name, log) for name in ("a1", "b1")}
    for one in engines.values():
        await one.start()
    rule = {"targetModels": [{"modelServerName": "a"}], "fallback": [{"modelServerName": "b"}]}
    documents = [
        server("a", "big/model", [engines["a1"]]),
        server("b", "small", [engines["b1"]]),
        route("m", {**rule, "retry": {"minConcurrency": 9, "budgetPercent": 0}}),
    ]
    may_answer = asyncio.Event()
    there: Counter[str] = Counter()

    async def holds(http: web.Request) -> web.StreamResponse:
        there[(await http.json())["user"]] += 1
        await may_answer.wait()
        return web.json_response({**WHOLE, "model": "b1"})

    try:
        async with running(tmp_path / "stack", documents, engines, log, {"clients": "Trusted"}) as gateway:
            gateway.http.timeout = PATIENCE_S

            def ask(tenant: str) -> asyncio.Task[httpx.Response]:
                body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "user": tenant}
                asking = gateway.http.post(gateway.url + PATH, json=body, headers={"x-attache-tenant": tenant})
                return asyncio.create_task(asking)

            async def is_avoided() -> bool:
                assert (await ask("greedy")).status_code == 200
                return any("no_endpoint" in labels for labels in await gateway.values("attache_fallbacks_total"))

            engines["a1"].does = 503
            await eventually(is_avoided)
            engines["b1"].says = holds
            modest = ask("modest")
            await eventually(lambda: there["modest"] == 1)
            greedy = [ask("greedy") for _ in range(20)]
            # two thirds at most of what the other one leaves; the rest gets the refusal of its own engine
            await eventually(lambda: sum(one.done() for one in greedy) + there["greedy"] == 20)
            assert 0 < there["greedy"] <= 6
            later = [ask("modest"), ask("third")]
            await eventually(lambda: (there["modest"], there["third"]) == (2, 1))
            assert there.total() <= 9
            may_answer.set()
            answers = await asyncio.gather(modest, *later)
            assert {one.headers["x-attache-served-by"] for one in answers} == {"default/b"}
            statuses = Counter(one.status_code for one in await asyncio.gather(*greedy))
            assert statuses == {200: there["greedy"], 503: 20 - there["greedy"]}
    finally:
        may_answer.set()
        for one in engines.values():
            await one.stop()
