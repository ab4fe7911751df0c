# SPDX-License-Identifier: Apache-2.0
"""The commands that need only Python, in a short form, and that no command is without a test or a reason."""

from __future__ import annotations

import filecmp
import re
from typing import TYPE_CHECKING

import pytest

from attache.commands import COMMANDS
from tests.named_commands import PAGES, ROOT, named_commands
from tests.short_forms import (
    NOT_TESTED,
    SHORT_FORMS,
    TESTED_ELSEWHERE,
    ShortForm,
    as_parameter,
    check,
    copy_sources,
    run,
)

if TYPE_CHECKING:
    from pathlib import Path

    from bench.stack.orphan_reaper import ProcessGuard

MAKEFILE = (ROOT / "Makefile").read_text()


@pytest.mark.parametrize("short", [as_parameter(one) for one in SHORT_FORMS if not one.needs_envoy])
def test_a_short_form_works(short: ShortForm, tmp_path: Path, guard: ProcessGuard) -> None:
    check(short, tmp_path, guard)


def files_of(directory: Path) -> set[Path]:
    found = (one.relative_to(directory) for one in directory.rglob("*") if one.is_file())
    return {one for one in found if "__pycache__" not in one.parts}


@pytest.mark.slow
def test_what_is_generated_is_what_is_committed(tmp_path: Path, guard: ProcessGuard) -> None:
    clone = tmp_path / "clone"
    copy_sources(clone)
    before = files_of(clone)
    for name in ("manifests/crds/attache.dev_models.yaml", "docs/reference/commands.md", "docs/reference/apis.md"):
        (clone / name).unlink()
    run(ShortForm("make generate", "", ()), clone, guard)
    assert files_of(clone) == before
    different = [str(one) for one in before if not filecmp.cmp(clone / one, ROOT / one, shallow=False)]
    assert different == []


def test_nothing_that_make_makes_is_left(tmp_path: Path, guard: ProcessGuard) -> None:
    clone = tmp_path / "clone"
    copy_sources(clone)
    before = files_of(clone)
    for name in (".venv/ready", ".tools/x", ".cache/x", ".coverage.1", "bench/out/x", "bench/__pycache__/x"):
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        (clone / name).touch()
    run(ShortForm("make clean", "", ()), clone, guard)
    assert {one.relative_to(clone) for one in clone.rglob("*") if one.is_file()} == before


def commands() -> set[str]:
    """All of ours, all targets with a line of help, and the programs of ours that pages name with ``python -m``."""
    targets = {f"make {one}" for one in re.findall(r"^([\w-]+):.*## ", MAKEFILE, re.MULTILINE)}
    typed = (one for page in PAGES for one in named_commands(page) if one.program == "python")
    ours = re.compile(r"(?:attache|bench|controller|extproc|tests|tools)\b")
    modules = {f"python -m {one.words[1]}" for one in typed if ours.match(one.words[1])}
    return targets | modules | {f"attache {one}" for one in COMMANDS}


def test_every_command_has_a_short_form_or_a_test_or_a_reason() -> None:
    known = {one.command for one in SHORT_FORMS} | TESTED_ELSEWHERE.keys() | NOT_TESTED.keys()
    assert sorted(commands() - known) == []
    # a part of make bench
    assert sorted(known - commands()) == ["python -m pytest"]
    assert TESTED_ELSEWHERE.keys() & NOT_TESTED.keys() == set()


@pytest.mark.parametrize("command", TESTED_ELSEWHERE)
def test_the_test_that_is_said_to_run_a_command_exists(command: str) -> None:
    file, _, name = TESTED_ELSEWHERE[command].partition("::")
    assert re.search(rf"def {name}\(", (ROOT / file).read_text())
