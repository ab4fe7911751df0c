# SPDX-License-Identifier: Apache-2.0
"""The scripts of our pages as they stand, each in an empty directory and a network of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from bench.cluster.netns import NoNamespace, unshare_command
from tests.docs_examples import EXAMPLES, ROOT
from tests.programs import not_tested

if TYPE_CHECKING:
    from pathlib import Path

    from bench.stack.orphan_reaper import ProcessGuard

# What each prints in the end.
SAYS = {
    "README.md": ['"finish_reason":"length"'],
    "engines.md": ['"sql"', '"law"'],
    "teams.md": [
        *('"rate_limit_exceeded"', '"insufficient_quota"', '"invalid_api_key"', "revoked", "status 429", "status 401"),
        # who sees what, without the columns that a loaded machine changes
        *("\ncove,cove-web,", "\nacme,acme-web,3,", "\nbell,bell-web,", "\ncove    llama"),
    ],
    "on-demand.md": ["sql: 200 after", "law: 200 after", "tax: 200 after", "attache_adapter_loads_total"],
}
SCRIPTS: dict[str, str] = {}
for one in EXAMPLES:
    if one.is_script:
        SCRIPTS[one.page] = SCRIPTS.get(one.page, "") + one.text


def test_each_page_with_a_script_is_tried() -> None:
    assert SCRIPTS.keys() == SAYS.keys()


@pytest.mark.parametrize(
    "page",
    # each takes some ten seconds, and the first shows most of what the others do
    [pytest.param(one, marks=[pytest.mark.slow] * (one != "README.md")) for one in SCRIPTS],
)
def test_a_script_runs_from_an_empty_directory(page: str, envoy: str, tmp_path: Path, guard: ProcessGuard) -> None:
    try:
        unshare_command()
    except NoNamespace as reason:
        not_tested("NAMESPACES", str(reason))
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "attache").write_text(f'#!/bin/sh\nexec {sys.executable} -m attache "$@"\n')
    (programs / "attache").chmod(0o755)
    (tmp_path / "example.sh").write_text(SCRIPTS[page])
    empty, said = tmp_path / "empty", tmp_path / "said"
    empty.mkdir()
    words = [sys.executable, "-m", "bench.cluster.netns", "--", "bash", "-e", str(tmp_path / "example.sh")]
    variables = {"PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "ENVOY": envoy}
    with said.open("wb") as output:
        process = subprocess.Popen(
            words, cwd=empty, env={**os.environ, **variables}, stdout=output, stderr=output, start_new_session=True
        )
        guard.add(process.pid)
        try:
            status = process.wait(timeout=120)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            guard.remove(process.pid)
    text = said.read_text()
    assert status == 0, text
    assert [one for one in SAYS[page] if one not in text] == [], text
