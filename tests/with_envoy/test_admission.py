# SPDX-License-Identifier: Apache-2.0
"""Limits and queues through a real Envoy: who is held, who goes first, what those are told who cannot go."""

from __future__ import annotations

import asyncio
import base64
import hmac
import itertools
import json
import os
import signal
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import httpx
import openai
import pytest
import pytest_asyncio
import yaml

from bench.stack.loopback_stack import ALIAS, EngineFlags, Stack, running_stack
from tests.fork_server import output_of
from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from pathlib import Path

pytestmark = pytest.mark.asyncio(loop_scope="module")

ONE_AT_A_TIME = {"queueDepth": None, "kvUsage": None, "maxWait": None, "maxRequests": 1}
OBJECTIVE = {
    "apiVersion": "inference.networking.x-k8s.io/v1alpha2",
    "kind": "InferenceObjective",
    "metadata": {"name": "urgent"},
    "spec": {"priority": 100, "poolRef": {"name": "llama"}},
}
KEYS = [
    {"name": f"{tenant}-1", "key": f"sk-{tenant}-secret", "tenant": tenant}
    for tenant in ("acme", "bell", "cord", "dent")
]


def request(*, max_tokens: int = 1, **fields: object) -> dict[str, object]:
    return {"model": ALIAS, "max_tokens": max_tokens, "messages": [{"role": "user", "content": "hello"}], **fields}


async def metric(stack: Stack, name: str, **labels: str) -> float:
    """The sum of a metric's series that have these labels."""
    async with httpx.AsyncClient(verify=False, timeout=60) as http:  # noqa: S501 - plain HTTP; loading certificates takes long
        text = (await http.get(f"{stack.metrics}/metrics")).text
    queued = [f'{label}="{value}"' for label, value in labels.items()]
    lines = [line for line in text.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
    return sum(float(line.rpartition(" ")[2]) for line in lines if all(one in line for one in queued))


def place_at_engine(answer: httpx.Response) -> int:
    """The engine numbers requests as they come. In which order a busy client gets to read its answers says less."""
    return int(answer.json()["id"][-8:], 16)


async def envoy_stat(stack: Stack, name: str) -> int:
    async with httpx.AsyncClient(verify=False, timeout=60) as http:  # noqa: S501 - plain HTTP; loading certificates takes long
        text = (await http.get(f"{stack.admin}/stats", params={"filter": f"^{name}$"})).text
    return int(text.rpartition(":")[2])


def edit(stack: Stack, kind: str, **spec: object) -> None:
    """Change fields of a document's spec, as an operator would."""
    file = stack.config / "attache.yaml"
    documents = list(yaml.safe_load_all(file.read_text()))
    for document in documents:
        if document["kind"] == kind:
            document["spec"].update(spec)
    new = file.with_suffix(".new")
    new.write_text(yaml.safe_dump_all(documents))
    new.rename(file)


def spec_of(stack: Stack, kind: str) -> dict[str, object]:
    documents = yaml.safe_load_all((stack.config / "attache.yaml").read_text())
    spec: dict[str, object] = next(one["spec"] for one in documents if one["kind"] == kind)
    return spec


async def change(stack: Stack, kind: str, **spec: object) -> None:
    """The same, and wait until extproc has taken it over."""
    before = await metric(stack, "attache_config_reloads_total", result="applied")
    edit(stack, kind, **spec)
    await eventually(lambda: metric_is(stack, "attache_config_reloads_total", before + 1, result="applied"))


class OneEngine:
    """A stack whose only engine takes one request at a time, and clients of it."""

    def __init__(self, stack: Stack, http: httpx.AsyncClient) -> None:
        self.stack = stack
        self.http = http

    async def ask(self, headers: Mapping[str, str], **fields: object) -> httpx.Response:
        return await self.http.post("/v1/chat/completions", json=request(**fields), headers=dict(headers))

    async def waiting(self) -> float:
        return await metric(self.stack, "attache_queue_waiting")

    @asynccontextmanager
    async def busy(self, headers: Mapping[str, str] | None = None) -> AsyncIterator[None]:
        """A client has the engine, and leaves at the end of the block."""
        blocker = asyncio.create_task(self.ask(headers or {}, max_tokens=100_000))
        await eventually(lambda: metric_is(self.stack, "attache_in_flight", 1))
        yield
        blocker.cancel()
        await asyncio.wait([blocker])
        assert blocker.cancelled(), "its answer ended before the block did"


# how long Envoy then bears streams that are idle: 300s and the time without an engine, which is 60s by default
IDLE = "360s"
CONTROL = {"saturation": ONE_AT_A_TIME, "sharing": "Strict", "fairness": "RoundRobin", "timeout": "40s"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def queueing(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """One engine that takes one request at a time. Clients are trusted: they are the gateway that says who asks."""
    async with running_stack(
        tmp_path_factory.mktemp("queueing") / "stack",
        EngineFlags(count=1, speed=10.0, stream_headers="first-token"),
        watch=True,
        gateway={"clients": "Trusted", "messageTimeout": "1s"},
        more={"flowControl": CONTROL},
    ) as stack:
        (stack.config / "urgent.yaml").write_text(yaml.safe_dump(OBJECTIVE))
        await eventually(lambda: metric_is(stack, "attache_config_reloads_total", 2, result="applied"))
        yield stack


@pytest_asyncio.fixture(loop_scope="module")
async def held(queueing: Stack) -> AsyncIterator[OneEngine]:
    """The stack as it was started, whatever the test before has changed, with nothing in it."""
    if spec_of(queueing, "ModelServer")["flowControl"] != CONTROL:
        await change(queueing, "ModelServer", flowControl=CONTROL)
        # Envoy follows by itself
        await eventually(lambda: listener_waits(queueing, IDLE))
    await eventually(lambda: metric_is(queueing, "attache_in_flight", 0))
    await eventually(lambda: metric_is(queueing, "attache_queue_waiting", 0))
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=queueing.url, timeout=60, limits=limits) as http:
        yield OneEngine(queueing, http)


async def metric_is(stack: Stack, name: str, value: float, **labels: str) -> bool:
    return await metric(stack, name, **labels) == value


@pytest.mark.real_time
async def test_of_two_hundred_held_clients_fifty_leave_and_the_rest_are_served_in_order(held: OneEngine) -> None:
    stack = held.stack
    engine = stack.engines[0].removeprefix("http://")
    sent_before = await envoy_stat(stack, "cluster.server/default/llama.upstream_rq_total")
    waits_before = {one: await metric(stack, "attache_queue_waits_total", outcome=one) for one in ("left", "sent")}
    resets_before = await envoy_stat(stack, "http.attache.downstream_rq_rx_reset")
    # without an engine everybody is held, for as long as the test needs
    control = {"saturation": ONE_AT_A_TIME, "sharing": "Strict", "fairness": "RoundRobin", "noEndpointTimeout": "5m"}
    await without_engine(stack, **control)
    await eventually(lambda: listener_waits(stack, "600s"))
    clients: dict[str, asyncio.Task[httpx.Response]] = {}
    for number in range(200):
        tenant, is_urgent = "ab"[number % 2], number % 10 == 9
        headers = {"x-attache-tenant": tenant, **({"x-llm-d-inference-objective": "urgent"} if is_urgent else {})}
        name = f"{'urgent' if is_urgent else tenant}-{number:03}"
        clients[name] = asyncio.create_task(held.ask(headers))
        # so that they arrive in this order
        await eventually(lambda count=number + 1: metric_is(stack, "attache_queue_waiting", count), pause_s=0.001)
    leaving = [name for name in clients if int(name.rpartition("-")[2]) % 4 == 2]
    for name in leaving:
        clients[name].cancel()
    await eventually(lambda: metric_is(stack, "attache_queue_waiting", 150))
    picked_before = await metric(stack, "attache_picks_total")
    edit(stack, "ModelServer", endpoints=[{"address": engine}])

    stayed = [name for name in clients if name not in leaving]
    answers = await asyncio.gather(*(clients[name] for name in stayed))
    assert {one.status_code for one in answers} == {200}
    # the urgent first, then a turn each, in a flow in the order in which they came
    places = dict(zip(stayed, map(place_at_engine, answers), strict=True))
    order = sorted(stayed, key=places.__getitem__)
    urgent = [name for name in stayed if name.startswith("urgent")]
    a, b = ([name for name in stayed if name.startswith(f"{tenant}-")] for tenant in "ab")
    assert order[:20] == urgent
    turns = list(itertools.chain.from_iterable(itertools.zip_longest(a, b)))
    assert order[20:] == [name for name in turns if name is not None]

    # Envoy and extproc agree on what happened
    assert await metric(stack, "attache_picks_total") - picked_before == 150
    assert await envoy_stat(stack, "cluster.server/default/llama.upstream_rq_total") - sent_before == 150
    waits = {one: await metric(stack, "attache_queue_waits_total", outcome=one) for one in ("left", "sent")}
    assert {one: waits[one] - waits_before[one] for one in waits} == {"left": 50, "sent": 150}
    assert await envoy_stat(stack, "http.attache.downstream_rq_rx_reset") - resets_before == 50
    await eventually(lambda: metric_is(stack, "attache_in_flight", 0))
    assert await metric(stack, "attache_open_streams") == 0


async def has_engine_in_envoy(stack: Stack) -> bool:
    async with httpx.AsyncClient(verify=False, timeout=60) as http:  # noqa: S501 - plain HTTP; loading certificates takes long
        return "server/default/llama::127.0.0.1" in (await http.get(f"{stack.admin}/clusters")).text


async def without_engine(stack: Stack, **control: object) -> None:
    """Take the only engine away, and wait until both extproc and Envoy have let go of it."""
    await change(stack, "ModelServer", endpoints=[], flowControl=control)

    async def is_gone() -> bool:
        return not await has_engine_in_envoy(stack)

    await eventually(is_gone)


async def listener_waits(stack: Stack, idle_timeout: str) -> bool:
    """Whether Envoy's own configuration, as it runs, bears streams that are idle for so long."""
    async with httpx.AsyncClient(verify=False, timeout=60) as http:  # noqa: S501 - plain HTTP; loading certificates takes long
        text = (await http.get(f"{stack.admin}/config_dump", params={"resource": "dynamic_listeners"})).text
    return f'"stream_idle_timeout": "{idle_timeout}"' in text


async def test_a_held_request_outlives_the_time_that_envoy_waits_for_others(held: OneEngine) -> None:
    async with held.busy():
        waiting = asyncio.create_task(held.ask({}))
        await eventually(lambda: metric_is(held.stack, "attache_queue_waiting", 1))
        # three times messageTimeout
        await asyncio.sleep(3)
        assert await held.waiting() == 1
    assert (await waiting).status_code == 200
    assert await envoy_stat(held.stack, "http.attache.ext_proc.message_timeouts") == 0
    assert await envoy_stat(held.stack, "http.attache.ext_proc.override_message_timeout_received") >= 1
    assert await envoy_stat(held.stack, "http.attache.ext_proc.override_message_timeout_ignored") == 0


@pytest.mark.parametrize(("mode", "status", "asked"), [("Open", 200, 1), ("Close", 503, 2)])
async def test_a_hung_extproc_costs_the_time_of_a_message_though_requests_may_be_held_for_long(
    tmp_path: Path, mode: str, status: int, asked: int
) -> None:
    async with running_stack(
        tmp_path / "stack",
        EngineFlags(count=1, speed=20.0),
        gateway={"messageTimeout": "1s", "failureMode": mode},
        more={"flowControl": {"timeout": "10m", "noEndpointTimeout": "20m"}},
    ) as stack:
        os.kill(stack.pids["extproc"], signal.SIGSTOP)
        try:
            # what a hold may take is out of reach of this client
            async with httpx.AsyncClient(base_url=stack.url, timeout=30) as http:
                answer = await http.post("/v1/chat/completions", json=request())
        finally:
            os.kill(stack.pids["extproc"], signal.SIGCONT)
        assert answer.status_code == status
        assert await envoy_stat(stack, "http.attache.ext_proc.message_timeouts") == asked


FORGED = {
    "x-attache-tenant": "bell",
    "x-attache-user": "root",
    "x-attache-client": "bell-1",
    "X-Attache-Deadline-Ms": "1",
    "x-llm-d-inference-objective": "urgent",
    "x-gateway-inference-objective": "urgent",
    "x-llm-d-inference-fairness-id": "bell",
    "X-Gateway-Inference-Fairness-Id": "bell",
    "x-llm-d-slo-ttft-ms": "1",
    "x-slo-tpot-ms": "1",
    "x-attache-bundle": "1",
}
LIMITED = {
    "rateLimits": [
        {"others": True, "unit": "hour", "requests": 3},
        {"tenants": ["dent"], "unit": "hour", "requests": 1},
        {"per": "Tenant", "unit": "hour", "totalTokens": 100_000},
    ]
}


@asynccontextmanager
async def with_keys(directory: Path, limits: Mapping[str, object]) -> AsyncIterator[Stack]:
    """Clients are told apart by API keys."""
    async with running_stack(
        directory,
        EngineFlags(count=1, speed=20.0, stream_headers="first-token"),
        gateway={"authentication": {"apiKeys": KEYS}},
        more={"flowControl": {"saturation": ONE_AT_A_TIME}},
        route=limits,
        headers={"authorization": f"Bearer {KEYS[0]['key']}"},
    ) as stack:
        (stack.config / "urgent.yaml").write_text(yaml.safe_dump(OBJECTIVE))
        await eventually(lambda: metric_is(stack, "attache_config_reloads_total", 2, result="applied"))
        yield stack


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def keyed(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """Every tenant has three requests an hour, and one has one; each test takes tenants of its own."""
    async with with_keys(tmp_path_factory.mktemp("keyed") / "stack", LIMITED) as stack:
        yield stack


def client_of(stack: Stack, key: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key=key, max_retries=0, timeout=30)


async def ask_as(client: openai.AsyncOpenAI, **headers: str) -> httpx.Headers:
    answer = await client.chat.completions.with_raw_response.create(
        model=ALIAS, messages=[{"role": "user", "content": "hello"}], max_tokens=2, extra_headers=headers
    )
    return answer.headers


async def test_forged_headers_change_nothing(keyed: Stack) -> None:
    waits, standard = "attache_queue_wait_seconds_count", {"band": "standard"}
    waits_before = [await metric(keyed, waits), await metric(keyed, waits, **standard)]
    async with client_of(keyed, "sk-acme-secret") as acme, client_of(keyed, "sk-bell-secret") as bell:
        for _ in range(3):
            await ask_as(acme, **FORGED)
        # it was acme that used up what it has, and not bell
        with pytest.raises(openai.RateLimitError):
            await ask_as(acme, **FORGED)
        await ask_as(bell)
    assert await metric(keyed, "attache_tenant_requests_total", outcome="picked", tenant="acme") == 3
    assert await metric(keyed, "attache_tenant_requests_total", outcome="rate_limited", tenant="acme") == 1
    assert await metric(keyed, "attache_tenant_requests_total", tenant="bell") == 1
    # and nobody was urgent
    waits_after = [await metric(keyed, waits), await metric(keyed, waits, **standard)]
    assert [after - before for after, before in zip(waits_after, waits_before, strict=True)] == [4, 4]


async def test_who_has_no_key_is_told_so(keyed: Stack) -> None:
    async with client_of(keyed, "sk-of-nobody") as nobody:
        with pytest.raises(openai.AuthenticationError) as caught:
            await ask_as(nobody, **FORGED)
    assert caught.value.code == "invalid_api_key"


async def test_limits_are_told_in_the_headers_and_errors_that_openais_clients_read(keyed: Stack) -> None:
    async with client_of(keyed, "sk-cord-secret") as cord:
        headers = [await ask_as(cord) for _ in range(3)]
        assert [one["x-ratelimit-remaining-requests"] for one in headers] == ["2", "1", "0"]
        assert headers[0]["x-ratelimit-limit-requests"] == "3"
        assert headers[0]["x-ratelimit-reset-requests"] == "20m0s"
        assert headers[0]["x-ratelimit-limit-tokens"] == "100000"
        assert 99_900 < int(headers[0]["x-ratelimit-remaining-tokens"]) < 100_000
        with pytest.raises(openai.RateLimitError) as caught:
            await ask_as(cord)
    error = caught.value
    assert (error.code, error.type) == ("rate_limit_exceeded", "requests")
    assert "Please try again in 20m0s" in error.message
    assert error.response.headers["x-ratelimit-remaining-requests"] == "0"
    assert 1150 <= int(error.response.headers["retry-after"]) <= 1200


async def test_a_limit_that_names_a_tenant_is_its_own(keyed: Stack) -> None:
    async with client_of(keyed, "sk-dent-secret") as dent:
        headers = await ask_as(dent)
        assert headers["x-ratelimit-limit-requests"] == "1"
        assert headers["x-ratelimit-limit-tokens"] == "100000"
        with pytest.raises(openai.RateLimitError):
            await ask_as(dent)


async def test_tokens_are_reserved_by_what_is_asked_for_and_settled_by_what_was_written(tmp_path: Path) -> None:
    limits = {"rateLimits": [{"per": "Tenant", "unit": "hour", "outputTokens": 1000}]}
    async with with_keys(tmp_path / "stack", limits) as stack, client_of(stack, "sk-acme-secret") as acme:

        async def remaining(most: int | None) -> int:
            answer = await acme.chat.completions.with_raw_response.create(
                model=ALIAS, messages=[{"role": "user", "content": "hello"}], max_tokens=most
            )
            return int(answer.headers["x-ratelimit-remaining-tokens"])

        # nothing said: as many as nearly all answers have had, which is 1,000 before any has; the engine writes 256
        assert await remaining(None) == 0
        await eventually(lambda: metric_is(stack, "attache_access_log_entries_total", 1, result="settled"))
        assert await remaining(700) == 44
        with pytest.raises(openai.RateLimitError) as caught:
            await remaining(2000)
        assert "the limit of this tenant grants no more than 1000 at once" in caught.value.message


async def test_who_waits_too_long_is_told_when_to_come_back(held: OneEngine) -> None:
    await change(held.stack, "ModelServer", flowControl={"saturation": ONE_AT_A_TIME, "timeout": "300ms"})
    async with held.busy():
        answer = await held.ask({})
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "queue_timeout"
    assert int(answer.headers["retry-after"]) >= 1


async def test_top_shows_who_waits(held: OneEngine) -> None:
    async with held.busy({"x-attache-tenant": "acme"}):
        waiting = [asyncio.create_task(held.ask({"x-attache-tenant": "bell"})) for _ in range(3)]
        await eventually(lambda: metric_is(held.stack, "attache_queue_waiting", 3))
        page = held.stack.metrics.removeprefix("http://")
        command = [sys.executable, "-m", "extproc", "top", "--once", "--interval", "200ms", page]
        _, out = await output_of(command, held.stack.directory)
    rows = [line.split() for line in out.splitlines()]
    assert ["default/llama", "standard", "3"] in [row[:3] for row in rows]
    assert "acme" in [row[0] for row in rows if row]
    assert [one.status_code for one in await asyncio.gather(*waiting)] == [200] * 3


async def test_a_full_queue_refuses_the_lowest_first(held: OneEngine) -> None:
    await change(held.stack, "ModelServer", flowControl={"saturation": ONE_AT_A_TIME, "maxRequests": 2})
    async with held.busy():
        waiting = [asyncio.create_task(held.ask({})) for number in range(2)]
        await eventually(lambda: metric_is(held.stack, "attache_queue_waiting", 2))
        refused = await held.ask({})
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        urgent = asyncio.create_task(held.ask({"x-llm-d-inference-objective": "urgent"}))
        # the urgent one has pushed one of the others out
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    answers = await asyncio.gather(*waiting, urgent)
    assert sorted(one.status_code for one in answers) == [200, 200, 429]
    assert answers[-1].status_code == 200
    assert place_at_engine(answers[-1]) < max(place_at_engine(one) for one in answers[:-1] if one.status_code == 200)


async def test_changing_the_queue_keeps_those_who_wait_and_taking_it_away_lets_them_go(held: OneEngine) -> None:
    stack = held.stack
    blocker = asyncio.create_task(held.ask({}, max_tokens=6000))
    await eventually(lambda: metric_is(stack, "attache_in_flight", 1))
    waiting = [asyncio.create_task(held.ask({})) for number in range(5)]
    await eventually(lambda: metric_is(stack, "attache_queue_waiting", 5))
    await change(stack, "ModelServer", flowControl={"saturation": ONE_AT_A_TIME, "fairness": "SlidingWindow"})
    assert await held.waiting() == 5
    edit(stack, "ModelServer", flowControl=None)
    answers = await asyncio.gather(*waiting)
    assert {one.status_code for one in answers} == {200}
    assert not blocker.done()
    assert (await blocker).status_code == 200


async def test_a_model_without_engines_holds_its_requests_until_the_first_is_there(held: OneEngine) -> None:
    stack = held.stack
    engine = stack.engines[0].removeprefix("http://")
    control = {"saturation": ONE_AT_A_TIME, "fairness": "RoundRobin", "noEndpointTimeout": "30s"}
    await without_engine(stack, **control)
    clients = []
    for number in range(6):
        headers = {"x-attache-tenant": "a" if number < 3 else "b"}
        clients.append(asyncio.create_task(held.ask(headers)))
        await eventually(lambda count=number + 1: metric_is(stack, "attache_queue_waiting", count))
    # what an autoscaler reads
    assert await metric(stack, "attache_wanted_engines", server="default/llama") == 6

    edit(stack, "ModelServer", endpoints=[{"address": engine}])
    answers = await asyncio.gather(*clients)
    assert [one.status_code for one in answers] == [200] * 6
    # a0, b3, a1, b4, a2, b5
    assert [place_at_engine(answers[number]) for number in (0, 3, 1, 4, 2, 5)] == sorted(map(place_at_engine, answers))
    assert await metric(stack, "attache_wanted_engines", server="default/llama") == 0


async def test_a_model_that_gets_no_engine_in_time_says_so(held: OneEngine) -> None:
    stack = held.stack
    await without_engine(stack, noEndpointTimeout="200ms")
    answer = await held.ask({})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_endpoint")
    assert answer.headers["retry-after"]


def signed(secret: bytes, **claims: object) -> str:
    """A token as an issuer would sign it."""

    def part(value: bytes) -> str:
        return base64.urlsafe_b64encode(value).decode().rstrip("=")

    text = f"{part(json.dumps({'alg': 'HS256', 'kid': 'k'}).encode())}.{part(json.dumps(claims).encode())}"
    return f"{text}.{part(hmac.digest(secret, text.encode(), 'sha256'))}"


async def test_tokens_say_who_asks(tmp_path: Path) -> None:
    secret = b"a secret that only the issuer and Envoy know"
    jwks = tmp_path / "jwks.json"
    jwks.write_text(key_set(secret))
    issuer = {
        "name": "login",
        "issuer": "https://login.example",
        "jwksFile": str(jwks),
        "audiences": ["attache"],
        "tenantClaim": "org",
    }
    claims = {"iss": "https://login.example", "exp": 4_000_000_000, "aud": "attache", "sub": "alice", "org": "acme"}

    def token(secret: bytes = secret, **changes: object) -> str:
        return signed(secret, **{name: value for name, value in {**claims, **changes}.items() if value is not None})

    good = token()
    cases = [
        (200, {"authorization": f"Bearer {good}", **FORGED}, ""),
        (200, {"authorization": f"bearer {good}"}, ""),
        (200, {"authorization": f"bEARER {good}"}, ""),
        *(
            (401, {"authorization": wrong}, "")
            for wrong in (
                f"Basic {good}",
                f"Digest {good}",
                good,
                f"Basic bearer {good}",
                f"Basic x, Bearer {good}",
            )
        ),
        (401, {"authorization": f"Bearer {token(b'another', org='bell')}"}, ""),
        (401, {}, ""),
        (401, {}, f"?access_token={good}"),
        (401, {"cookie": f"access_token={good}"}, ""),
        (401, {"authorization": f"Bearer {token(exp=None)}"}, ""),
        (401, {"authorization": f"Bearer {token(exp=1)}"}, ""),
        (403, {"authorization": f"Bearer {token(aud='another')}"}, ""),
        (403, {"authorization": f"Bearer {token(aud=None)}"}, ""),
        *(
            (403, {"authorization": f"Bearer {token(org=wrong)}"}, "")
            for wrong in (None, "", 7, True, ["acme"], {"a": 1})
        ),
        *((403, {"authorization": f"Bearer {token(sub=wrong)}"}, "") for wrong in (None, "", "a\nb")),
        (401, {"authorization": f"Bearer {token(sub=7)}"}, ""),
    ]
    async with (
        running_stack(
            tmp_path / "stack",
            EngineFlags(count=1, speed=20.0),
            gateway={"authentication": {"jwt": [issuer]}},
            headers={"authorization": f"Bearer {good}"},
            watch=True,
        ) as stack,
        httpx.AsyncClient(base_url=stack.url, timeout=60) as http,
    ):

        async def status(headers: dict[str, str], query: str = "") -> int:
            answer = await http.post(f"/v1/chat/completions{query}", json=request(), headers=headers)
            assert answer.status_code == 200 or answer.json()["error"]["message"]
            return answer.status_code

        assert [await status(headers, query) for _, headers, query in cases] == [expected for expected, *_ in cases]
        assert await metric(stack, "attache_tenant_requests_total", tenant="acme", outcome="picked") == 3
        assert await metric(stack, "attache_tenant_requests_total") == 3

        async def is_counted() -> bool:
            return await metric(stack, "attache_tenant_service_tokens_total", tenant="acme") > 0

        await eventually(is_counted)

        jwks.write_text("{}")
        replacement = jwks.with_suffix(".new")
        replacement.write_text(key_set(b"the issuer's next secret"))
        replacement.replace(jwks)

        async def is_revoked() -> bool:
            return await status({"authorization": f"Bearer {good}"}) == 401

        await eventually(is_revoked)
        next_good = {"authorization": "Bearer " + token(b"the issuer's next secret")}
        assert await status(next_good) == 200

        # an issuer whose key set is not there yet concerns nobody else, and is taken when it comes
        late_jwks = tmp_path / "late.json"
        late = {**issuer, "name": "late", "issuer": "https://late.example", "jwksFile": str(late_jwks)}
        edit(stack, "GatewayConfig", authentication={"jwt": [issuer, late]})
        of_late = {"authorization": "Bearer " + token(b"a late secret", iss="https://late.example")}

        async def envoy_knows_it() -> bool:
            # a token of an issuer that Envoy does not know is 401 as well: its own filter file says what it has
            return "signs-nothing" in (stack.directory / "envoy" / "tokens.json").read_text()

        await eventually(envoy_knows_it)
        assert await status(of_late) == 401
        assert await status(next_good) == 200
        late_jwks.write_text(key_set(b"a late secret"))

        async def is_taken() -> bool:
            return await status(of_late) == 200

        await eventually(is_taken)
        async with httpx.AsyncClient(timeout=60) as admin:
            stats = (
                await admin.get(f"{stack.admin}/stats", params={"filter": "extension_config_discovery.*(fail|reject)"})
            ).text
        assert [line for line in stats.splitlines() if not line.endswith(": 0")] == []


def key_set(secret: bytes) -> str:
    key = base64.urlsafe_b64encode(secret).decode().rstrip("=")
    return json.dumps({"keys": [{"kty": "oct", "alg": "HS256", "kid": "k", "k": key}]})
