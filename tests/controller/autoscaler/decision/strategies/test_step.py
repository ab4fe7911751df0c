# SPDX-License-Identifier: Apache-2.0
"""Steps by the ratio of metrics to their targets: numbers worked out by hand, and a policy that uses them."""

from __future__ import annotations

import msgspec
import pytest

from controller.api.autoscaling import MetricTarget
from controller.api.autoscaling_policy import AutoscalingPolicySpec
from controller.autoscaler.decision.decide import decide, make_strategies
from controller.autoscaler.decision.situation import EngineState, MetricReading, Situation
from controller.autoscaler.decision.strategies.step import StepAdjustment, StepParameters, StepStrategy
from extproc.api.quantities import decode_quantity
from tests.controller.autoscaler.decision.situations import binding_of, spec_of
from tests.scaling_scenes import NOW_S, engine, situation, target

QUEUE = MetricTarget(name="queue", value=10.0, source="Prometheus")
CPU = MetricTarget(name="cpu", value=0.5, source="Resource")
STEPS = StepParameters(
    scale_up=(
        StepAdjustment(ratio=2.0, value=4),
        StepAdjustment(ratio=1.0, value=1),
        StepAdjustment(ratio=5.0, value=50, type="Percent"),
    ),
    scale_down=(StepAdjustment(ratio=0.5, value=1), StepAdjustment(ratio=0.1, value=50, type="Percent")),
)


def seen(total: float, ready: int = 4, *, starting: int = 0, is_lower_bound: bool = False) -> Situation:
    """``total``: of the queue."""
    engines = [engine(f"e{number}") for number in range(ready)]
    engines += [engine(f"s{number}", state=EngineState.STARTING) for number in range(starting)]
    return situation(
        target(engines), metrics={"queue": MetricReading(NOW_S, total=total, is_lower_bound=is_lower_bound)}
    )


def asked(given: Situation, *metrics: MetricTarget) -> float | None:
    return StepStrategy(STEPS, metrics or (QUEUE,)).recommend(given, None)[0].replicas


@pytest.mark.parametrize(
    ("total", "desired"),
    # a ratio of 1 is 40 with four replicas
    [(20, 4), (40, 4), (41, 5), (80, 5), (81, 8), (200, 8), (201, 6), (19, 3), (4, 3), (3, 2), (0, 2)],
)
def test_the_step_that_is_furthest_out_is_taken_and_none_between(total: float, desired: float) -> None:
    assert asked(seen(total)) == desired


def test_a_per_cent_of_few_is_one() -> None:
    assert asked(seen(51, ready=1)) == 2
    assert asked(seen(0, ready=1)) == 1


def test_replicas_that_are_starting_count_towards_the_step() -> None:
    assert asked(seen(90, ready=4, starting=1)) == 8
    assert asked(seen(90, ready=4, starting=4)) == 8
    assert asked(seen(41, ready=4, starting=4)) == 8


def test_a_target_for_all_replicas_is_not_divided_among_them() -> None:
    of_all = msgspec.structs.replace(QUEUE, total=True)
    assert asked(seen(11, ready=4), of_all) == 5
    assert asked(seen(9, ready=4), of_all) == 4


def test_the_largest_ratio_of_several_metrics_counts_and_a_missing_one_forbids_scaling_in() -> None:
    engines = [engine(f"e{number}") for number in range(4)]
    cpu = MetricReading(NOW_S, by_engine={f"e{number}": 0.6 for number in range(4)})
    both = {"queue": MetricReading(NOW_S, total=0.0), "cpu": cpu}
    assert asked(situation(target(engines), metrics=both), QUEUE, CPU) == 5
    gone = {"queue": MetricReading(NOW_S, total=0.0), "cpu": MetricReading(NOW_S, problem="no value")}
    assert asked(situation(target(engines), metrics=gone), QUEUE, CPU) is None
    gone["queue"] = MetricReading(NOW_S, total=41.0)
    assert asked(situation(target(engines), metrics=gone), QUEUE, CPU) == 5


def test_what_is_not_known_of_all_engines_only_scales_out() -> None:
    engines = [engine(f"e{number}") for number in range(4)]
    assert asked(situation(target(engines), metrics={"cpu": MetricReading(NOW_S, by_engine={"e0": 0.01})}), CPU) is None
    assert asked(situation(target(engines), metrics={"cpu": MetricReading(NOW_S, by_engine={"e0": 0.6})}), CPU) == 5
    assert asked(seen(0, is_lower_bound=True)) is None
    assert asked(seen(41, is_lower_bound=True)) == 5
    assert asked(seen(41, ready=0, starting=2)) is None
    assert StepStrategy().recommend(seen(41), None)[0].replicas is None


def test_a_policy_takes_steps_and_behaves_as_an_hpa() -> None:
    written = {
        "strategies": [{"name": "Step", "step": {"scaleUp": [{"ratio": 1.5, "value": 3}], "scaleDown": []}}],
        "metrics": [
            {"name": "queue", "value": 10, "source": "Prometheus", "prometheus": {"address": "http://p", "query": "q"}}
        ],
    }
    policy = msgspec.convert(written, AutoscalingPolicySpec, dec_hook=decode_quantity)
    (made,) = make_strategies(policy)
    assert made == StepStrategy(StepParameters((StepAdjustment(ratio=1.5, value=3),), ()), policy.metrics)
    spec = spec_of()
    there = situation(
        target([engine("e0"), engine("e1")], spec=spec), metrics={"queue": MetricReading(NOW_S, total=40.0)}
    )
    decision, _ = decide(policy, binding_of(spec), [there], None, NOW_S)
    assert decision.targets[0].desired == 5
    assert decision.stages[0].recommendations[0].reason == "queue is 2.00 times its target, above 1.5"
