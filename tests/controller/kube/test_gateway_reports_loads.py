# SPDX-License-Identifier: Apache-2.0
"""What gateways say of pods, asked over real HTTP."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import aiohttp
from aiohttp import web
from prometheus_client import CollectorRegistry

from bench.stack.processes import free_ports
from controller.kube.gateway_reports import loads_by_pod, read_loads
from controller.kube.metrics_and_health import serve_pages
from extproc.api.status_page_contents import LOADS_LABEL, LOADS_PATH, EndpointLoad

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

PODS = {
    "default/a": {"metadata": {"name": "a"}, "status": {"podIP": "10.0.0.1"}},
    "default/b": {"metadata": {"name": "b"}, "status": {"podIP": "10.0.0.2"}},
    "default/c": {"metadata": {"name": "c"}, "status": {}},
}


@contextlib.asynccontextmanager
async def telling(answer: str, status: int = 200) -> AsyncIterator[str]:
    """An extproc's page; gives its address."""

    async def show(_: web.Request) -> web.Response:
        return web.Response(text=answer, status=status)

    app = web.Application()
    app.add_routes([web.get(LOADS_PATH, show)])
    runner, port = web.AppRunner(app), free_ports(1)[0]
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await runner.cleanup()


def gateway(address: str, **status: object) -> dict[str, Any]:
    ip, _, port = address.partition(":")
    return {
        "metadata": {"name": "g", "labels": {LOADS_LABEL: port}},
        "status": {"podIP": ip, "phase": "Running", **status},
    }


async def test_pods_get_what_all_gateways_say_of_their_ports() -> None:
    one = (
        '{"10.0.0.1:8000": {"inFlight": 2, "cachedTokens": 100, "reported": 7}, '
        '"10.0.0.1:8001": {"inFlight": 1, "cachedTokens": 50, "reported": 2}}'
    )
    other = '{"10.0.0.1:8000": {"inFlight": 4, "cachedTokens": 70}}'
    async with telling(one) as first, telling(other) as second, aiohttp.ClientSession() as http:
        found = await loads_by_pod(http, [gateway(first), gateway(second)], PODS)
    assert found == {
        "default/a": EndpointLoad(7, 150, 9),
        "default/b": EndpointLoad(0, 0),
        "default/c": EndpointLoad(0, 0),
    }


async def test_nothing_is_known_while_one_gateway_does_not_answer() -> None:
    async with (
        telling('{"10.0.0.1:8000": {"inFlight": 2, "cachedTokens": 0}}') as fine,
        aiohttp.ClientSession() as http,
    ):
        for answer, status in (
            ("{}", 503),
            ("not json", 200),
            ('{"a": 1}', 200),
            ("[" * 5_000_000, 200),
            ('{"a": {"x": ' + "[" * 100_000, 200),
        ):
            async with telling(answer, status) as broken:
                assert await loads_by_pod(http, [gateway(fine), gateway(broken)], PODS) == {}
        silent = gateway(f"127.0.0.1:{free_ports(1)[0]}")
        assert await loads_by_pod(http, [gateway(fine), silent], PODS) == {}


async def test_gateways_that_do_not_run_are_not_asked_and_without_any_nothing_is_in_flight() -> None:
    nowhere = f"127.0.0.1:{free_ports(1)[0]}"
    ended = [gateway(nowhere, phase="Succeeded"), gateway(nowhere, podIP=None), gateway("127.0.0.1:http")]
    async with aiohttp.ClientSession() as http:
        assert await loads_by_pod(http, ended, PODS) == dict.fromkeys(PODS, EndpointLoad(0, 0))


async def test_a_gateways_page_is_the_sum_of_its_extprocs_or_an_error() -> None:
    one, other = '{"a:1": {"inFlight": 1, "cachedTokens": 5}}', '{"a:1": {"inFlight": 2, "cachedTokens": 3}}'
    async with telling(one) as first, telling(other) as second, aiohttp.ClientSession() as http:
        for extprocs, expected in (([first, second], {"a:1": EndpointLoad(3, 5)}), ([first, "127.0.0.1:1"], None)):
            address = f"127.0.0.1:{free_ports(1)[0]}"
            async with serve_pages(address, CollectorRegistry(), lambda: True, extprocs=extprocs):
                assert await read_loads(http, [address]) == expected
