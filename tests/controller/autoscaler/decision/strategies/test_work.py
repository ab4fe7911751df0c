# SPDX-License-Identifier: Apache-2.0
"""The work strategy, with numbers worked out by hand."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec
import pytest

from controller.api.autoscaling import LatencyObjective
from controller.autoscaler.decision.situation import Backlog, EngineReport, Situation
from controller.autoscaler.decision.strategies.work import (
    LatencyCorrection,
    WorkMemory,
    WorkParameters,
    WorkStrategy,
)
from extproc.api.quantities import Duration
from tests.controller.autoscaler.decision.situations import NOW_S, SPEED, situation_of, spec_of, target_of, traffic_of

if TYPE_CHECKING:
    from controller.autoscaler.decision.decision import Recommendation

# 0.21 s of an engine a request, see `situations`.
TPOT = LatencyObjective(tpot=Duration("40ms"), percentile=50.0)


def asked(situation: Situation, **parameters: object) -> Recommendation:
    """What the strategy asks for at first, with no room unless it is said."""
    fields = {"headroom": 1.0} | parameters
    return WorkStrategy(WorkParameters(**fields)).recommend(situation, None)[0]  # type: ignore[arg-type]


def factor(memory: WorkMemory) -> float:
    """Of the correction."""
    assert memory.correction is not None
    return memory.correction.factor


def test_without_an_objective_engines_are_four_fifths_busy() -> None:
    found = asked(situation_of(target_of(ready=4), traffic=traffic_of(12.0)))
    # 12 * 0.21 / 0.8 = 3.15, and 15% more as that is fewer than there are
    assert found.replicas == pytest.approx(3.15 * 1.15)
    assert "engines at most 80% busy" in found.reason


def test_the_objective_of_tpot_says_how_busy_engines_may_be() -> None:
    # a step of 10 ms within 40 ms: 0.75; at the median no room for noise
    found = asked(situation_of(target_of(ready=1), traffic=traffic_of(4.0), objective=TPOT))
    assert found.replicas == pytest.approx(4 * 0.21 / 0.75)
    assert "TPOT within 40ms" in found.reason


def test_steps_that_do_not_grow_with_context_have_an_objective_all_the_same() -> None:
    flat = msgspec.structs.replace(SPEED, step_s_per_token=0.0)
    found = asked(situation_of(target_of(ready=1, speed=flat), traffic=traffic_of(4.0), objective=TPOT))
    # 0.1 s of prefill each, a step of 10 ms within 40 ms, and 15% more as that is fewer than there are
    assert found.replicas == pytest.approx(4 * 0.1 / 0.75 * 1.15)
    assert "TPOT within 40ms" in found.reason


def test_a_written_utilization_takes_its_place() -> None:
    found = asked(situation_of(target_of(ready=1), traffic=traffic_of(4.0), objective=TPOT), utilization=0.5)
    assert found.replicas == pytest.approx(4 * 0.21 / 0.5)


def test_a_short_ttft_binds() -> None:
    objective = LatencyObjective(ttft=Duration("150ms"), tpot=Duration("1s"), percentile=90.0)
    found = asked(situation_of(target_of(ready=9), traffic=traffic_of(12.0), objective=objective))
    assert "TTFT within 150ms" in found.reason


def test_small_caches_bind() -> None:
    small = msgspec.structs.replace(SPEED, kv_tokens=10_000.0)
    found = asked(situation_of(target_of(ready=2, speed=small), traffic=traffic_of(4.0), objective=TPOT))
    # 4 * (0.1 + 200 * 0.04) * 1,100 tokens in flight, 9,000 in each cache
    assert found.replicas == pytest.approx(4 * 8.1 * 1100 / 9000)
    assert "caches" in found.reason


def test_each_stage_counts_its_own_work() -> None:
    prefill = target_of(ready=9, spec=spec_of(stage="Prefill"))
    decode = target_of(ready=9, spec=spec_of(stage="Decode"))
    assert asked(situation_of(prefill, traffic=traffic_of(40.0))).replicas == pytest.approx(40 * 0.1 / 0.8 * 1.15)
    assert asked(situation_of(decode, traffic=traffic_of(40.0))).replicas == pytest.approx(40 * 0.11 / 0.8 * 1.15)


def test_a_rise_is_continued_over_the_start_time() -> None:
    rising = traffic_of(lambda second: 40.0 + second * 0.05)
    target = target_of(ready=20)
    with_trend = asked(situation_of(target, traffic=rising))
    without = asked(situation_of(target, traffic=rising), trend=False)
    # at the end of the start time of 60 s there are 43 a second; of the rise to come 0.7 are believed
    assert with_trend.inputs["arrivals_per_s_ahead"] == pytest.approx(40 + 0.7 * 3, rel=0.01)
    assert without.inputs["arrivals_per_s_ahead"] < 40


def test_what_waits_calls_for_replicas_that_work_it_off() -> None:
    # 100,000 tokens of prompts and 100 answers: 10 s + 11 s of work. One engine of 0.9 has 0.42 left of arrivals' 0.48:
    # in a minute 21 + 60 * (0.42 - 0.9) = -7.8, so it copes
    situation = situation_of(target_of(ready=1), traffic=traffic_of(2.0), waiting=Backlog(100, 100_000.0, 3.0))
    assert asked(situation).inputs["replicas_for_backlog"] == 0
    # three times as much: 63 - 28.8 = 34.2 s left, to be done within half of the start time: 0.42 + 34.2 / 30
    much = msgspec.structs.replace(situation, waiting=Backlog(300, 300_000.0, 3.0))
    assert asked(much).inputs["replicas_for_backlog"] == pytest.approx(0.42 + 34.2 / 30)


def test_what_is_starting_is_not_ordered_twice() -> None:
    waiting = Backlog(300, 300_000.0, 3.0)
    alone = asked(situation_of(target_of(ready=1), traffic=traffic_of(2.0), waiting=waiting))
    # another one is ready in 10 s, and takes 45 s of work off within the minute
    helped = target_of(ready=1, starting=1, age_s=50.0)
    assert alone.inputs["backlog_left_s"] == pytest.approx(34.2)
    assert asked(situation_of(helped, traffic=traffic_of(2.0), waiting=waiting)).inputs["backlog_left_s"] == 0


def test_queues_of_engines_are_backlog_too() -> None:
    target = target_of(ready=1)
    busy = msgspec.structs.replace(target.engines[0], report=EngineReport(NOW_S, waiting=301.0))
    situation = situation_of(msgspec.structs.replace(target, engines=(busy,)), traffic=traffic_of(2.0))
    assert asked(situation).inputs["backlog_left_s"] == pytest.approx(300 * 0.21 - 60 * (0.9 - 0.42))


def test_nothing_arrives_and_nothing_waits() -> None:
    assert asked(situation_of(target_of(ready=3), traffic=traffic_of(0.0))).replicas == 0


def test_without_traffic_the_strategy_does_not_know() -> None:
    assert asked(situation_of(target_of(ready=3))).replicas is None


def test_unknown_speeds_grow_by_requests_in_flight_and_never_shrink() -> None:
    target = target_of(ready=2, speed=None)
    busy = tuple(msgspec.structs.replace(one, report=EngineReport(NOW_S, in_flight=64)) for one in target.engines)
    situation = situation_of(msgspec.structs.replace(target, engines=busy), traffic=traffic_of(2.0))
    assert asked(situation).replicas == pytest.approx(4.0)
    assert asked(situation_of(target, traffic=traffic_of(2.0))).replicas == 2


class TestCorrection:
    """Measured latency guards the model."""

    def followed(self, ttft_s: float, *, looks: int = 36, starting: int = 0) -> WorkMemory:
        """After minutes with this latency and one engine that should be enough."""
        strategy, memory = WorkStrategy(), None
        objective = LatencyObjective(ttft=Duration("1s"))
        for look in range(looks):
            now_s = NOW_S + 5 * look
            situation = situation_of(
                target_of(ready=1, starting=starting),
                traffic=traffic_of(1.0, now_s=now_s, ttft_s=ttft_s, tpot_s=0.02),
                objective=objective,
                now_s=now_s,
            )
            _, memory = strategy.recommend(situation, memory)
        assert memory is not None
        return memory

    def test_late_answers_that_the_model_cannot_explain_raise_it(self) -> None:
        # enough for more than three minutes first: 37 looks; then 12 at the full rate of 1 / 240 s
        assert factor(self.followed(5.0, looks=49)) == pytest.approx((1 + 5 / 240) ** 12)

    def test_it_is_bounded(self) -> None:
        assert factor(self.followed(5.0, looks=120)) == 2.0

    def test_answers_in_time_leave_it(self) -> None:
        assert factor(self.followed(0.2)) == 1.0

    def test_what_starts_is_waited_for(self) -> None:
        assert factor(self.followed(5.0, starting=1)) == 1.0

    @pytest.mark.parametrize(("tpot_s", "correction"), [(0.0125, 0.5), (0.0155, 0.707), (0.022, 1.0), (0.035, 1.714)])
    def test_in_a_steady_minute_it_follows_measured_tpot(self, tpot_s: float, correction: float) -> None:
        # The median of values in one bucket is its middle: 11.3, 14.22, 22.54 and 35.72 ms. Where an idle step takes 10
        # ms, they show an engine that is 0.115, 0.297, 0.556 and 0.72 busy; 2 * 0.21 s are expected. Half of that is
        # the least that is believed, and more only near the objective.
        strategy, memory = WorkStrategy(), None
        for look in range(240):
            now_s = NOW_S + 5 * look
            situation = situation_of(
                target_of(ready=1),
                traffic=traffic_of(2.0, now_s=now_s, seconds=120, ttft_s=0.2, tpot_s=tpot_s),
                objective=TPOT,
                now_s=now_s,
            )
            _, memory = strategy.recommend(situation, memory)
        assert memory is not None
        assert factor(memory) == pytest.approx(correction, abs=0.02)

    @pytest.mark.parametrize("more", [0, 2])
    def test_late_tokens_raise_it_at_once_by_the_fewest_replicas_of_their_time(self, more: int) -> None:
        # Values in the bucket of 0.05 s are 44.9 ms in the middle: an engine that is 0.777 busy, where 2 * 0.21 s were
        # expected of it. Replicas that came half a minute ago have not written these tokens.
        strategy, memory = WorkStrategy(), None
        for look in range(18):
            now_s = NOW_S + 5 * look
            situation = situation_of(
                target_of(ready=1 if look < 12 else 1 + more),
                traffic=traffic_of(2.0, now_s=now_s, seconds=120, ttft_s=0.2, tpot_s=0.05),
                objective=TPOT,
                now_s=now_s,
            )
            _, memory = strategy.recommend(situation, memory)
        assert memory is not None
        assert factor(memory) == pytest.approx(1 + 0.851 * (1 - (11 / 12) ** 17), abs=0.01)

    def test_it_fades(self) -> None:
        situation = situation_of(target_of(ready=9), traffic=traffic_of(2.0), now_s=NOW_S)
        _, memory = WorkStrategy().recommend(
            situation, WorkMemory(NOW_S - 60, LatencyCorrection(at_s=NOW_S - 60, factor=2.0))
        )
        assert memory is not None
        assert factor(memory) == pytest.approx(1 + math.pow(0.5, 60 / 3600))
