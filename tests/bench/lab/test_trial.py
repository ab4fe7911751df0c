# SPDX-License-Identifier: Apache-2.0
"""Every policy plays a workload to its end, and what may be expected of a few on traffic that tells them apart."""

from __future__ import annotations

import time

import pytest

from bench.lab.hardware_spec_parser import HardwareUnknown, engine_profiles
from bench.lab.measures import LatencyObjective, compute_measures
from bench.lab.policies.policy_file import PolicyFailed
from bench.lab.policies.registry import POLICIES
from bench.lab.trial import Trial, TrialConditions, TrialReport, check_trials, run_trial

CHAT = "chat:sessions=60,sessions_per_s=12,system_prompts=6,system_tokens=3000,turns=2"
SHORT = CHAT.replace("sessions=60", "sessions=20")


def play(policy: str, trace: str = CHAT, **conditions: object) -> TrialReport:
    known = {"engines": 3, "hardware": "h100", "model": "8b", "block_size": 16, **conditions}
    if policy.startswith("pd-"):
        known = {"prefill": 1, "decode": 2, **known}
    return run_trial(Trial(policy, TrialConditions(trace, **known)), time.perf_counter)  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_policy_serves_everybody_and_can_be_repeated(policy: str) -> None:
    report = play(policy, SHORT)
    assert len(report.rows) == 40
    assert not any(row.error for row in report.rows)
    # nobody is faster than an idle engine that holds all, but by the 15.6 ms of an API server that is counted in both
    assert all(row.ttft_s >= 0.99 * row.ideal_s for row in report.rows)
    assert play(policy, SHORT).rows == report.rows


def test_policies_that_know_prefixes_find_more_of_them_than_chance_does() -> None:
    objective = LatencyObjective()
    ratios = {
        name: compute_measures(found.rows, 1.0, objective).cached_token_ratio
        for name in ("attache", "attache-precise", "sglang", "dynamo", "random")
        for found in [play(name)]
    }
    assert all(ratios[name] > ratios["random"] + 0.05 for name in ratios if name != "random")
    assert ratios["attache-precise"] == pytest.approx(ratios["attache"], abs=0.03)


def test_pairs_transfer_and_the_whole_fleet_does_not() -> None:
    roles = {"prefill": 1, "decode": 2, "network": "100gb"}
    always, whole = play("pd-always", SHORT, **roles), play("attache", SHORT, **roles)
    assert all(row.prefill == 0 and row.engine in {1, 2} for row in always.rows)
    assert all(row.prefill == -1 for row in whole.rows)
    assert {row.engine for row in whole.rows} == {0, 1, 2}
    pushed = play("pd-always", SHORT, **roles, pushes=True)
    assert all(row.prefill == 0 for row in pushed.rows)
    # while one prompt is computed, what was computed of it is on its way
    assert compute_measures(pushed.rows, 1.0, LatencyObjective()).ttft_s.mean < (
        compute_measures(always.rows, 1.0, LatencyObjective()).ttft_s.mean
    )


def test_expected_seconds_lose_less_than_a_rule_by_length_where_prefill_engines_are_few() -> None:
    long = "chat:sessions=60,sessions_per_s=8,system_prompts=60,system_tokens=12000,turns=2"
    ttft_s = {
        policy: compute_measures(play(policy, long, network="100gb").rows, 1.0, LatencyObjective()).ttft_s.mean
        for policy in ("pd-attache", "pd-llm-d", "pd-always")
    }
    assert ttft_s["pd-attache"] < 0.7 * ttft_s["pd-llm-d"]
    assert ttft_s["pd-attache"] < 0.7 * ttft_s["pd-always"]


def test_pairs_need_roles() -> None:
    with pytest.raises(PolicyFailed, match="--prefill N and --decode N"):
        check_trials([Trial("pd-attache", TrialConditions(SHORT))])


def test_unequal_engines_are_told_apart_without_a_word() -> None:
    trace = "heavy-tail:requests=400,rate=25,sigma=0.5,median=4000,output=20"
    report = play("attache", trace, hardware="h100*2+l40s*2", engines=4)
    served = [sum(1 for row in report.rows if row.engine == engine) for engine in range(4)]
    # an L40S prefills a third as fast
    assert sum(served[:2]) > 2 * sum(served[2:])


def test_a_queue_before_the_engines_holds_and_loses_nobody() -> None:
    trace = "heavy-tail:requests=150,rate=40,output=20"
    queue = '{"fairness": "GlobalStrict", "timeout": "59m", "saturation": {"queueDepth": 1}}'
    report = play("llm-d-token-load", trace, flow_control=queue, engines=2)
    assert not any(row.error for row in report.rows)
    assert {row.engine for row in report.rows} == {0, 1}


def test_prompts_that_fit_no_cache_are_errors_and_not_waits() -> None:
    report = play("attache", "heavy-tail:requests=20,median=100000,longest=900000,sigma=1", hardware="l40s")
    assert {row.error for row in report.rows} == {"", "longer than the KV cache"}


@pytest.mark.parametrize(
    ("words", "count", "gpus"),
    [("h100", 3, [1, 1, 1]), ("h100x4", 2, [4, 4]), ("h100*1+l40sx2*2", 8, [1, 2, 2]), ("h100+l40s", 3, [1, 1, 1])],
)
def test_engines_by_words(words: str, count: int, gpus: list[int]) -> None:
    kinds = engine_profiles(words, "8b", count=count, block_size=16)
    assert len(kinds) == len(gpus)
    with pytest.raises(HardwareUnknown, match="h200"):
        engine_profiles(words + "!", "8b", count=count, block_size=16)


def test_dynamos_mocked_engines_take_its_polynomials_times() -> None:
    (kind,) = engine_profiles("dynamo-mocker", "8b", count=1, block_size=64)
    from bench.engine.step_time import StepWork, step_batch  # noqa: PLC0415

    # 16.5 + 15.18 + 0.421 ms; and half of the cache in use: 5.74 + 27.005 - 6.435 ms
    assert kind.speed.seconds(step_batch([StepWork(1000, 0)])) == pytest.approx(0.032101)
    assert kind.speed.seconds(step_batch([StepWork(1, 16_384 * 32)])) == pytest.approx(0.02631)
    assert kind.limits.num_gpu_blocks == 16_384
