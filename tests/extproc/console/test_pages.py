# SPDX-License-Identifier: Apache-2.0
"""The console's pages over real HTTP: safe, bounded, of the right worker, and in turns."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import re
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from aiohttp import web

from bench.sizes.config_generator import GatewayPorts, ObjectCounts, configuration
from bench.stack.processes import free_ports, ports_in_a_row
from extproc.api.config_loader import load_snapshot
from extproc.api.status_page_contents import SloObjectiveCounts
from extproc.console import pages
from extproc.console.pages import ConsoleWorkerInfo
from extproc.console.slo import objectives_answer
from extproc.core.request_states import STEP_NAMES
from extproc.metrics.slo_attainment import merge_attainments
from tools.console_pictures import Gateway, demo_gateway

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

HOUR = 500_000
MANY = ObjectCounts(models=100, routes=100, hosts=1, adapters=1, endpoints=5_000)


def many_engines() -> Gateway:
    ports = GatewayPorts("127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3", 80)
    return Gateway(load_snapshot(configuration(MANY, ports, "Open")))


@contextlib.asynccontextmanager
async def usage_api(
    body: bytes, content_type: str = "application/json", *, path: str = "/v1/usage"
) -> AsyncIterator[tuple[str, list[str]]]:
    """Its URL, and the queries that it got. Another API has another ``path``."""
    asked = list[str]()

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.path_qs)
        return web.Response(body=body, content_type=content_type)

    app = web.Application()
    app.add_routes([web.get(path, answer)])
    runner = web.AppRunner(app)
    await runner.setup()
    port = free_ports(1)[0]
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield f"http://127.0.0.1:{port}/", asked
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def hanging_manager() -> AsyncIterator[str]:
    """The URL of one that takes connections and never answers."""
    released = asyncio.Event()

    async def hold(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await released.wait()
        writer.close()

    server = await asyncio.start_server(hold, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        released.set()
        server.close()
        await server.wait_closed()


async def status_and_answer(url: str) -> tuple[int, Any]:
    """JSON, or text."""
    async with aiohttp.ClientSession() as client, client.get(url) as answer:
        return answer.status, await (answer.json() if answer.content_type == "application/json" else answer.text())


async def test_the_policy_of_the_page_allows_its_own_script_and_style_and_nothing_else() -> None:
    async with (
        demo_gateway().served(free_ports(1)[0]) as url,
        aiohttp.ClientSession() as client,
        client.get(url) as answer,
    ):
        page, policy = await answer.read(), answer.headers["Content-Security-Policy"]
    for tag in (b"script", b"style"):
        (content,) = re.findall(b"<%b>(.*?)</%b>" % (tag, tag), page, re.DOTALL)
        hashed = base64.b64encode(hashlib.sha256(content).digest()).decode()
        assert f"{tag.decode()}-src 'sha256-{hashed}'" in policy
    assert policy.startswith("default-src 'none'; ")
    assert "frame-ancestors 'none'" in policy
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    # nothing from elsewhere, nothing that makes markup of text
    assert not re.search(rb"(src|href)=\"(?!data:,)|innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", page)


@pytest.mark.parametrize("step", STEP_NAMES.values())
def test_the_page_has_a_column_and_a_colour_for_every_step(step: str) -> None:
    page = Path(pages.__file__).with_name("console.html").read_text()
    assert f'["{step}S", "{step}",' in page
    assert f".{step} {{ fill: var(--{step}); }}" in page
    assert page.count(f"--{step}: #") == 2  # light and dark


async def test_5000_engines_make_an_answer_of_bounded_size_in_turns() -> None:
    gateway, turns = many_engines(), 0
    async with gateway.served(free_ports(1)[0]) as url, aiohttp.ClientSession() as client:

        async def other_work() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        working = asyncio.create_task(other_work())
        async with client.get(f"{url}/state", params={"limit": "200"}) as answer:
            whole, state = len(await answer.read()), await answer.json()
        working.cancel()
    assert whole < 200_000
    assert turns > MANY.models / 4
    assert (len(state["engines"]), state["counts"]["engines"], state["total"]["engines"]) == (200, 5_000, 5_000)
    assert (len(state["servers"]), state["counts"]["servers"]) == (50, 100)


@pytest.mark.parametrize(
    "query", ["limit=201", "limit=x", "sort=password", "unknown=1", f"find={'x' * 201}", "descending=perhaps"]
)
async def test_a_query_that_is_not_one_is_refused(query: str) -> None:
    async with demo_gateway().served(free_ports(1)[0]) as url:
        status, text = await status_and_answer(f"{url}/state?{query}")
    assert status == 400
    assert query.partition("=")[0] in text


async def test_a_worker_fetches_what_is_asked_of_another_one() -> None:
    first = ports_in_a_row(2)
    gateways = [demo_gateway(), many_engines()]
    async with contextlib.AsyncExitStack() as stack:
        urls = [
            await stack.enter_async_context(one.served(port, ConsoleWorkerInfo(("127.0.0.1", port), number, 2)))
            for number, (one, port) in enumerate(zip(gateways, (first, first + 1), strict=True))
        ]
        client = await stack.enter_async_context(aiohttp.ClientSession())

        async def asked(url: str) -> tuple[int, int]:
            async with client.get(url) as answer:
                state = await answer.json()
            return state["process"]["worker"], state["total"]["engines"]

        for url in urls:
            assert await asked(f"{url}/state?worker=0") == (0, 12)
            assert await asked(f"{url}/state?worker=1&limit=1") == (1, 5_000)
        async with client.get(f"{urls[0]}/requests?worker=1&limit=3") as answer:
            assert (await answer.json())["worker"] == 1
        assert gateways[1].metrics.recent.is_open
        for number in ("2", "-1", "x", "99999999"):
            async with client.get(f"{urls[0]}/state?worker={number}") as answer:
                assert answer.status == 404


async def test_a_worker_that_does_not_answer_is_named() -> None:
    first = ports_in_a_row(2)
    place = ConsoleWorkerInfo(("127.0.0.1", first), 0, 2)
    async with demo_gateway().served(first, place) as url:
        status, answer = await status_and_answer(f"{url}/state?worker=1")
    assert status == 502
    assert answer["error"]["message"].startswith("No answer of worker 1: ")


async def test_usage_is_passed_on_with_known_parameters_alone() -> None:
    port = free_ports(1)[0]
    async with usage_api(b'{"data": []}') as (api, asked):
        place = ConsoleWorkerInfo(("127.0.0.1", port), usage_api=api)
        async with demo_gateway().served(port, place) as url:
            passed = await status_and_answer(f"{url}/usage?group_by=tenant&evil=1&tenant=a%26b")
            _, state = await status_and_answer(f"{url}/state")
    assert passed == (200, {"data": []})
    assert state["process"]["hasUsage"] is True
    assert asked == ["/v1/usage?group_by=tenant&tenant=a%26b"]


@pytest.mark.parametrize(
    ("body", "content_type", "message"),
    [(b"<html>", "text/html", "no JSON"), (b" " * (1 << 20) + b"{}", "application/json", "larger than 1 MiB")],
)
async def test_a_usage_api_that_answers_something_else_is_not_passed_on(
    body: bytes, content_type: str, message: str
) -> None:
    port = free_ports(1)[0]
    async with (
        usage_api(body, content_type) as (api, _),
        demo_gateway().served(port, ConsoleWorkerInfo(("127.0.0.1", port), usage_api=api)) as url,
    ):
        status, answer = await status_and_answer(f"{url}/usage")
    assert status == 502
    assert message in answer["error"]["message"]


async def test_without_a_usage_api_there_is_no_usage() -> None:
    async with demo_gateway().served(free_ports(1)[0]) as url:
        status, answer = await status_and_answer(f"{url}/usage")
    assert status == 404
    assert "--usage-api" in answer["error"]["message"]


@pytest.mark.parametrize(("page", "path"), [("decisions", "/decisions"), ("rollouts", "/rollouts?find=llama")])
async def test_what_the_manager_says_is_passed_on(page: str, path: str) -> None:
    port = free_ports(1)[0]
    async with usage_api(b'{"some": []}', path=f"/{page}") as (api, asked):
        async with demo_gateway().served(port, ConsoleWorkerInfo(("127.0.0.1", port), manager=api)) as url:
            passed = await status_and_answer(f"{url}/{path.removeprefix('/')}")
            refused, _ = await status_and_answer(f"{url}/rollouts?evil=1")
            _, state = await status_and_answer(f"{url}/state")
        without = await status_and_answer_of_none(page)
    assert passed == (200, {"some": []})
    assert refused == 400
    assert state["process"]["hasManager"] is True
    assert [one.removesuffix("?find=") for one in asked] == [path]
    assert without[0] == 404
    assert "--manager" in without[1]["error"]["message"]


async def status_and_answer_of_none(page: str) -> tuple[int, Any]:
    """Of a process that knows no manager."""
    async with demo_gateway().served(free_ports(1)[0]) as url:
        return await status_and_answer(f"{url}/{page}")


async def test_a_manager_that_is_gone_is_named_at_once() -> None:
    port, nobody = free_ports(2)
    async with demo_gateway().served(
        port, ConsoleWorkerInfo(("127.0.0.1", port), manager=f"http://127.0.0.1:{nobody}")
    ) as url:
        async with asyncio.timeout(4):
            found = [await status_and_answer(f"{url}/{page}") for page in ("rollouts", "decisions")]
    assert [status for status, _ in found] == [502, 502]
    assert all(one["error"]["message"].startswith("No answer of the manager: ") for _, one in found)


@pytest.mark.parametrize("leader", [0, 1])
async def test_of_the_replicas_of_a_name_the_one_that_leads_is_shown(
    leader: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One name with two addresses, as a headless Service has them; the other answers 503."""
    port, own = free_ports(2)
    addresses = ["127.0.0.1", "127.0.0.2"]
    resolve = asyncio.get_running_loop().getaddrinfo

    async def resolved(host: str, number: int, **kind: int) -> list[Any]:
        found = [await resolve(one, number, **kind) for one in (addresses if host == "manager.test" else [host])]
        return [one for each in found for one in each]

    async def answer(request: web.Request) -> web.Response:
        if request.transport.get_extra_info("sockname")[0] != addresses[leader]:  # type: ignore[union-attr] # open
            return web.Response(status=503, text="this replica does not lead")
        return web.json_response({"asked": request.host})

    app = web.Application()
    app.add_routes([web.get("/decisions", answer)])
    runner = web.AppRunner(app)
    await runner.setup()
    for one in addresses:
        await web.TCPSite(runner, one, port).start()
    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolved)
    manager = f"http://manager.test:{port}"
    async with demo_gateway().served(own, ConsoleWorkerInfo(("127.0.0.1", own), manager=manager)) as url:
        found = await status_and_answer(f"{url}/decisions")
    await runner.cleanup()
    assert found == (200, {"asked": f"manager.test:{port}"})


async def test_a_manager_whose_name_nobody_knows_is_named() -> None:
    port = free_ports(1)[0]
    async with demo_gateway().served(
        port, ConsoleWorkerInfo(("127.0.0.1", port), manager="http://nobody.invalid:1")
    ) as url:
        status, answer = await status_and_answer(f"{url}/decisions")
    assert status == 502
    assert "nobody.invalid" in answer["error"]["message"]


async def test_a_manager_that_hangs_holds_four_requests_and_neither_usage_nor_the_state() -> None:
    port = free_ports(1)[0]
    async with hanging_manager() as manager, usage_api(b'{"data": []}') as (api, _):
        place = ConsoleWorkerInfo(("127.0.0.1", port), usage_api=api, manager=manager)
        async with demo_gateway().served(port, place) as url:
            asking = [asyncio.create_task(status_and_answer(f"{url}/rollouts")) for _ in range(20)]
            async with asyncio.timeout(4):
                refused = {(await one)[0] for one in islice(asyncio.as_completed(asking), 16)}
            passed = await status_and_answer(f"{url}/usage")
            state, _ = await status_and_answer(f"{url}/state")
            still = sum(not one.done() for one in asking)
            for one in asking:
                one.cancel()
    assert refused == {503}
    assert (passed[0], state, still) == (200, 200, 4)


async def test_keys_are_listed_without_digests_and_objectives_as_the_command_has_them() -> None:
    gateway = demo_gateway()
    keys = gateway.core.snapshot.gateway.authentication
    assert keys is not None
    async with gateway.served(free_ports(1)[0]) as url:
        status, found = await status_and_answer(f"{url}/keys")
        _, one = await status_and_answer(f"{url}/keys?find=ANN")
        _, objectives = await status_and_answer(f"{url}/objectives?find=interactive")
        _, nothing = await status_and_answer(f"{url}/objectives?find=large")
        refused, _ = await status_and_answer(f"{url}/keys?limit=9")
    assert (status, refused) == (200, 400)
    assert [each["name"] for each in found["keys"]] == ["research-web", "search-web", "support-web"]
    assert not any(each.digest and each.digest[:12] in str(found) for each in keys.api_keys)
    assert (one["count"], one["keys"][0]["models"]) == (1, ["large"])
    expected = {
        each.counts.objective: (each.requests, each.missed_requests, each.budget_left)
        for each in merge_attainments(gateway.metrics.objectives.report())
    }
    got = {each["objective"]: (each["requests"], each["bad"], each["budgetLeft"]) for each in objectives["objectives"]}
    assert got == expected
    assert nothing["objectives"] == nothing["worst"] == []


def test_the_least_budget_comes_first_and_the_rest_is_counted() -> None:
    def counts(number: int, bad: int) -> SloObjectiveCounts:
        hours = [(HOUR - number, 100 - bad, bad)] if bad else []
        return SloObjectiveCounts("default/r", f"c{number}", "ttft", 0.5, 0.9, 86_400.0, 0, hours)

    steps = objectives_answer(
        [counts(number, number % 60) for number in range(120)], find="", now_s=3600.0 * HOUR, worker=0, workers=1
    )
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found = end.value
            break
    assert (found.count, len(found.objectives), len(found.worst)) == (120, 50, 20)
    assert [one.name for one in found.objectives[:3]] == ["c119", "c59", "c118"]
    assert found.objectives[0].budget_left == pytest.approx(1 - 59 / 10)
    assert [one.bad for one in found.worst[:4]] == [59, 59, 58, 58]
    assert (found.worst[0].name, found.worst[0].at) == ("c59", 3600 * (HOUR - 59))
