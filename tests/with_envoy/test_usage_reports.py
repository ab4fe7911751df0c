# SPDX-License-Identifier: Apache-2.0
"""Reports through a real Envoy, which says who calls."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import httpx
import pytest
from aiohttp import web

from bench.stack.loopback_stack import EngineFlags, running_stack
from bench.stack.processes import free_ports
from controller.usage.ingest import IngestCounters
from controller.usage.log_follower import LogPosition
from controller.usage.rows import parse_usage_line
from controller.usage.server import UsageQueryRunner, UsageReportsApi
from controller.usage.store import SqlStore, open_engine
from extproc.browser_security import add_browser_protection
from tests.usage_lines import NOON_S, context, line, text

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

ACME, BELL, LEAD, BAR = "sk-acme-0123", "sk-bell-0123", "sk-lead-0123", "sk-bar-01234"
# a name that means something in Lua, in headers and in URLs
CAFE = '" caf\u00e9\\ %2F '


def stored(folder: Path) -> SqlStore:
    """Two requests of one key and one each of two others."""
    store = SqlStore(open_engine(f"sqlite:///{folder}/usage.db"), "log")
    store.prepare()
    callers = [("acme", "first"), ("acme", "first"), ("bell", "second"), (CAFE, "third")]
    lines = [
        line(f"r{index}", of=context(tenant=one, api_key=key, user="")) for index, (one, key) in enumerate(callers)
    ]
    store.write([parse_usage_line(text(one), NOON_S) for one in lines], LogPosition(), LogPosition(1, 1, "x"))
    return store


@asynccontextmanager
async def serving(reports: UsageReportsApi, port: int) -> AsyncIterator[None]:
    app = reports.app()
    add_browser_protection(app, "127.0.0.1", is_behind_envoy=True)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        yield
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(("failure_mode", "clients"), [("Open", "Untrusted"), ("Close", "Trusted")])
async def test_callers_get_their_own_usage_and_cannot_say_that_they_are_others(
    tmp_path: Path, failure_mode: str, clients: str
) -> None:
    (port,) = free_ports(1)
    store = stored(tmp_path)
    database = UsageQueryRunner(store.engine, lambda: 0.0, lambda: NOON_S + 60.0)
    keys = [
        {"name": "first", "key": ACME, "tenant": "acme"},
        {"name": "second", "key": BELL, "tenant": "bell"},
        # of the tenant of an administrator's tokens
        {"name": "lead", "key": LEAD, "tenant": "acme", "reports": "Tenant"},
        {"name": "bar", "key": BAR, "tenant": CAFE, "reports": "Tenant"},
    ]
    gateway = {
        "authentication": {"apiKeys": keys},
        "failureMode": failure_mode,
        "clients": clients,
        "usageLog": {"path": f"{tmp_path}/usage.log", "api": f"127.0.0.1:{port}"},
    }
    # of an API key Envoy knows no tenant, and writes none over this one
    forged = {"x-attache-caller-tenant": "ops", "x-attache-caller-client": "second"}
    forged |= {"x-attache-reports": "bell", "x-attache-caller-reports": "bell"}
    if clients == "Untrusted":
        forged["x-attache-tenant"] = "ops"
    async with (
        serving(
            UsageReportsApi(database, counts=IngestCounters(), admin_keys=["second"], admin_tenants=["ops", "acme"]),
            port,
        ),
        running_stack(
            tmp_path / "stack",
            EngineFlags(count=1, speed=20.0),
            gateway=gateway,
            headers={"authorization": f"Bearer {ACME}"},
        ) as stack,
        httpx.AsyncClient(base_url=stack.url, timeout=60) as http,
    ):
        asked = [(ACME, {}, 2), (ACME, forged, 2), (BELL, {}, 4), (LEAD, {}, 2), (LEAD, forged, 2), (BAR, {}, 1)]
        for key, headers, expected in asked:
            # a script of another site that the gateway lets in, and the gateway's own name
            page = {"host": "api.example", "origin": "https://app.example", "sec-fetch-site": "cross-site"}
            own = {**headers, **page, "authorization": f"Bearer {key}"}
            answer = await http.get("/v1/usage?start=2026-11-23&end=2026-11-24", headers=own)
            assert [one["requests"] for one in answer.json()["data"]] == [expected]
            answer = await http.get(f"/v1/organization/usage/completions?start_time={NOON_S}&limit=1", headers=own)
            (bucket,) = answer.json()["data"]
            assert [one["num_model_requests"] for one in bucket["results"]] == [expected]
        answer = await http.get(
            "/v1/usage?start=2026-11-23&end=2026-11-24&tenant=bell", headers={"authorization": f"Bearer {LEAD}"}
        )
        assert answer.json()["data"] == []
        assert (await http.get("/v1/usage", headers=forged)).status_code == 401
        # no other path leads there, and models are served as before
        assert (await http.get("/v1/usages", headers={"authorization": f"Bearer {ACME}"})).status_code == 404
    store.close()
