# SPDX-License-Identifier: Apache-2.0
"""Breakers are closed over HTTP, by the page and by the command."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import TYPE_CHECKING
from unittest import mock

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from bench.stack.processes import free_ports
from extproc.__main__ import main
from extproc.api.config_loader import load_snapshot
from extproc.api.status_page_contents import RESET_PATH, ConfigReport
from extproc.core.core import Core
from extproc.core.effects import BreakerChanged
from extproc.listen_sockets import listen
from extproc.metrics.request_metrics import Metrics
from extproc.runtime.admin_pages import breaker_reset_page, serve_pages
from extproc.runtime.demand_watch import DemandWatchServer
from tests.extproc.breakers import trip
from tests.extproc.conftest import CONFIG

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from extproc.core.effects import Effect

ENGINE = "10.0.0.2:8000"
SERVER = "default/llama"


@contextlib.asynccontextmanager
async def served() -> AsyncIterator[tuple[str, Core, list[Effect]]]:
    """The address, the core, and the effects that were performed."""
    core = Core(load_snapshot({"all.yaml": CONFIG}), rng=random.Random(0), ticket_prefix="t")
    performed: list[Effect] = []
    clock = asyncio.get_running_loop().time
    metrics = Metrics(core.pools.values, lambda: 0.0, clock)
    address = f"127.0.0.1:{free_ports(1)[0]}"
    runner = await serve_pages(
        listen(address),
        metrics.registry,
        is_ready=lambda: True,
        report=ConfigReport,
        loads=core.engine_loads_by_pool,
        demand=DemandWatchServer(core, clock),
        explain=None,
        others=[breaker_reset_page(core, clock, performed.extend)],
    )
    try:
        yield address, core, performed
    finally:
        await runner.cleanup()


async def run(*words: str) -> int:
    return await asyncio.to_thread(main, ["reset", *words])


async def test_the_command_closes_what_it_is_asked_to(capsys: pytest.CaptureFixture[str]) -> None:
    async with served() as (address, core, performed):
        table = core.pools[SERVER].table
        rows = [table.row_of(one) for one in ("10.0.0.1:8000", ENGINE)]
        for row in rows:
            assert row is not None
            trip(table, row, 0.0)
        assert await run(SERVER, "--engine", ENGINE, "--metrics", address) == 0
        assert capsys.readouterr().out == f"closed: {ENGINE}\n"
        assert [bool(table.breakers[row or 0].trips) for row in rows] == [True, False]
        assert await run(SERVER, "--metrics", address) == 0
        assert capsys.readouterr().out == "closed: 10.0.0.1:8000\n"
        assert await run(SERVER, "--metrics", address) == 0
        assert capsys.readouterr().out == "no breaker was open\n"
        assert len([one for one in performed if isinstance(one, BreakerChanged)]) == 2
        assert await run("default/other", "--metrics", address) == 2
        assert capsys.readouterr().err == f"there is no ModelServer 'default/other'; there are: '{SERVER}'\n"
        assert await run(SERVER, "--engine", "10.9.9.9:1", "--metrics", address) == 2
        assert f"{SERVER} has no engine '10.9.9.9:1'; it has: '10.0.0.1:8000'" in capsys.readouterr().err
        assert await run(SERVER.removeprefix("default/"), "--metrics", address) == 0
        assert capsys.readouterr().out == "no breaker was open\n"
    assert await run(SERVER, "--metrics", address) == 2
    assert "is extproc running there?" in capsys.readouterr().err


@pytest.mark.parametrize("headers", [{"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}])
async def test_no_page_of_another_site_closes_breakers(headers: dict[str, str]) -> None:
    async with served() as (address, core, performed), aiohttp.ClientSession() as client:
        trip(core.pools[SERVER].table, 0, 0.0)
        url = f"http://{address}{RESET_PATH}?server={SERVER}"
        async with client.post(url, headers=headers) as answer:
            assert answer.status == 403
        async with client.get(url) as answer:
            assert answer.status == 405, "no link and no reader changes anything"
        assert not performed


@pytest.mark.parametrize(
    ("peer", "status"),
    [
        (("127.0.0.1", 4711), 200),
        (("::1", 4711, 0, 0), 200),
        (("::ffff:127.0.0.1", 4711, 0, 0), 200),
        # a Unix socket
        ("", 200),
        (("10.0.0.9", 4711), 403),
        (("::ffff:10.0.0.9", 4711, 0, 0), 403),
        (None, 403),
    ],
)
async def test_breakers_are_reset_from_this_machine_alone(peer: object, status: int) -> None:
    core = Core(load_snapshot({"all.yaml": CONFIG}), rng=random.Random(0), ticket_prefix="t")
    trip(core.pools[SERVER].table, 0, 0.0)
    performed: list[Effect] = []
    page = breaker_reset_page(core, lambda: 0.0, performed.extend)
    transport = mock.Mock(**{"get_extra_info.return_value": peer})
    answer = await page.handler(make_mocked_request("POST", f"{RESET_PATH}?server={SERVER}", transport=transport))
    assert isinstance(answer, web.Response)
    assert answer.status == status
    assert bool(performed) == (status == 200)
