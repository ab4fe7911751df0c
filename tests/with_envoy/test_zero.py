# SPDX-License-Identifier: Apache-2.0
"""ModelServers without engines behind a real Envoy: requests wait, and none is lost while engines come and go.

``ATTACHE_ZERO_CYCLES``: how often engines go and come in the long test.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import signal
from typing import TYPE_CHECKING, Self

import httpx
import msgspec
import pytest
import pytest_asyncio
import yaml

from bench.stack.loopback_stack import MODEL, EngineFlags, Stack, running_stack
from extproc.api.spec import API_VERSION
from extproc.api.status_page_contents import content_digest
from tests.examples import IS_SLOW, slow
from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

log = logging.getLogger(__name__)
pytestmark = pytest.mark.asyncio(loop_scope="module")

CYCLES = int(os.environ.get("ATTACHE_ZERO_CYCLES", "60" if IS_SLOW else "10"))
MODES = [slow("Open"), "Close"]
# Side by side: each has two engines of its own, of which one is there at a time.
MODELS = 10 if IS_SLOW else 4
FLAGS = EngineFlags(count=2 * MODELS + 1, speed=20.0, stream_headers="first-token")
# Shorter than the time for which requests are held: what a held request needs is added to each. Longer than a machine
# with other work takes for a request.
GATEWAY = {"messageTimeout": "8s", "requestTimeout": "8s"}


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=MODES)
async def zero(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """A stack whose last engine serves a model that is always there."""
    directory = tmp_path_factory.mktemp("zero") / "stack"
    gateway = {**GATEWAY, "failureMode": request.param}
    async with running_stack(directory, FLAGS, watch=True, gateway=gateway) as running:
        yield running


def put(stack: Stack, name: str, engines: Iterable[str], *, draining: bool = False, hold: str = "60s") -> bytes:
    """Write a model's file, at one moment; returns its content."""
    listed = [{"address": one, **({"draining": True} if draining else {})} for one in engines]
    server = {"model": MODEL, "endpoints": listed, "activation": {"holdTimeout": hold, "startTime": "30s"}}
    route = {"modelName": name, "rules": [{"targetModels": [{"modelServerName": name}]}]}
    documents = [
        {"apiVersion": API_VERSION, "kind": kind, "metadata": {"name": name}, "spec": spec}
        for kind, spec in (("ModelServer", server), ("ModelRoute", route))
    ]
    text = yaml.safe_dump_all(documents).encode()
    draft = stack.directory / f"{name}.draft"
    draft.write_bytes(text)
    draft.replace(stack.config / f"{name}.yaml")
    return text


def engine_of(stack: Stack, number: int) -> str:
    return stack.engines[number].removeprefix("http://")


async def in_use(stack: Stack, name: str, text: bytes) -> None:
    """Until extproc uses the file."""

    async def is_used() -> bool:
        async with httpx.AsyncClient(timeout=60) as http:
            report = (await http.get(f"{stack.metrics}/config")).json()
        return bool(report["files"].get(f"{name}.yaml") == content_digest(text))

    await eventually(is_used)


async def waiting(stack: Stack, name: str) -> int:
    async with httpx.AsyncClient(timeout=60) as http:
        page = (await http.get(f"{stack.metrics}/demand")).json()
    return int(page["servers"].get(f"default/{name}", {}).get("atZero", 0))


async def envoy_counted(stack: Stack) -> str:
    """What Envoy counted of requests that extproc did not decide, and of those without an engine: why one was lost."""
    async with httpx.AsyncClient(timeout=60) as http:
        page = (await http.get(f"{stack.admin}/stats?filter=ext_proc|cx_none_healthy|health_check.failure")).text
    return ", ".join(line for line in page.splitlines() if not line.endswith(": 0"))


async def ask(http: httpx.AsyncClient, stack: Stack, model: str, *, stream: bool = False) -> httpx.Response:
    body = {"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 20, "stream": stream}
    return await http.post(f"{stack.url}/v1/chat/completions", json=body)


async def test_a_request_is_held_longer_than_every_other_time_limit_and_then_served(zero: Stack) -> None:
    await asyncio.gather(*(is_held_and_served(zero, stream=stream) for stream in (False, True)))


async def is_held_and_served(zero: Stack, *, stream: bool) -> None:
    name = f"slow-{stream}".lower()
    await in_use(zero, name, put(zero, name, []))
    async with httpx.AsyncClient(timeout=60) as http:
        asked = asyncio.create_task(ask(http, zero, name, stream=stream))

        async def waits() -> bool:
            return await waiting(zero, name) == 1

        await eventually(waits)
        # longer than requests may take otherwise
        await asyncio.sleep(10.0)
        put(zero, name, [engine_of(zero, -1)])
        answer = await asked
        assert answer.status_code == 200
        assert "[DONE]" in answer.text if stream else answer.json()["usage"]["completion_tokens"] == 20


async def test_a_first_engine_is_not_used_before_envoy_knows_it_however_long_that_takes(zero: Stack) -> None:
    await in_use(zero, "unknown", put(zero, "unknown", []))
    bundle = zero.processes.pid("bundle")
    async with httpx.AsyncClient(timeout=60) as http:
        asked = asyncio.create_task(ask(http, zero, "unknown"))

        async def waits() -> bool:
            return await waiting(zero, "unknown") == 1

        await eventually(waits)
        os.kill(bundle, signal.SIGSTOP)
        try:
            await in_use(zero, "unknown", put(zero, "unknown", [engine_of(zero, -1)]))
            # longer than extproc waits in any case
            await asyncio.sleep(3.0)
            assert await waits()
        finally:
            os.kill(bundle, signal.SIGCONT)
        assert (await asked).status_code == 200


async def test_a_deadline_that_passes_says_when_to_come_back(zero: Stack) -> None:
    await in_use(zero, "late", put(zero, "late", [], hold="3s"))
    async with httpx.AsyncClient(timeout=60) as http:
        answer = await ask(http, zero, "late")
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "engine_starting"
        # of the 30 s that a start is taken to need, 3 have passed, and more on a busy machine
        assert 1 <= int(answer.headers["retry-after"]) <= 27
        counted = (await http.get(f"{zero.metrics}/metrics")).text
    assert 'attache_requests_total{outcome="engine_starting"} 1.0' in counted


async def test_a_client_that_leaves_is_waited_for_no_more(zero: Stack) -> None:
    await in_use(zero, "left", put(zero, "left", []))
    async with httpx.AsyncClient(timeout=1.5) as http:
        with pytest.raises(httpx.ReadTimeout):
            await ask(http, zero, "left")

    async def nobody_waits() -> bool:
        return await waiting(zero, "left") == 0

    await eventually(nobody_waits)


async def test_while_extproc_hangs_a_model_without_engines_says_when_to_come_back(zero: Stack) -> None:
    await in_use(zero, "unheard", put(zero, "unheard", []))
    extproc = zero.processes.pid("extproc")
    os.kill(extproc, signal.SIGSTOP)
    try:
        async with httpx.AsyncClient(timeout=60) as http:
            refused = await ask(http, zero, "unheard")
    finally:
        os.kill(extproc, signal.SIGCONT)
    assert refused.status_code == 503
    error = refused.json()["error"]
    assert error["type"] == "service_unavailable_error"
    # Open and Close
    assert error["code"] in ("no_engine", "no_picker")
    assert refused.headers["retry-after"] == "5"


class Clients:
    """Ask for one model all the time, at their own pace. ``wrong``: answers that were not what was asked for."""

    def __init__(self, stack: Stack, model: str, pick: random.Random) -> None:
        self.served = 0
        self.wrong: list[str] = []
        self._stack = stack
        self._model = model
        self._pick = pick
        self._stopped = False
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._http = httpx.AsyncClient(timeout=90, limits=httpx.Limits(max_connections=None))
        self._tasks = [asyncio.create_task(self._go_on()) for _ in range(2)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stopped = True
        await asyncio.gather(*self._tasks)
        await self._http.aclose()

    def one_more(self) -> None:
        """At this moment."""
        self._tasks.append(asyncio.create_task(self._ask()))

    async def _go_on(self) -> None:
        while not self._stopped:
            await self._ask()
            await asyncio.sleep(self._pick.uniform(0.0, 0.4))

    async def _ask(self) -> None:
        stream = self._pick.random() < 0.5
        try:
            answer = await ask(self._http, self._stack, self._model, stream=stream)
        except httpx.HTTPError as error:
            self._note(repr(error))
            return
        is_whole = "[DONE]" in answer.text if stream else answer.status_code == 200 and "usage" in answer.json()
        if answer.status_code == 200 and is_whole:
            self.served += 1
        else:
            self._note(f"{answer.status_code} {answer.text[:200]} {json.dumps(dict(answer.headers))}")

    def _note(self, what: str) -> None:
        log.warning("%s: %s", self._model, what)
        self.wrong.append(what)


class _Load(msgspec.Struct, rename="camel"):
    in_flight: int = 0


async def in_flight(stack: Stack, address: str) -> int:
    async with httpx.AsyncClient(timeout=60) as http:
        page = (await http.get(f"{stack.metrics}/loads")).content
    return msgspec.json.decode(page, type=dict[str, _Load]).get(address, _Load()).in_flight


async def cycle(stack: Stack, clients: Clients, name: str, engines: tuple[str, str], pick: random.Random) -> None:
    """The engine of ``name`` leaves as engines do, with nobody after it, and another one comes."""
    old, new = engines
    text = put(stack, name, [old], draining=True)
    clients.one_more()
    await in_use(stack, name, text)

    async def is_idle() -> bool:
        return await in_flight(stack, old) == 0

    await eventually(is_idle)
    put(stack, name, [])
    clients.one_more()
    await asyncio.sleep(pick.choice([0.0, 0.05, 0.2, 0.5]))
    # whoever asked since waits: nothing was sent to the engine that has left
    assert await in_flight(stack, old) == 0
    before = clients.served
    put(stack, name, [new])
    clients.one_more()

    async def is_served() -> bool:
        return clients.served > before or bool(clients.wrong)

    await eventually(is_served)
    await asyncio.sleep(pick.uniform(0.0, 0.5))


async def test_engines_go_and_come_while_requests_arrive_and_none_is_lost(zero: Stack) -> None:
    async def of_model(number: int) -> Clients:
        name, pick = f"model-{number}", random.Random(number)
        engines = engine_of(zero, 2 * number), engine_of(zero, 2 * number + 1)
        await in_use(zero, name, put(zero, name, [engines[0]]))
        async with Clients(zero, name, pick) as clients:
            for _ in range(CYCLES // MODELS):
                await cycle(zero, clients, name, engines, pick)
                engines = engines[1], engines[0]
                assert clients.wrong == [], await envoy_counted(zero)
        return clients

    all_clients = await asyncio.gather(*map(of_model, range(MODELS)))
    assert [one for clients in all_clients for one in clients.wrong] == []
    assert min(clients.served for clients in all_clients) >= CYCLES // MODELS
    served = sum(clients.served for clients in all_clients)
    log.info("%d cycles, %d requests", CYCLES, served)
