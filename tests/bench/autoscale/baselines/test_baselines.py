# SPDX-License-Identifier: Apache-2.0
"""Each baseline's strategy on cases worked out by hand from its code."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from bench.autoscale.baselines.aibrix import AibrixApa
from bench.autoscale.baselines.baseline import hpa, kpa
from bench.autoscale.baselines.dynamo import DynamoPlanner, DynamoState, MeanRequest
from bench.autoscale.baselines.kthena import (
    Kthena,
    RecommendationSample,
    recommended_instances,
    smallest_corrected_replicas,
)
from bench.autoscale.baselines.llm_d import KedaQueue, KedaSlo
from bench.autoscale.baselines.wva import RequestMeans, WvaV1, WvaV2, analyze_saturation, median
from controller.api.autoscaling import LatencyObjective
from controller.api.autoscaling_binding import ScaleTarget
from controller.api.shared_types import ObjectReference
from controller.autoscaler.decision.situation import Backlog, EngineReport, EngineState, ReplicaSpeed, Situation
from controller.autoscaler.decision.strategies.spare_capacity import SpareCapacityParameters
from controller.autoscaler.decision.traffic import Traffic
from extproc.api.quantities import Duration
from tests.examples import examples
from tests.scaling_scenes import engine, latencies, pool, report, situation, some_report, steady, target

if TYPE_CHECKING:
    from bench.autoscale.baselines.baseline import Baseline

PROMISED = LatencyObjective(Duration("1s"), Duration("100ms"))
SPEED = ReplicaSpeed(prefill_tokens_per_s=10_000.0, step_s=0.01, step_s_per_token=1e-6, kv_tokens=100_000)


def once(baseline: Baseline[Any], seen: Situation) -> int:
    return baseline.desired_replicas(seen, None)[0]


def played(baseline: Baseline[Any], story: list[Situation]) -> list[int]:
    """What a baseline answers when its answers come true at once; the situations' engines are repeated or left out."""
    memory, answers, now_s, replicas = None, [], 0.0, story[0].targets[0].current or 0
    for seen in story:
        load = seen.targets[0].engines[0].report
        fleet = target((engine(f"e{number}", load) for number in range(replicas)), current=replicas)
        replicas, memory = baseline.desired_replicas(
            msgspec.structs.replace(seen, targets=(fleet,), now_s=now_s), memory
        )
        answers.append(replicas)
        now_s += baseline.period_s
    return answers


def test_hpa_takes_the_larger_of_running_and_waiting_and_doubles_at_most() -> None:
    seen = pool(report(running=30, waiting=0), report(running=30, waiting=0), waiting=Backlog(requests=8))
    assert once(hpa(running=20, waiting=4), seen) == 3
    assert once(hpa(running=20, waiting=2), seen) == 4
    assert once(hpa(running=2), pool(*[report(in_flight=90)] * 5)) == 10


def test_hpa_scales_in_after_five_minutes() -> None:
    answers = played(hpa(running=10), [pool(*[report(in_flight=1)] * 4)] * 25)
    assert answers[:20] == [4] * 20
    assert answers[20:] == [1] * 5


def test_kpa_counts_what_waits() -> None:
    assert once(kpa(target=10, utilization=0.7), pool(report(in_flight=10), waiting=Backlog(requests=11))) == 3


def test_llm_d_counts_queue_and_running() -> None:
    assert once(KedaQueue(), pool(report(in_flight=20), waiting=Backlog(requests=2))) == 2
    assert once(KedaQueue(), pool(*[report(in_flight=40)] * 2)) == 4
    assert once(KedaQueue(up_window_s=300), pool(*[report(in_flight=40)] * 2)) == 2


def test_llm_ds_latency_strategy_is_its_formula() -> None:
    strategy = KedaSlo(PROMISED)
    assert strategy.replicas_for_latency_share(1.1, 4, 4) == 8
    assert strategy.replicas_for_latency_share(1.1, 8, 4) == 8
    assert strategy.replicas_for_latency_share(0.6, 10, 5) == 6
    assert strategy.replicas_for_latency_share(0.2, 10, 10) == 5
    assert strategy.replicas_for_latency_share(0.5, 7, 7) == 7


def test_llm_ds_latency_strategy_takes_silence_for_idleness_and_leaves_slowly() -> None:
    answers = played(KedaSlo(PROMISED), [pool(*[report(in_flight=5)] * 4)] * 40)
    assert answers[11] == 4
    # one pod in 120 s after 180 s
    assert answers[12:20] == [3] * 8
    assert answers[20] == 2


def test_wva_v1_takes_an_engine_away_beside_a_full_one() -> None:
    # spare: 0.55 and 5; with one fewer of the two that it looks at: load 0.25 * 2, spare 0.3
    found = analyze_saturation([(0.2, 0), (0.3, 0), (0.9, 7)], SpareCapacityParameters())
    assert (found.unsaturated, found.scale_up, found.scale_down_safe) == (2, False, True)
    assert found.kv_spare == pytest.approx(0.55)
    seen = pool(report(kv=0.2, waiting=0), report(kv=0.3, waiting=0), report(kv=0.9, waiting=7))
    assert once(WvaV1(), seen) == 2


def test_wva_v1_with_all_engines_full() -> None:
    found = analyze_saturation([(0.85, 2), (0.5, 6), (0.9, 7)], SpareCapacityParameters())
    assert (found.unsaturated, found.kv_spare, found.scale_up, found.scale_down_safe) == (0, 0.0, True, False)
    assert analyze_saturation([], SpareCapacityParameters()).scale_up is False


def test_wva_v1_agrees_with_the_references_formulas_in_many_cases() -> None:
    rng, given = random.Random(17), SpareCapacityParameters()
    for _ in range(examples(10_000)):
        loads = [(rng.random(), float(rng.choice((0, 0, 1, 2, 5, 9)))) for _ in range(rng.randrange(1, 9))]
        calm = [(kv, queue) for kv, queue in loads if not (kv >= 0.8 or queue >= 5)]
        count = len(calm)
        kv = sum(one for one, _ in calm) / count if count else 0.8
        queue = sum(one for _, one in calm) / count if count else 5.0
        found = analyze_saturation(loads, given)
        assert found.scale_up == (0.8 - kv < 0.1 or 5 - queue < 3)
        assert found.scale_down_safe == (
            count >= 2 and 0.8 - kv * count / (count - 1) >= 0.1 and 5 - queue * count / (count - 1) >= 3
        )


def test_wva_v1_does_nothing_in_transition() -> None:
    full = [engine("e", report(kv=0.9, waiting=9))]
    assert once(WvaV1(), situation(target(full))) == 2
    assert once(WvaV1(), situation(target([*full, engine("s", state=EngineState.STARTING)]))) == 2


def test_wva_v2_gives_all_that_is_missing() -> None:
    def holding(tokens: int, waiting: int = 0) -> Situation:
        return pool(report(kv=tokens / 100_000, waiting=waiting, cache=100_000), waiting=Backlog(tokens=80_000))

    # (60,000 + 80,000) / 0.85 - 80,000 = 84,706
    assert once(WvaV2(), holding(60_000)) == 3
    assert once(WvaV2(), pool(*[report(kv=0.25, waiting=0, cache=100_000)] * 4)) == 2
    assert once(WvaV2(), pool(report(kv=0.9, waiting=0))) == 1


def test_wva_v2_learns_from_full_queues() -> None:
    strategy, history, means = WvaV2(), {}, RequestMeans(1000, 200)
    one = report(cache=100_000)
    assert strategy.capacity_of(one, 30_001, 5, means, history) == 30_001
    assert strategy.capacity_of(one, 20_000, 9, means, history) == 20_000
    assert strategy.capacity_of(one, 20_000, 4, means, history) == 25_000
    # a class of which nothing was seen: 256 sequences of 1,300 tokens are more than the cache
    assert strategy.capacity_of(one, 20_000, 0, RequestMeans(1000, 600), history) == 80_000
    assert strategy.capacity_of(report(cache=1_000_000), 0, 0, RequestMeans(10, 600), history) == 256 * 310
    assert median([1, 2]) == 1


def test_kthenas_ratio() -> None:
    assert recommended_instances([20, 20], 10, current=2, unready=0, missing=0, tolerance=0.1) == 4
    assert recommended_instances([10.5, 10.5], 10, current=2, unready=0, missing=0, tolerance=0.1) == 2
    assert recommended_instances([20], 10, current=3, unready=2, missing=0, tolerance=0.1) == 3
    assert recommended_instances([40], 10, current=3, unready=2, missing=0, tolerance=0.1) == 4
    assert recommended_instances([1, 1], 10, current=4, unready=0, missing=2, tolerance=0.1) == 3
    assert recommended_instances([], 10, current=4, unready=0, missing=2, tolerance=0.1) is None


def test_kthena_doubles_panics_and_comes_back_at_once() -> None:
    busy, idle = pool(*[report(in_flight=45)] * 2), pool(*[report(in_flight=1)] * 2)
    answers = played(Kthena(10), [busy, idle, idle, idle, idle, idle, idle])
    # asked for nine, four and a half times as many: panic, held for 60 s; then in by everything that a period allows
    assert answers[:5] == [9, 9, 9, 9, 9]
    assert answers[5:] == [1, 1]


def test_kthena_without_panic_doubles_in_a_period() -> None:
    # 1.9 times as many is below the threshold of panic
    assert once(Kthena(10), pool(*[report(in_flight=19)] * 10)) == 19
    assert once(Kthena(10, panic_threshold_percent=1000), pool(*[report(in_flight=90)] * 2)) == 4


def test_kthenas_window_of_corrected_numbers() -> None:
    samples = (RecommendationSample(0.0, 9, 3), RecommendationSample(15.0, 9, 6), RecommendationSample(30.0, 9, 12))
    assert smallest_corrected_replicas(samples, 12, 15.0, 45.0) == 6
    assert smallest_corrected_replicas(samples, 12, 15.0, 30.0) == 3
    assert smallest_corrected_replicas(samples, 20, 15.0, 60.0) == 12
    assert smallest_corrected_replicas(samples, 20, 15.0, 61.0) == 20


def test_aibrix_changes_by_at_most_two() -> None:
    strategy = AibrixApa(10)
    assert strategy.replicas_for_mean(15, 4) == 6
    assert strategy.replicas_for_mean(50, 4) == 8
    assert strategy.replicas_for_mean(10.9, 4) == 4
    assert strategy.replicas_for_mean(7, 4) == 3
    assert strategy.replicas_for_mean(1, 5) == 2
    assert once(strategy, pool(*[report(in_flight=10)] * 2, waiting=Backlog(requests=20))) == 4


def test_aibrix_scales_in_after_its_cooldown() -> None:
    answers = played(AibrixApa(10), [pool(*[report(in_flight=1)] * 4)] * 32)
    assert answers[29] == 4
    assert answers[30] == 2


def planned(
    *reports: EngineReport, waiting: Backlog | None = None, traffic: Traffic | None = None, floor: int = 0
) -> int:
    seen = pool(*reports, waiting=waiting or Backlog(), traffic=traffic or steady(requests=1, prompt=1000, answer=100))
    targets = (msgspec.structs.replace(seen.targets[0], speed=SPEED),)
    memory = DynamoState(floor, seen.now_s - 5.0)
    return DynamoPlanner(PROMISED).desired_replicas(msgspec.structs.replace(seen, targets=targets), memory)[0]


def test_dynamo_adds_one_when_every_engine_is_late() -> None:
    # ten prompts of 1,000 tokens wait at each, and the own one: 1.1 s
    slow, quick = report(waiting=10, tokens=1000.0), report(waiting=0, tokens=1000.0)
    assert planned(slow, slow) == 3
    assert planned(slow, quick) == 2
    # a step of 0.01 + 0.095 s
    assert planned(*[report(waiting=0, tokens=95_000.0)] * 2) == 3


def test_dynamo_takes_one_away_when_the_others_would_keep_most_of_the_objective() -> None:
    assert planned(*[report(waiting=0, tokens=10_000.0)] * 3) == 2
    # two thirds of the queue more would be 0.75 s, of 0.72 s that are allowed
    assert planned(*[report(waiting=5, tokens=10_000.0)] * 3) == 3
    assert planned(*[report(waiting=0, tokens=50_000.0)] * 3) == 3
    assert planned(report(waiting=0, tokens=0.0)) == 1


def test_dynamo_keeps_the_floor_of_its_throughput_and_sets_it_every_three_minutes() -> None:
    assert planned(*[report(waiting=0)] * 3, floor=5) == 5
    strategy = DynamoPlanner(PROMISED)
    # 90,000 tokens in flight keep a step at 0.1 s; a request has 1,050 of them in the mean
    at_once = 90_000 / 1050
    assert strategy.engine_requests_per_s(SPEED, MeanRequest(1, 1000, 1000, 100)) == pytest.approx(
        1 / (0.1 + 100 * 0.1 / at_once)
    )
    seen = pool(*[report(waiting=0)] * 2, traffic=steady(requests=20, prompt=1000, answer=100))
    seen = msgspec.structs.replace(seen, targets=(msgspec.structs.replace(seen.targets[0], speed=SPEED),))
    # 20 a second, of which an engine carries 4.6
    assert strategy.desired_replicas(seen, DynamoState(0, seen.now_s - 180))[0] == 5


def test_dynamo_waits_while_replicas_start() -> None:
    late = [engine("e", report(waiting=10)), engine("s", state=EngineState.STARTING)]
    seen = situation(target(late), traffic=steady(requests=1, prompt=1000, answer=100))
    seen = msgspec.structs.replace(seen, targets=(msgspec.structs.replace(seen.targets[0], speed=SPEED),))
    assert DynamoPlanner(PROMISED).desired_replicas(seen, None)[0] == 2


BASELINES: dict[str, Baseline[Any]] = {
    "hpa": hpa(running=16, waiting=2),
    "kpa": kpa(target=16),
    "keda-queue": KedaQueue(),
    "keda-slo": KedaSlo(PROMISED),
    "wva-v1": WvaV1(),
    "wva-v2": WvaV2(),
    "kthena": Kthena(16),
    "aibrix": AibrixApa(16),
    "dynamo": DynamoPlanner(PROMISED),
}


@pytest.mark.parametrize("name", BASELINES)
def test_every_baseline_keeps_within_bounds_whatever_it_sees(name: str) -> None:
    rng, baseline, memory = random.Random(18), BASELINES[name], None
    spec = ScaleTarget("a", ObjectReference("ModelInfer", "a"), 12, min_replicas=2)
    replicas = 3
    for step in range(300):
        ready = rng.randrange(replicas + 1)
        fleet = [engine(f"e{number}", some_report(rng)) for number in range(ready)]
        fleet += [engine(f"s{number}", state=EngineState.STARTING) for number in range(replicas - ready)]
        now_s = step * baseline.period_s
        traffic = rng.choice(
            (Traffic(), steady(requests=3, prompt=900, answer=90, now_s=now_s), latencies(ttft_s=3, now_s=now_s))
        )
        seen = situation(
            msgspec.structs.replace(target(fleet, spec=spec), speed=rng.choice((None, SPEED))),
            traffic=traffic,
            waiting=Backlog(rng.choice((0, 0, 7, 90)), float(rng.choice((0, 5_000, 90_000)))),
            now_s=now_s,
        )
        replicas, memory = baseline.desired_replicas(seen, memory)
        assert 2 <= replicas <= 12
