# SPDX-License-Identifier: Apache-2.0
"""Envoy is drained when a file appears, and the file goes when no request is left."""

from __future__ import annotations

import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import TYPE_CHECKING

import pytest

from controller.bundle.envoy_drain import drain_on_demand
from tests.waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def until_gone(file: Path) -> None:
    for _ in range(int(PATIENCE_S / 0.02)):
        if not file.exists():
            return
        time.sleep(0.02)
    pytest.fail(f"{file} stays")


class Admin:
    """Envoy's admin interface. ``running``: requests of clients; ``failed``: its health check is failed."""

    def __init__(self) -> None:
        self.running, self.failed = 0, threading.Event()
        self.server = HTTPServer(("127.0.0.1", 0), self._handler())
        self.address = f"127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def _handler(admin) -> type[BaseHTTPRequestHandler]:  # noqa: N805 - the handler has a self of its own
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                if self.path == '/healthcheck/fail?"':
                    admin.failed.set()
                self._answer(b"OK")

            def do_GET(self) -> None:
                stats = f'{{"stats": [{{"name": "http.attache.downstream_rq_active", "value": {admin.running}}}]}}'
                self._answer(stats.encode())

            def _answer(self, body: bytes) -> None:
                self.send_response(200)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        return Handler


@pytest.fixture
def admin() -> Iterator[Admin]:
    made = Admin()
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.fixture
def file(admin: Admin, tmp_path: Path) -> Iterator[Path]:
    """What is created to have Envoy drained."""
    stop, path = threading.Event(), tmp_path / "drain"
    addresses = ("127.0.0.1:1", admin.address)
    thread = threading.Thread(target=drain_on_demand, args=(path, lambda: addresses, stop), kwargs={"settle_s": 0.1})
    thread.start()
    yield path
    stop.set()
    thread.join()


def test_the_file_goes_when_no_request_is_left(admin: Admin, file: Path) -> None:
    admin.running = 1
    file.touch()
    assert admin.failed.wait(PATIENCE_S)
    assert file.exists()
    admin.running = 0
    until_gone(file)


def test_an_envoy_that_is_gone_has_nothing_to_drain(admin: Admin, file: Path) -> None:
    admin.server.shutdown()
    admin.server.server_close()
    file.touch()
    until_gone(file)
