# SPDX-License-Identifier: Apache-2.0
"""Whatever policies, bindings, engines, gateways and annotations say: a decision comes of it, within all bounds."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.api.autoscaling_binding import AutoscalingPolicyBinding, EngineCapacity
from controller.api.autoscaling_policy import AutoscalingPolicySpec
from controller.autoscaler.decision.decide import decide
from controller.autoscaler.decision.replica_performance import estimate_speed
from controller.autoscaler.decision.saved_state import decode_memory, encode_memory
from controller.autoscaler.decision.situation import (
    Backlog,
    Engine,
    EngineReport,
    EngineState,
    MetricReading,
    Situation,
    TargetSituation,
)
from extproc.api.quantities import decode_quantity
from extproc.api.status_page_contents import EngineDemand
from tests.controller.autoscaler.decision.situations import (
    NOW_S,
    binding_of,
    situation_of,
    spec_of,
    target_of,
    traffic_of,
)

SHARE = st.sampled_from([5e-324, 1e-9, 0.3, 1.0])
AMOUNT = st.sampled_from([5e-324, 1e-9, 1.0, 77.0, 1e12])
SEEN = st.sampled_from([0.0, 5e-324, 1.0, 77.0, 1e15])
SPAN = st.sampled_from(["1ns", "1ms", "5s", "1h", "106000d"])
LEARNED = st.sampled_from([5e-324, -1.0, 0.0, 1.0, 1e308, -1e308])
MILLION = 1_000_000

PARAMETERS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "work": {"utilization": SHARE, "window": SPAN, "drainBudget": SPAN},
    "concurrency": {"target": AMOUNT, "targetUtilization": SHARE, "stableWindow": SPAN},
    "saturation": {"maxQueue": st.sampled_from([1, MILLION]), "scaleUpIncrement": st.sampled_from([1, MILLION])},
    "spareCapacity": {"kvCacheThreshold": SHARE, "queueLengthThreshold": AMOUNT, "queueSpareTrigger": AMOUNT},
    "tokens": {"kvCacheThreshold": SHARE, "queueLengthThreshold": AMOUNT, "maxBatchedTokens": st.just(1)},
    "slo": {"smoothing": SPAN},
    "predictive": {"season": SPAN, "lead": SPAN, "utilization": SHARE, "window": SPAN},
}


@st.composite
def policies(draw: st.DrawFn) -> AutoscalingPolicySpec:
    strategies: list[dict[str, Any]] = [{"name": "Target"}]
    for field in draw(st.sets(st.sampled_from(sorted(PARAMETERS)), max_size=3)):
        given_ = draw(st.fixed_dictionaries({}, optional=PARAMETERS[field]))
        strategies.append({"name": field[0].upper() + field[1:], field: given_})
    metrics = [
        {"name": name, "value": draw(AMOUNT), "total": draw(st.booleans())}
        for name in ("requests_in_flight", "kv_usage", "theirs")
    ]
    objective = {"ttft": draw(SPAN), "tpot": draw(SPAN), "percentile": draw(st.sampled_from([5e-324, 50, 99.99999]))}
    schedule = {"start": "* * * * *", "duration": "1h", "timeZone": draw(st.sampled_from(["UTC", "America"]))}
    written = {
        "strategies": strategies,
        "metrics": metrics,
        "objective": objective,
        "panic": {"windowPercent": draw(st.sampled_from([5e-324, 100]))},
        "schedules": [schedule | {"minReplicas": draw(st.sampled_from([0, MILLION]))}],
        "staleness": {"soft": draw(SPAN), "hard": draw(SPAN)},
        "period": draw(SPAN),
    }
    return msgspec.convert(written, AutoscalingPolicySpec, dec_hook=decode_quantity)


@st.composite
def bindings(draw: st.DrawFn) -> AutoscalingPolicyBinding:
    targets = [
        {
            "name": f"t{number}",
            "ref": {"kind": "Deployment", "name": f"t{number}", "apiVersion": "apps/v1"},
            "maxReplicas": draw(st.sampled_from([1, 7, MILLION])),
            "minReplicas": draw(st.sampled_from([0, 1])),
            "stage": draw(st.sampled_from(["Both", "Prefill", "Decode"])),
            "cost": draw(AMOUNT),
            "accelerator": "H100",
            "accelerators": draw(st.sampled_from([0, 1, 100_000])),
            "priority": draw(st.sampled_from([0, 10**30])),
            "weight": draw(st.sampled_from([0, 1, MILLION])),
            "spot": draw(st.booleans()),
            "capacity": {"prefillTokensPerSecond": draw(AMOUNT), "step": draw(SPAN), "stepPerToken": draw(SPAN)},
            "startTime": draw(SPAN),
        }
        for number in range(draw(st.integers(1, 3)))
    ]
    low, high = sorted((draw(AMOUNT), draw(AMOUNT)))
    written = {
        "policyRef": "policy",
        "targets": targets,
        "allocation": draw(st.sampled_from(["Cheapest", "Priority", "Weights", "Expansion"])),
        "minOnDemand": draw(SHARE),
        "budget": {"costPerHour": draw(AMOUNT), "accelerators": {"H100": draw(st.sampled_from([0, MILLION]))}},
        "ratios": [{"numerator": "t0", "denominator": targets[-1]["name"], "min": low, "max": high}],
    }
    whole = {"metadata": {"name": "chat", "namespace": "default"}, "spec": written}
    return msgspec.convert(whole, AutoscalingPolicyBinding, dec_hook=decode_quantity)


def situations(draw: st.DrawFn, binding: AutoscalingPolicyBinding, now_s: float) -> list[Situation]:
    stages: dict[str, list[TargetSituation]] = {}
    for spec in binding.spec.targets:
        state = draw(st.sampled_from(list(EngineState)))
        report = EngineReport(now_s, int(draw(SEEN)), draw(SEEN), draw(SEEN), draw(SEEN), 0.5, draw(SEEN))
        engine = Engine(spec.name, state, now_s + draw(SEEN) - 1e9, now_s, report)
        demand = EngineDemand(prefill_tokens_per_s=draw(AMOUNT), step_s=draw(SEEN), step_s_per_token=draw(SEEN))
        current = draw(st.sampled_from([None, 0, 1, 2 * MILLION]))
        target = TargetSituation(spec, current, (engine,) if current else (), estimate_speed(spec.capacity, [demand]))
        stages.setdefault(spec.stage, []).append(target)
    traffic = traffic_of(draw(st.sampled_from([0.0, 3.0, 1e12])), seconds=60, now_s=now_s, ttft_s=1.0, tpot_s=0.1)
    waiting = Backlog(int(draw(SEEN)), draw(SEEN), draw(SEEN), int(draw(SEEN)))
    theirs = MetricReading(now_s, total=draw(st.sampled_from([0.0, 1e300, -1e300])))
    made = [situation_of(targets, traffic=traffic, waiting=waiting, now_s=now_s) for targets in stages.values()]
    return [msgspec.structs.replace(one, metrics={"theirs": theirs}) for one in made]


@given(st.data(), policies(), bindings())
@settings(max_examples=60, deadline=None)
def test_a_decision_comes_of_it(
    data: st.DataObject, policy: AutoscalingPolicySpec, binding: AutoscalingPolicyBinding
) -> None:
    draw: Any = data.draw
    memory = decode_memory(learned(draw), NOW_S)
    for step in range(2):
        now_s = NOW_S + 70 * step
        decision, memory = decide(policy, binding, situations(draw, binding, now_s), memory, now_s, free={"H100": 9})
        for one in decision.targets:
            assert one.desired is None or 0 <= one.desired <= 2 * MILLION
        # the next leader can read it
        assert decode_memory(encode_memory(memory), now_s).stages.keys() == memory.stages.keys()


def learned(draw: st.DrawFn) -> bytes:
    speed = {name: draw(LEARNED) for name in ("prefill_tokens_per_s", "step_s", "step_s_per_token", "kv_tokens")}
    stage = {
        "speeds": {"t0": speed | {"is_measured": True, "followed_s": draw(LEARNED)}},
        "starts": {"t0": {"starts": [{"engine": "e", "took_s": draw(LEARNED)}]}},
        "strategies": {name: {"profile": [draw(LEARNED)] * 9, "season_s": 60.0} for name in ("Predictive", "x")},
    }
    return msgspec.json.encode(dict.fromkeys(("Both", "Prefill", "Decode", "nobody"), stage))


@pytest.mark.parametrize("text", [b"{", b"[]", b'{"a":' + b"[" * 100_000, b'{"Both":{"x":' + b"[" * 100_000 + b"}}"])
def test_what_is_nothing_of_ours_is_a_mistake_that_can_be_told(text: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        decode_memory(text, NOW_S)


def test_declared_durations_are_kept_for_the_next_leader() -> None:
    written = {"prefillTokensPerSecond": 100.0, "step": "20ms", "stepPerToken": "1us"}
    capacity = msgspec.convert(written, EngineCapacity, dec_hook=decode_quantity)
    target = target_of(spec=spec_of(), speed=estimate_speed(capacity, []))
    situation = situation_of(target, traffic=traffic_of(1.0))
    _, memory = decide(AutoscalingPolicySpec(), binding_of(spec_of()), [situation], None, NOW_S)
    again = decode_memory(encode_memory(memory), NOW_S).stages["Both"].speeds["main"]
    assert (again.step_s, again.step_s_per_token) == (0.02, 1e-6)


def test_a_speed_learned_beyond_all_bounds_scales_nothing_in() -> None:
    liar = {"Both": {"speeds": {"main": {"prefill_tokens_per_s": 1e300, "step_s": 1e-300, "step_s_per_token": 1e-300}}}}
    memory = decode_memory(msgspec.json.encode(liar), NOW_S)
    assert memory.stages["Both"].speeds == {}
