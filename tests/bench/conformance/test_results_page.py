# SPDX-License-Identifier: Apache-2.0
"""The page of all cases: what it says, and that the one in the documentation is what the kept reports make."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from bench.cluster.kubernetes_binaries import pinned_versions
from bench.conformance.results_page import (
    PAGE,
    Remarks,
    SuiteCase,
    SuiteResult,
    check_against_report,
    load_remarks,
    load_results,
    render_page,
    save_result,
    unexplained_failures,
)
from bench.conformance.suites import Suite, SuiteOptions, choose_suites, list_suites, suite_arguments

if TYPE_CHECKING:
    from pathlib import Path

RESULT = SuiteResult(
    "gateway-api-1.2.3",
    (
        SuiteCase("A", "passed", 1.0),
        SuiteCase("B", "failed", 2.0, "no <answer> | none", ("part",)),
        SuiteCase("C", "skipped", 0.0, "suite does not support Mesh"),
    ),
    {
        "date": "2026-01-02T03:04:05Z",
        "profiles": [
            {
                "name": "GATEWAY-HTTP",
                "summary": "Core tests failed with 1 test failures.",
                "core": {"failedTests": ["B"], "statistics": {"Passed": 1, "Failed": 1, "Skipped": 0}},
                "extended": {"supportedFeatures": ["HTTPRouteCORS"]},
            }
        ],
    },
    120.0,
)
NAMES = [one.name for one in list_suites(pinned_versions())]


def test_every_case_stands_on_the_page_and_those_that_failed_come_first() -> None:
    text = render_page(
        [RESULT],
        Remarks(
            suites={"gateway-api": "About it."},
            features={"Mesh": "No mesh."},
            cases={"B": "There is no such thing here."},
        ),
    )
    assert "| [gateway-api-1.2.3](#gateway-api-123) | 1 | 1 | 1 | 2026-01-02 | 2 min |" in text
    assert text.index("About it.") < text.index("GATEWAY-HTTP: Core tests failed") < text.index("`HTTPRouteCORS`")
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert rows == [
        "| `B` | **failed** | The suite says: no &lt;answer> \\| none There is no such thing here. |",
        "| `C` | skipped | Needs `Mesh`. No mesh. |",
        "| `A` | passed |  |",
    ]


def test_a_case_that_did_not_pass_without_a_word_of_ours_is_found() -> None:
    assert unexplained_failures([RESULT], Remarks()) == ["gateway-api-1.2.3: B", "gateway-api-1.2.3: C"]
    assert unexplained_failures([RESULT], Remarks(features={"Mesh": "x"}, cases={"B": "x"})) == []


def test_results_are_kept_as_they_are(tmp_path: Path) -> None:
    save_result(RESULT, tmp_path)
    assert load_results(["other", "gateway-api-1.2.3"], tmp_path) == [RESULT]


def test_the_page_is_what_the_kept_reports_make() -> None:
    """If this fails: ``python -m bench.conformance --rewrite``."""
    results = load_results(NAMES)
    assert PAGE.read_text() == render_page(results, load_remarks())
    for result in results:
        check_against_report(result.cases, result.report)
    assert unexplained_failures(results, load_remarks()) == []


def test_a_report_is_made_with_nothing_but_the_suites_own_settings(tmp_path: Path) -> None:
    words = suite_arguments(Suite("gateway-api", "1.2.3"), tmp_path / "r.yaml", "10.88.255.250", SuiteOptions())
    assert "-gateway-class=attache" in words
    assert "-conformance-profiles=GATEWAY-HTTP,GATEWAY-GRPC" in words
    assert "-test.run=^TestConformance$" in words
    assert not [one for one in words if "timeout" in one or "features" in one or "skip" in one]
    wishes = SuiteOptions(run=("HTTPRouteWeight", "HTTPRouteCORS"), features="Gateway,HTTPRoute", quick=True)
    wished = set(suite_arguments(Suite("gateway-api", "1.2.3"), tmp_path / "r.yaml", "10.88.255.250", wishes)) - set(
        words
    )
    assert {one.partition("=")[0] for one in wished} == {
        "-test.run",
        "-supported-features",
        "-timeout-config-overrides",
    }
    assert "-test.run=^TestConformance$/^(HTTPRouteWeight|HTTPRouteCORS)$" in wished


def test_suites_are_chosen_by_name_or_by_kind() -> None:
    known = [Suite("gateway-api", "1"), Suite("inference-extension", "2"), Suite("inference-extension", "3")]
    assert choose_suites([], known) == known
    assert choose_suites(["inference-extension"], known) == known[1:]
    assert choose_suites(["gateway-api-1", "inference-extension-3"], known) == [known[0], known[2]]
    with pytest.raises(KeyError):
        choose_suites(["gateway-api-2"], known)
