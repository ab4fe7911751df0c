# SPDX-License-Identifier: Apache-2.0
"""Results of conformance suites: read from their output and reports, kept beside the docs, and listed on a page."""

from __future__ import annotations

import re
import textwrap
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
import yaml

from bench.cluster.kubernetes_binaries import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterable

Outcome = Literal["passed", "failed", "skipped"]
_OUTCOMES: Final[Mapping[str, Outcome]] = {"PASS": "passed", "FAIL": "failed", "SKIP": "skipped"}
_ENDED: Final = re.compile(r"^\s*--- (PASS|FAIL|SKIP): TestConformance/(\S+) \(([\d.]+)s\)$")
_SPEAKS: Final = re.compile(r"^=== (?:RUN|CONT|NAME|PAUSE)\s+TestConformance/(\S+)")
_ANOTHER: Final = re.compile(r"^(?:===|\s*---)")
_SKIPPED: Final = re.compile(r"Skipping \S+: (.*)$")
_ERROR: Final = re.compile(r"^\s+(?:Error|Messages):\s+(.*\S)\s*$")
# the last line of a case's output, without its time; lines of its cleanup are no reason
_FATAL: Final = re.compile(r"^\s+[\w-]+\.go:\d+: (?:[\dT:.-]+Z: )?+(?!Deleting|Creating|Updating|Applying)(.*\S)\s*$")
_LONGEST: Final = 300
_SIGNS: Final[Mapping[Outcome, str]] = {"passed": "passed", "failed": "**failed**", "skipped": "skipped"}
_ORDER: Final[Sequence[Outcome]] = ("failed", "skipped", "passed")
_WIDTH: Final = 118
# Cases of a feature that its profile lacks, so that reports leave them out.
_IN_NO_PROFILE: Final = frozenset({"GRPCRouteNamedRule"})
_UNSUPPORTED: Final = re.compile(r"does not support (\w+)$")
_HEAD: Final = """\
# Conformance

<!-- Written by `make conformance` from the suites' own reports. Do not edit; what we say of a case stands in
bench/conformance/remarks.toml. -->

The conformance suites of the [Gateway API](https://gateway-api.sigs.k8s.io/concepts/conformance/) and of its
[Inference Extension](https://gateway-api-inference-extension.sigs.k8s.io/) run as they are published, against the
GatewayClass of controller `attache.dev/gateway`, on the
[cluster on one machine](kubernetes.md#a-cluster-on-one-machine): a real API server, pods in network namespaces of their
own, and the gateway as `manifests/gateway` deploys it. `make conformance` builds and runs them and writes this page;
the suites' own reports lie in `docs/conformance/`.

The suite of the Gateway API runs with the profiles `GATEWAY-HTTP` and `GATEWAY-GRPC` and the features that our
GatewayClass names in its status. Cases of other features are skipped by the suite itself, and each says which feature
it needs.
"""
PAGE: Final = ROOT / "docs" / "conformance.md"
REPORTS: Final = ROOT / "docs" / "conformance"
_REPORT: Final = ".report.yaml"
_CASES: Final = ".cases.yaml"


class SuiteCase(msgspec.Struct, frozen=True):
    """One case of a suite. ``why``: the suite's message, if it did not pass; ``parts``: subtests that failed."""

    name: str
    outcome: Outcome
    seconds: float
    why: str = ""
    parts: tuple[str, ...] = ()


class SuiteResult(msgspec.Struct, frozen=True):
    """A run of one suite. ``report``: what the suite itself wrote; empty if it wrote none."""

    name: str
    cases: tuple[SuiteCase, ...]
    report: Mapping[str, Any]
    wall_s: float

    def count_cases(self, outcome: Outcome) -> int:
        """How many cases had it."""
        return sum(one.outcome == outcome for one in self.cases)


class ReportMismatch(Exception):
    """A suite's output and its report contradict each other."""


def parse_cases(output: Iterable[str]) -> list[SuiteCase]:
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
        SuiteCase(
            name, outcome, seconds, _why(outcome, _words(name, failed.get(name, ()), said)), tuple(failed.get(name, ()))
        )
        for name, (outcome, seconds) in sorted(ended.items())
    ]


def check_against_report(found: Sequence[SuiteCase], report: Mapping[str, Any]) -> None:
    """Compare with the suite's own report; raises Disagreement.

    A report counts what passed and names what failed and what was skipped on request, in each profile that the case
    belongs to. It leaves out the cases of features that are not supported, which the output has as skipped.
    """
    passed: list[int] = []
    names: set[str] = set()
    for profile in report.get("profiles") or ():
        levels = [profile.get(level) or {} for level in ("core", "extended")]
        counts = [{name.lower(): number for name, number in (one.get("statistics") or {}).items()} for one in levels]
        failed = [name for one in levels for name in one.get("failedTests") or ()]
        if sum(one.get("failed", 0) for one in counts) != len(failed):
            raise ReportMismatch(f"{profile['name']} names {len(failed)} that failed, and counts another number")
        names.update(failed)
        passed.append(sum(one.get("passed", 0) for one in counts))
    ours = {one.name for one in found if one.outcome == "failed"}
    if names != ours - _IN_NO_PROFILE:
        raise ReportMismatch(f"failed by the report: {sorted(names)}, by the output: {sorted(ours)}")
    known = sum(one.outcome == "passed" and one.name not in _IN_NO_PROFILE for one in found)
    if not max(passed, default=0) <= known <= sum(passed):
        raise ReportMismatch(f"the report counts {passed} that passed, by profile, the output has {known}")


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
    message = "; ".join(dict.fromkeys(testify)) or (fatal[-1] if fatal else "")
    return message if len(message) <= _LONGEST else message[: _LONGEST - 1] + "…"


class Remarks(msgspec.Struct, frozen=True):
    """Our remarks beside the suites' messages: on suites by their kind, on features and cases by their name."""

    suites: dict[str, str] = {}
    features: dict[str, str] = {}
    cases: dict[str, str] = {}


def render_page(results: Sequence[SuiteResult], remarks: Remarks) -> str:
    """The whole page."""
    rows = [
        f"| [{one.name}](#{_anchor(one.name)}) | {one.count_cases('passed')} | {one.count_cases('failed')} "
        f"| {one.count_cases('skipped')} | {one.report.get('date', '')[:10]} | {one.wall_s / 60:.0f} min |"
        for one in results
    ]
    table = ["| suite | passed | failed | skipped | run on | took |", "|---|---|---|---|---|---|", *rows]
    return "\n".join([_HEAD, *table, "", *(_section(one, remarks) for one in results)])


def unexplained_failures(results: Sequence[SuiteResult], remarks: Remarks) -> list[str]:
    """The failed cases without a remark of ours."""
    return [
        f"{result.name}: {case.name}"
        for result in results
        for case in result.cases
        if case.outcome != "passed" and case.name not in remarks.cases and _feature(case) not in remarks.features
    ]


def _section(result: SuiteResult, remarks: Remarks) -> str:
    kind = result.name.rpartition("-")[0]
    words = [f"## {result.name}", ""]
    if said := remarks.suites.get(kind):
        words += [said.strip(), ""]
    for profile in result.report.get("profiles") or ():
        words += [f"{profile['name']}: {profile['summary']}", ""]
        supported = (profile.get("extended") or {}).get("supportedFeatures") or ()
        if supported:
            named = "Extended features: " + ", ".join(f"`{one}`" for one in supported) + "."
            words += [textwrap.fill(named, _WIDTH, break_long_words=False, break_on_hyphens=False), ""]
    ordered = sorted(result.cases, key=lambda one: (_ORDER.index(one.outcome), one.name))
    rows = [f"| `{one.name}` | {_SIGNS[one.outcome]} | {_reason(one, remarks)} |" for one in ordered]
    return "\n".join([*words, "| case | outcome | why |", "|---|---|---|", *rows, ""])


def _reason(case: SuiteCase, remarks: Remarks) -> str:
    feature = _feature(case)
    needs = f"Needs `{feature}`." if feature else _quoted(case.why)
    said = [needs, remarks.features.get(feature, ""), remarks.cases.get(case.name, "").strip()]
    return " ".join(one for one in said if one).replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def _feature(case: SuiteCase) -> str:
    """The missing feature for which the suite skipped it; empty if that was not the reason."""
    found = _UNSUPPORTED.search(case.why)
    return found[1] if found and case.outcome == "skipped" else ""


def _quoted(words: str) -> str:
    return f"The suite says: {words}" if words else ""


def _anchor(name: str) -> str:
    return name.replace(".", "")


class _SuiteResult(msgspec.Struct, frozen=True):
    wall_s: float
    cases: tuple[SuiteCase, ...]


def save_result(result: SuiteResult, folder: Path = REPORTS) -> None:
    """Write the suite's own report, and what became of each case, which the report does not list."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{result.name}{_REPORT}").write_text(yaml.safe_dump(dict(result.report), sort_keys=False, width=120))
    kept = msgspec.to_builtins(_SuiteResult(round(result.wall_s, 1), result.cases))
    (folder / f"{result.name}{_CASES}").write_text(yaml.safe_dump(kept, sort_keys=False, width=120))


def load_results(names: Sequence[str], folder: Path = REPORTS) -> list[SuiteResult]:
    """The kept results of these suites, as far as there are any."""
    found: list[SuiteResult] = []
    for name in names:
        path = folder / f"{name}{_CASES}"
        if path.is_file():
            kept = msgspec.convert(yaml.safe_load(path.read_text()), _SuiteResult)
            report = yaml.safe_load((folder / f"{name}{_REPORT}").read_text())
            found.append(SuiteResult(name, kept.cases, report, kept.wall_s))
    return found


def load_remarks() -> Remarks:
    """Our remarks on suites and cases."""
    return msgspec.convert(tomllib.loads(Path(__file__).with_name("remarks.toml").read_text()), Remarks)


def write_page(names: Sequence[str]) -> None:
    """Write the page from what is kept."""
    PAGE.write_text(render_page(load_results(names), load_remarks()))
