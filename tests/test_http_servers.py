# SPDX-License-Identifier: Apache-2.0
"""All HTTP servers of the product: their clients are bounded, and none is open to web pages in somebody's browser."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT: Final = Path(__file__).resolve().parents[1]
# TLS, and a client must show a certificate, a token, or a path that is a secret.
_FOR_API_SERVERS: Final = {"controller/autoscaler/export/external_metrics.py", "controller/webhooks/server.py"}
# A socket in a directory, which no browser connects to, and which is open to Envoy's user alone; and the port in the
# place of an engine's, to which Envoy passes any Host and Origin of its clients.
_FOR_ENVOY: Final = {"extproc/runtime/api_translator.py", "controller/agents/runtime/batcher.py"}


def calls() -> Iterator[tuple[str, list[str]]]:
    """Each module, and the names that it calls."""
    for package in ("attache", "controller", "extproc"):
        for file in sorted((ROOT / package).rglob("*.py")):
            called = [one.func for one in ast.walk(ast.parse(file.read_text())) if isinstance(one, ast.Call)]
            names = [one.attr if isinstance(one, ast.Attribute) else getattr(one, "id", "") for one in called]
            yield str(file.relative_to(ROOT)), names


def test_every_server_refuses_what_web_pages_send() -> None:
    # those that listen more often than they protect
    unprotected = {
        module for module, names in calls() if names.count("PageServer") > names.count("add_browser_protection")
    }
    assert unprotected == _FOR_API_SERVERS | _FOR_ENVOY


def test_every_server_bounds_connections_and_the_time_of_silent_clients() -> None:
    unbounded = {"AppRunner", "ServerRunner", "TCPSite", "UnixSite", "SockSite", "run_app"}
    unbounded |= {"make_server", "start_http_server", "HTTPServer", "ThreadingHTTPServer"}
    assert [module for module, names in calls() if unbounded & {*names}] == []
