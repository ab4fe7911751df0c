# SPDX-License-Identifier: Apache-2.0
"""On a machine that has nothing but Python the tests are skipped, loudly; none starts a program unasked."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs import PROGRAMS, program

ROOT = Path(__file__).parent.parent
TESTS = sorted((ROOT / "tests").rglob("*.py"))
# their functions start a program: the first argument, or the first word of it
_STARTS = frozenset({"subprocess", "asyncio", "os"})
_IS_START = re.compile(r"run|Popen|call|check|exec|spawn|system")
# to read a text is faster than to parse it
_MAY_BE_OWN_WAY = re.compile(rf"skip|which|(?:{'|'.join(_STARTS)})\.\w*(?:{_IS_START.pattern})")
# one test of each program, and what is said where it is missing
BY_PROGRAM = {
    "tests/with_kube/test_autoscaling_end_to_end.py::test_nothing_is_scaled_in_because_of_faults": "PROMETHEUS",
    "tests/with_redis/test_peers.py": "REDIS",
    "tests/with_envoy/test_top.py": "ENVOY",
    "tests/with_envoy/test_acknowledgements.py": "ENVOY",
    "tests/with_vllm/test_real_engines.py": "VLLM",
    "tests/with_model_servers/test_replicas.py": "MLSERVER",
    "tests/attache/test_completion.py": "BASH",
    "tests/test_deploy.py::test_systemd_finds_nothing_wrong_with_the_units": "SYSTEMD",
    "tests/bench/cluster/node/test_pod_network.py::"
    "test_a_command_in_the_network_sees_its_range_and_nothing_else": "NAMESPACES",
    "tests/tools/test_preflight.py::test_make_looks_first_then_fetches_then_builds_then_runs": "MAKE",
    "tests/controller/agents/downloader/test_download_trouble.py::"
    "test_a_disk_that_fills_up_meanwhile_ends_the_download_and_what_is_there_is_used_later": "MOUNT",
}


def run_without_programs(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Pytest where there is no program, no Envoy and, for Kubernetes, nothing that would run."""
    assets = tmp_path / "assets"
    assets.mkdir()
    for name in ("etcd", "kube-apiserver"):
        (assets / name).touch()
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in {"CI", "PYTEST_ADDOPTS"} and not name.startswith(("ATTACHE_", "PYTEST_XDIST", "COV"))
    }
    empty = {"PATH": str(tmp_path / "none"), "ENVOY": "/nowhere/envoy", "KUBEBUILDER_ASSETS": str(assets)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words]
    return subprocess.run(command, cwd=ROOT, env={**kept, **empty}, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_where_programs_are_missing_their_tests_are_skipped_with_the_way_to_get_them(tmp_path: Path) -> None:
    done = run_without_programs(tmp_path, *BY_PROGRAM)
    assert done.returncode == 0, done.stdout
    assert "failed" not in done.stdout.splitlines()[-1]
    skipped = re.findall(r"^SKIPPED \[\d+\] .*?: NOT TESTED WITH (\w+): (.+)$", done.stdout, re.MULTILINE)
    assert {what for what, _ in skipped} == set(BY_PROGRAM.values())
    for what, how in skipped:
        assert re.search(r"apt-get install|install the packages|`?make |as root|fetch one", how), f"{what}: {how}"


@pytest.mark.parametrize("what", ["CI", "ATTACHE_REQUIRE_REDIS"])
def test_where_a_program_is_required_its_tests_fail(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    for name in ("CI", "ATTACHE_REQUIRE_REDIS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(pytest.skip.Exception, match="NOT TESTED WITH REDIS"):
        program("redis-server")
    monkeypatch.setenv(what, "1")
    with pytest.raises(pytest.fail.Exception, match="REDIS is required here: there is no redis-server; apt-get inst"):
        program("redis-server")


def test_tests_ask_one_helper_for_programs_and_skip_through_it() -> None:
    found = [
        f"{file.relative_to(ROOT)}: {ast.unparse(one)[:100]}"
        for file in TESTS
        if file.name != "programs.py" and _MAY_BE_OWN_WAY.search(text := file.read_text())
        for one in ast.walk(ast.parse(text))
        if is_own_way(one)
    ]
    assert found == [], "call tests.programs.program or not_tested"


def is_own_way(node: ast.AST) -> bool:
    """A program by its bare name, ``shutil.which``, or a skip."""
    if isinstance(node, ast.Attribute) and node.attr in {"skipif", "which"}:
        return True
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    if node.func.attr == "skip":
        return True
    if ast.unparse(node.func.value) not in _STARTS or not _IS_START.search(node.func.attr) or not node.args:
        return False
    first = node.args[0]
    if isinstance(first, ast.List | ast.Tuple) and first.elts:
        first = first.elts[0]
    return isinstance(first, ast.Constant) and isinstance(first.value, str) and "/" not in first.value


def test_the_rule_sees_each_way_round_the_helper() -> None:
    ways = [
        "subprocess.run(['git', 'log'])",
        "asyncio.create_subprocess_exec('git', 'log')",
        "shutil.which('git')",
        "pytest.skip('no git')",
        "pytest.mark.skipif(True, reason='')",
    ]
    for way in ways:
        assert any(is_own_way(one) for one in ast.walk(ast.parse(way))), way
    for fine in ("subprocess.run([sys.executable, '-c', ''])", "subprocess.run([program('git'), 'log'])", "main('x')"):
        assert not any(is_own_way(one) for one in ast.walk(ast.parse(fine))), fine


def test_every_program_says_how_to_get_it() -> None:
    for what, how in PROGRAMS.values():
        assert what.isupper()
        assert how.startswith("apt-get install ")
