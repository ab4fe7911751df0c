# SPDX-License-Identifier: Apache-2.0
"""Builds programs from published Go modules with the toolchain of this machine."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_GO_NEEDED: Final = (1, 26)


def go_version(said: str) -> tuple[int, int]:
    """The version in what ``go version`` prints; (0, 0) if there is none."""
    found = re.search(r"go(\d+)\.(\d+)", said)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def toolchain_missing() -> str:
    """What is needed and what was found, if that is too little; empty if the toolchain will do."""
    program = shutil.which("go")
    said = run_go(["version"]) if program else ""
    if go_version(said) >= _GO_NEEDED:
        return ""
    return f"Go {'.'.join(map(str, _GO_NEEDED))} or newer is needed, found {said.strip() or 'none'}"


def download_module(module: str, version: str) -> dict[str, Any]:
    """What go says of a module in its cache, into which it is downloaded: ``Dir``, ``GoMod`` and more."""
    answer: dict[str, Any] = json.loads(run_go(["mod", "download", "-json", f"{module}@v{version}"]))
    return answer


def source(module: str, version: str) -> Path:
    """The directory of a module's files."""
    return Path(download_module(module, version)["Dir"])


def go_mod_text(name: str, modules: Mapping[str, str]) -> str:
    """The go.mod of a module ``name`` that needs ``modules``, each in its version."""
    lines = "".join(f"\t{module} v{version}\n" for module, version in modules.items())
    return f"module {name}\n\ngo 1.26\n\nrequire (\n{lines})\n"


def build(packages: Sequence[str], work: Path, out: Path, flags: str) -> None:
    """Build programs in the module of ``work``. ``out``: a directory, or the file for one program.

    ``-mod=mod``: go completes go.mod and go.sum by itself, from what the modules ask for.
    """
    target = f"{out}/" if out.is_dir() else str(out)
    run_go(["build", "-mod=mod", "-trimpath", "-ldflags", flags, "-o", target, *packages], work)


def build_tests(package: str, work: Path, out: Path) -> None:
    """Build the tests of a package as a program that runs them."""
    run_go(["test", "-c", "-mod=mod", "-trimpath", "-ldflags", "-s -w", "-o", str(out), package], work)


def run_go(words: Sequence[str], directory: Path | None = None) -> str:
    """Run go with nothing of this machine's C compiler; its output. What it says on stderr is shown."""
    environment = {**os.environ, "CGO_ENABLED": "0", "GOWORK": "off"}
    with tempfile.TemporaryDirectory() as empty:  # not in our repository, nor under somebody's go.mod
        done = subprocess.run(  # noqa: S603 - the toolchain, with words of this project
            [_program(), *words], cwd=directory or empty, env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
    return done.stdout


def _program() -> str:
    found = shutil.which("go")
    if found is None:
        raise FileNotFoundError("there is no go in PATH")
    return found
