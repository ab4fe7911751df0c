# SPDX-License-Identifier: Apache-2.0
"""HPA v2's behaviour block: answers of the original, another way to write its rules, and stories of load over time."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from controller.api.autoscaling import Behavior, ScalingRule, ScalingRules
from controller.autoscaler.decision.behavior import (
    PastRecommendation,
    ReplicaChange,
    ScalingHistory,
    add_recommendation,
    apply_behavior,
    hpa_tolerance,
    limit_by_policies,
    stabilize,
)
from tests.examples import examples

UPSTREAM = Path(__file__).parent / "upstream"
ORIGINAL = json.loads((UPSTREAM / "hpa.json").read_text())["behavior"]
STORIES = json.loads((UPSTREAM / "hpa_stories.json").read_text())
NOW_S = 10_000.0


def rules_of(given: dict[str, Any]) -> ScalingRules:
    return msgspec.convert({key: value for key, value in given.items() if value is not None}, ScalingRules)


def answered(case: dict[str, Any]) -> float:
    past = ScalingHistory(
        tuple(PastRecommendation(NOW_S - one["ageS"], one["value"]) for one in case["recommendations"] or ()),
        (
            *(ReplicaChange(NOW_S - one["ageS"], one["value"]) for one in case["ups"] or ()),
            *(ReplicaChange(NOW_S - one["ageS"], -one["value"]) for one in case["downs"] or ()),
        ),
    )
    behavior = Behavior(rules_of(case["scaleUp"]), rules_of(case["scaleDown"]))
    found, _ = apply_behavior(behavior, past, recommended=case["recommended"], current=case["current"], now_s=NOW_S)
    return min(max(found, case["min"]), case["max"])


def test_answers_are_those_of_kubernetes_own_code() -> None:
    assert [case for case in ORIGINAL if answered(case) != case["desired"]] == []
    assert len(ORIGINAL) >= 200


def test_histories_are_those_of_kubernetes_own_code() -> None:
    for story in STORIES:
        behavior = Behavior(rules_of(story["scaleUp"]), rules_of(story["scaleDown"]))
        current, past = story["first"], ScalingHistory((PastRecommendation(0.0, story["first"]),))
        for at_s, recommended, desired in story["looks"]:
            found, _ = apply_behavior(behavior, past, recommended=recommended, current=current, now_s=at_s)
            assert found == desired
            past = add_recommendation(behavior, past, PastRecommendation(at_s, recommended))
            if found != current:
                past = ScalingHistory(past.recommendations, (*past.changes, ReplicaChange(at_s, found - current)))
            current = found
    assert sum(len(story["looks"]) for story in STORIES) == 3000


class Written:
    """The behaviour block told again: what may be there at the end of this step, policy by policy."""

    def __init__(self, behavior: Behavior, changes: list[ReplicaChange], current: float) -> None:
        self.behavior, self.changes, self.current = behavior, changes, current

    def start_of(self, seconds: float) -> float:
        replicas = self.current
        for change in reversed(self.changes):
            if NOW_S - change.at_s < seconds:
                replicas -= change.change
        return replicas

    def ceiling(self) -> float:
        rules = self.behavior.scale_up
        given = [(one.type, one.value, one.period_seconds) for one in rules.policies]
        allowed = []
        for kind, value, seconds in given or [("Pods", 4, 15), ("Percent", 100, 15)]:
            start = self.start_of(seconds)
            allowed.append(start + value if kind == "Pods" else math.ceil(start * (1 + value / 100)))
        chosen = {"Max": max, "Min": min, "Disabled": lambda _: self.current}[rules.select_policy](allowed)
        return max(chosen, self.current)

    def floor(self) -> float:
        rules = self.behavior.scale_down
        given = [(one.type, one.value, one.period_seconds) for one in rules.policies]
        allowed = []
        for kind, value, seconds in given or [("Percent", 100, 15)]:
            start = self.start_of(seconds)
            allowed.append(start - value if kind == "Pods" else int(start * (1 - value / 100)))
        chosen = {"Max": min, "Min": max, "Disabled": lambda _: self.current}[rules.select_policy](allowed)
        return min(chosen, self.current)


def some_rules(rng: random.Random) -> ScalingRules:
    policies = tuple(
        ScalingRule(rng.choice(("Pods", "Percent")), rng.choice((1, 3, 10, 50, 100)), rng.choice((10, 60, 300)))
        for _ in range(rng.randrange(3))
    )
    return ScalingRules(rng.choice((None, 0, 20, 200)), rng.choice(("Max", "Max", "Min", "Disabled")), policies)


def some_past(rng: random.Random) -> ScalingHistory:
    ages = sorted((rng.uniform(0.1, 400.0) for _ in range(rng.randrange(8))), reverse=True)
    recommendations = tuple(PastRecommendation(NOW_S - age, rng.randrange(50)) for age in ages)
    changes = tuple(ReplicaChange(NOW_S - age, rng.choice((-6, -1, 2, 9))) for age in ages[:4])
    return ScalingHistory(recommendations, changes)


def test_many_cases_agree_with_the_restatement() -> None:
    rng = random.Random(4)
    for _ in range(examples(10_000)):
        behavior, past = Behavior(some_rules(rng), some_rules(rng)), some_past(rng)
        recommended, current = rng.randrange(50), rng.randrange(1, 30)
        up_s, down_s = behavior.scale_up.stabilization_window_seconds, behavior.scale_down.stabilization_window_seconds
        recent = [(NOW_S - one.at_s, one.replicas) for one in past.recommendations]
        low = min([value for age, value in recent if age < (up_s or 0)] + [recommended])
        high = max([value for age, value in recent if age < (300 if down_s is None else down_s)] + [recommended])
        expected: float = sorted((low, current, high))[1]
        written = Written(behavior, list(past.changes), current)
        if expected > current:
            expected = min(expected, written.ceiling())
        elif expected < current:
            expected = max(expected, written.floor())
        assert apply_behavior(behavior, past, recommended=recommended, current=current, now_s=NOW_S)[0] == expected


def test_what_is_forgotten_is_never_needed() -> None:
    rng = random.Random(5)
    for _ in range(500):
        behavior = Behavior(some_rules(rng), some_rules(rng))
        whole, kept, now_s = ScalingHistory(), ScalingHistory(), 0.0
        for _ in range(60):
            now_s += rng.uniform(1.0, 30.0)
            recommended, current = rng.randrange(20), rng.randrange(1, 20)
            answers = [
                apply_behavior(behavior, past, recommended=recommended, current=current, now_s=now_s)
                for past in (whole, kept)
            ]
            assert answers[0] == answers[1]
            change = (ReplicaChange(now_s, answers[0][0] - current),)
            whole = ScalingHistory(
                (*whole.recommendations, PastRecommendation(now_s, recommended)), whole.changes + change
            )
            kept = add_recommendation(
                behavior,
                ScalingHistory(kept.recommendations, kept.changes + change),
                PastRecommendation(now_s, recommended),
            )


def test_a_steady_load_leaves_little_to_remember() -> None:
    rng = random.Random(6)
    behavior, past = Behavior(scale_down=ScalingRules(stabilization_window_seconds=3600)), ScalingHistory()
    for step in range(720):
        past = add_recommendation(behavior, past, PastRecommendation(step * 5.0, rng.choice((7, 8, 9))))
    assert len(past.recommendations) <= 6


def test_a_peak_holds_replicas_for_the_window_and_no_longer() -> None:
    behavior, past = Behavior(), ScalingHistory()
    current, seen = 2.0, []
    for at_s, recommended in ((0.0, 8.0), *((step * 15.0, 2.0) for step in range(1, 24))):
        found, _ = apply_behavior(behavior, past, recommended=recommended, current=current, now_s=at_s)
        past = add_recommendation(behavior, past, PastRecommendation(at_s, recommended))
        if found != current:
            past = ScalingHistory(past.recommendations, (*past.changes, ReplicaChange(at_s, found - current)))
        current = found
        seen.append((at_s, current))
    # four more at once is the most that the default policies allow; the next recommendation is 2 already
    assert {current for at_s, current in seen if at_s < 300.0} == {6.0}
    assert {current for at_s, current in seen if at_s >= 300.0} == {2.0}


def test_a_short_dip_does_not_end_a_scale_out_but_a_window_waits_for_it() -> None:
    past = ScalingHistory((PastRecommendation(NOW_S - 20, 3),))
    patient = Behavior(scale_up=ScalingRules(stabilization_window_seconds=60))
    assert stabilize(Behavior(), past.recommendations, recommended=9, current=3, now_s=NOW_S) == 9
    assert stabilize(patient, past.recommendations, recommended=9, current=3, now_s=NOW_S) == 3


def test_the_smallest_of_several_policies() -> None:
    rules = ScalingRules(0, "Min", (ScalingRule("Pods", 4, 60), ScalingRule("Percent", 10, 60)))
    assert limit_by_policies(Behavior(scale_up=rules), (), desired=100, current=20, now_s=NOW_S) == 22
    assert limit_by_policies(Behavior(scale_down=rules), (), desired=1, current=20, now_s=NOW_S) == 18


def test_changes_of_the_period_use_up_the_policy() -> None:
    rules = ScalingRules(0, "Max", (ScalingRule("Pods", 2, 60),))
    changes = (ReplicaChange(NOW_S - 30, 1), ReplicaChange(NOW_S - 90, 5))
    assert limit_by_policies(Behavior(scale_up=rules), changes, desired=100, current=10, now_s=NOW_S) == 11
    assert limit_by_policies(Behavior(scale_down=rules), changes, desired=1, current=10, now_s=NOW_S) == 7


def test_disabled_forbids_a_direction() -> None:
    off = ScalingRules(0, "Disabled")
    assert apply_behavior(Behavior(scale_up=off), ScalingHistory(), recommended=9, current=3, now_s=NOW_S)[0] == 3
    assert apply_behavior(Behavior(scale_down=off), ScalingHistory(), recommended=1, current=3, now_s=NOW_S)[0] == 3


def test_fractions_of_replicas_are_not_rounded() -> None:
    rules = Behavior(ScalingRules(0, "Max", (ScalingRule("Percent", 10, 60),)))
    assert limit_by_policies(rules, (), desired=9, current=2.5, now_s=NOW_S, whole=False) == pytest.approx(2.75)
    assert limit_by_policies(rules, (), desired=9, current=2, now_s=NOW_S) == 3


def test_steps_say_what_changed_the_answer() -> None:
    past = ScalingHistory((PastRecommendation(NOW_S - 100, 30),))
    found, steps = apply_behavior(Behavior(), past, recommended=2, current=9, now_s=NOW_S)
    assert found == 9
    assert [(step.rule, step.before, step.after) for step in steps] == [("Stabilized", 2, 9)]
    assert "300 s" in steps[0].reason
    found, steps = apply_behavior(Behavior(), ScalingHistory(), recommended=50, current=9, now_s=NOW_S)
    assert (found, steps[0].rule) == (18, "Limited")


def test_the_default_tolerance_is_that_of_kubernetes() -> None:
    assert hpa_tolerance(ScalingRules()) == 0.1
    assert hpa_tolerance(ScalingRules(tolerance=0.0)) == 0.0
