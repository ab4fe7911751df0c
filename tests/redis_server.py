# SPDX-License-Identifier: Apache-2.0
"""A real Redis. Without its binary these tests are skipped, loudly; where it must be there, they fail."""

from __future__ import annotations

import signal
import subprocess
import time
from typing import TYPE_CHECKING

import pytest

from bench.stack.processes import free_ports
from tests.programs import program

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from bench.stack.orphan_reaper import ProcessGuard


class Redis:
    """A server that can be ended and started again on its port."""

    def __init__(self, binary: str, directory: Path, guard: ProcessGuard) -> None:
        self._guard = guard
        self._client = program("redis-cli")
        (self.port,) = free_ports(1)
        self.url = f"redis://127.0.0.1:{self.port}"
        self._command = [binary, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", str(directory)]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, start_new_session=True)
        self._guard.add(self._process.pid)
        for _ in range(1_200):
            probe = subprocess.run([self._client, "-p", str(self.port), "ping"], capture_output=True, check=False)
            if probe.stdout.strip() == b"PONG":
                return
            time.sleep(0.05)
        raise TimeoutError("redis-server does not answer")

    def hang(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._guard.remove(self._process.pid)
            self._process = None


@pytest.fixture(name="redis")
def running_redis(tmp_path: Path, guard: ProcessGuard) -> Iterator[Redis]:
    """A running server with nothing in it."""
    server = Redis(program("redis-server"), tmp_path, guard)
    server.start()
    yield server
    server.stop()
