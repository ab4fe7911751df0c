# SPDX-License-Identifier: Apache-2.0
"""Reading a provider's load over real HTTP: what it is asked, and what becomes of answers that are none."""

from __future__ import annotations

import asyncio
import json
import random
import ssl
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

import pytest
from aiohttp import web

from extproc.api.config_loader import load_snapshot
from extproc.api.dns_resolver import with_resolved_addresses
from extproc.core.core import Core
from extproc.engines.engine_responses import UnreadableResponse, parse_gateway_load
from extproc.feeds.engine_http import EngineCredentials
from extproc.feeds.engine_scraper import EngineScraper
from extproc.metrics.request_metrics import Metrics
from tests.certificates import Authority
from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from extproc.scheduling.pool import Pool

KEY: Final = "sk-of-this-gateway-0123456789"


class Gateway:
    """Another one. ``text``: of its answers."""

    def __init__(self) -> None:
        self.text = '{"id": "org/chat m", "object": "model", "saturation": 0.25}'
        self.status = 200
        self.asked = list[tuple[str, dict[str, str]]]()

    async def answer(self, http: web.Request) -> web.Response:
        self.asked.append((http.raw_path, {name.lower(): value for name, value in http.headers.items()}))
        return web.Response(text=self.text, status=self.status, headers={"location": "/elsewhere"})


@asynccontextmanager
async def read(
    gateway: Gateway, folder: Path, tls: ssl.SSLContext | None = None, **provider: object
) -> AsyncIterator[tuple[Pool, Metrics]]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", gateway.answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
    (folder / "key").write_text(KEY)
    spec = {
        "model": "org/chat m",
        "provider": {"host": "localhost", "port": runner.addresses[0][1], "reportsLoad": True, **provider},
        "apis": ["ChatCompletions"],
        "connection": {"apiKeyFile": "key", **({"tls": {"caFile": "ca.pem"}} if tls else {})},
    }
    server = {"apiVersion": "attache.dev/v1alpha1", "kind": "ModelServer", "metadata": {"name": "west"}, "spec": spec}
    snapshot = with_resolved_addresses(
        load_snapshot({"a.yaml": json.dumps(server).encode()}), {"localhost": ("127.0.0.1",)}
    )
    core = Core(snapshot, rng=random.Random(0), ticket_prefix="t")
    clock = asyncio.get_running_loop().time
    metrics = Metrics(core.pools.values, lambda: 0.0, clock)
    scraper = EngineScraper(
        core,
        metrics,
        access=EngineCredentials({}, clock, folder),
        clock=clock,
        rng=random.Random(0),
        deliver=lambda event: core.on_engine_report(event, clock()),
    )
    task = asyncio.create_task(scraper.run())
    try:
        yield core.pools["default/west"], metrics
    finally:
        task.cancel()
        await asyncio.wait([task])
        await runner.cleanup()


async def test_it_is_asked_about_its_model_with_the_key_of_its_connection(tmp_path: Path) -> None:
    gateway = Gateway()
    async with read(gateway, tmp_path, scheme="http", pathPrefix="/west") as (pool, metrics):
        await eventually(lambda: pool.table.load[0] == 0.25)
        page = "".join(metrics.registry.exposition_chunks())
        path, headers = gateway.asked[0]
        assert path == "/west/v1/models/org/chat%20m"
        assert headers["authorization"] == f"Bearer {KEY}"
        assert headers["host"].startswith("localhost:")
        assert {one for one, _ in gateway.asked} == {path}
        # of its requests it tells no number
        assert 'attache_provider_load{endpoint="127.0.0.1:' in page
        assert "attache_engine_waiting{" not in page


async def test_its_certificate_is_checked_against_its_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    authority = Authority("west")
    (tmp_path / "ca.pem").write_bytes(authority.cert)
    contexts = []
    for name in ("localhost", "other.example"):
        files = authority.issue(dns=[name]).write(tmp_path, name)
        contexts.append(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
        contexts[-1].load_cert_chain(files["certFile"], files["keyFile"])
    gateway, other = Gateway(), Gateway()
    async with read(gateway, tmp_path, contexts[0]) as (pool, _):
        await eventually(lambda: pool.table.load[0] == 0.25)
    async with read(other, tmp_path, contexts[1]) as (pool, _):
        await eventually(lambda: "Hostname mismatch" in caplog.text)
        assert not other.asked
        assert not pool.table.has_reported(0)


async def test_without_a_load_it_counts_as_one_that_does_not_report(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = Gateway()
    gateway.text = '{"id": "org/chat m"}'
    async with read(gateway, tmp_path, scheme="http") as (pool, _):
        await eventually(lambda: "write this gateway's tenant there into loadShownTo" in caplog.text)
        assert not pool.table.has_reported(0)
        gateway.text = '{"saturation": 1}'
        await eventually(lambda: pool.is_provider_full(asyncio.get_running_loop().time()))


@pytest.mark.parametrize("status", [302, 401, 404, 500])
async def test_an_answer_of_another_status_is_no_report(tmp_path: Path, status: int) -> None:
    gateway = Gateway()
    gateway.status, gateway.text = status, '{"saturation": 1}'
    async with read(gateway, tmp_path, scheme="http") as (pool, _):
        await eventually(lambda: len(gateway.asked) > 1)
        assert not pool.table.has_reported(0)
        # a redirect is not followed
        assert {path for path, _ in gateway.asked} == {"/v1/models/org/chat%20m"}


@pytest.mark.parametrize(
    "text",
    [
        '{"saturation": NaN}',
        '{"saturation": Infinity}',
        '{"saturation": 1e999}',
        '{"saturation": -0.1}',
        '{"saturation": 1.01}',
        '{"saturation": "1"}',
        '{"saturation": true}',
        '{"saturation": [1]}',
        '{"saturation": null}',
        "[]",
        "",
        "<html>",
        "\udcff",
        "{" * 100_000,
        '{"a":' * 9_000 + "1" + "}" * 9_000,
        '{"a":' + "[" * 9_000 + "]" * 9_000 + "}",
    ],
)
def test_whatever_it_answers_is_a_number_from_0_to_1_or_no_load(text: str) -> None:
    with pytest.raises(UnreadableResponse):
        parse_gateway_load(text.encode(errors="surrogateescape"))


def test_more_fields_and_whole_numbers_do_not_matter() -> None:
    assert parse_gateway_load(b'{"id": "m", "saturation": 1, "saturations": {}}') == 1
    assert parse_gateway_load(b'{"saturation": 0}') == 0
