# SPDX-License-Identifier: Apache-2.0
"""An engine's host name that changes its address while requests run: extproc and Envoy follow it alike.

Both programs resolve names with the machine's own resolver, so a hosts file of the test's stands in for a name server.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import subprocess
from typing import TYPE_CHECKING

import httpx
import pytest
from aiohttp import web

from attache.__main__ import main
from bench.stack.loopback_stack import ALIAS, EngineFlags, documents, running_stack
from tests.waiting import eventually

if TYPE_CHECKING:
    from pathlib import Path

# each with a prompt of its own: no address is preferred for what its cache holds
REQUESTS = (
    {"model": ALIAS, "messages": [{"role": "user", "content": f"{number}: hi"}], "max_tokens": 3}
    for number in itertools.count()
)


class Engine:
    """Listens on the same port of several addresses and counts the requests of each."""

    def __init__(self) -> None:
        self.requests: dict[str, int] = {}

    async def handle(self, http: web.Request) -> web.Response:
        host = http.transport.get_extra_info("sockname")[0]  # type: ignore[union-attr]
        self.requests[host] = self.requests.get(host, 0) + 1
        return web.json_response({"choices": [], "usage": {}})


@pytest.mark.usefixtures("full_starts")
async def test_a_name_that_moves_takes_its_requests_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = tmp_path / "hosts"
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(RESOLVER.format(hosts=str(hosts)))
    monkeypatch.setenv("PYTHONPATH", str(site))
    engine = Engine()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", engine.handle)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    first = web.TCPSite(runner, "127.0.0.11", 0)
    await first.start()
    port = runner.addresses[0][1]
    await web.TCPSite(runner, "127.0.0.12", port).start()
    name_addresses(hosts, {"engines.example": ["127.0.0.11"]})
    more = {"endpoints": [{"address": f"engines.example:{port}"}], "scrapeInterval": "0s"}
    refused = []
    try:
        async with (
            running_stack(tmp_path / "stack", EngineFlags(count=1), more=more, watch=True) as stack,
            httpx.AsyncClient(base_url=stack.url, timeout=20) as http,
        ):

            async def ask() -> None:
                answer = await http.post("/v1/chat/completions", json=next(REQUESTS))
                if answer.status_code != 200:
                    refused.append(answer.text)

            await ask()
            assert set(engine.requests) == {"127.0.0.11"}
            name_addresses(hosts, {"engines.example": ["127.0.0.12"]})

            async def moves() -> bool:
                await ask()
                return "127.0.0.12" in engine.requests

            await eventually(moves)

            # the old address serves until it has been gone from the answers for a while; then nothing goes there
            async def has_left() -> bool:
                before = engine.requests["127.0.0.11"]
                for _ in range(10):
                    await ask()
                return engine.requests["127.0.0.11"] == before

            await eventually(has_left, pause_s=0.5)
            name_addresses(hosts, {})
            log = stack.directory / "extproc.log"
            # of its last addresses, the first one may be among those that stay: it had few requests by chance
            await eventually(lambda: bool(re.search(r"its last addresses stay: .*127\.0\.0\.12", log.read_text())))
            await ask()
            assert not refused
    finally:
        await asyncio.gather(runner.cleanup())


def name_addresses(hosts: Path, addresses: dict[str, list[str]]) -> None:
    """Replace the file at once: nobody reads half of it."""
    new = hosts.with_suffix(".new")
    new.write_text(json.dumps(addresses))
    new.replace(hosts)


RESOLVER = """
import json, socket
real = socket.getaddrinfo
def getaddrinfo(host, *words, **options):
    if not str(host).endswith(".example"):
        return real(host, *words, **options)
    found = json.loads(open({hosts!r}).read()).get(host, [])
    if not found:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    return [one for ip in found for one in real(ip, *words, **options)]
socket.getaddrinfo = getaddrinfo
"""


@pytest.mark.parametrize("extproc", ["extproc.example:9002", "localhost:9002"])
def test_envoy_takes_a_name_of_extproc(envoy: str, tmp_path: Path, extproc: str) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "a.yaml").write_text(documents(["127.0.0.1:8000"], gateway={"extproc": extproc}))
    bundle = tmp_path / "bundle"
    assert main(["bundle", "--config", str(tmp_path / "config"), "--out", str(bundle)]) == 0
    checked = subprocess.run(
        [envoy, "--mode", "validate", "-c", str(bundle / "bootstrap.json")], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stderr[-2000:]
    told = next(file.read_text() for file in sorted(bundle.rglob("*.json")) if '"attache-extproc"' in file.read_text())
    assert ("STRICT_DNS" in told, '"address": "extproc.example"' in told) == (extproc != "localhost:9002",) * 2
