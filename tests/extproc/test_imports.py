# SPDX-License-Identifier: Apache-2.0
"""A process that serves loads nothing that only the controller, the benchmarks or unused features need."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

_NOT_OF_EXTPROC = {"betterproto2", "envoy_data_plane", "grpc", "kopf", "kubernetes", "matplotlib", "pydantic", "rich"}

_IMPORT_ALL = """
import importlib, pkgutil, sys
import extproc
for module in pkgutil.walk_packages(extproc.__path__, "extproc."):
    importlib.import_module(module.name)
print(*sorted({name.partition(".")[0] for name in sys.modules}))
"""


def loaded_by(program: str) -> set[str]:
    """Top-level names of the modules that a Python process has loaded at the end of ``program``."""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_no_module_of_extproc_needs_the_packages_of_the_controller_or_the_benchmarks() -> None:
    loaded = loaded_by(_IMPORT_ALL)

    assert "google" in loaded
    assert not loaded & _NOT_OF_EXTPROC
