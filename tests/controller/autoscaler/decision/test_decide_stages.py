# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode engines that are scaled apart, second by second: which load moves which of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from controller.api.autoscaling import LatencyObjective
from controller.api.autoscaling_binding import (
    AutoscalingPolicyBinding,
    AutoscalingPolicyBindingSpec,
    RatioConstraint,
)
from controller.api.autoscaling_policy import AutoscalingPolicySpec, Strategy
from controller.autoscaler.decision.decide import decide
from controller.autoscaler.decision.situation import (
    Engine,
    EngineReport,
    EngineState,
    ReplicaSpeed,
    Situation,
    TargetSituation,
    objective_of_stage,
)
from controller.autoscaler.decision.traffic import Traffic, TrafficPoint, TrafficTotals
from extproc.api.quantities import Duration
from extproc.api.spec import Metadata
from extproc.api.status_page_contents import TPOT_BOUNDS_S, TTFT_BOUNDS_S, bucket_index
from tests.controller.autoscaler.decision.situations import spec_of

if TYPE_CHECKING:
    from controller.autoscaler.decision.saved_state import BindingMemory

SPEED = ReplicaSpeed(
    prefill_tokens_per_s=15_000.0, step_s=0.008, step_s_per_token=8e-8, kv_tokens=400_000.0, is_measured=True
)
OBJECTIVE = LatencyObjective(ttft=Duration("2s"), tpot=Duration("40ms"))
START_S = 60.0
RATE = 3
USUAL = (1000.0, 200.0)


class Fleet:
    """One group: engines of each stage, a queue before each, three requests a second."""

    def __init__(
        self, *, strategy: str = "Work", most_prefill: int = 12, ratio: tuple[float, float] | None = None
    ) -> None:
        self.policy = AutoscalingPolicySpec(objective=OBJECTIVE, strategies=(Strategy(name=strategy),))
        self.specs = (
            spec_of("prefill", most=most_prefill, stage="Prefill"),
            spec_of("decode", most=12, stage="Decode"),
        )
        ratios = () if ratio is None else (RatioConstraint("prefill", "decode", *ratio),)
        self.binding = AutoscalingPolicyBinding(
            metadata=Metadata(name="pair"),
            spec=AutoscalingPolicyBindingSpec(policy_ref="policy", targets=self.specs, ratios=ratios),
        )
        self.now_s = 1_780_000_000.0
        self.engines = {one.name: [self.now_s - 1000.0] for one in self.specs}
        self.memory: BindingMemory | None = None
        self.work = {"prefill": 0.0, "decode": 0.0}
        self.sums = {"arrivals": 0.0, "prompt": 0.0, "output": 0.0}
        self.histograms = ([0] * (len(TTFT_BOUNDS_S) + 1), [0] * (len(TPOT_BOUNDS_S) + 1))
        self.points = [TrafficPoint(self.now_s, TrafficTotals())]

    def run(self, seconds: int, prompt: float, output: float) -> Fleet:
        for second in range(seconds):
            self.second(prompt, output)
            if second % 5 == 0:
                self.decide()
        return self

    def second(self, prompt: float, output: float) -> None:
        self.now_s += 1.0
        need = {
            "prefill": prompt / SPEED.prefill_tokens_per_s,
            "decode": output * SPEED.step_s_per_token * (prompt + output / 2),
        }
        busy, waits_s = {}, {}
        for name, each_s in need.items():
            ready = len([one for one in self.engines[name] if self.is_ready(one)])
            work_s = self.work[name] + RATE * each_s
            self.work[name] = max(0.0, work_s - ready)
            busy[name], waits_s[name] = min(0.95, work_s / ready), self.work[name] / ready
        self.sums["arrivals"] += RATE
        self.sums["prompt"] += RATE * prompt
        self.sums["output"] += RATE * output
        ttft_s = waits_s["prefill"] + need["prefill"] / (1 - busy["prefill"] / 2)
        self.histograms[0][bucket_index(ttft_s, TTFT_BOUNDS_S)] += RATE
        self.histograms[1][bucket_index(SPEED.step_s / (1 - busy["decode"]), TPOT_BOUNDS_S)] += RATE
        self.in_flight = {
            "prefill": round(self.work["prefill"] / need["prefill"]),
            "decode": round(self.work["decode"] / need["decode"] + RATE * output * SPEED.step_s / (1 - busy["decode"])),
        }
        ttft, tpot = (tuple(one) for one in self.histograms)
        prompts = self.sums["prompt"]
        totals = TrafficTotals(
            self.sums["arrivals"], 0.0, self.sums["arrivals"], prompts, 0.0, self.sums["output"], prompts
        )
        self.points.append(TrafficPoint(self.now_s, msgspec.structs.replace(totals, ttft=ttft, tpot=tpot)))

    def is_ready(self, created_at_s: float) -> bool:
        return self.now_s - created_at_s >= START_S

    def decide(self) -> None:
        situations = [self.situation(TargetSituation(spec, len(self.engines[spec.name]))) for spec in self.specs]
        decision, self.memory = decide(self.policy, self.binding, situations, self.memory, self.now_s)
        for target in decision.targets:
            there = self.engines[target.name]
            assert target.desired is not None
            there += [self.now_s] * (target.desired - len(there))
            del there[target.desired :]

    def situation(self, target: TargetSituation) -> Situation:
        name, there = target.name, self.engines[target.name]
        ready = len([one for one in there if self.is_ready(one)])
        report = EngineReport(self.now_s, in_flight=self.in_flight[name] // ready)
        engines = tuple(
            Engine(f"{name}-{number}", EngineState.READY, one, one + START_S, report)
            if self.is_ready(one)
            else Engine(f"{name}-{number}", EngineState.STARTING, one)
            for number, one in enumerate(there)
        )
        return Situation(
            now_s=self.now_s,
            targets=(msgspec.structs.replace(target, engines=engines, speed=SPEED, start_s=START_S),),
            traffic=Traffic(tuple(self.points[-900:])),
            objective=objective_of_stage(self.policy.objective, target.spec.stage),
        )

    @property
    def replicas(self) -> tuple[int, int]:
        return len(self.engines["prefill"]), len(self.engines["decode"])


def test_long_prompts_scale_prefill_alone() -> None:
    fleet = Fleet().run(420, *USUAL)
    assert fleet.replicas == (1, 1)
    fleet.run(900, 8000.0, 100.0)
    prefill, decode = fleet.replicas
    # 3 * 8000 / 15,000 is 1.6 engines' time, without any room
    assert prefill >= 2
    assert decode == 1


def test_long_answers_scale_decode_alone() -> None:
    fleet = Fleet().run(420, *USUAL)
    fleet.run(900, 1000.0, 4000.0)
    prefill, decode = fleet.replicas
    # 3 * 4000 * 8e-8 * 3000 is 2.9 engines' time
    assert prefill == 1
    assert decode >= 3


@pytest.mark.parametrize("strategy", ["Work", "Slo"])
def test_prompts_that_wait_for_prefill_engines_are_no_reason_for_decode_engines(strategy: str) -> None:
    """There may be no more than two prefill engines, and first tokens come late."""
    fleet = Fleet(strategy=strategy, most_prefill=2).run(420, *USUAL)
    fleet.run(900, 12_000.0, 100.0)
    assert fleet.replicas == (2, 1)


def test_slow_answers_are_no_reason_for_prefill_engines() -> None:
    fleet = Fleet(strategy="Slo").run(420, *USUAL)
    fleet.run(900, 1000.0, 4000.0)
    prefill, decode = fleet.replicas
    assert prefill == 1
    assert decode >= 3


def test_the_ratio_holds_while_only_one_stage_has_more_load() -> None:
    fleet = Fleet(ratio=(0.5, 2.0)).run(420, *USUAL)
    fleet.run(900, 1000.0, 4000.0)
    prefill, decode = fleet.replicas
    assert decode >= 3
    assert prefill == -(-decode // 2)


def test_a_policy_with_an_objective_for_the_other_stage_alone_keeps_it() -> None:
    assert objective_of_stage(OBJECTIVE, "Prefill") == LatencyObjective(ttft=Duration("2s"))
    assert objective_of_stage(OBJECTIVE, "Decode") == LatencyObjective(tpot=Duration("40ms"))
    assert objective_of_stage(OBJECTIVE, "Both") is OBJECTIVE
    alone = LatencyObjective(ttft=Duration("2s"))
    assert objective_of_stage(alone, "Decode") is alone
    assert objective_of_stage(None, "Decode") is None
