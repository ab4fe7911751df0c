# SPDX-License-Identifier: Apache-2.0
"""What ours would have chosen beside another picker's choice."""

from __future__ import annotations

import random

import pytest

from extproc.core.core import Core
from extproc.core.request_record import GatewayProperties, RequestHead
from extproc.core.shadow_picks import compare_picks, other_picker_choice
from extproc.metrics.request_metrics import ShadowAgreement
from tests.extproc.scenes import configuration, endpoints, request

A, B = "10.0.0.1:8000", "10.0.0.2:8000"


def two_engines() -> Core:
    return Core(configuration(servers={"llama": endpoints(A, B)}), rng=random.Random(0), ticket_prefix="t")


def test_the_choice_is_in_the_header_or_in_metadata() -> None:
    assert (
        other_picker_choice(RequestHead("POST", "/", {"x-gateway-destination-endpoint": f"{A},{B}"}, has_body=True), B)
        == A
    )
    assert other_picker_choice(RequestHead("POST", "/", {}, has_body=True), B) == B
    assert other_picker_choice(RequestHead("POST", "/", {}, has_body=True), "") == ""


@pytest.mark.parametrize(
    ("theirs", "verdict", "went_to"),
    [(A, "agreed", (A,)), ("10.0.0.9:8000", "unknown_endpoint", ()), ("", "not_chosen", ())],
)
def test_a_choice_that_is_known_is_compared(theirs: str, verdict: str, went_to: tuple[str, ...]) -> None:
    core = two_engines()
    core.arrive(request(core, "else " * 5000), 0.0, GatewayProperties(subset=(B,)))
    found, where = compare_picks(core, request(core), GatewayProperties(), theirs, 0.0)
    assert found.verdict == verdict
    assert tuple(where) == went_to
    assert (found.ours is None) == (not went_to)


def test_ours_would_go_where_less_waits_and_says_what_theirs_costs() -> None:
    core = two_engines()
    for number in range(8):
        core.arrive(request(core, f"{number} " * 5000), 0.0, GatewayProperties(subset=(A,)))
    found, _ = compare_picks(core, request(core, "else " * 3000), GatewayProperties(), A, 0.0)
    assert found.verdict == "differed"
    assert found.ours is not None
    assert found.ours.addresses[0] == B
    assert found.their_cost_s is not None
    assert found.their_cost_s > found.ours.cost_s


def test_the_share_is_reported_once_for_each_change() -> None:
    share = ShadowAgreement()
    assert share.report() == ""
    for verdict in ("agreed", "agreed", "differed", "not_chosen"):
        share.add(verdict)
    assert share.report() == "shadow: 66.7% of 3 picks of the other picker are ours; 1 not chosen"
    assert share.report() == ""
