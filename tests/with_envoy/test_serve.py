# SPDX-License-Identifier: Apache-2.0
"""``attache serve``: one process that runs all of a machine, whatever happens to its parts."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import msgspec
import pytest
import pytest_asyncio

from bench.stack.loopback_stack import ALIAS, EngineFlags, EnginePorts, documents
from bench.stack.processes import Processes, free_ports, workers_of
from extproc.api.pricing import Price, Rates, TokenCounts, cost_micros
from tests.waiting import eventually, until_served
from tests.with_envoy.load import Load

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Served(msgspec.Struct, frozen=True):
    """``url``: of Envoy; ``writer``: of the bundle's writer's page; ``usage``: of reports about all callers;
    ``translator``: of its page. ``command``: of the process called ``serve``.
    """

    processes: Processes
    directory: Path
    url: str
    writer: str
    usage: str
    translator: str
    command: tuple[str, ...]

    @property
    def log(self) -> str:
        """All that it and its children have written."""
        return (self.directory / "serve.log").read_text()

    def child(self, word: str) -> int:
        """The process id of the child that has ``word`` among its arguments."""
        pid = self.processes.pid("serve")
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            if word in Path(f"/proc/{child}/cmdline").read_text().split("\0"):
                return int(child)
        raise LookupError(word)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory, envoy: str) -> AsyncIterator[Served]:
    """An engine, and the command. Each test leaves it serving."""
    directory = tmp_path_factory.mktemp("serve")
    engine, listen, admin, extproc, metrics, writer, usage, rows, translator = free_ports(9)
    config = directory / "config"
    config.mkdir()
    gateway = {
        "listen": f"127.0.0.1:{listen}",
        "admin": f"127.0.0.1:{admin}",
        "extproc": f"127.0.0.1:{extproc}",
        "usageLog": {"path": str(directory / "usage" / "usage.log")},
    }
    server: dict[str, Any] = {"pricing": [{"perMillion": {"input": "2.5", "output": "10"}}]}
    server |= {"apis": ["ChatCompletions"], "translation": "Lenient"}
    route = {"budgets": [{"name": "all", "per": "Route", "window": "Month", "max": {"requests": 1_000_000}}]}
    text = documents([f"127.0.0.1:{engine}"], gateway=gateway, more=server, route=route)
    (config / "attache.yaml").write_text(text)
    flags = EngineFlags(count=1, speed=5.0, stream_headers="first-token")
    command = (
        *("env", f"ENVOY={envoy}", sys.executable, "-m", "attache", "serve", "--config", str(config)),
        *("--metrics", f"127.0.0.1:{metrics}", "--bundle-metrics", f"127.0.0.1:{writer}"),
        *("--usage-metrics", f"127.0.0.1:{rows}", "--usage-admin", f"127.0.0.1:{usage}"),
        *("--translate-metrics", f"127.0.0.1:{translator}"),
        *("--usage-store", f"sqlite:///{directory}/store/usage.db"),
    )
    async with Processes(directory) as processes, httpx.AsyncClient() as http:
        words = flags.arguments([EnginePorts(engine, 0, 0)])
        await processes.start("engines", [sys.executable, "-m", "bench.engine", *words])
        await processes.start("serve", command)
        urls = [f"http://127.0.0.1:{port}" for port in (listen, writer, usage, translator)]
        one = Served(processes, directory, *urls, command)
        # its store cannot be opened yet: nothing waits for rows
        await eventually(lambda: "ready: clients connect to" in one.log)
        await until_served(http, one.url)
        await eventually(lambda: "rows cannot be kept" in one.log)
        ready = await http.get(f"http://127.0.0.1:{rows}/readyz")
        assert (ready.status_code, ready.text) == (503, "unable to open database file")
        (directory / "store").mkdir()

        async def is_open() -> bool:
            return (await http.get(f"http://127.0.0.1:{rows}/readyz")).status_code == 200

        await eventually(is_open)
        yield one


async def test_one_line_tells_that_all_of_it_is_ready(served: Served) -> None:
    assert served.log.count("ready: clients connect to") == 1
    assert f"ready: clients connect to {served.url.removeprefix('http://')};" in served.log
    async with httpx.AsyncClient() as http:
        assert (await http.get(f"{served.writer}/readyz")).status_code == 200
    # the log has the lines of all, but those of Envoy about extensions that are new
    assert "work-in-progress" not in served.log
    assert "extproc.runtime.app: listening on" in served.log
    assert "controller.bundle.sync: the bundle has configuration" in served.log


async def test_each_request_has_a_row_whichever_child_is_killed_meanwhile(served: Served) -> None:
    # no other request has been sent yet
    price = Price("", "USD", Rates(input=2_500_000, output=10_000_000))
    expected = [0, 0, 0, 0, 0]
    rows: list[dict[str, Any]] | Exception = []
    async with httpx.AsyncClient(timeout=60) as http:

        async def is_reported() -> bool:
            nonlocal rows
            try:
                answer = await http.get(f"{served.usage}/v1/usage", params={"group_by": "server"})
                rows = answer.json()["data"]
            except (httpx.TransportError, ValueError) as error:
                # it is killed, and starts again
                rows = error
                return False
            sums = [one[name] for one in rows for name in ("requests", "input_tokens", "output_tokens", "unpriced")]
            return [*sums, *(one["cost_micros"].get("USD") for one in rows)] == expected

        for number, killed in enumerate(["", "usage", "extproc", "bundle", ""], start=1):
            body = {"model": ALIAS, "messages": [{"role": "user", "content": "hello " * number}], "max_tokens": number}
            await until_served(http, served.url)
            answer = await http.post(f"{served.url}/v1/chat/completions", json=body)
            usage = answer.json()["usage"]
            tokens = TokenCounts(usage["prompt_tokens"], output=usage["completion_tokens"])
            # Envoy serves requests by itself until it has a connection to the new extproc: they have no price
            is_priced = "x-attache-budget-remaining" in answer.headers
            cost = cost_micros(price, tokens) if is_priced else 0
            new = (1, tokens.input, tokens.output, int(not is_priced), cost)
            expected = [old + one for old, one in zip(expected, new, strict=True)]
            if killed:
                # before its second has passed, after which Envoy writes the line
                before = served.log.count(f"{killed} is ready again")
                os.kill(served.child(killed), signal.SIGKILL)
                await eventually(lambda word=killed, count=before: served.log.count(f"{word} is ready again") > count)
        try:
            await eventually(is_reported)
        except TimeoutError:
            pytest.fail(f"{rows!r} is not {expected}\n{served.log}")
        # budgets do not begin anew with a process
        before = served.log.count("extproc is ready again")
        os.kill(served.child("extproc"), signal.SIGKILL)
        await eventually(lambda: served.log.count("extproc is ready again") > before)
        remaining: list[str | None] = []

        async def is_counted() -> bool:
            # Envoy serves requests by itself until it has a connection to the new extproc
            answer = await http.post(f"{served.url}/v1/chat/completions", json=body)
            remaining.append(answer.headers.get("x-attache-budget-remaining"))
            return remaining[-1] is not None

        await eventually(is_counted)
        # of the requests that Envoy served by itself, the budget may have counted some
        unsure = range(-expected[3], len(remaining))
        expected_first = {f'"all";r={1_000_000 - expected[0] - 1 - uncounted}' for uncounted in unsure}
        assert str(remaining[-1]).split(";t=")[0] in expected_first


@pytest.mark.parametrize(
    ("name", "then"),
    [
        ("worker-0", "the spare process takes over"),
        ("extproc", "it is started again in 0.2 s"),
        pytest.param("bundle", "it is started again in 0.2 s", marks=pytest.mark.slow),
    ],
)
async def test_a_child_that_is_killed_comes_back_and_costs_no_request(served: Served, name: str, then: str) -> None:
    before = served.log.count(f"{name} is ready again")
    async with Load(served.url, clients=6, pause_s=0.05) as load:
        await load.more(20)
        (worker,) = workers_of(served.child("extproc"))
        os.kill(worker if name == "worker-0" else served.child(name), signal.SIGKILL)
        await eventually(lambda: served.log.count(f"{name} is ready again") > before)
        await load.more(20)
    assert load.tally.lost == []
    assert load.tally.cut == 0
    assert f"{name} ended by SIGKILL; {then}" in served.log


async def test_a_translator_that_is_killed_comes_back(served: Served) -> None:
    body = {"model": ALIAS, "max_tokens": 2, "messages": [{"role": "user", "content": "hi"}]}
    async with httpx.AsyncClient(timeout=30) as http:
        assert (await http.post(f"{served.url}/v1/messages", json=body)).json()["type"] == "message"
        os.kill(served.child("translate"), signal.SIGKILL)
        await eventually(lambda: "translate is ready again" in served.log)
        assert (await http.post(f"{served.url}/v1/messages", json=body)).json()["type"] == "message"
        page = (await http.get(f"{served.translator}/metrics")).text
        assert 'attache_translations_total{client="messages",ended="answered",engine="chat"} 1.0' in page


async def test_an_envoy_that_is_killed_comes_back(served: Served) -> None:
    async with Load(served.url, clients=6, pause_s=0.05) as load:
        await load.more(20)
        os.kill(served.child("--use-dynamic-base-id"), signal.SIGKILL)
        await eventually(lambda: "envoy is ready again" in served.log)
        await load.more(20)


async def test_a_second_one_on_the_same_ports_says_so_in_one_line(served: Served) -> None:
    second = await asyncio.create_subprocess_exec(*served.command, stderr=asyncio.subprocess.PIPE)
    _, said = await second.communicate()
    assert second.returncode == 2
    (line,) = said.decode().splitlines()
    address = served.url.removeprefix("http://")
    assert line.startswith(f"cannot listen on {address}: Address already in use; stop what listens there, or write")
    assert line.endswith("'listen' or 'listeners' of the GatewayConfig")


async def test_requests_that_run_end_before_anything_is_stopped(served: Served) -> None:
    body = {"model": ALIAS, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 600, "stream": True}
    async with (
        httpx.AsyncClient(timeout=120) as http,
        http.stream("POST", f"{served.url}/v1/chat/completions", json=body) as answer,
    ):
        pieces = answer.aiter_text()
        text = await anext(pieces)
        os.kill(served.processes.pid("serve"), signal.SIGTERM)
        async for piece in pieces:
            text += piece
    assert text.endswith("data: [DONE]\n\n")
    assert await served.processes.wait_for_exit("serve") == 0
    order = ["draining: Envoy closes its listeners within 5 s", "extproc.runtime.app: drained", "everything has ended"]
    places = [served.log.rfind(line) for line in order]
    assert -1 not in places
    assert places == sorted(places)
    await served.processes.restart("serve", signal.SIGTERM)
    async with httpx.AsyncClient() as http:
        await until_served(http, served.url)


async def test_a_configuration_with_a_mistake_is_refused_at_the_start(served: Served, tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("kind: ModelServer\n")
    command = [str(tmp_path) if word == str(served.directory / "config") else word for word in served.command]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    _, said = await process.communicate()
    assert process.returncode == 2
    assert "bad.yaml:1" in said.decode()


async def test_with_json_each_line_of_all_programs_is_an_object(tmp_path: Path, envoy: str) -> None:
    listen, admin, extproc, engine = free_ports(4)
    gateway = {"listen": f"127.0.0.1:{listen}", "admin": f"127.0.0.1:{admin}", "extproc": f"127.0.0.1:{extproc}"}
    config = tmp_path / "config"
    config.mkdir()
    (config / "attache.yaml").write_text(documents([f"127.0.0.1:{engine}"], gateway=gateway))
    command = (
        *("env", f"ENVOY={envoy}", sys.executable, "-m", "attache", "serve", "--config", str(config)),
        *("--metrics", "off", "--log-format", "json", "--envoy-log-level", "info"),
    )
    log = tmp_path / "serve.log"
    async with Processes(tmp_path) as processes:
        await processes.start("serve", command)
        await eventually(lambda: "ready: clients connect to" in log.read_text())
        os.kill(processes.pid("serve"), signal.SIGTERM)
        assert await processes.wait_for_exit("serve") == 0
        lines = [json.loads(line) for line in log.read_text().splitlines()]
    loggers = {line["logger"] for line in lines}
    assert {"attache.serve", "extproc.runtime.app", "controller.bundle.sync", "envoy.main"} <= loggers
    assert all({"time", "level", "message"} <= line.keys() for line in lines)
