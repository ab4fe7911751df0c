# SPDX-License-Identifier: Apache-2.0
"""Whether Envoy calls where extproc listens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from extproc.api.gateway_config import GatewayConfigSpec
from extproc.api.meeting import missed_meeting
from extproc.api.validation import worker_addresses
from extproc.cli.check import main

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("called", "listens"),
    [
        ("127.0.0.1:9002", "127.0.0.1:9002"),
        ("127.0.0.1:9002", "0.0.0.0:9002"),
        ("127.0.0.1:9002", "[::]:9002"),
        ("10.1.2.3:9002", "0.0.0.0:9002"),
        ("[::1]:9002", "[::]:9002"),
        ("0.0.0.0:9002", "127.0.0.1:9002"),
        ("unix:/run/attache.sock", "unix:/run/attache.sock"),
        ("unix:/run/attache.sock", "unix:/run/../run//attache.sock"),
    ],
)
def test_these_two_meet(called: str, listens: str) -> None:
    assert missed_meeting(GatewayConfigSpec(extproc=called), [listens]) == ""


@pytest.mark.parametrize(
    ("called", "listens"),
    [
        ("127.0.0.1:9002", "127.0.0.1:9012"),
        ("127.0.0.1:9002", "10.1.2.3:9002"),
        ("10.1.2.3:9002", "127.0.0.1:9002"),
        ("[::1]:9002", "0.0.0.0:9002"),
        ("[::1]:9002", "127.0.0.1:9002"),
        ("unix:/run/attache.sock", "unix:/run/other.sock"),
        ("unix:/run/attache.sock", "127.0.0.1:9002"),
        ("127.0.0.1:9002", "unix:/run/attache.sock"),
    ],
)
def test_these_two_miss_each_other_and_both_are_named(called: str, listens: str) -> None:
    said = missed_meeting(GatewayConfigSpec(extproc=called), [listens])
    assert f"call {called}, and extproc listens on {listens}" in said


def test_as_many_workers_must_listen_as_are_called() -> None:
    gateway = GatewayConfigSpec(extproc="127.0.0.1:9002", extproc_workers=4)
    assert missed_meeting(gateway, worker_addresses("0.0.0.0:9002", 4)) == ""
    for workers in (1, 3, 5):
        said = missed_meeting(gateway, worker_addresses("0.0.0.0:9002", workers))
        assert "127.0.0.1:9002 to 127.0.0.1:9005" in said
        assert "extprocWorkers" in said


def test_check_says_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.yaml").write_text(
        "apiVersion: attache.dev/v1alpha1\nkind: GatewayConfig\nmetadata: {name: g}\nspec: {extproc:"
        " '127.0.0.1:9002'}\n"
    )
    assert main([str(tmp_path), "--listen", "0.0.0.0:9002"]) == 0
    assert main([str(tmp_path), "--listen", "127.0.0.1:9012"]) == 2
    assert "call 127.0.0.1:9002, and extproc listens on 127.0.0.1:9012" in capsys.readouterr().err
    assert main([str(tmp_path), "--listen", "127.0.0.1:9002", "--workers", "2"]) == 2
    with pytest.raises(SystemExit):
        main([str(tmp_path), "--listen", "nowhere"])
