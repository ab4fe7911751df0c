# SPDX-License-Identifier: Apache-2.0
"""``bundle`` sees whether a real Envoy takes what it has written, and says what was refused."""

from __future__ import annotations

import json
import re
import socket
import sys
from typing import TYPE_CHECKING

import httpx
import msgspec
import pytest

from bench.stack.loopback_stack import documents, envoy_command
from bench.stack.processes import Processes, free_ports
from controller.bundle.acknowledgements import AcknowledgementPoller
from controller.bundle.envoy_admin_client import read_envoy_state
from extproc.api.config_loader import load_directory
from extproc.api.status_page_contents import REPORT_PATH, ConfigReport
from tests.fork_server import output_of
from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


class Writer:
    """``bundle --watch`` beside a running Envoy."""

    def __init__(self, directory: Path, processes: Processes, http: httpx.AsyncClient) -> None:
        self.listen, self.admin, self.extproc, self.metrics = free_ports(4)
        self.config, self.out = directory / "config", directory / "envoy"
        self._directory, self.processes, self._http = directory, processes, http

    def write(self, **gateway: object) -> None:
        """Fields that are None are left out."""
        addresses = {
            "listen": f"127.0.0.1:{self.listen}",
            "admin": f"127.0.0.1:{self.admin}",
            "extproc": f"127.0.0.1:{self.extproc}",
        }
        self.config.mkdir(exist_ok=True)
        spec = {name: value for name, value in {**addresses, **gateway}.items() if value is not None}
        (self.config / "a.yaml").write_text(documents(["127.0.0.1:8000"], gateway=spec))

    def command(self, *words: str) -> list[str]:
        return [
            *(sys.executable, "-m", "controller", "bundle", "--config", str(self.config), "--out", str(self.out)),
            *words,
        ]

    async def run(self, *words: str) -> tuple[int, str]:
        """The exit status and the output of the command, which ends."""
        return await output_of(self.command(*words), self._directory)

    async def logs(self, *texts: str) -> None:
        """Its log has all of these, at once or soon: a thread of its own writes it."""
        await eventually(lambda: all(text in (self._directory / "bundle.log").read_text() for text in texts))

    async def status(self) -> str:
        """What the metrics say that Envoy does."""
        try:
            page = (await self._http.get(f"http://127.0.0.1:{self.metrics}/metrics")).text
        except httpx.TransportError:
            return ""
        found = re.search(r'attache_bundle_acknowledgement\{status="(\w+)"\} 1', page)
        return "" if found is None else found[1]

    async def readiness(self) -> tuple[int, str]:
        answer = await self._http.get(f"http://127.0.0.1:{self.metrics}/readyz")
        return answer.status_code, answer.text

    async def report(self) -> ConfigReport:
        """What of the directory Envoy uses."""
        page = await self._http.get(f"http://127.0.0.1:{self.metrics}{REPORT_PATH}")
        return msgspec.json.decode(page.content, type=ConfigReport)

    async def until(self, status: str) -> None:
        async def holds() -> bool:
            return await self.status() == status

        await eventually(holds)


@pytest.fixture
async def writer(tmp_path: Path) -> AsyncIterator[Writer]:
    """Both run, and Envoy has taken the bundle."""
    async with Processes(tmp_path) as processes, httpx.AsyncClient(timeout=60) as http:
        one = Writer(tmp_path, processes, http)
        one.write()
        await processes.start("bundle", one.command("--watch", "--metrics", f"127.0.0.1:{one.metrics}"))

        async def is_written() -> bool:
            return (one.out / "bootstrap.json").is_file()

        await processes.wait_ready("bundle", is_written)
        await processes.start("envoy", envoy_command(one.out))
        await one.until("Taken")
        yield one


async def test_a_refused_listener_is_said_with_the_file_and_the_reason(writer: Writer) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        writer.write(listen=f"127.0.0.1:{taken.getsockname()[1]}")
        await writer.until("Refused")
    await writer.logs("Envoy refused lds.json", "Address already in use")
    writer.write()
    await writer.until("Taken")
    await writer.logs("Envoy uses the bundle as it is")


async def test_an_envoy_whose_port_is_taken_at_its_start_is_not_ready_and_serves_nothing(writer: Writer) -> None:
    assert await writer.readiness() == (200, "Envoy takes requests")
    await writer.processes.end("envoy")
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", writer.listen))
        taken.listen()
        await writer.processes.start("envoy", envoy_command(writer.out))
        await writer.until("Refused")
        why = f"cannot bind '127.0.0.1:{writer.listen}': Address already in use"
        assert await writer.readiness() == (503, f"Envoy has no listeners: {why}")
        report = await writer.report()
        assert (report.has_nothing, report.files) == (True, {})
        assert f"lds.json and serves nothing: {why}" in report.refused


@pytest.mark.parametrize("change", [{"connect_timeout": "-1s"}, {"transport_socket": {"name": "unknown"}}])
async def test_an_envoy_that_refuses_the_clusters_of_its_start_is_not_ready_and_serves_nothing(
    writer: Writer, change: dict[str, object]
) -> None:
    """Of a negative time it refuses the file; with an unknown transport socket, it takes the other clusters."""
    await writer.processes.end("envoy")
    file = writer.out / "cds.json"
    page = json.loads(file.read_text())
    (server,) = (one for one in page["resources"] if one["name"] == "server/default/llama")
    server |= change
    file.write_text(json.dumps(page))
    await writer.processes.start("envoy", envoy_command(writer.out))
    await writer.until("Refused")
    assert await writer.readiness() == (
        503,
        "Envoy has no clusters: its log says why, after 'config update rejected'",
    )
    assert (await writer.report()).has_nothing


async def test_an_envoy_without_one_of_its_listeners_is_ready(writer: Writer) -> None:
    await writer.processes.end("envoy")
    (free,) = free_ports(1)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ports = {"taken": taken.getsockname()[1], "free": free}
        listeners = [{"name": name, "address": f"127.0.0.1:{port}"} for name, port in ports.items()]
        writer.write(listeners=listeners, listen=None)
        await eventually(lambda: str(free) in (writer.out / "lds.json").read_text())
        await writer.processes.start("envoy", envoy_command(writer.out))
        await writer.until("Refused")
        assert (await writer.readiness())[0] == 200
        assert not (await writer.report()).has_nothing


async def test_refused_routes_and_endpoints_are_said(writer: Writer) -> None:
    # what check lets through, Envoy takes: only somebody else's hand can write this
    await writer.processes.end("bundle")
    for name in ("rds.json", "eds/default/llama.json"):
        file = writer.out / name
        page = json.loads(file.read_text())
        page["version_info"] = "new"
        if name == "rds.json":
            page["resources"][0]["virtual_hosts"][0]["domains"] = []
        else:
            endpoint = page["resources"][0]["endpoints"][0]["lb_endpoints"][0]["endpoint"]
            endpoint["address"]["socket_address"]["address"] = "nowhere"
        draft = file.with_suffix(".draft")
        draft.write_text(json.dumps(page))
        draft.replace(file)
    acknowledgements = AcknowledgementPoller(read_envoy_state, f"{writer.out}/bootstrap.json")
    acknowledgements.expect(load_directory(writer.config), writer.out, 0.0)
    found = []

    async def are_refused() -> bool:
        found[:] = acknowledgements.poll(float("inf")).files
        return len(found) == 2

    await eventually(are_refused)
    assert set(found) == {"rds.json", "eds/default/llama.json"}


async def test_without_watch_the_exit_status_says_whether_envoy_took_the_bundle(writer: Writer) -> None:
    await writer.processes.end("bundle")
    writer.write(servedHeader="x-served-by")
    assert await writer.run("--wait", "20s") == (0, "")
    status, said = await writer.run("--wait", "1s", "--admin", "127.0.0.1:1")
    assert status == 1
    assert "no Envoy answers at its admin address 127.0.0.1:1" in said

    # another directory, the same Envoy
    first, writer.out = writer.out, writer.out.with_name("other")
    writer.write(servedHeader="x-other")
    status, said = await writer.run("--wait", "1s")
    assert status == 1
    assert f"was started with {first}/bootstrap.json" in said
