# SPDX-License-Identifier: Apache-2.0
"""What a suite printed becomes one case each, and must agree with its report."""

from __future__ import annotations

import pytest

from bench.conformance.results_page import ReportMismatch, SuiteCase, check_against_report, parse_cases

OUTPUT = """\
=== RUN   TestConformance
    conformance.go:119: Running conformance tests with:
=== RUN   TestConformance/HTTPRouteWeight
    apply.go:288: 2026-11-22T02:17:13Z: Creating weight HTTPRoute
=== RUN   TestConformance/HTTPRouteWeight/Requests_are_spread
--- SKIPPED is no line of Go's
=== RUN   TestConformance/UDPRouteSimple
    conformance.go:68: Skipping UDPRouteSimple: suite does not support UDPRoute
=== RUN   TestConformance/HTTPRouteCORS
=== RUN   TestConformance/HTTPRouteCORS/preflight
=== RUN   TestConformance/HTTPRouteCORS/simple
=== NAME  TestConformance/HTTPRouteCORS/preflight
    http.go:276:
        \tError Trace:\tsomewhere/http.go:276
        \t            \tsomewhere/cors.go:41
        \tError:      \tReceived unexpected error:
        \tTest:       \tTestConformance/HTTPRouteCORS/preflight
        \tMessages:   \tno answer after 30s
=== RUN   TestConformance/GatewayInfrastructure
    gateway-infrastructure.go:90: 2026-11-22T02:17:13.5Z: expected labels on the Service, got none
    apply.go:288: 2026-11-22T02:17:14Z: Deleting gateway-with-labels Gateway
--- FAIL: TestConformance (4.00s)
    --- PASS: TestConformance/HTTPRouteWeight (1.25s)
        --- PASS: TestConformance/HTTPRouteWeight/Requests_are_spread (1.00s)
    --- SKIP: TestConformance/UDPRouteSimple (0.00s)
    --- FAIL: TestConformance/HTTPRouteCORS (2.00s)
        --- FAIL: TestConformance/HTTPRouteCORS/preflight (1.50s)
        --- PASS: TestConformance/HTTPRouteCORS/simple (0.50s)
    --- FAIL: TestConformance/GatewayInfrastructure (0.75s)
FAIL
"""
REPORT = {
    "profiles": [
        {
            "name": "GATEWAY-HTTP",
            "core": {"statistics": {"Passed": 1, "Failed": 0, "Skipped": 0}},
            "extended": {
                "failedTests": ["HTTPRouteCORS", "GatewayInfrastructure"],
                "statistics": {"Passed": 0, "Failed": 2, "Skipped": 0},
            },
        }
    ]
}


def test_each_case_has_its_outcome_and_what_the_suite_said() -> None:
    assert parse_cases(OUTPUT.splitlines(keepends=True)) == [
        SuiteCase("GatewayInfrastructure", "failed", 0.75, "expected labels on the Service, got none"),
        SuiteCase("HTTPRouteCORS", "failed", 2.0, "Received unexpected error:; no answer after 30s", ("preflight",)),
        SuiteCase("HTTPRouteWeight", "passed", 1.25),
        SuiteCase("UDPRouteSimple", "skipped", 0.0, "suite does not support UDPRoute"),
    ]


def test_a_report_that_agrees_is_taken() -> None:
    check_against_report(parse_cases(OUTPUT.splitlines()), REPORT)


@pytest.mark.parametrize(
    ("failed", "passed"), [(["HTTPRouteCORS"], 1), (["HTTPRouteCORS", "Other"], 1), (None, 2), (None, 0)]
)
def test_a_report_that_says_something_else_is_refused(failed: list[str] | None, passed: int) -> None:
    profile = REPORT["profiles"][0]
    extended = profile["extended"]
    assert isinstance(extended, dict)
    changed = {
        "name": "GATEWAY-HTTP",
        "core": {"statistics": {"Passed": passed, "Failed": 0, "Skipped": 0}},
        "extended": {**extended, "failedTests": extended["failedTests"] if failed is None else failed},
    }
    with pytest.raises(ReportMismatch):
        check_against_report(parse_cases(OUTPUT.splitlines()), {"profiles": [changed]})


def test_a_case_counts_in_each_of_its_profiles_and_one_of_none_in_no_report() -> None:
    (profile,) = REPORT["profiles"]
    found = [*parse_cases(OUTPUT.splitlines()), SuiteCase("GRPCRouteNamedRule", "passed", 0.1)]
    # one case of gateways is in both, another of them alone in this one
    second = {
        "name": "GATEWAY-GRPC",
        "core": {"statistics": {"Passed": 1, "Failed": 1, "Skipped": 0}, "failedTests": ["GatewayInfrastructure"]},
    }
    check_against_report(found, {"profiles": [profile, second]})
    with pytest.raises(ReportMismatch, match="counts another number"):
        check_against_report(
            found, {"profiles": [profile, {**second, "core": {"statistics": {"Passed": 1, "Failed": 2}}}]}
        )
    with pytest.raises(ReportMismatch, match="that passed, by profile"):
        check_against_report(
            found,
            {"profiles": [profile, {**second, "core": {**second["core"], "statistics": {"Passed": 2, "Failed": 1}}}]},
        )
