# SPDX-License-Identifier: Apache-2.0
"""The results kept beside the documentation, and the page written from them."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import yaml

from bench.cluster.assets import ROOT
from bench.conformance.page import Remarks, page
from bench.conformance.results import Case, SuiteResult

if TYPE_CHECKING:
    from collections.abc import Sequence

PAGE: Final = ROOT / "docs" / "conformance.md"
REPORTS: Final = ROOT / "docs" / "conformance"
_REPORT: Final = ".report.yaml"
_CASES: Final = ".cases.yaml"


class _Kept(msgspec.Struct, frozen=True):
    wall_s: float
    cases: tuple[Case, ...]


def keep(result: SuiteResult, folder: Path = REPORTS) -> None:
    """Write the suite's own report, and what became of each case, which the report does not list."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{result.name}{_REPORT}").write_text(yaml.safe_dump(dict(result.report), sort_keys=False, width=120))
    kept = msgspec.to_builtins(_Kept(round(result.wall_s, 1), result.cases))
    (folder / f"{result.name}{_CASES}").write_text(yaml.safe_dump(kept, sort_keys=False, width=120))


def kept_results(names: Sequence[str], folder: Path = REPORTS) -> list[SuiteResult]:
    """The kept results of these suites, as far as there are any."""
    found: list[SuiteResult] = []
    for name in names:
        path = folder / f"{name}{_CASES}"
        if path.is_file():
            kept = msgspec.convert(yaml.safe_load(path.read_text()), _Kept)
            report = yaml.safe_load((folder / f"{name}{_REPORT}").read_text())
            found.append(SuiteResult(name, kept.cases, report, kept.wall_s))
    return found


def remarks() -> Remarks:
    """What we say of suites and cases."""
    return msgspec.convert(tomllib.loads(Path(__file__).with_name("remarks.toml").read_text()), Remarks)


def write_page(names: Sequence[str]) -> None:
    """Write the page from what is kept."""
    PAGE.write_text(page(kept_results(names), remarks()))
