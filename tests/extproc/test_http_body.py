# SPDX-License-Identifier: Apache-2.0
"""Bodies of HTTP that are read up to a limit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from extproc.http_body import read_at_most

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


async def endless(request: web.Request) -> web.StreamResponse:
    answer = web.StreamResponse()
    await answer.prepare(request)
    while True:
        await answer.write(b"x" * 1000)


async def ten(_: web.Request) -> web.Response:
    return web.Response(body=b"0123456789")


@pytest.fixture
async def server() -> AsyncIterator[TestServer]:
    app = web.Application()
    app.add_routes([web.get("/ten", ten), web.get("/endless", endless)])
    async with TestServer(app) as running:
        yield running


@pytest.mark.parametrize(("most", "body"), [(10, b"0123456789"), (9, None), (11, b"0123456789")])
async def test_a_body_of_as_much_is_whole_and_a_longer_one_is_none(
    server: TestServer, most: int, body: bytes | None
) -> None:
    async with aiohttp.ClientSession() as http, http.get(server.make_url("/ten")) as answer:
        assert await read_at_most(answer.content, most) == body


async def test_a_body_without_end_is_left(server: TestServer) -> None:
    async with aiohttp.ClientSession() as http, http.get(server.make_url("/endless")) as answer:
        assert await read_at_most(answer.content, 5000) is None
