# SPDX-License-Identifier: Apache-2.0
"""The example of a plugin in docs/picking.md, in a package of its own; and the same with a mistake in it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.plugin_package import install_plugin

if TYPE_CHECKING:
    from collections.abc import Callable

PAGE = (Path(__file__).parents[2] / "docs" / "picking.md").read_text().partition("\n## Plugins\n")[2]
SERVER = """\
apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {name: llama}
spec:
  model: m
  pickerConfig: epp.yaml
  endpoints:
    - {address: "10.0.0.1:8000", labels: {generation: "1"}}
    - {address: "10.0.0.2:8000", labels: {generation: "2"}}
---
apiVersion: attache.dev/v1alpha1
kind: ModelRoute
metadata: {name: llama}
spec: {modelName: m, rules: [{targetModels: [{modelServerName: llama}]}]}
"""
BODY = {"model": "m", "messages": [{"role": "user", "content": "Who are you?"}]}


def block(language: str) -> str:
    """The section's only block of code in this language."""
    (text,) = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    return text


@pytest.fixture
def attache(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the command with the page's package and directory; ``replaced``: what is different in the package."""

    def run(*words: str, replaced: tuple[str, str] = ("", "")) -> subprocess.CompletedProcess[str]:
        source = block("python")
        assert replaced[0] in source
        entry_points = tomllib.loads(block("toml"))["project"]["entry-points"]["attache.scheduling"]
        install_plugin(tmp_path / "site", source.replace(*replaced), entry_points)
        config = tmp_path / "config"
        config.mkdir()
        (config / "server.yaml").write_text(SERVER)
        (config / "epp.yaml").write_text(block("yaml"))
        (tmp_path / "body.json").write_text(json.dumps(BODY))
        return subprocess.run(
            [sys.executable, "-m", "attache", *words],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": f"{Path(__file__).parents[2]}:{tmp_path / 'site'}"},
            capture_output=True,
            text=True,
            check=False,
        )

    return run


MISTAKE = ("view.table.configs", "view.table.traits")


def test_the_pages_example_is_valid(attache: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = attache("check", "config")
    assert (done.returncode, done.stderr) == (0, "")


def test_the_pages_example_decides(attache: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = attache("explain", "--json", "--config", "config", "body.json")
    explained = json.loads(done.stdout)
    assert explained["addresses"][0] == "10.0.0.2:8000"
    assert [one["scores"]["newest-scorer"] for one in explained["profiles"][0]["endpoints"]] == [1.0, 0.5]
    assert explained["failed"] == {}


def test_check_refuses_a_plugin_that_raises_with_both_files_and_lines(
    attache: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = attache("check", "config", replaced=MISTAKE)
    assert done.returncode == 2
    first, last = done.stderr.splitlines()
    assert first.startswith("epp.yaml:4: plugins[0]: the plugin 'newest-scorer' fails: AttributeError: ")
    assert "'traits'" in first
    line = next(number for number, one in enumerate(block("python").splitlines(), start=1) if "configs" in one)
    assert first.endswith(f"my_package.py:{line})")
    assert last == "1 mistake"


def test_explain_decides_without_a_plugin_that_raises_and_names_it(
    attache: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = attache("explain", "--config", "config", "body.json", replaced=MISTAKE)
    assert done.returncode == 0
    assert "the plugin 'newest-scorer' fails" in done.stdout
    assert "cost in seconds" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_a_package_that_cannot_be_imported_is_a_mistake_of_the_file_that_names_it(
    attache: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = attache("check", "config", replaced=("import numpy as np", "import nunpy as np"))
    assert done.returncode == 2
    first, last = done.stderr.splitlines()
    assert first.startswith("epp.yaml:4: plugins[0].type: my_package:NEWEST cannot be loaded: ModuleNotFoundError: ")
    assert first.endswith("my_package.py:2)")
    assert last == "1 mistake"
