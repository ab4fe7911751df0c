# SPDX-License-Identifier: Apache-2.0
"""Pages that are not what a command expects: endless, cut, not extproc's, or meant for the terminal."""

from __future__ import annotations

import contextlib
import http.server
import threading
import urllib.error
from typing import TYPE_CHECKING

import pytest

from extproc.__main__ import main
from extproc.cli import common
from extproc.cli.common import fetch_page, to_printable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

EXTPROC = b"attache_open_streams 1\n"


@contextlib.contextmanager
def answering(raw: bytes) -> Iterator[str]:
    """The address of a server that writes ``raw`` to everybody, headers included, and hangs up."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def handle(self) -> None:
            while self.rfile.readline().strip():
                pass
            with contextlib.suppress(OSError):
                self.wfile.write(raw)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def page(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


def top(address: str) -> int:
    return main(["top", "--once", "--interval", "100ms", address])


@pytest.mark.parametrize(
    "raw",
    [
        b"\x1b[2Jno HTTP at all\r\n\r\n",
        b"HTTP/1.1 500 \x1b[2Jbad\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nshort",
        page(b"<html>hello</html>"),
        page(b'{"server": 1}'),
        page(b"\xff"),
        page(b""),
    ],
)
def test_other_pages_are_told_of_in_a_line_without_marks_for_the_terminal(
    raw: bytes, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    body = tmp_path / "body.json"
    body.write_text("{}")
    with answering(raw) as address:
        assert top(address) == 2
        assert main(["explain", "--url", f"http://{address}", str(body)]) == 2
    told = capsys.readouterr().err
    assert address in told
    assert told == to_printable(told)


def test_names_from_elsewhere_cannot_command_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    rows = b'attache_in_flight{server="a\x1b[2J\x1b]0;t\x07",endpoint="e\xe2\x80\xae"} 1\n'
    with answering(page(EXTPROC + rows)) as address:
        assert top(address) == 0
    shown = capsys.readouterr().out
    assert "[2J" in shown
    assert not {"\x1b", "\x07", "\u202e"} & set(shown)


@pytest.mark.parametrize("number", [b"NaN", b"+Inf", b"-Inf", b"1e300", b"-1e300"])
def test_numbers_that_are_none_do_not_end_the_command(number: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    where = b'server="a",endpoint="e"'
    rows = b"".join(
        b"attache_%b{%b} %b\n" % (name, where, number)
        for name in (b"engine_report_age_seconds", b"endpoint_avoided_since_timestamp_seconds", b"in_flight")
    )
    rows += b'attache_endpoint_avoided{%b,reason="silent"} 1\nattache_in_flight{%b} 0\n' % (where, where)
    with answering(page(EXTPROC + rows)) as address:
        assert top(address) == 0
    assert "AVOIDED" in capsys.readouterr().out


def test_a_page_without_an_end_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "_MOST_BYTES", 10_000)
    monkeypatch.setattr(common, "_PIECE_BYTES", 1_000)
    with answering(b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 10_001) as address, pytest.raises(OSError, match="no end"):
        fetch_page(f"http://{address}/", timeout_s=120.0)
    with answering(b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 10_000) as address:
        assert len(fetch_page(f"http://{address}/", timeout_s=120.0)) == 10_000


def test_a_page_that_comes_too_slowly_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "_PIECE_BYTES", 1)
    passing = iter(range(100))
    monkeypatch.setattr(common.time, "monotonic", lambda: float(next(passing)))
    with answering(page(b"x" * 100)) as address, pytest.raises(OSError, match="within 9 s"):
        fetch_page(f"http://{address}/", timeout_s=3.0)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_not_followed(status: int) -> None:
    with answering(page(b"from elsewhere")) as elsewhere:
        moved = f"HTTP/1.1 {status} Moved\r\nlocation: http://{elsewhere}/\r\ncontent-length: 0\r\n\r\n"
        with answering(moved.encode()) as address, pytest.raises(urllib.error.HTTPError, match=str(status)):
            fetch_page(f"http://{address}/metrics", timeout_s=120.0)
