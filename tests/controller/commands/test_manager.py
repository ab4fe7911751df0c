# SPDX-License-Identifier: Apache-2.0
"""The options of attache manager."""

from __future__ import annotations

import subprocess
import sys

import pytest

from controller.commands.manager import _innermost, parser
from controller.kube.kopf_thread import KopfEnded


def test_help_loads_neither_kopf_nor_the_client() -> None:
    script = (
        "import sys; from controller.commands import manager; manager.parser().format_help(); "
        "print(sorted(sys.modules.keys() & {'kopf', 'aiohttp', 'prometheus_client'}))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("words", [["--workers", "0"], ["--lease-duration", "x"], ["--workers", "-1"]])
def test_numbers_that_make_no_sense_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parser().parse_args(words)
    assert caught.value.code == 2
    assert words[0] in capsys.readouterr().err


def test_an_error_is_found_inside_groups() -> None:
    ended = KopfEnded("ended")
    assert _innermost(ExceptionGroup("a", [ExceptionGroup("b", [ended])])) is ended


@pytest.mark.parametrize("address", ["a b", "", "http://a", "a:0", "a:99999", "a:b", "a/b", "--x", "a:"])
def test_an_address_of_steps_that_is_none_is_refused(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args([f"--steps={address}"])
    assert "write HOST or HOST:PORT" in capsys.readouterr().err


@pytest.mark.parametrize("address", ["gw.team.svc", "gw.team.svc:9012", "127.0.0.1:9012", "10.0.0.1"])
def test_an_address_of_steps_is_taken_as_it_is(address: str) -> None:
    assert parser().parse_args([f"--steps={address}"]).steps == address
