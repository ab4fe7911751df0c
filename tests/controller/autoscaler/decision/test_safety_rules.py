# SPDX-License-Identifier: Apache-2.0
"""The rules between strategies and targets, one decision at a time."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.api.autoscaling import (
    Behavior,
    LatencyObjective,
    MetricTarget,
    Panic,
    ScaleToZero,
    ScalingRule,
    ScalingRules,
    Schedule,
)
from controller.api.autoscaling_binding import RatioConstraint
from controller.api.autoscaling_policy import AutoscalingPolicySpec, Strategy
from controller.autoscaler.decision.decide import decide
from controller.autoscaler.decision.saved_state import BindingMemory, decode_memory, encode_memory
from controller.autoscaler.decision.situation import (
    Backlog,
    EngineReport,
    EngineState,
    Freshness,
    MetricReading,
    ReplicaSpeed,
)
from controller.autoscaler.decision.strategies.work import WorkParameters
from controller.autoscaler.decision.traffic import Traffic
from extproc.api.quantities import Duration
from tests.controller.autoscaler.decision.situations import (
    NOW_S,
    SPEED,
    binding_of,
    situation_of,
    spec_of,
    target_of,
    traffic_of,
)

# numbers are worked out for load as it is
POLICY = AutoscalingPolicySpec(strategies=(Strategy(name="Work", work=WorkParameters(headroom=1.0)),))


class Stage:
    """One target under a policy, decision after decision, with the same situation but for the time."""

    def __init__(self, policy: AutoscalingPolicySpec = POLICY, **fields: object) -> None:
        self.policy = policy
        self.fields: dict[str, Any] = {"target": target_of(ready=2), "traffic": 4.0} | fields
        self.memory: BindingMemory | None = None
        self.now_s = NOW_S

    def look(self, after_s: float = 0.0, **fields: object) -> tuple[int | None, list[str]]:
        """Replicas and the rules that changed them."""
        self.fields |= fields
        self.now_s += after_s
        target = self.fields["target"]
        traffic = self.fields["traffic"]
        if not isinstance(traffic, Traffic):
            traffic = traffic_of(traffic, now_s=self.now_s, before=traffic * (self.now_s - NOW_S))
        rest = {name: value for name, value in self.fields.items() if name not in {"target", "traffic", "metrics"}}
        situation = situation_of(target, traffic=traffic, now_s=self.now_s, **rest)
        situation = msgspec.structs.replace(situation, metrics=self.fields.get("metrics", {}))
        decision, self.memory = decide(self.policy, binding_of(target.spec), [situation], self.memory, self.now_s)
        steps = [step.rule for stage in decision.stages for step in stage.steps]
        return decision.targets[0].desired, steps

    def settled(self, **fields: object) -> tuple[int | None, list[str]]:
        """The decision after minutes of the same."""
        for _ in range(30):
            self.look(5.0)
        return self.look(5.0, **fields)


def test_load_asks_for_replicas() -> None:
    # 12 requests of 0.21 s are 2.52 engines' work; at most 0.8 busy: 3.15
    assert Stage(traffic=12.0).look() == (4, [])


def test_nothing_is_scaled_in_right_after_a_restart() -> None:
    stage = Stage(target=target_of(ready=9), traffic=4.0)
    assert stage.look() == (9, ["Restarted"])
    assert stage.look(60.0)[0] == 9


def test_after_a_window_of_the_same_it_is() -> None:
    # 4 requests of 0.21 s at 0.8 are 1.05 replicas, and a tenth of room
    assert Stage(target=target_of(ready=9)).settled()[0] == 2


def test_a_gap_between_decisions_is_a_restart() -> None:
    stage = Stage(target=target_of(ready=9))
    for _ in range(20):
        stage.look(5.0)
    assert stage.look(60.0) == (9, ["Restarted"])


@pytest.mark.parametrize(
    "freshness",
    [
        Freshness(age_s=16.0),
        Freshness(age_s=61.0),
        Freshness(gateways=2, silent=("b",)),
        Freshness(unreported=("main-3",)),
        Freshness(gateways=0),
    ],
)
def test_old_and_missing_data_never_scale_in(freshness: Freshness) -> None:
    assert Stage(target=target_of(ready=9)).settled(freshness=freshness) == (9, ["Stale"])


def test_old_data_still_scale_out() -> None:
    assert Stage().settled(freshness=Freshness(age_s=16.0), traffic=12.0)[0] == 4


def test_very_old_data_scale_out_for_what_waits_only() -> None:
    stage = Stage()
    assert stage.settled(freshness=Freshness(age_s=61.0), traffic=40.0)[0] == 2
    # 2 ready, and one for each 32 that wait
    assert stage.look(5.0, waiting=Backlog(requests=33, tokens=33_000.0))[0] == 4


def test_what_waits_keeps_replicas() -> None:
    stage = Stage(target=target_of(ready=9))
    assert stage.settled(waiting=Backlog(requests=1, tokens=1000.0, oldest_s=1.5)) == (9, ["Waiting"])


def test_latency_near_its_objective_keeps_replicas() -> None:
    objective = LatencyObjective(ttft=Duration("200ms"))
    stage = Stage(target=target_of(ready=9), objective=objective)
    slow = traffic_of(4.0, now_s=NOW_S + 155, ttft_s=0.24)
    assert stage.settled(traffic=slow) == (9, ["Latency"])


def test_caches_that_the_rest_could_not_hold_keep_replicas() -> None:
    target = target_of(ready=9)
    engines = tuple(msgspec.structs.replace(one, report=EngineReport(NOW_S, kv_usage=0.5)) for one in target.engines)
    # 4.5 caches in use, 0.8 of each may be: 5.6 replicas
    assert Stage(target=msgspec.structs.replace(target, engines=engines)).settled()[0] == 6


def test_bounds_hold_above_all() -> None:
    low, high = spec_of(least=3, most=5), spec_of(least=0, most=2)
    assert Stage(target=target_of(ready=3, spec=low)).settled() == (3, ["ScalingLimited"])
    assert Stage(target=target_of(ready=2, spec=high), traffic=40.0).look() == (2, ["ScalingLimited"])


def test_a_schedule_raises_and_lowers() -> None:
    every = Schedule(start="0 * * * *", duration=Duration("1h"), min_replicas=6)
    assert Stage(AutoscalingPolicySpec(schedules=(every,))).look() == (6, ["Schedule"])
    capped = msgspec.structs.replace(every, min_replicas=None, max_replicas=1)
    assert Stage(AutoscalingPolicySpec(schedules=(capped,)), traffic=40.0).look() == (1, ["Schedule"])


def test_a_panic_keeps_the_largest_answer() -> None:
    stage = Stage(AutoscalingPolicySpec(panic=Panic()), target=target_of(ready=2), traffic=20.0)
    # 20 * 0.21 s, and what the two that are ready leave for others in a minute, done in half of one: 4.2 + 2 * (4.2 - 2
    # * 0.9)
    assert stage.look()[0] == 9
    assert stage.look(5.0, traffic=2.0, target=target_of(ready=2, starting=7))[0] == 9


@pytest.mark.parametrize(("mode", "desired"), [("Auto", 2), ("ScaleUpOnly", 9), ("Recommend", 2), ("Export", 2)])
def test_modes_that_decide(mode: Literal["Auto", "ScaleUpOnly", "Recommend", "Export"], desired: int) -> None:
    assert Stage(AutoscalingPolicySpec(mode=mode), target=target_of(ready=9)).settled()[0] == desired


def test_paused_changes_nothing() -> None:
    assert Stage(AutoscalingPolicySpec(mode="Paused"), traffic=40.0).look() == (2, [])


def test_what_somebody_else_has_set_stays_for_a_while() -> None:
    held = msgspec.structs.replace(target_of(ready=2), set_by="kubectl-scale", set_at_s=NOW_S)
    stage = Stage(target=held, traffic=40.0)
    assert stage.look(599.0)[0] == 2
    # 40 * 0.21 s, and what the two that are ready leave for others in a minute, done in half of one: 8.4 + 2 * (8.4 - 2
    # * 0.9)
    assert stage.look(1.0)[0] == 22


def test_an_object_that_is_not_there_gets_no_replicas() -> None:
    gone = msgspec.structs.replace(target_of(ready=0), current=None)
    assert Stage(target=gone, traffic=40.0).look()[0] is None


def test_a_strategy_that_cannot_tell_keeps_replicas() -> None:
    policy = AutoscalingPolicySpec(
        strategies=(*POLICY.strategies, Strategy(name="Target")), metrics=(MetricTarget(name="cpu", value=1.0),)
    )
    broken = {"cpu": MetricReading(NOW_S, problem="the server is down")}
    assert Stage(policy, target=target_of(ready=9)).settled(metrics=broken)[0] == 9
    assert Stage(policy, target=target_of(ready=2)).settled(metrics=broken, traffic=12.0)[0] == 4


def test_a_forecast_that_knows_too_little_does_not_keep_replicas() -> None:
    policy = AutoscalingPolicySpec(strategies=(Strategy(name="Work"), Strategy(name="Predictive")))
    stage = Stage(policy, target=target_of(ready=9))
    assert stage.settled()[0] == 2


ZERO = AutoscalingPolicySpec(scale_to_zero=ScaleToZero(idle=Duration("5m")))
NONE = traffic_of(0.0)


def zero_stage(**fields: object) -> Stage:
    return Stage(ZERO, **({"target": target_of(ready=1, spec=spec_of(least=0)), "traffic": 0.0} | fields))


def test_without_requests_for_long_enough_it_goes_to_zero() -> None:
    stage = zero_stage()
    seen = [stage.look(5.0)[0] for _ in range(62)]
    assert seen[:59] == [1] * 59
    assert seen[-1] == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"freshness": Freshness(gateways=2, silent=("b",))},
        {"freshness": Freshness(age_s=20.0)},
        {"freshness": Freshness(since_s=100.0)},
        {"waiting": Backlog(requests=1)},
        {"traffic": 0.01},
    ],
)
def test_with_any_doubt_it_does_not(fields: dict[str, Any]) -> None:
    stage = zero_stage(**fields)
    assert {stage.look(5.0)[0] for _ in range(90)} == {1}


@pytest.mark.parametrize("speed", [SPEED, None])
def test_a_few_requests_long_ago_and_unknown_speeds_do_not_keep_an_idle_replica(speed: ReplicaSpeed | None) -> None:
    # a minute before the first look, and six before the last one
    few = traffic_of(lambda second: 1.0 if second == -460 else 0.0, seconds=1000, now_s=NOW_S + 400)
    stage = zero_stage(target=target_of(ready=1, spec=spec_of(least=0), speed=speed), traffic=few)
    seen = [stage.look(5.0) for _ in range(62)]
    assert [one[0] for one in seen[:59]] == [1] * 59
    assert seen[-1] == (0, ["Idle"])


def test_a_strategy_that_cannot_tell_keeps_an_idle_replica() -> None:
    stage = zero_stage(traffic=Traffic())
    assert {stage.look(5.0)[0] for _ in range(90)} == {1}


def test_an_engine_with_a_request_is_kept() -> None:
    target = target_of(ready=1, spec=spec_of(least=0))
    busy = msgspec.structs.replace(target.engines[0], report=EngineReport(NOW_S, in_flight=1))
    stage = zero_stage(target=msgspec.structs.replace(target, engines=(busy,)))
    assert {stage.look(5.0)[0] for _ in range(90)} == {1}


def test_without_the_rule_one_stays() -> None:
    stage = Stage(target=target_of(ready=1, spec=spec_of(least=0)), traffic=0.0)
    assert {stage.look(5.0)[0] for _ in range(90)} == {1}


def test_zero_stays_zero_after_a_restart() -> None:
    assert zero_stage(target=target_of(ready=0, spec=spec_of(least=0))).look() == (0, [])


def test_a_request_at_zero_is_answered_by_a_start_at_once() -> None:
    stage = zero_stage(target=target_of(ready=0, spec=spec_of(least=0)))
    assert stage.look(waiting=Backlog(requests=1, at_zero=1))[0] == 1


def test_many_requests_at_zero_start_several() -> None:
    stage = zero_stage(target=target_of(ready=0, spec=spec_of(least=0)))
    assert stage.look(waiting=Backlog(requests=70, at_zero=70))[0] == 3


def test_what_was_woken_stays_until_it_has_had_its_chance() -> None:
    policy = AutoscalingPolicySpec(scale_to_zero=ScaleToZero(idle=Duration("10s")))
    spec = spec_of(least=0)
    stage = Stage(policy, target=target_of(ready=0, spec=spec), traffic=0.0)
    assert stage.look(waiting=Backlog(requests=1, at_zero=1))[0] == 1
    # the client has gone, the engine needs a minute: for three minutes it may go on
    stage.fields |= {"waiting": Backlog(), "target": target_of(starting=1, ready=0, spec=spec)}
    seen = [stage.look(5.0)[0] for _ in range(60)]
    assert 0 not in seen[:36]
    assert seen[-1] == 0


def test_stages_count_their_own_work_and_go_to_zero_together() -> None:
    prefill = target_of(ready=5, spec=spec_of("prefill", least=0, stage="Prefill"))
    decode = target_of(ready=5, spec=spec_of("decode", least=0, stage="Decode"))
    situations = [situation_of(one, traffic=traffic_of(40.0)) for one in (prefill, decode)]
    decision, _ = decide(POLICY, binding_of(prefill.spec, decode.spec), situations, None, NOW_S)
    # 40 * 0.1 s of prefill, 40 * 0.11 s of decode, at most 0.8 busy
    assert [one.desired for one in decision.targets] == [5, 6]

    busy = msgspec.structs.replace(decode.engines[0], report=EngineReport(NOW_S, in_flight=1))
    decode = msgspec.structs.replace(decode, engines=(busy, *decode.engines[1:]))
    memory = None
    for step in range(90):
        now_s = NOW_S + 5 * step
        situations = [situation_of(one, traffic=traffic_of(0.0, now_s=now_s), now_s=now_s) for one in (prefill, decode)]
        decision, memory = decide(ZERO, binding_of(prefill.spec, decode.spec), situations, memory, now_s)
    assert [one.desired for one in decision.targets] == [1, 1]


def test_no_stage_is_at_zero_while_the_other_has_engines() -> None:
    """Decode has more engines to remove, one a minute; prefill's last one stays until then. One request wakes both."""
    slowly = ScalingRules(policies=(ScalingRule(type="Pods", value=1, period_seconds=60),))
    policy = msgspec.structs.replace(ZERO, behavior=Behavior(scale_down=slowly))
    prefill = target_of(ready=1, spec=spec_of("prefill", least=0, stage="Prefill"))
    decode = target_of(ready=6, spec=spec_of("decode", least=0, stage="Decode"))
    binding, memory, seen = binding_of(prefill.spec, decode.spec), None, []
    ratio = RatioConstraint("prefill", "decode", 0.1, 2.0)
    binding = msgspec.structs.replace(binding, spec=msgspec.structs.replace(binding.spec, ratios=(ratio,)))
    for step in range(150):
        now_s = NOW_S + 5 * step
        situations = [situation_of(one, traffic=traffic_of(0.0, now_s=now_s), now_s=now_s) for one in (prefill, decode)]
        decision, memory = decide(policy, binding, situations, memory, now_s)
        seen.append([one.desired for one in decision.targets])
        prefill, decode = (
            msgspec.structs.replace(one, current=now.desired, engines=one.engines[: now.desired])
            for one, now in zip((prefill, decode), decision.targets, strict=True)
        )
    assert seen[-1] == [0, 0]
    assert all(bool(of_prefill) == bool(of_decode) for of_prefill, of_decode in seen)
    waiting = Backlog(requests=1, at_zero=1)
    situations = [
        situation_of(one, traffic=traffic_of(0.0, now_s=now_s), now_s=now_s, waiting=waiting)
        for one in (prefill, decode)
    ]
    decision, _ = decide(policy, binding, situations, memory, now_s)
    assert [one.desired for one in decision.targets] == [1, 1]


def test_what_took_long_to_learn_survives_a_restart() -> None:
    stage = Stage()
    stage.settled()
    assert stage.memory is not None
    kept = decode_memory(encode_memory(stage.memory), NOW_S)
    assert kept.stages["Both"].speeds == stage.memory.stages["Both"].speeds
    assert kept.stages["Both"].starts["main"].percentile(90) == 60.0
    assert not kept.stages["Both"].past.recommendations


freshness_values = st.builds(
    Freshness,
    age_s=st.floats(0, 100),
    gateways=st.integers(0, 3),
    silent=st.sampled_from([(), ("a",)]),
    unreported=st.sampled_from([(), ("main-0",)]),
)
waiting_values = st.builds(
    Backlog,
    requests=st.integers(0, 500),
    tokens=st.floats(0, 1e6),
    oldest_s=st.floats(0, 60),
    at_zero=st.integers(0, 3),
)
looks = st.lists(
    st.tuples(st.floats(1, 40), st.floats(0, 60), freshness_values, waiting_values, st.integers(0, 12)),
    min_size=1,
    max_size=12,
)
policies = st.builds(
    AutoscalingPolicySpec,
    objective=st.sampled_from([None, LatencyObjective(ttft=Duration("1s"), tpot=Duration("30ms"))]),
    panic=st.sampled_from([None, Panic()]),
    scale_to_zero=st.sampled_from([None, ScaleToZero(idle=Duration("10s"))]),
    mode=st.sampled_from(["Auto", "Recommend", "ScaleUpOnly"]),
)


@settings(max_examples=60, deadline=None)
@given(policies, looks, st.integers(0, 3), st.integers(4, 12))
def test_whatever_happens_bounds_hold_and_doubt_never_scales_in(
    policy: AutoscalingPolicySpec, history: list[Any], least: int, most: int
) -> None:
    stage = Stage(policy)
    spec = spec_of(least=least, most=most)
    for number, (after_s, rate, freshness, waiting, ready) in enumerate(history):
        target = target_of(ready=ready, spec=spec)
        traffic = traffic_of(rate, now_s=stage.now_s + after_s, seconds=60)
        desired, _ = stage.look(after_s, target=target, freshness=freshness, waiting=waiting, traffic=traffic)
        assert desired is not None
        assert desired <= most or (policy.mode == "ScaleUpOnly" and desired == ready)
        assert desired >= least
        in_doubt = (
            freshness.age_s > policy.staleness.soft
            or freshness.silent
            or freshness.unreported
            or not freshness.gateways
        )
        if in_doubt or number == 0:
            assert desired >= min(ready, most)
        if not ready and (waiting.at_zero or waiting.requests):
            assert desired > 0


def test_every_engine_state_has_units() -> None:
    situation = situation_of(target_of(ready=2, starting=1))
    assert (situation.engine_units(EngineState.READY), situation.engine_units(EngineState.STARTING)) == (2, 1)
