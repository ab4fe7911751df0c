# SPDX-License-Identifier: Apache-2.0
"""Answers of engines through a real Envoy: headers that only the gateway may write, redirects, other protocols."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Final

import pytest
import pytest_asyncio

from extproc.wire_names import (
    COST_CURRENCY,
    COST_MICROS,
    REQUEST_ID,
    RESERVED_FROM_ENGINES,
    SERVED_BY,
)
from tests.waiting import eventually
from tests.with_envoy.test_fallback import document
from tests.with_envoy.test_providers import CHAT, MESSAGES, Attempt, Gateway, Server, chain, engine, model_server
from tests.with_envoy.test_providers import running as running_gateway

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import httpx

pytestmark = pytest.mark.asyncio(loop_scope="module")

SERVED: Final = "x-who-served"
# What clients would believe.
FORGED: Final = {
    "x-attache-cost-micros": "1",
    "x-attache-cost-currency": "XXX",
    "x-attache-budget-remaining": '"team";r=1;t=1;unit="USD"',
    "x-attache-budget-warning": '"team"',
    "x-attache-served-by": "default/other",
    "x-attache-degraded": "model",
    "x-attache-dropped": "model",
    "x-attache-refused-for": "context-window",
    "x-attache-engine-host": "10.0.0.1:8000",
    "x-attache-engine-attempts": "7",
    "x-attache-engine-answered": "via_upstream",
    "X-Attache-Anything": "1",
    "x-gateway-destination-endpoint-served": "10.0.0.1:8000",
    "x-llm-d-request-dropped-reason": "rejected-capacity",
    "x-slo-ttft-ms": "1",
    "x-envoy-ratelimited": "true",
    "x-envoy-upstream-service-time": "1",
    "x-envoy-immediate-health-check-fail": "1",
    "x-ratelimit-limit-requests": "1",
    "x-ratelimit-remaining-tokens": "0",
    "x-ratelimit-reset-requests": "1h",
    "x-ratelimit-anything": "1",
    "access-control-allow-origin": "*",
    "access-control-allow-credentials": "true",
    "alt-svc": 'h2="elsewhere.example:443"',
    SERVED: "10.0.0.1:8000",
}
# Of a server behind an HTTPRoute these are its own.
OF_BACKENDS: Final = {one for one in FORGED if one.startswith(("x-ratelimit-", "access-control-", "alt-svc"))}
OWN: Final = {"x-own": "1", "openai-processing-ms": "5"}
WEB: Final = {
    "apiVersion": "gateway.networking.k8s.io/v1",
    "kind": "HTTPRoute",
    "metadata": {"name": "web"},
    "spec": {
        "rules": [
            {
                "matches": [{"path": {"type": "PathPrefix", "value": f"/{name}"}}],
                "filters": [
                    {
                        "type": "URLRewrite",
                        "urlRewrite": {"path": {"type": "ReplacePrefixMatch", "replacePrefixMatch": "/"}},
                    }
                ],
                "backendRefs": [{"group": "attache.dev", "kind": kind, "name": name}],
            }
            for kind, name in (("Backend", "web"), ("ModelServer", "a"))
        ]
    },
}
TEXT_PATH: Final = "/v2/models/v/infer"


LIMITED: Final = {
    "modelName": "limited",
    "rules": [{"targetModels": [{"modelServerName": "a"}]}],
    "rateLimits": [{"requests": 9, "unit": "hour"}],
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    """``a`` and ``p`` are engines of ModelServers, ``c`` of one with the protocol V2; ``q`` is a Backend, too."""
    folder = tmp_path_factory.mktemp("answers")
    log = list[Attempt]()
    servers = {name: Server(name, log) for name in ("a", "p", "c", "q")}
    async with AsyncExitStack() as started:
        for one in servers.values():
            await started.enter_async_context(one.running())
        retried = {"outlierDetection": {"consecutiveFailures": 1000}, "retry": {"attempts": 1}}
        price = [{"perMillion": {"input": "100000", "output": "200000"}}]
        at = {name: [{"address": f"127.0.0.1:{one.port}"}] for name, one in servers.items()}
        documents = [
            {**model_server("a", endpoints=at["a"], scrapeInterval="0s", pricing=price)},
            engine("p", servers["p"]),
            model_server("retried", endpoints=[*at["a"], *at["p"]], scrapeInterval="0s", trafficPolicy=retried),
            model_server("v", endpoints=at["c"], protocol="V2"),
            # for Gateway.heal
            engine("c", servers["c"]),
            engine("q", servers["q"]),
            document("Backend", "web", {"endpoints": [at["q"][0]["address"]]}),
            WEB,
            *map(chain, ("a", "retried", "v")),
            chain("a", "p"),
            chain("p", "q"),
            document("ModelRoute", "limited", LIMITED),
        ]
        spec = {
            "failureMode": "Open",
            "servedHeader": SERVED,
            "usageLog": {"path": str(folder / "usage.log"), "costHeader": True},
        }
        found = Gateway(folder / "stack", servers, log)
        found.directory.mkdir()
        async with running_gateway(found, documents, spec) as running:
            yield running


def forged(answer: httpx.Response) -> set[str]:
    """Of ``FORGED``, those that a client reads as the engine wrote them."""
    return {name for name, value in FORGED.items() if value in answer.headers.get_list(name)}


@pytest.mark.parametrize("stream", [False, True])
async def test_what_only_the_gateway_may_say_no_engine_says(gateway: Gateway, *, stream: bool) -> None:
    await gateway.heal()
    gateway.servers["a"].headers = {**FORGED, **OWN}
    answer = await gateway.post(CHAT, {"model": "a", "messages": [{"role": "user", "content": "hi"}], "stream": stream})
    assert answer.status_code == 200
    assert not forged(answer)
    assert not {name for name in answer.headers if name.startswith(("x-ratelimit-", "x-envoy-", "access-control-"))}
    assert OWN.items() <= dict(answer.headers).items()
    # the gateway's own
    assert answer.headers.get_list(SERVED) == [f"127.0.0.1:{gateway.servers['a'].port}"]
    assert len(answer.headers.get_list(REQUEST_ID)) == 1
    cost = answer.headers.get_list(COST_MICROS), answer.headers.get_list(COST_CURRENCY)
    assert cost == (([], []) if stream else (["1800000"], ["USD"]))


async def test_its_own_state_of_limits_is_the_gateways(gateway: Gateway) -> None:
    await gateway.heal()
    gateway.servers["a"].headers = FORGED
    answer = await gateway.ask("limited")
    assert not forged(answer)
    assert answer.headers.get_list("x-ratelimit-limit-requests") == ["9"]


async def test_nor_does_one_of_a_rule_with_fallbacks_or_its_fallback(gateway: Gateway) -> None:
    await gateway.heal()
    gateway.servers["a"].headers = gateway.servers["p"].headers = FORGED
    answer = await gateway.ask("a-p")
    assert not forged(answer)
    assert answer.headers.get_list(SERVED_BY) == ["default/a"]
    gateway.servers["a"].status = 503
    answer = await gateway.ask("a-p")
    assert (answer.status_code, [one.server for one in gateway.log]) == (200, ["a", "p"])
    assert not forged(answer)
    assert answer.headers.get_list(SERVED_BY) == ["default/p"]


async def test_nor_does_an_error_or_an_answer_by_another_protocol_or_route(gateway: Gateway) -> None:
    await gateway.heal()
    for one in gateway.servers.values():
        one.headers = FORGED
    gateway.servers["a"].status = 400
    assert not forged(await gateway.ask("a"))
    gateway.servers["a"].status = 200
    answer = await gateway.post("/a" + CHAT, {"model": "a-model", "messages": []})
    assert (answer.status_code, forged(answer)) == (200, set())
    answer = await gateway.post(TEXT_PATH, {"inputs": []})
    assert (answer.status_code, forged(answer)) == (200, set())


async def test_an_engine_does_not_hinder_a_second_attempt(gateway: Gateway) -> None:
    await gateway.heal()
    for name, other in (("a", "p"), ("p", "a")):
        gateway.servers[name].status, gateway.servers[name].headers = 429, {"x-envoy-ratelimited": "true"}
        assert (await gateway.ask("retried")).status_code == 200
        gateway.servers[name].be_good()
        assert gateway.log[-1].server in {name, other}


async def test_of_other_servers_limits_and_policies_of_browsers_are_their_own(gateway: Gateway) -> None:
    await gateway.heal()
    gateway.servers["q"].headers = {**FORGED, **OWN}
    answer = await gateway.http.post(f"{gateway.url}/web/anything", json={})
    assert answer.status_code == 200
    assert forged(answer) == OF_BACKENDS
    gateway.servers["q"].status, gateway.servers["q"].headers = 302, {"location": "http://elsewhere.example/"}
    answer = await gateway.http.post(f"{gateway.url}/web/anything", json={})
    assert (answer.status_code, answer.headers["location"]) == (302, "http://elsewhere.example/")


@pytest.mark.parametrize("status", [101, 300, 301, 302, 303, 304, 307, 308, 399])
async def test_neither_a_redirect_nor_another_protocol_reaches_a_client(gateway: Gateway, status: int) -> None:
    await gateway.heal()
    switches = {"upgrade": "websocket", "connection": "upgrade"}
    headers = switches if status == 101 else {"location": f"http://127.0.0.1:{gateway.servers['c'].port}{CHAT}"}
    code = "engine_switched_protocols" if status == 101 else "engine_redirected"
    for one in gateway.servers.values():
        one.status, one.headers, one.text = status, headers, "" if status in {101, 304} else "go there"
    answer = await gateway.ask("a")
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, code)
    assert not {"location", "upgrade"} & answer.headers.keys()
    assert [one.server for one in gateway.log] == ["a"]
    answer = await gateway.ask("a", MESSAGES)
    assert (answer.status_code, answer.json()["type"], answer.json()["error"]["code"]) == (502, "error", code)
    answer = await gateway.post(TEXT_PATH, {"inputs": []})
    assert answer.status_code == 502
    assert isinstance(answer.json()["error"], str)
    answer = await gateway.post("/a" + CHAT, {"model": "a-model", "messages": []})
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, code)


async def test_both_are_failures_after_which_the_next_one_is_asked(gateway: Gateway) -> None:
    await gateway.heal()
    gateway.servers["p"].status, gateway.servers["p"].headers = 307, {"location": "http://elsewhere.example/"}
    assert await gateway.tried("p-q") == ["p", "q"]

    async def is_counted() -> bool:
        lines = (await gateway.http.get(f"{gateway.metrics}/metrics")).text.splitlines()
        wanted = ("attache_fallbacks_total{", '"default/q"', '"failed"', " 1.0")
        return any(all(part in line for part in wanted) for line in lines)

    await eventually(is_counted, timeout_s=20)


async def test_a_long_redirect_shows_nothing_either(gateway: Gateway) -> None:
    await gateway.heal()
    gateway.servers["a"].status, gateway.servers["a"].headers = 302, {"location": "http://elsewhere.example/"}
    gateway.servers["a"].text = "there " * 100_000
    for gateway.servers["a"].is_chunked in (False, True):
        answer = await gateway.ask("a")
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "engine_redirected")


async def test_all_of_this_holds_without_extproc(gateway: Gateway) -> None:
    await gateway.heal()
    await gateway.processes.end("extproc")

    async def is_alone() -> bool:
        return "x-ratelimit-limit-requests" not in (await gateway.ask("limited")).headers

    await eventually(is_alone)
    gateway.servers["a"].headers = gateway.servers["p"].headers = FORGED
    for model in ("a", "a-p"):
        answer = await gateway.ask(model)
        assert (answer.status_code, forged(answer)) == (200, set())
    gateway.servers["a"].status, gateway.servers["a"].headers = 307, {"location": "http://elsewhere.example/"}
    answer = await gateway.ask("a")
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "engine_redirected")
    assert await gateway.tried("a-p") == ["a", "p"]


async def test_the_list_has_all_of_these() -> None:
    assert [name for name in FORGED if not name.lower().startswith(RESERVED_FROM_ENGINES)] == [SERVED]
