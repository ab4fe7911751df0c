# SPDX-License-Identifier: Apache-2.0
"""The page that lists every case of every suite, as text. No network, no clock."""

from __future__ import annotations

import re
import textwrap
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bench.conformance.results import Case, Outcome, SuiteResult

_SIGNS: Final[Mapping[Outcome, str]] = {"passed": "passed", "failed": "**failed**", "skipped": "skipped"}
_ORDER: Final[Sequence[Outcome]] = ("failed", "skipped", "passed")
_WIDTH: Final = 118
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

The suite of the Gateway API runs with the profile `GATEWAY-HTTP` and the features that our GatewayClass names in its
status. Cases of other features are skipped by the suite itself, and each says which feature it needs.
"""


class Remarks(msgspec.Struct, frozen=True):
    """What we say beside the suites' words: of suites by their kind, of features and cases by their name."""

    suites: dict[str, str] = {}
    features: dict[str, str] = {}
    cases: dict[str, str] = {}


def page(results: Sequence[SuiteResult], remarks: Remarks) -> str:
    """The whole page."""
    rows = [
        f"| [{one.name}](#{_anchor(one.name)}) | {one.counted('passed')} | {one.counted('failed')} "
        f"| {one.counted('skipped')} | {one.report.get('date', '')[:10]} | {one.wall_s / 60:.0f} min |"
        for one in results
    ]
    table = ["| suite | passed | failed | skipped | run on | took |", "|---|---|---|---|---|---|", *rows]
    return "\n".join([_HEAD, *table, "", *(_section(one, remarks) for one in results)])


def unexplained(results: Sequence[SuiteResult], remarks: Remarks) -> list[str]:
    """The cases that did not pass, and of which we say nothing."""
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
    rows = [f"| `{one.name}` | {_SIGNS[one.outcome]} | {_why(one, remarks)} |" for one in ordered]
    return "\n".join([*words, "| case | outcome | why |", "|---|---|---|", *rows, ""])


def _why(case: Case, remarks: Remarks) -> str:
    feature = _feature(case)
    needs = f"Needs `{feature}`." if feature else _quoted(case.why)
    said = [needs, remarks.features.get(feature, ""), remarks.cases.get(case.name, "").strip()]
    return " ".join(one for one in said if one).replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def _feature(case: Case) -> str:
    """The feature for want of which the suite skipped it; empty if that was not why."""
    found = _UNSUPPORTED.search(case.why)
    return found[1] if found and case.outcome == "skipped" else ""


def _quoted(words: str) -> str:
    return f"The suite says: {words}" if words else ""


def _anchor(name: str) -> str:
    return name.replace(".", "")
