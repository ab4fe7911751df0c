# SPDX-License-Identifier: Apache-2.0
"""A real Prometheus with TLS, a token or client certificates, and something for it to scrape."""

from __future__ import annotations

import contextlib
import ssl
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec
import yaml
from aiohttp import web

from bench.cluster.certificates import Authority, write_private
from bench.stack.processes import Processes, free_ports
from tests.programs import program

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

NAME = "prometheus"


class Exporter:
    """A page with one gauge, ``queue_length``; ``value`` is what it says; None: the page is broken."""

    def __init__(self) -> None:
        self.value: float | None = 0.0

    async def page(self, _: web.Request) -> web.Response:
        if self.value is None:
            return web.Response(status=500)
        return web.Response(text=f"queue_length {self.value}\n")


class Running(msgspec.Struct, frozen=True):
    """``url``: with https. ``client``: certificate and key that it takes."""

    url: str
    authority: str
    client: tuple[str, str]
    processes: Processes
    exporter: Exporter

    async def ready(self) -> bool:
        """Whether it has scraped at least once."""
        context = ssl.create_default_context(cadata=self.authority)
        pem = self.processes._logs / "test-client.pem"
        write_private(pem, "\n".join(self.client))
        context.load_cert_chain(pem)
        with contextlib.suppress(aiohttp.ClientError):
            query = {"query": "queue_length"}
            async with (
                aiohttp.ClientSession() as http,
                http.get(f"{self.url}/api/v1/query", params=query, ssl=context) as answer,
            ):
                return answer.status == 200 and bool((await answer.json())["data"]["result"])
        return False


@contextlib.asynccontextmanager
async def running_prometheus(folder: Path) -> AsyncIterator[Running]:
    """It takes only clients with a certificate of its authority."""
    binary, exporter = program(NAME), Exporter()
    port, page = free_ports(2)
    authority = Authority(datetime.now(UTC))
    certificate, key = authority.issue("prometheus", ["127.0.0.1"])
    files = {"ca.pem": authority.certificate, "server.pem": certificate, "server-key.pem": key}
    for name, text in files.items():
        write_private(folder / name, text)
    server = {
        "cert_file": str(folder / "server.pem"),
        "key_file": str(folder / "server-key.pem"),
        "client_auth_type": "RequireAndVerifyClientCert",
        "client_ca_file": str(folder / "ca.pem"),
    }
    (folder / "web.yaml").write_text(yaml.safe_dump({"tls_server_config": server}))
    scraped = {"job_name": "queue", "static_configs": [{"targets": [f"127.0.0.1:{page}"]}]}
    config = {"global": {"scrape_interval": "200ms", "scrape_timeout": "200ms"}, "scrape_configs": [scraped]}
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    app = web.Application()
    app.add_routes([web.get("/metrics", exporter.page)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", page).start()
    command = [
        binary,
        f"--config.file={folder / 'prometheus.yaml'}",
        f"--web.config.file={folder / 'web.yaml'}",
        f"--web.listen-address=127.0.0.1:{port}",
        f"--storage.tsdb.path={folder / 'data'}",
    ]
    try:
        async with Processes(folder) as processes:
            await processes.start(NAME, command)
            shown = authority.issue("attache")
            found = Running(f"https://127.0.0.1:{port}", authority.certificate, shown, processes, exporter)
            await processes.wait_ready(NAME, found.ready)
            yield found
    finally:
        await runner.cleanup()


class Scraper(msgspec.Struct, frozen=True):
    """A Prometheus that scrapes. ``url``: plain HTTP."""

    url: str

    async def query(self, expression: str) -> list[dict[str, Any]]:
        """Labels (``metric``) and value of each series."""
        async with (
            aiohttp.ClientSession() as http,
            http.get(f"{self.url}/api/v1/query", params={"query": expression}) as answer,
        ):
            found: list[dict[str, Any]] = (await answer.json())["data"]["result"]
            return found

    async def problems(self) -> list[str]:
        """Of targets that cannot be scraped."""
        async with aiohttp.ClientSession() as http, http.get(f"{self.url}/api/v1/targets") as answer:
            targets = (await answer.json())["data"]["activeTargets"]
        return [f"{one['scrapeUrl']}: {one['health']} {one['lastError']}" for one in targets if one["health"] != "up"]

    async def is_ready(self) -> bool:
        with contextlib.suppress(aiohttp.ClientError):
            async with aiohttp.ClientSession() as http, http.get(f"{self.url}/-/ready") as answer:
                return answer.status == 200
        return False


@contextlib.asynccontextmanager
async def scraping(folder: Path, file: Path) -> AsyncIterator[Scraper]:
    """``file``: its configuration."""
    (port,) = free_ports(1)
    command = [
        program(NAME),
        f"--config.file={file}",
        f"--web.listen-address=127.0.0.1:{port}",
        f"--storage.tsdb.path={folder / 'data'}",
    ]
    async with Processes(folder) as processes:
        await processes.start(NAME, command)
        found = Scraper(f"http://127.0.0.1:{port}")
        await processes.wait_ready(NAME, found.is_ready)
        yield found
