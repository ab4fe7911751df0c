# SPDX-License-Identifier: Apache-2.0
"""extproc as a process: it starts, is asked over gRPC, drains and ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING

import grpc
import httpx
import msgspec
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.stack.processes import free_ports, workers_of
from extproc.__main__ import main
from extproc.api.status_page_contents import ConfigReport
from extproc.sd_notify import ALIVE, NOTIFY_VARIABLE, READY, STOPPING, WATCHDOG_VARIABLE
from extproc.streams.messages import ProcessingRequest, ProcessingResponse, StreamAccessLogsMessage
from tests.extproc.conftest import CONFIG
from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from bench.stack.orphan_reaper import ProcessGuard

PROCESS = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
LOGS = "/envoy.service.accesslog.v3.AccessLogService/StreamAccessLogs"
# extproc that reports when it saves
SAVES_AND_TELLS = """
import os, runpy
from extproc.feeds.saved_limits import SavedLimits
from extproc.feeds.saved_slo_counts import SavedSloCounts
from extproc.sd_notify import notify
SavedLimits.save = SavedSloCounts.save = lambda _: notify(b"SAVES=1", os.environ)
runpy.run_module("extproc", None, "__main__")
"""
CHAT = json.dumps({"model": "chat", "messages": [{"role": "user", "content": "hello " * 100}]}).encode()


def free_port() -> int:
    return free_ports(1)[0]


class ExtprocProcess:
    def __init__(self, process: asyncio.subprocess.Process, target: str, metrics: str) -> None:
        self.process = process
        self.metrics = metrics
        # tried often: the process takes a moment before it listens
        options = [("grpc.max_reconnect_backoff_ms", 100), ("grpc.min_reconnect_backoff_ms", 1000)]
        self.channel = grpc.aio.insecure_channel(target, options=options)

    async def health(self, service: str) -> int:
        stub = health_pb2_grpc.HealthStub(self.channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
        status: int = answer.status
        return status

    def open_stream(self) -> grpc.aio.StreamStreamCall[ProcessingRequest, ProcessingResponse]:
        return self.channel.stream_stream(
            PROCESS,
            request_serializer=ProcessingRequest.SerializeToString,
            response_deserializer=ProcessingResponse.FromString,
        )()

    async def page(self, path: str) -> httpx.Response:
        async with httpx.AsyncClient(timeout=60) as client:
            return await client.get(f"http://{self.metrics}{path}")

    async def is_draining(self) -> bool:
        return (await self.page("/readyz")).status_code == 503


async def start(
    config: Path,
    listen: str,
    guard: ProcessGuard,
    *,
    log: IO[str] | None = None,
    program: Sequence[str] = ("-m", "extproc"),
    more: Sequence[str] = (),
) -> ExtprocProcess:
    metrics = f"127.0.0.1:{free_port()}"
    arguments = ["--config", str(config), "--listen", listen, "--metrics", metrics, "--drain", "10m"]
    command = [sys.executable, *program, *arguments, *more]
    process = await asyncio.create_subprocess_exec(*command, start_new_session=True, stderr=log)
    guard.add(process.pid)
    one = ExtprocProcess(process, listen, metrics)
    async with asyncio.timeout(120):
        await one.channel.channel_ready()
    return one


@pytest.fixture
async def extproc(tmp_path: Path, guard: ProcessGuard) -> AsyncIterator[ExtprocProcess]:
    (tmp_path / "all.yaml").write_bytes(CONFIG)
    one = await start(tmp_path, f"127.0.0.1:{free_port()}", guard)
    yield one
    await one.channel.close()
    if one.process.returncode is None:
        one.process.kill()
    await one.process.wait()
    guard.remove(one.process.pid)


async def decide(
    stream: grpc.aio.StreamStreamCall[ProcessingRequest, ProcessingResponse], body: bytes
) -> ProcessingResponse:
    headers = ProcessingRequest()
    for key, value in ((":method", b"POST"), (":path", b"/v1/chat/completions")):
        headers.request_headers.headers.headers.add(key=key, raw_value=value)
    await stream.write(headers)
    await stream.read()
    whole = ProcessingRequest()
    whole.request_body.body, whole.request_body.end_of_stream = body, True
    await stream.write(whole)
    answer = await stream.read()
    assert isinstance(answer, ProcessingResponse)
    return answer


async def test_it_is_ready_decides_and_shows_it(extproc: ExtprocProcess) -> None:
    for service in ("", "liveness", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor"):
        assert await extproc.health(service) == health_pb2.HealthCheckResponse.SERVING
    assert (await extproc.page("/readyz")).status_code == 200
    report = msgspec.json.decode((await extproc.page("/config")).content, type=ConfigReport)
    assert (list(report.files), report.refused) == (["all.yaml"], "")
    stream = extproc.open_stream()
    answer = await decide(stream, CHAT)
    assert (
        "10.0.0.1:8000"
        in answer.dynamic_metadata.fields["envoy.lb"].struct_value.fields["x-gateway-destination-endpoint"].string_value
    )

    assert 'attache_in_flight{endpoint="10.0.0.' in (text := (await extproc.page("/metrics")).text)
    assert sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith("attache_in_flight{")) == 1
    await stream.done_writing()
    await stream.read()
    assert 'attache_requests_total{outcome="picked"} 1.0' in text


async def test_the_console_asks_for_the_token(tmp_path: Path, guard: ProcessGuard) -> None:
    config, token = tmp_path / "config", tmp_path / "token"
    config.mkdir()
    (config / "all.yaml").write_bytes(CONFIG)
    token.write_text("of-the-operator-1234\n")
    one = await start(config, f"127.0.0.1:{free_port()}", guard, more=["--console-token", str(token)])
    async with httpx.AsyncClient(timeout=60, base_url=f"http://{one.metrics}") as client:
        found = [(await client.get(path)).status_code for path in ("/metrics", "/readyz", "/console", "/console/state")]
        state = await client.get("/console/state", auth=("ann", "of-the-operator-1234"))
    assert found == [200, 200, 401, 401]
    assert state.json()["total"]["engines"] == 3
    await end(one, guard)


async def test_a_global_limit_that_comes_later_is_said_to_have_no_redis(tmp_path: Path, guard: ProcessGuard) -> None:
    config, log = tmp_path / "config", tmp_path / "log"
    config.mkdir()
    (config / "all.yaml").write_bytes(CONFIG)
    with log.open("w") as opened:
        one = await start(config, f"127.0.0.1:{free_port()}", guard, log=opened)
    (config / "more.yaml").write_bytes(
        b"apiVersion: attache.dev/v1alpha1\nkind: ModelRoute\nmetadata: {name: limited}\n"
        b"spec: {modelName: limited, rules: [{targetModels: [{modelServerName: llama}]}],\n"
        b"  rateLimits: [{requests: 1, unit: second, scope: Global}]}\n"
    )

    async def is_said() -> bool:
        return "default/limited: rateLimits[0] is Global, and there is no --redis" in log.read_text()

    await eventually(is_said)
    await one.channel.close()
    one.process.kill()
    await one.process.wait()
    guard.remove(one.process.pid)


async def end(one: ExtprocProcess, guard: ProcessGuard) -> None:
    one.process.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(one.process.wait(), 120) == 0
    guard.remove(one.process.pid)
    await one.channel.close()


async def decide_one(one: ExtprocProcess) -> None:
    stream = one.open_stream()
    assert (await decide(stream, CHAT)).WhichOneof("response") == "request_body"
    stream.cancel()


async def test_a_decision_log_that_nobody_reads_or_that_is_full_costs_lines_alone(
    tmp_path: Path, guard: ProcessGuard
) -> None:
    config, full, pipe = tmp_path / "config", Path("/dev/full"), tmp_path / "pipe"
    config.mkdir()
    (config / "all.yaml").write_bytes(CONFIG)
    os.mkfifo(pipe)
    more = ("--decision-sample", "1", "--decision-log")
    one = await start(config, f"127.0.0.1:{free_port()}", guard, more=(*more, str(full)))
    for _ in range(2):
        await decide_one(one)

    async def are_counted() -> bool:
        return 'attache_decision_log_lines_total{result="failed"} 2.0' in (await one.page("/metrics")).text

    await eventually(are_counted)
    await end(one, guard)
    two = await start(config, f"127.0.0.1:{free_port()}", guard, more=(*more, str(pipe)))
    await decide_one(two)
    assert 'attache_requests_total{outcome="picked"} 1.0' in (await two.page("/metrics")).text
    await end(two, guard)


async def test_a_client_that_leaves_frees_its_place(extproc: ExtprocProcess) -> None:
    stream = extproc.open_stream()
    await decide(stream, CHAT)
    stream.cancel()

    async def is_gone() -> bool:
        return "attache_open_streams 0.0" in (await extproc.page("/metrics")).text

    await eventually(is_gone)
    in_flight = [
        line for line in (await extproc.page("/metrics")).text.splitlines() if line.startswith("attache_in_flight{")
    ]
    assert [line.split()[-1] for line in in_flight] == ["0.0"] * 3


async def test_sigterm_lets_running_streams_finish_and_takes_no_new_ones(extproc: ExtprocProcess) -> None:
    running = extproc.open_stream()
    await decide(running, CHAT)
    extproc.process.send_signal(signal.SIGTERM)
    await eventually(extproc.is_draining)

    async def is_refused() -> bool:
        late = extproc.open_stream()
        try:
            await decide(late, CHAT)
        except grpc.aio.AioRpcError:
            return True
        # not ready is said a moment before streams are refused
        await late.done_writing()
        await late.read()
        return False

    await eventually(is_refused)
    assert extproc.process.returncode is None

    await running.done_writing()
    await running.read()
    async with asyncio.timeout(120):
        assert await extproc.process.wait() == 0


async def test_an_open_access_log_stream_does_not_hold_up_the_end(extproc: ExtprocProcess) -> None:
    logs = extproc.channel.stream_unary(LOGS, request_serializer=StreamAccessLogsMessage.SerializeToString)()
    await logs.write(StreamAccessLogsMessage())
    extproc.process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(120):
        assert await extproc.process.wait() == 0


async def test_a_second_signal_ends_the_drain(extproc: ExtprocProcess) -> None:
    running = extproc.open_stream()
    await decide(running, CHAT)
    extproc.process.send_signal(signal.SIGTERM)
    await eventually(extproc.is_draining)
    extproc.process.send_signal(signal.SIGTERM)

    async with asyncio.timeout(120):
        assert await extproc.process.wait() == 0


async def test_a_stream_of_a_wrong_mode_is_refused_and_the_next_one_is_served(extproc: ExtprocProcess) -> None:
    odd = extproc.open_stream()
    message = ProcessingRequest()
    message.request_body.end_of_stream = True
    await odd.write(message)
    refused = await odd.read()
    assert isinstance(refused, ProcessingResponse)
    assert refused.immediate_response.status.code == 500

    assert (await decide(extproc.open_stream(), CHAT)).WhichOneof("response") == "request_body"
    assert 'attache_requests_total{outcome="internal_error"} 1.0' in (await extproc.page("/metrics")).text


async def test_access_log_entries_are_taken_whatever_is_in_them(extproc: ExtprocProcess) -> None:
    ticket = (
        (await decide(extproc.open_stream(), CHAT))
        .dynamic_metadata.fields["attache"]
        .struct_value.fields["ticket"]
        .string_value
    )
    message = StreamAccessLogsMessage()
    message.http_logs.log_entry.add()
    entry = message.http_logs.log_entry.add()
    entry.response.response_code.value = 200
    for name, key, value in (("attache", "ticket", ticket), ("attache", "ticket", "of-another")):
        metadata = entry.common_properties.metadata.filter_metadata[name]
        metadata.fields[key].string_value = value
        message.http_logs.log_entry.add().CopyFrom(entry)
    entry.common_properties.metadata.filter_metadata["attache"].fields["ticket"].number_value = 7
    logs = extproc.channel.stream_unary(LOGS, request_serializer=StreamAccessLogsMessage.SerializeToString)()
    await logs.write(message)
    await logs.done_writing()
    await logs

    text = (await extproc.page("/metrics")).text
    assert 'attache_access_log_entries_total{result="settled"} 1.0' in text
    assert 'attache_access_log_entries_total{result="unknown_ticket"} 1.0' in text
    assert 'attache_access_log_entries_total{result="no_ticket"} 2.0' in text


async def test_a_unix_socket_will_do(tmp_path: Path, guard: ProcessGuard) -> None:
    (tmp_path / "all.yaml").write_bytes(CONFIG)
    one = await start(tmp_path, f"unix:{tmp_path}/extproc.sock", guard)
    assert (await decide(one.open_stream(), CHAT)).WhichOneof("response") == "request_body"
    one.process.send_signal(signal.SIGKILL)
    await one.process.wait()
    # a socket file left behind by a process that was killed is no obstacle
    again = await start(tmp_path, f"unix:{tmp_path}/extproc.sock", guard)
    again.process.send_signal(signal.SIGTERM)
    assert await again.process.wait() == 0
    for ended in (one, again):
        guard.remove(ended.process.pid)
    await one.channel.close()
    await again.channel.close()


async def is_page_without_streams(one: ExtprocProcess) -> bool:
    """As of a successor."""
    try:
        return "attache_open_streams 0.0" in (await one.page("/metrics")).text
    except httpx.TransportError:
        # the event loop closes a connection that it accepts in the turn in which it stops listening
        return False


@pytest.mark.parametrize("kind", ["tcp", "unix"])
async def test_a_successor_has_the_port_and_the_pages_while_its_predecessor_ends_what_it_has_begun(
    tmp_path: Path, guard: ProcessGuard, kind: str
) -> None:
    (tmp_path / "all.yaml").write_bytes(CONFIG)
    listen = f"unix:{tmp_path}/extproc.sock" if kind == "unix" else f"127.0.0.1:{free_port()}"
    one = await start(tmp_path, listen, guard, more=("--workers", "1", "--state", str(tmp_path / "state")))
    supervisor = one.process.pid
    begun = one.open_stream()
    assert (await decide(begun, CHAT)).WhichOneof("response") == "request_body"
    (predecessor,) = workers_of(supervisor)
    one.process.send_signal(signal.SIGUSR1)

    await eventually(partial(is_page_without_streams, one))
    late = one.open_stream()
    assert (await decide(late, CHAT)).WhichOneof("response") == "request_body"
    assert len(workers_of(supervisor)) == 2
    # the predecessor may have got it, too, if that has not closed its connections yet
    await late.done_writing()
    await begun.done_writing()
    assert await begun.read() == grpc.aio.EOF
    await eventually(lambda: predecessor not in workers_of(supervisor))
    await one.channel.close()
    one.process.send_signal(signal.SIGTERM)
    assert await one.process.wait() == 0
    guard.remove(supervisor)


async def test_a_predecessor_is_not_hurried_by_the_end_of_its_supervisor(tmp_path: Path, guard: ProcessGuard) -> None:
    (tmp_path / "all.yaml").write_bytes(CONFIG)
    one = await start(tmp_path, f"127.0.0.1:{free_port()}", guard, more=("--workers", "1", "--grace", "0s"))
    supervisor = one.process.pid
    begun = one.open_stream()
    assert (await decide(begun, CHAT)).WhichOneof("response") == "request_body"
    (predecessor,) = workers_of(supervisor)
    one.process.send_signal(signal.SIGUSR1)
    await eventually(partial(is_page_without_streams, one))
    one.process.send_signal(signal.SIGTERM)
    await eventually(lambda: workers_of(supervisor) == [predecessor])
    await begun.done_writing()
    assert await begun.read() == grpc.aio.EOF
    assert await one.process.wait() == 0
    await one.channel.close()
    guard.remove(supervisor)


async def test_it_reports_with_its_first_report_that_it_is_alive(
    tmp_path: Path, guard: ProcessGuard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A supervisor watches what has said so: there is no time in which it is ready and not watched."""
    (tmp_path / "all.yaml").write_bytes(CONFIG)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as reports:
        reports.bind(str(tmp_path / "notify"))
        monkeypatch.setenv(NOTIFY_VARIABLE, str(tmp_path / "notify"))
        one = await start(tmp_path, f"127.0.0.1:{free_port()}", guard)
        assert reports.recv(100).splitlines() == [ALIVE, READY]
    await one.channel.close()
    one.process.send_signal(signal.SIGTERM)
    assert await one.process.wait() == 0
    guard.remove(one.process.pid)


async def test_it_reports_to_its_end_that_it_is_alive_and_before_each_file_that_it_saves(
    tmp_path: Path, guard: ProcessGuard, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "all.yaml").write_bytes(CONFIG)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as reports:
        reports.bind(str(tmp_path / "notify"))
        monkeypatch.setenv(NOTIFY_VARIABLE, str(tmp_path / "notify"))
        monkeypatch.setenv(WATCHDOG_VARIABLE, "100000")
        more = ("--state", str(tmp_path / "state"))
        one = await start(tmp_path, f"127.0.0.1:{free_port()}", guard, program=("-c", SAVES_AND_TELLS), more=more)
        stream = one.open_stream()
        assert (await decide(stream, CHAT)).WhichOneof("response") == "request_body"
        one.process.send_signal(signal.SIGTERM)
        received = list[bytes]()

        def drains() -> bool:
            with suppress(BlockingIOError):
                while True:
                    received.extend(reports.recv(100).splitlines())
            return STOPPING in received and received[received.index(STOPPING) :].count(ALIVE) > 3

        await eventually(drains)
        await stream.done_writing()
        await eventually(lambda: drains() and one.process.returncode == 0)
    saves = [at for at, report in enumerate(received) if report == b"SAVES=1" and at > received.index(STOPPING)]
    # the levels of limits and the hours of objectives, at the end
    assert [received[at - 1] for at in saves[-2:]] == [ALIVE] * 2
    await one.channel.close()
    guard.remove(one.process.pid)


@pytest.mark.parametrize("more", [(), ("--workers", "1")])
async def test_an_address_in_use_is_said_and_ends_it(tmp_path: Path, more: Sequence[str]) -> None:
    (tmp_path / "all.yaml").write_bytes(CONFIG)
    taken = await asyncio.start_server(lambda _reader, writer: writer.close(), "127.0.0.1", 0)
    port = taken.sockets[0].getsockname()[1]
    arguments = ["--config", str(tmp_path), "--listen", f"127.0.0.1:{port}", "--metrics", "off", *more]
    second = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "extproc", *arguments, stderr=asyncio.subprocess.PIPE
    )
    _, stderr = await asyncio.wait_for(second.communicate(), 120)
    taken.close()
    assert second.returncode == 2
    lines = stderr.decode().splitlines()
    assert not [one for one in lines if "add_port" in one], "the gRPC library's own"
    (line,) = [one for one in lines if "cannot listen" in one]
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use; stop what listens there" in line


def test_check_says_every_mistake_and_its_exit_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "all.yaml").write_bytes(CONFIG)
    assert main(["check", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path} is valid: 1 ModelRoute, 1 ModelServer with 3 endpoints\n"

    (tmp_path / "all.yaml").write_bytes(
        CONFIG.replace(b"Name: llama}", b"Name: lama}").replace(b"modelName:", b"modelNam:")
    )
    assert main(["check", str(tmp_path)]) == 2
    assert "did you mean" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["--listen", "nowhere"], ["--metrics", "80"], ["--drain", "5"], ["--workers", "2"]]
)
def test_an_argument_that_does_not_parse_is_explained(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "all.yaml").write_bytes(CONFIG)
    with pytest.raises(SystemExit) as caught:
        main(["--config", str(tmp_path), *arguments])
    assert caught.value.code == 2
    assert "write " in capsys.readouterr().err


BROKEN_FEEDS = """
import sys
from extproc.feeds.config_directory import DirectoryFeed
from extproc.feeds.engine_scraper import EngineScraper
from extproc.feeds.kv_events import KvEventFeed
from extproc.feeds.saved_limits import SavedLimits
from extproc.replication.peer_event_exchange import PeerEventExchange

async def fails(*_args, **_more):
    raise ZeroDivisionError("a mistake of ours")

for feed in (EngineScraper, KvEventFeed, SavedLimits, PeerEventExchange):
    feed.run = fails
watch, starts = DirectoryFeed.watch, []
async def fails_once(self):
    starts.append(self)
    if len(starts) == 1:
        raise KeyError("once")
    await watch(self)
DirectoryFeed.watch = fails_once

from extproc.__main__ import main
sys.exit(main())
"""


async def test_feeds_that_fail_are_started_again_and_the_process_serves_on_and_drains(
    tmp_path: Path, guard: ProcessGuard
) -> None:
    config, log = tmp_path / "config", tmp_path / "log"
    config.mkdir()
    (config / "all.yaml").write_bytes(CONFIG)
    with log.open("w") as opened:
        more = ("--state", str(tmp_path / "state"))
        one = await start(
            config, f"127.0.0.1:{free_port()}", guard, log=opened, program=("-c", BROKEN_FEEDS), more=more
        )

    async def have_failed() -> bool:
        try:
            text = (await one.page("/metrics")).text
        except httpx.TransportError:
            # pages come a moment after gRPC's port
            return False
        return all(
            float(text.partition(f'attache_feed_restarts_total{{feed="{feed}"}} ')[2].partition("\n")[0] or 0) >= least
            for feed, least in (("engines", 3), ("kv_events", 3), ("saved_levels", 3), ("peers", 3), ("directory", 1))
        )

    await eventually(have_failed)
    stream = one.open_stream()
    assert (await decide(stream, CHAT)).WhichOneof("response") == "request_body"
    stream.cancel()
    # a feed that failed once goes on
    (config / "more.yaml").write_bytes(
        b"apiVersion: attache.dev/v1alpha1\nkind: ModelRoute\nmetadata: {name: more}\n"
        b"spec: {modelName: more, rules: [{targetModels: [{modelServerName: llama}]}]}\n"
    )

    async def is_reloaded() -> bool:
        return 'attache_config_reloads_total{result="applied"} 2.0' in (await one.page("/metrics")).text

    await eventually(is_reloaded)
    one.process.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(one.process.wait(), 120) == 0
    guard.remove(one.process.pid)
    await one.channel.close()
    text = log.read_text()
    for feed in ("engines", "kv_events", "saved_levels", "peers", "directory"):
        assert text.count(f"the feed {feed} has failed and is started again (only") == 1
    assert text.count("Traceback") == 5, "one of each feed"


def test_pages_of_freed_memory_go_back_to_the_system() -> None:
    """1 KB of each 100 KB stays; the process of its own has a heap that nothing else has used."""
    code = """
import os, sys
from extproc.runtime.app import trim_heap
def rss():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGESIZE")
before = rss()
kept = [bytes(1024) for _ in range(100_000)][::100]
left = rss()
trim_heap()
print((left - before) >> 20, (rss() - before) >> 20)
"""
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    left, trimmed = map(int, out.split())
    assert left > 50
    assert trimmed < left / 4
