# SPDX-License-Identifier: Apache-2.0
"""``attache engine``: what it says of a port that it cannot have."""

from __future__ import annotations

import socket

import pytest

from bench.engine.__main__ import main


@pytest.mark.parametrize("port", ["0", "65536", "99999", "-1", "http"])
def test_a_number_that_is_no_port_is_refused(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([f"--port={port}"])
    assert ended.value.code == 2
    assert f"'{port}' is not a port: write one from 1 to 65535" in capsys.readouterr().err


def test_a_port_that_is_in_use_is_named_with_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert main(["--port", address.rpartition(":")[2]]) == 2
    advice = "stop what listens there, or write another address for --port"
    assert capsys.readouterr().err == f"cannot listen on {address}: Address already in use; {advice}\n"
