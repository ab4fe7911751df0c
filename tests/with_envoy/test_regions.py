# SPDX-License-Identifier: Apache-2.0
"""Two gateways, each with a real Envoy: the one in the west is a provider of the one in the east, and reports its load.

Each has one engine that takes one request at a time.
"""

from __future__ import annotations

import asyncio
import signal
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

import pytest
import pytest_asyncio
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from tests.waiting import PATIENCE_S, eventually
from tests.with_envoy.test_fallback import route
from tests.with_envoy.test_providers import CHAT, CHAT_ANSWER, Gateway, model_server, running

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from pathlib import Path

    import httpx

pytestmark = pytest.mark.asyncio(loop_scope="module")

EAST_KEY, CLIENT_KEY = "sk-region-east-0123456789", "sk-client-acme-0123456789"
KEYS: Final = [
    {"name": "region-east", "key": EAST_KEY, "tenant": "east"},
    {"name": "acme", "key": CLIENT_KEY, "tenant": "acme"},
]
ONE_AT_ONCE: Final = {
    "saturation": {"queueDepth": None, "kvUsage": None, "maxWait": None, "maxRequests": 1},
    "timeout": "60s",
}


class Engine:
    """Answers while ``may_answer`` is set. ``running``: what it has. ``status``: of its answers. ``says``: of a server
    that passes for a gateway, how full it is.
    """

    def __init__(self) -> None:
        self.port = self.running = self.asked = 0
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.status = 200
        self.says: object = None

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        app = web.Application()
        app.add_routes([web.post(CHAT, self._answer), web.get("/v1/models/{name}", self._load)])
        # a client that leaves ends its request
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.port = runner.addresses[0][1]
        yield
        await runner.cleanup()

    async def _answer(self, http: web.Request) -> web.Response:
        await http.read()
        self.asked += 1
        self.running += 1
        try:
            await self.may_answer.wait()
        finally:
            self.running -= 1
        return web.json_response(CHAT_ANSWER, status=self.status)

    async def _load(self, _: web.Request) -> web.Response:
        return web.json_response({"id": "m", "saturation": self.says})


def engines(name: str, at: Engine, **spec: object) -> dict[str, object]:
    return model_server(name, endpoints=[{"address": f"127.0.0.1:{at.port}"}], scrapeInterval="0s", **spec)


def provider(name: str, port: int, model: str, key: Path) -> dict[str, object]:
    return model_server(
        name,
        model=model,
        provider={"host": "localhost", "port": port, "scheme": "http", "reportsLoad": True},
        apis=["ChatCompletions"],
        connection={"apiKeyFile": str(key)},
    )


def spilling(to: str) -> dict[str, object]:
    """Requests that wait for the own engine go there after 100 ms; those that fail, then to the spare one."""
    rule = {
        "targetModels": [{"modelServerName": "own"}],
        "fallback": [{"modelServerName": to, "afterQueue": "100ms"}, {"modelServerName": "spare"}],
    }
    return route(f"to-{to}", rule)


class Regions:
    """``own``, ``spare``: engines in the east. ``remote``: the engine in the west. ``liar``: passes for a gateway."""

    def __init__(self, east: Gateway, west: Gateway, servers: Mapping[str, Engine]) -> None:
        self.east, self.west = east, west
        self.own, self.spare, self.remote, self.liar = (servers[one] for one in ("own", "spare", "remote", "liar"))

    async def ask(self, model: str = "to-west") -> httpx.Response:
        body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
        return await self.east.http.post(self.east.url + CHAT, json=body)

    async def ask_west(self) -> httpx.Response:
        body = {"model": "chat", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
        return await self.west.http.post(self.west.url + CHAT, json=body)

    async def entry(self, key: str) -> dict[str, Any]:
        """Of the model, as the west shows it to a key."""
        answer = await self.west.http.get(f"{self.west.url}/v1/models/chat", headers={"authorization": f"Bearer {key}"})
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    async def sample(self, name: str, **labels: str) -> float | None:
        """A metric of the gateway in the east."""
        page = (await self.east.http.get(f"{self.east.metrics}/metrics")).text
        samples = (one for family in text_string_to_metric_families(page) for one in family.samples)
        return next(
            (one.value for one in samples if one.name == name and labels.items() <= one.labels.items()),
            None,
        )

    async def reads(self, result: str, server: str) -> float:
        """How often the load of a provider was read."""
        return await self.sample("attache_engine_reports_total", server=server, result=result) or 0.0

    async def knows(self, load: float, server: str = "default/west") -> None:
        async def is_known() -> bool:
            return await self.sample("attache_provider_load", server=server) == load

        await eventually(is_known)


@asynccontextmanager
async def held(engine: Engine, asked: asyncio.Task[httpx.Response]) -> AsyncIterator[None]:
    """While the engine has the request and does not answer."""
    engine.may_answer.clear()
    await eventually(lambda: engine.running > 0)
    try:
        yield
    finally:
        engine.may_answer.set()
        assert (await asked).status_code == 200


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def regions(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Regions]:
    folder = tmp_path_factory.mktemp("regions")
    servers = {name: Engine() for name in ("own", "spare", "remote", "liar")}
    key = folder / "west.key"
    key.write_text(EAST_KEY)
    async with AsyncExitStack() as started:
        for one in servers.values():
            await started.enter_async_context(one.serving())
        east, west = (Gateway(folder / name, {}, []) for name in ("east", "west"))
        for gateway in (east, west):
            gateway.directory.mkdir()
            gateway.http.timeout = PATIENCE_S
        west.http.headers["authorization"] = f"Bearer {CLIENT_KEY}"
        await started.enter_async_context(
            running(
                west,
                [
                    engines("remote", servers["remote"], flowControl=ONE_AT_ONCE),
                    route("chat", {"targetModels": [{"modelServerName": "remote"}]}),
                ],
                {"authentication": {"apiKeys": KEYS}, "loadShownTo": ["east"]},
            )
        )
        await started.enter_async_context(
            running(
                east,
                [
                    engines("own", servers["own"], flowControl=ONE_AT_ONCE),
                    engines("spare", servers["spare"]),
                    provider("west", int(west.url.rpartition(":")[2]), "chat", key),
                    provider("liar", servers["liar"].port, "m", key),
                    spilling("west"),
                    spilling("liar"),
                ],
                {},
            )
        )
        yield Regions(east, west, servers)


async def test_a_region_whose_engines_are_busy_spills_to_another_that_has_room(regions: Regions) -> None:
    await regions.knows(0)
    regions.own.may_answer.clear()
    first = asyncio.create_task(regions.ask())
    async with held(regions.own, first):
        answer = await regions.ask()
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-attache-served-by"] == "default/west"
        assert regions.remote.asked == 1


async def test_it_is_not_chosen_while_it_is_full_of_requests_of_others(regions: Regions) -> None:
    asked = regions.remote.asked
    regions.remote.may_answer.clear()
    theirs = asyncio.create_task(regions.ask_west())
    async with held(regions.remote, theirs):
        await regions.knows(1)
        regions.own.may_answer.clear()
        first = asyncio.create_task(regions.ask())
        async with held(regions.own, first):
            second = asyncio.create_task(regions.ask())
            before = await regions.reads("read", "default/west")

            async def was_asked_about() -> bool:
                # by then it could have gone there a few times
                return await regions.reads("read", "default/west") > before + 3

            await eventually(was_asked_about)
            assert not second.done()
        answer = await second
        assert answer.headers["x-attache-served-by"] == "default/own"
        assert regions.remote.asked == asked + 1


async def test_only_the_other_gateway_is_told_how_full_it_is(regions: Regions) -> None:
    assert (await regions.entry(EAST_KEY))["saturation"] == 0
    assert "saturation" not in await regions.entry(CLIENT_KEY)
    listed = await regions.west.http.get(
        f"{regions.west.url}/v1/models", headers={"authorization": f"Bearer {EAST_KEY}"}
    )
    assert "saturation" not in listed.text


async def test_one_that_says_what_cannot_be_is_chosen_as_if_it_said_nothing(regions: Regions) -> None:
    regions.liar.says = 7
    before = await regions.reads("failed", "default/liar")

    async def is_refused() -> bool:
        return await regions.reads("failed", "default/liar") > before

    await eventually(is_refused)
    regions.own.may_answer.clear()
    first = asyncio.create_task(regions.ask())
    async with held(regions.own, first):
        answer = await regions.ask("to-liar")
        assert answer.headers["x-attache-served-by"] == "default/liar"


async def test_one_that_lies_gets_what_it_cannot_serve_until_its_breaker_opens(regions: Regions) -> None:
    regions.liar.says, regions.liar.status = 0, 503
    await regions.knows(0, "default/liar")
    regions.own.may_answer.clear()
    first = asyncio.create_task(regions.ask("to-liar"))
    async with held(regions.own, first):
        for _ in range(30):
            answer = await regions.ask("to-liar")
            assert answer.status_code == 200, answer.text
            assert answer.headers["x-attache-served-by"] == "default/spare"
            if await regions.sample("attache_breaker_state", server="default/liar"):
                break
        else:
            pytest.fail("its breaker has not opened")


async def test_one_that_dies_is_left_by_its_breaker(regions: Regions) -> None:
    await regions.west.processes.end("envoy", signal.SIGKILL)
    regions.own.status = 503
    try:
        for _ in range(30):
            answer = await regions.ask()
            assert answer.status_code == 200, answer.text
            assert answer.headers["x-attache-served-by"] == "default/spare"
            if await regions.sample("attache_breaker_state", server="default/west"):
                break
        else:
            pytest.fail("its breaker has not opened")
    finally:
        regions.own.status = 200
