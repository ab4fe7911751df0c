# SPDX-License-Identifier: Apache-2.0
"""The console's token: who sees which pages, with whatever headers."""

from __future__ import annotations

import base64
import contextlib
import logging
from typing import TYPE_CHECKING, Final

import aiohttp
import pytest
from yarl import URL

from bench.stack.processes import free_ports, ports_in_a_row
from extproc.console.pages import ConsoleWorkerInfo
from extproc.console.token_auth import token_auth_middleware
from tools.console_pictures import demo_gateway

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

TOKEN: Final = "of-the-operator-" + "1" * 16
FOR_PEOPLE: Final = ("", "/state", "/requests", "/keys", "/objectives", "/usage", "/decisions", "/rollouts")
FOR_MACHINES: Final = ("/metrics", "/readyz", "/loads", "/demand", "/")


def basic(password: str, user: str = "ann") -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def write(file: Path, content: str | None) -> None:
    """None: it is gone."""
    if content is None:
        file.unlink()
    else:
        file.write_text(content)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    found = tmp_path / "token"
    found.write_text(TOKEN + "\n")
    return found


@contextlib.asynccontextmanager
async def guarded(file: Path) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    """A client, and the URL of a console that has this file's token."""
    port = free_ports(1)[0]
    async with demo_gateway().served(port, guard=token_auth_middleware(file)) as url, aiohttp.ClientSession() as client:
        yield client, url


async def status(client: aiohttp.ClientSession, url: str | URL, authorization: str | None = None) -> int:
    headers = {} if authorization is None else {"Authorization": authorization}
    async with client.get(url, headers=headers) as answer:
        if answer.status == 401:
            assert answer.headers["WWW-Authenticate"].startswith("Basic realm=")
            assert answer.headers["Cache-Control"] == "no-store"
        return answer.status


async def test_pages_for_people_need_the_token_and_those_for_machines_do_not(file: Path) -> None:
    async with guarded(file) as (client, url):
        base = url.removesuffix("/console")
        assert {await status(client, url + page) for page in FOR_PEOPLE} == {401}
        found = [await status(client, url + page, basic(TOKEN)) for page in FOR_PEOPLE]
        # neither a usage API nor a manager is known
        assert found == [200] * 5 + [404] * 3
        assert {await status(client, base + page) for page in FOR_MACHINES} == {200}
        body = b'{"model": "large", "messages": []}'
        for headers, expected in (({}, 401), ({"Authorization": f"bearer {TOKEN}"}, 200)):
            async with client.post(f"{base}/debug/explain/v1/chat/completions", data=body, headers=headers) as answer:
                assert answer.status == expected


@pytest.mark.parametrize(
    "authorization",
    [
        "",
        "Bearer",
        "Bearer ",
        "Bearer " + TOKEN[:-1],
        f"Bearer {TOKEN}x",
        f"Bearer {TOKEN} x",
        TOKEN,
        f"Token {TOKEN}",
        "Bearer " + "x" * 4_000,
        f"Bearer \N{LATIN SMALL LETTER E WITH ACUTE}{TOKEN}",
        "Basic",
        "Basic not base64",
        "Basic \N{LATIN SMALL LETTER E WITH ACUTE}",
        "Basic " + base64.b64encode(TOKEN.encode()).decode(),
        "Basic " + base64.b64encode(b"\xff\xff:\xff").decode(),
        basic(""),
        basic(f"x{TOKEN}"),
        basic("", user=TOKEN),
    ],
)
async def test_what_is_not_the_token_is_refused(file: Path, authorization: str) -> None:
    async with guarded(file) as (client, url):
        assert await status(client, f"{url}/state", authorization) == 401


async def test_the_path_may_be_written_in_any_way(file: Path) -> None:
    async with guarded(file) as (client, url):
        base = url.removesuffix("/console")
        for path in ("/consol%65", "/consol%65/state", "/console%2Fstate", "//console", "/console/", "/./console/keys"):
            assert await status(client, URL(base + path, encoded=True)) in {401, 404}


async def test_another_token_holds_at_once_and_a_file_that_is_gone_admits_nobody(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, "extproc.console.token_auth")
    async with guarded(file) as (client, url):
        write(file, "another-token-of-theirs")
        assert await status(client, url, basic(TOKEN)) == 401
        assert await status(client, url, basic("another-token-of-theirs")) == 200
        for content in ("", "short"):
            write(file, content)
            assert await status(client, url, basic(content)) == 503
        write(file, None)
        assert [await status(client, url, basic("another-token-of-theirs")) for _ in range(3)] == [503] * 3
        # once for each reason, however many ask
        assert len(caplog.records) == 2
        write(file, TOKEN)
        assert await status(client, url, basic(TOKEN)) == 200


async def test_a_worker_passes_the_token_on_to_the_one_that_is_asked_for(file: Path) -> None:
    first = ports_in_a_row(2)
    async with contextlib.AsyncExitStack() as stack:
        urls = [
            await stack.enter_async_context(
                demo_gateway().served(
                    port, ConsoleWorkerInfo(("127.0.0.1", port), number, 2), guard=token_auth_middleware(file)
                )
            )
            for number, port in enumerate((first, first + 1))
        ]
        client = await stack.enter_async_context(aiohttp.ClientSession())
        assert await status(client, f"{urls[0]}/state?worker=1") == 401
        async with client.get(f"{urls[0]}/state?worker=1", headers={"Authorization": basic(TOKEN)}) as answer:
            assert (answer.status, (await answer.json())["process"]["worker"]) == (200, 1)
