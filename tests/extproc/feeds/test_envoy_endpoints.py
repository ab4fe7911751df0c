# SPDX-License-Identifier: Apache-2.0
"""What Envoy's admin interface says of engines, and what is made of an interface that says something else or
nothing.
"""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp import web

from bench.processes import free_ports
from extproc.feeds.envoy_endpoints import endpoints_in_envoy


def assignment(cluster: str, *addresses: tuple[str, int]) -> dict[str, Any]:
    """As Envoy 1.40 dumps it."""
    endpoints = [
        {"endpoint": {"address": {"socket_address": {"address": ip, "port_value": port}}}, "health_status": "HEALTHY"}
        for ip, port in addresses
    ]
    localities = [{"locality": {}, "lb_endpoints": endpoints}] if endpoints else []
    kind = "type.googleapis.com/envoy.admin.v3.EndpointsConfigDump.DynamicEndpointConfig"
    return {"@type": kind, "endpoint_config": {"cluster_name": cluster, "endpoints": localities}}


@pytest.mark.parametrize(
    ("status", "page", "known"),
    [
        (
            200,
            {"configs": [assignment("server/a/b", ("10.0.0.1", 8000), ("fd00::1", 80)), assignment("server/a/c")]},
            {"a/b": {("10.0.0.1", 8000), ("fd00::1", 80)}, "a/c": set()},
        ),
        (200, {}, {}),
        (200, {"configs": [{}]}, {"": set()}),
        # no Envoy, or none that tells
        (200, {"configs": "something else"}, None),
        (302, {}, None),
        (404, {"configs": [assignment("server/a/b")]}, None),
    ],
)
async def test_what_it_says_of_servers(status: int, page: object, known: object) -> None:
    asked: list[str] = []

    async def dump(request: web.Request) -> web.Response:
        asked.append(request.query["name_regex"])
        # where it is followed, it comes back to this page
        return web.json_response(page, status=status, headers={"location": str(request.url)})

    app = web.Application()
    app.add_routes([web.get("/config_dump", dump)])
    runner = web.AppRunner(app)
    await runner.setup()
    (port,) = free_ports(1)
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        assert await endpoints_in_envoy(f"0.0.0.0:{port}", {"a/c", "a/b.x"}) == known
    finally:
        await runner.cleanup()
    assert asked == [r"server/(a/b\.x|a/c)"]


async def test_a_page_that_is_nested_without_end_or_no_text_says_nothing() -> None:
    pages = iter((b'{"configs":' + b"[" * 100_000, b'{"x":' + b"[" * 100_000, b'{"configs":[{"x":"\xff"}]}', b""))

    async def dump(_: web.Request) -> web.Response:
        return web.Response(body=next(pages))

    app = web.Application()
    app.add_routes([web.get("/config_dump", dump)])
    runner, (port,) = web.AppRunner(app), free_ports(1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    for _ in range(4):
        assert not any((await endpoints_in_envoy(f"127.0.0.1:{port}", {"a/b"}) or {}).values())
    await runner.cleanup()


async def test_nobody_answers() -> None:
    (port,) = free_ports(1)
    assert await endpoints_in_envoy(f"127.0.0.1:{port}", {"a/b"}) is None
