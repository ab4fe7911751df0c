# SPDX-License-Identifier: Apache-2.0
"""attache envoy: which binary is run, with which words."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from attache import envoy


@pytest.fixture(autouse=True)
def empty_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No Envoy anywhere."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("ENVOY", raising=False)
    return tmp_path


def binary(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text('#!/bin/sh\necho "$@"\n')
    path.chmod(0o755)
    return path


def fetched(home: Path) -> Path:
    return home / "data" / "attache" / f"envoy-{envoy.VERSION}" / "envoy" / "_bin" / "envoy"


def test_without_any_it_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert envoy.main(["-c", "x"]) == 2
    assert "attache envoy --fetch" in capsys.readouterr().err


def test_the_variable_goes_before_the_fetched_one_before_the_path(
    empty_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_path = binary(empty_home / "bin" / "envoy")
    assert envoy.find_envoy() == on_path
    own = binary(fetched(empty_home))
    assert envoy.find_envoy() == own
    monkeypatch.setenv("ENVOY", str(on_path))
    assert envoy.find_envoy() == on_path
    monkeypatch.setenv("ENVOY", str(empty_home / "gone"))
    assert envoy.find_envoy() is None


def test_it_becomes_envoy_with_envoys_own_options(empty_home: Path) -> None:
    binary(fetched(empty_home))
    command = [sys.executable, "-m", "attache", "envoy", "-c", "bootstrap.json", "--log-level", "warn"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    # several on one machine share no memory, and none ends with the shell that started it
    assert done.stdout == "-c bootstrap.json --log-level warn --disable-hot-restart\n"


@pytest.mark.parametrize("own", ["--base-id=3", "--restart-epoch 1", "--disable-hot-restart", "--use-dynamic-base-id"])
def test_whoever_restarts_envoy_hot_decides_about_its_shared_memory(empty_home: Path, own: str) -> None:
    binary(fetched(empty_home))
    command = [sys.executable, "-m", "attache", "envoy", *own.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    assert done.stdout == f"{own}\n"


def test_fetch_prints_the_path_of_what_is_there_already(empty_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there = binary(fetched(empty_home))
    assert envoy.main(["--fetch"]) == 0
    assert capsys.readouterr().out == f"{there}\n"


def test_a_fetch_that_fails_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert envoy.main(["--fetch"]) == 2
    assert "was not fetched" in capsys.readouterr().err


def test_programs_that_start_envoy_are_told_of_the_fetched_one(
    empty_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    envoy.export_path()
    assert "ENVOY" not in os.environ
    there = binary(fetched(empty_home))
    envoy.export_path()
    assert os.environ["ENVOY"] == str(there)


def test_make_fetches_the_same_version() -> None:
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()
    assert f"\nENVOY_VERSION := {envoy.VERSION}\n" in makefile
