# SPDX-License-Identifier: Apache-2.0
"""Fallbacks of a rule as they are written: what is refused, with what to write instead."""

from __future__ import annotations

import json

import msgspec
import pytest

from extproc.api.config_errors import ConfigInvalid
from extproc.api.fallback import CONDITIONS, STATUSES, FallbackRetry, attempts_route_name
from extproc.api.quantities import Duration
from tests.extproc.scenes import configuration, endpoints

SERVERS = {name: endpoints(f"10.0.0.{number}:8000") for number, name in enumerate("abc", start=1)}


def loaded(*fallback: object, **rule: object) -> None:
    whole = {"targetModels": [{"modelServerName": "a"}], "fallback": fallback, **rule}
    configuration(servers=SERVERS, routes={"chat": f"rules: {json.dumps([whole])}"})


@pytest.mark.parametrize(
    ("fallback", "rule", "message"),
    [
        ([{"modelServerName": "nobody"}], {}, r"fallback\[0\].modelServerName: no ModelServer is called 'nobody'"),
        ([{"modelServerName": "a"}], {}, "'a' is the rule's only target, so it never helps"),
        ([{"modelServerName": "b"}] * 2, {}, "'b' is listed twice"),
        ([{"modelServerName": "b"}, {"modelServerName": "c", "on": ["connect"]}], {}, r"fallback\[1\].on: differs"),
        ([{"modelServerName": "b", "on": []}], {}, "on"),
        ([{"modelServerName": "b", "degrade": {"maxOutputTokens": 0}}], {}, "maxOutputTokens"),
        ([{"modelServerName": "b", "degrade": {}}], {}, "maxOutputTokens"),
        ([{"modelServerName": "b", "on": ["sometimes"]}], {}, "sometimes"),
        ([], {"retry": {"minConcurrency": 5}}, "has no effect without fallback"),
        ([{"modelServerName": "b"}], {"retry": {"idleTimeout": "0s"}}, "Envoy takes no 0s here"),
        ([{"modelServerName": "b"}], {"retry": {"budgetPercent": 101}}, "budgetPercent"),
    ],
)
def test_what_cannot_help_is_refused(fallback: list[object], rule: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigInvalid, match=message):
        loaded(*fallback, **rule)


def test_only_classes_of_refusals_may_be_those_of_some_fallbacks() -> None:
    failures = ["connect", "timeout"]
    loaded({"modelServerName": "b", "on": failures}, {"modelServerName": "c", "on": ["context-window", *failures]})
    loaded({"modelServerName": "b", "on": ["content-policy"]}, {"modelServerName": "c", "on": ["context-window"]})
    with pytest.raises(ConfigInvalid, match=r"fallback\[1\].on: differs"):
        loaded({"modelServerName": "b", "on": failures}, {"modelServerName": "c", "on": ["context-window"]})


def test_a_target_may_be_the_fallback_of_another_target() -> None:
    loaded({"modelServerName": "a"}, targetModels=[{"modelServerName": "a"}, {"modelServerName": "b"}])


def test_each_class_has_a_condition_or_statuses_and_none_is_a_clients() -> None:
    assert CONDITIONS.keys() == STATUSES.keys()
    assert all(CONDITIONS[one] or STATUSES[one] for one in CONDITIONS)
    assert not {status for found in STATUSES.values() for status in found if 400 <= status < 500} - {429}


def test_routes_of_envoy_differ_by_what_attempts_share() -> None:
    snapshot = configuration(
        servers=SERVERS,
        routes={"chat": "rules: [{targetModels: [{modelServerName: a}], fallback: [{modelServerName: b}]}]"},
    )
    policy, rule = snapshot.servers[0].spec.traffic_policy, snapshot.routes[0].spec.rules[0]
    plain = attempts_route_name(policy, rule.fallback, rule.fallback_retry)
    idle = attempts_route_name(policy, rule.fallback, FallbackRetry(idle_timeout=Duration("5s")))
    budget = attempts_route_name(policy, rule.fallback, FallbackRetry(min_concurrency=50))
    assert plain == "1800.0s/connect+timeout+overloaded+server-error"
    assert idle == f"{plain}/5.0s"
    assert budget == plain
    refusing = msgspec.structs.replace(rule.fallback[0], on=("content-policy", *rule.fallback[0].on))
    assert attempts_route_name(policy, (*rule.fallback, refusing), rule.fallback_retry) == f"{plain}+content-policy"
    # nor is it the name of a route without fallbacks
    assert plain != policy.route_settings_text
