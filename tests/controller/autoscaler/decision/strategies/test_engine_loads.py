# SPDX-License-Identifier: Apache-2.0
"""Metrics of source Gateway: each on a scene of three engines, and what is said when something is unknown."""

from __future__ import annotations

import pytest

from controller.api.autoscaling import GATEWAY_METRICS
from controller.autoscaler.decision.situation import Backlog, EngineState, Situation
from controller.autoscaler.decision.strategies.engine_loads import gateway_metric, kv_cache_usage, running_requests
from tests.scaling_scenes import engine, pool, report, situation, steady, target

BUSY = report(kv=0.5, waiting=2, running=7, in_flight=10, tokens=9_000.0)
CALM = report(kv=0.1, waiting=0, in_flight=3, tokens=1_000.0)


def scene() -> Situation:
    leaving = engine("d", report(kv=0.9, waiting=1, running=5, in_flight=6, tokens=5e3), EngineState.DRAINING)
    coming = engine("s", state=EngineState.STARTING)
    them = [engine("a", BUSY), engine("b", CALM), leaving, coming]
    return situation(target(them), waiting=Backlog(4, 2_000.0), traffic=steady(requests=3))


@pytest.mark.parametrize(
    ("name", "total"),
    [
        ("requests_in_flight", 10 + 3 + 4),
        ("requests_queued", 2 + 0 + 4),
        ("requests_running", 7 + 3),
        ("requests_per_second", 3),
        ("tokens_in_flight", 9_000 + 1_000 + 2_000),
    ],
)
def test_totals_are_of_engines_that_stay_and_of_what_waits(name: str, total: float) -> None:
    found = gateway_metric(name, scene())
    assert found.total == pytest.approx(total)
    assert not found.is_lower_bound


def test_cache_usage_is_by_ready_engine() -> None:
    assert gateway_metric("kv_usage", scene()).by_engine == {"a": 0.5, "b": 0.1}


def test_cache_usage_follows_from_tokens_where_engines_do_not_tell() -> None:
    assert kv_cache_usage(report(tokens=2_000.0, cache=8_000)) == 0.25
    assert kv_cache_usage(report(tokens=9_000.0, cache=8_000)) == 1.0
    assert kv_cache_usage(report(tokens=9_000.0)) is None


def test_running_follows_from_what_was_sent_where_engines_do_not_tell() -> None:
    assert running_requests(report(in_flight=5, waiting=2)) == 3
    assert running_requests(report(in_flight=5)) == 5
    assert running_requests(report(in_flight=5, running=1)) == 1


@pytest.mark.parametrize(
    "seen", [pool(BUSY, None), pool(BUSY, CALM, unreported=["e1"]), pool(BUSY, silent=["extproc-2"])]
)
def test_a_total_without_some_of_its_parts_is_a_lower_bound(seen: Situation) -> None:
    found = gateway_metric("requests_in_flight", seen)
    assert found.total == 10
    assert found.is_lower_bound


def test_an_engine_whose_queue_is_unknown_makes_the_queue_a_lower_bound_and_nothing_else() -> None:
    seen = pool(report(in_flight=4))
    assert gateway_metric("requests_queued", seen).is_lower_bound
    assert not gateway_metric("requests_in_flight", seen).is_lower_bound


def test_unknown_metrics_say_why() -> None:
    assert "no metric speed" in gateway_metric("speed", scene()).problem
    assert "long enough" in gateway_metric("requests_per_second", pool(BUSY)).problem


def test_each_metric_that_a_policy_may_name_is_known() -> None:
    assert [name for name in GATEWAY_METRICS if gateway_metric(name, scene()).problem] == []
    assert gateway_metric("request_in_flight", scene()).problem.startswith(
        "the gateway has no metric request_in_flight; it has requests_in_flight, "
    )
