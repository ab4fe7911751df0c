# SPDX-License-Identifier: Apache-2.0
"""Dynamo's planner for engines that do both stages: a floor by throughput, and one more or fewer by estimated latency.

Source: ai-dynamo/dynamo, ``components/src/dynamo/planner/core/{load_scaling,throughput_scaling}.py``. Every 180 s the
arrivals of the last interval (predictor "constant") over what an engine carries within the objectives make the floor.
Every 5 s each engine's next TTFT and ITL are estimated:

- one more, if on every engine the TTFT, or on every engine the ITL, is above its objective;
- one fewer, if on every engine both would keep 80 % of it with N/(N-1) of the load, for TTFT of what the queue adds,
  and the cache would hold it;
- nothing while replicas are starting.

Its models are regressions on passes of the engines; here they are the speeds that the situation has of the target,
which is as if its regressions had learned them without error. Without speeds it does nothing.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from bench.autoscale.baselines.baseline import clamp_to_bounds, current_replicas, ready_reports, waiting_per_engine
from controller.api.autoscaling import LatencyObjective

if TYPE_CHECKING:
    from controller.autoscaler.decision.situation import EngineReport, ReplicaSpeed, Situation


class MeanRequest(msgspec.Struct, frozen=True):
    """Means of the interval: requests a second, tokens of a prompt (``uncached`` of them without a hit) and an
    answer.
    """

    per_s: float
    prompt: float
    uncached: float
    answer: float


class DynamoState(msgspec.Struct, frozen=True):
    """``floor``: by throughput. ``floor_at_s``: when it was set. ``request``: as it was then or later."""

    floor: int
    floor_at_s: float
    request: MeanRequest | None = None


class DynamoPlanner(msgspec.Struct, frozen=True):
    """``objective``: TTFT and TPOT (ITL), 500 ms and 50 ms if left out. ``sensitivity``: the share of them to keep."""

    objective: LatencyObjective | None = None
    sensitivity: float = 0.8
    interval_s: float = 180.0
    period_s: float = 5.0

    def desired_replicas(self, situation: Situation, memory: DynamoState | None) -> tuple[int, DynamoState | None]:
        """The larger of the floor and the load's answer."""
        now_s, speed, current = situation.now_s, situation.targets[0].speed, current_replicas(situation)
        before = memory if memory is not None else DynamoState(0, now_s)
        request = mean_request(situation, self.interval_s) or before.request
        if speed is None or request is None:
            return clamp_to_bounds(current, situation), before
        floor, floor_at_s = before.floor, before.floor_at_s
        if now_s - floor_at_s >= self.interval_s:
            carried = self.engine_requests_per_s(speed, request)
            floor, floor_at_s = math.ceil(request.per_s / carried) if carried > 0 else floor, now_s
        reports = [one for one in ready_reports(situation) if one is not None]
        is_steady = len(reports) == current and current > 0
        wanted = self._by_load(situation, reports, speed, request) if is_steady else current
        return clamp_to_bounds(max(wanted, floor), situation), DynamoState(floor, floor_at_s, request)

    def engine_requests_per_s(self, speed: ReplicaSpeed, request: MeanRequest) -> float:
        """Requests a second that an engine carries with its steps within the objective; at least one at a time."""
        context = request.prompt + request.answer / 2
        tokens = (
            (self.itl_objective_s - speed.step_s) / speed.step_s_per_token if speed.step_s_per_token > 0 else math.inf
        )
        tokens = min(tokens, speed.kv_tokens or math.inf)
        at_once = max(tokens / context if context > 0 else 1.0, 1.0)
        step_s = speed.step_s + speed.step_s_per_token * at_once * context
        each_s = request.uncached / speed.prefill_tokens_per_s + request.answer * step_s / at_once
        return 1 / each_s if each_s > 0 else math.inf

    def _by_load(
        self, situation: Situation, reports: list[EngineReport], speed: ReplicaSpeed, request: MeanRequest
    ) -> int:
        count, held = len(reports), waiting_per_engine(situation)
        more = count / (count - 1) if count > 1 else math.inf
        own_s = request.uncached / speed.prefill_tokens_per_s
        queues = [(one.waiting or 0.0) * request.uncached + held * request.uncached for one in reports]
        ttfts_s = [own_s + queue / speed.prefill_tokens_per_s for queue in queues]
        caches = [one.in_flight_tokens for one in reports]
        itls_s = [speed.step_s + speed.step_s_per_token * tokens for tokens in caches]
        if all(one > self.ttft_objective_s for one in ttfts_s) or all(one > self.itl_objective_s for one in itls_s):
            return count + 1
        if count == 1:
            return count
        budget_s = (self.ttft_objective_s - own_s) * self.sensitivity
        queues_fit = budget_s > 0 and all(queue * more / speed.prefill_tokens_per_s < budget_s for queue in queues)
        merged = [(tokens + queue) * more for tokens, queue in zip(caches, queues, strict=True)]
        caches_fit = all(
            tokens < (speed.kv_tokens or math.inf)
            and speed.step_s + speed.step_s_per_token * tokens < self.itl_objective_s * self.sensitivity
            for tokens in merged
        )
        return count - 1 if queues_fit and caches_fit else count

    @property
    def ttft_objective_s(self) -> float:
        """The objective of the first token."""
        given = self.objective.ttft if self.objective is not None else None
        return float(given) if given else 0.5

    @property
    def itl_objective_s(self) -> float:
        """The objective of each further token."""
        given = self.objective.tpot if self.objective is not None else None
        return float(given) if given else 0.05


def mean_request(situation: Situation, window_s: float) -> MeanRequest | None:
    """Means of the window; None if nothing was answered in it."""
    rates = situation.traffic.rates(window_s, situation.now_s)
    if rates is None or rates.finished <= 0:
        return None
    uncached = max(rates.prompt_tokens - rates.cached_tokens, 0.0)
    return MeanRequest(
        rates.arrivals,
        rates.prompt_tokens / rates.finished,
        uncached / rates.finished,
        rates.output_tokens / rates.finished,
    )
