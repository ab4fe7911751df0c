# SPDX-License-Identifier: Apache-2.0
"""What became of each case, by a suite's output and its own report. No network, no clock."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

Outcome = Literal["passed", "failed", "skipped"]

_OUTCOMES: Final[Mapping[str, Outcome]] = {"PASS": "passed", "FAIL": "failed", "SKIP": "skipped"}
_ENDED: Final = re.compile(r"^\s*--- (PASS|FAIL|SKIP): TestConformance/(\S+) \(([\d.]+)s\)$")
_SPEAKS: Final = re.compile(r"^=== (?:RUN|CONT|NAME|PAUSE)\s+TestConformance/(\S+)")
_ANOTHER: Final = re.compile(r"^(?:===|\s*---)")
_SKIPPED: Final = re.compile(r"Skipping \S+: (.*)$")
_ERROR: Final = re.compile(r"^\s+(?:Error|Messages):\s+(.*\S)\s*$")
# what a case says last, without its time; what it cleans up after itself is no reason
_FATAL: Final = re.compile(r"^\s+[\w-]+\.go:\d+: (?:[\dT:.-]+Z: )?+(?!Deleting|Creating|Updating|Applying)(.*\S)\s*$")
_LONGEST: Final = 300


class Case(msgspec.Struct, frozen=True):
    """One case of a suite. ``why``: what the suite said of it, if it did not pass; ``parts``: subtests that failed."""

    name: str
    outcome: Outcome
    seconds: float
    why: str = ""
    parts: tuple[str, ...] = ()


class SuiteResult(msgspec.Struct, frozen=True):
    """A run of one suite. ``report``: what the suite itself wrote; empty if it wrote none."""

    name: str
    cases: tuple[Case, ...]
    report: Mapping[str, Any]
    wall_s: float

    def counted(self, outcome: Outcome) -> int:
        """How many cases had it."""
        return sum(one.outcome == outcome for one in self.cases)


class Disagreement(Exception):
    """A suite's output and its report say different things."""


def cases(output: Iterable[str]) -> list[Case]:
    """All cases, by name, from what the suite printed (``-test.v``)."""
    ended: dict[str, tuple[Outcome, float]] = {}
    failed: dict[str, list[str]] = {}
    said: dict[str, list[str]] = {}
    speaker = ""
    for line in output:
        if found := _ENDED.match(line):
            name, _, part = found[2].partition("/")
            outcome = _OUTCOMES[found[1]]
            if not part:
                ended[name] = outcome, float(found[3])
            elif outcome == "failed":
                failed.setdefault(name, []).append(part)
        elif found := _SPEAKS.match(line):
            speaker = found[1]
        elif _ANOTHER.match(line):
            speaker = ""
        elif speaker:
            said.setdefault(speaker, []).append(line.rstrip("\n"))
    return [
        Case(
            name, outcome, seconds, _why(outcome, _words(name, failed.get(name, ()), said)), tuple(failed.get(name, ()))
        )
        for name, (outcome, seconds) in sorted(ended.items())
    ]


def check(found: Sequence[Case], report: Mapping[str, Any]) -> None:
    """Compare with the suite's own report; raises Disagreement.

    A report counts what passed and names what failed and what was skipped on request. It leaves out the cases of
    features that are not supported, which the output has as skipped.
    """
    passed = failed = 0
    names: set[str] = set()
    for profile in report.get("profiles") or ():
        for level in ("core", "extended"):
            one = profile.get(level) or {}
            counts = {name.lower(): number for name, number in (one.get("statistics") or {}).items()}
            passed += counts.get("passed", 0)
            failed += counts.get("failed", 0)
            names.update(one.get("failedTests") or ())
    ours = {one.name for one in found if one.outcome == "failed"}
    if names != ours or failed != len(ours):
        raise Disagreement(f"failed by the report: {sorted(names)}, by the output: {sorted(ours)}")
    if passed != sum(one.outcome == "passed" for one in found):
        raise Disagreement(f"the report counts {passed} that passed, the output has another number")


def _words(name: str, parts: Sequence[str], said: Mapping[str, Sequence[str]]) -> list[str]:
    """The lines of a case, or of those of its parts that failed and have no failed part themselves."""
    last = [part for part in parts if not any(other.startswith(f"{part}/") for other in parts)]
    return [line for part in last for line in said.get(f"{name}/{part}", ())] or list(said.get(name, ()))


def _why(outcome: Outcome, lines: Sequence[str]) -> str:
    if outcome == "passed":
        return ""
    if outcome == "skipped":
        return next((found[1] for line in lines if (found := _SKIPPED.search(line))), "")
    testify = [found[1] for line in lines if (found := _ERROR.match(line))]
    fatal = [found[1] for line in lines if (found := _FATAL.match(line))]
    said = "; ".join(dict.fromkeys(testify)) or (fatal[-1] if fatal else "")
    return said if len(said) <= _LONGEST else said[: _LONGEST - 1] + "…"
