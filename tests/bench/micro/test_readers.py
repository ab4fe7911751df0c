# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio
import os

from bench.micro.instant_engine import _EngineConnection
from bench.micro.profile import read_libraries, read_stacks
from bench.stack.processes import cpu_seconds, is_running, peak_rss_bytes, thread_cpu_seconds


def test_shares_by_library_are_read_from_perf_report() -> None:
    said = (
        "# comment\n\n   37.50%;python       ;libpython3.11.so.1.0\n   "
        " 6.25%;event_engine;cygrpc.cpython-311-x86_64.so\n"
    )
    assert read_libraries(said) == {"python, libpython3.11.so.1.0": 0.375, "event_engine, cygrpc": 0.0625}


def test_samples_count_for_the_innermost_function_of_extproc_and_within_all_around_it() -> None:
    text = "uvloop:run;extproc.a:f;extproc.b:g;numpy:full 3\nuvloop:run;extproc.a:f 2\nuvloop:run 1\n"
    stacks = read_stacks(text)
    assert stacks.total == 6
    assert stacks.exclusive_samples() == {"extproc.b:g": 3, "extproc.a:f": 2, "outside": 1}
    assert stacks.inclusive_samples() == {"extproc.a:f": 5, "extproc.b:g": 3}


def test_a_process_has_threads_memory_and_time() -> None:
    pid = os.getpid()
    assert is_running(pid)
    assert thread_cpu_seconds(pid)["main"] > 0
    assert cpu_seconds(pid) >= thread_cpu_seconds(pid)["main"] * 0.5
    assert peak_rss_bytes(pid) > 2**20


class Wire(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []

    def write(self, data: object) -> None:
        assert isinstance(data, bytes)
        self.written.append(data)


def test_an_instant_engine_answers_when_a_body_is_whole_however_it_comes() -> None:
    wire, connection = Wire(), _EngineConnection()
    connection.connection_made(wire)
    head = b"POST /v1/chat/completions HTTP/1.1\r\n"
    connection.data_received(head + b"content-length: 4\r\n\r\nab")
    assert not wire.written
    connection.data_received(b"cd")
    assert len(wire.written) == 1
    connection.data_received(head + b"transfer-encoding: chunked\r\n\r\n2\r\nab\r\n")
    assert len(wire.written) == 1
    connection.data_received(b"0\r\n\r\n")
    assert len(wire.written) == 2
