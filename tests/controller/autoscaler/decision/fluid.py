# SPDX-License-Identifier: Apache-2.0
"""A deployment under load, second by second and without single requests: what `decide` does to it over hours."""

from __future__ import annotations

import itertools
import math
import random
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from controller.api.autoscaling_binding import (
    AutoscalingPolicyBinding,
    AutoscalingPolicyBindingSpec,
    ScaleTarget,
)
from controller.api.shared_types import ObjectReference
from controller.autoscaler.decision.decide import decide
from controller.autoscaler.decision.situation import (
    Backlog,
    Engine,
    EngineReport,
    EngineState,
    Freshness,
    ReplicaSpeed,
    Situation,
    TargetSituation,
)
from controller.autoscaler.decision.traffic import Traffic, TrafficPoint, TrafficTotals
from extproc.api.spec import Metadata
from extproc.api.status_page_contents import TPOT_BOUNDS_S, TTFT_BOUNDS_S, bucket_index

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from controller.api.autoscaling_policy import AutoscalingPolicySpec
    from controller.autoscaler.decision.decision import Decision
    from controller.autoscaler.decision.saved_state import BindingMemory

# 8B on an H100, nearly; a replica can do 11.8 of these requests a second.
SPEED = ReplicaSpeed(
    prefill_tokens_per_s=15_000.0, step_s=0.008, step_s_per_token=8e-8, kv_tokens=400_000.0, is_measured=True
)
PROMPT, OUTPUT = 1000.0, 200.0
SECONDS_A_REQUEST = PROMPT / 15_000.0 + OUTPUT * 8e-8 * (PROMPT + OUTPUT / 2)
_HISTORY_S = 900
_RUNS_S = 4.0


def target_spec(name: str = "main", *, least: int = 1, most: int = 40, stage: str = "Both") -> ScaleTarget:
    """A target of a Deployment."""
    return ScaleTarget(
        name=name,
        ref=ObjectReference(kind="Deployment", name=name, api_version="apps/v1"),
        min_replicas=least,
        max_replicas=most,
        stage=stage,  # type: ignore[arg-type]  # one of the three
    )


def binding_of(*targets: ScaleTarget) -> AutoscalingPolicyBinding:
    """A binding of them."""
    return AutoscalingPolicyBinding(
        metadata=Metadata(name="chat"), spec=AutoscalingPolicyBindingSpec(policy_ref="policy", targets=targets)
    )


class Fluid:
    """``rate``: requests a second at each instant. ``noise``: of learned speeds, as a share."""

    def __init__(
        self,
        policy: AutoscalingPolicySpec,
        rate: Callable[[float], float],
        *,
        replicas: int = 1,
        start_s: float = 60.0,
        noise: float = 0.1,
        seed: int = 1,
        spec: ScaleTarget | None = None,
    ) -> None:
        self.policy = policy
        self.rate = rate
        self.now_s = 1_780_000_000.0
        self.began_s = self.now_s
        self.start_s = start_s
        self.noise = noise
        self.spec = spec or target_spec()
        self.binding = binding_of(self.spec)
        self.freshness = Freshness()
        self.memory: BindingMemory | None = None
        self.decisions: list[Decision] = []
        self.history: list[tuple[float, int]] = []
        self._random = random.Random(seed)
        self._made = 0
        self._engines: list[Engine] = [
            self._engine(self.now_s - 1000, ready_s=self.now_s - 940) for _ in range(replicas)
        ]
        self._points: deque[TrafficPoint] = deque([TrafficPoint(self.now_s, TrafficTotals())], maxlen=_HISTORY_S)
        self._arrivals = self._finished = 0
        self._ttft = [0] * (len(TTFT_BOUNDS_S) + 1)
        self._tpot = [0] * (len(TPOT_BOUNDS_S) + 1)
        self._busy = 0.0
        self._oldest: deque[float] = deque()

    @property
    def replicas(self) -> int:
        """Asked for."""
        return len(self._engines)

    def run(self, seconds: float) -> None:
        """Load, and a decision every five seconds."""
        for _ in range(int(seconds)):
            self.second()
            if round(self.now_s - self.began_s) % 5 == 0:
                self.look()

    def second(self) -> None:
        """One second of load."""
        self.now_s += 1.0
        self._engines = [self._grown(one) for one in self._engines]
        arrived = poisson(self._random, self.rate(self.now_s - self.began_s))
        self._arrivals += arrived
        self._oldest.extend([self.now_s] * arrived)
        ready = sum(one.state is EngineState.READY for one in self._engines)
        served = min(len(self._oldest), int(ready / SECONDS_A_REQUEST + self._random.random()))
        busy = min(0.95, served * SECONDS_A_REQUEST / ready) if ready else 0.0
        # a request runs for some seconds, and its time per token is a mean over them
        self._busy += (busy - self._busy) / _RUNS_S
        for _ in range(served):
            wait_s = self.now_s - self._oldest.popleft()
            self._ttft[bucket_index(wait_s + 0.1 / (1 - self._busy), TTFT_BOUNDS_S)] += 1
            self._tpot[bucket_index(SPEED.step_s / (1 - self._busy), TPOT_BOUNDS_S)] += 1
        self._finished += served
        self._points.append(TrafficPoint(self.now_s, self._totals()))

    def situation(self) -> Situation:
        """As the manager would see it."""
        waiting = len(self._oldest)
        oldest_s = self.now_s - self._oldest[0] if self._oldest else 0.0
        return Situation(
            now_s=self.now_s,
            targets=(self.target(),),
            traffic=Traffic(tuple(self._points)),
            waiting=Backlog(
                requests=waiting,
                tokens=waiting * PROMPT,
                oldest_s=oldest_s,
                at_zero=waiting if not self._engines else 0,
            ),
            freshness=self.freshness,
            objective=self.policy.objective,
        )

    def target(self) -> TargetSituation:
        """With speeds as noisy as learned ones are."""
        factor = math.exp(self._random.gauss(0.0, self.noise)) if self.noise else 1.0
        speed = msgspec.structs.replace(
            SPEED,
            prefill_tokens_per_s=SPEED.prefill_tokens_per_s * factor,
            step_s_per_token=SPEED.step_s_per_token / factor,
        )
        return TargetSituation(
            spec=self.spec, current=len(self._engines), engines=tuple(self._engines), speed=speed, start_s=self.start_s
        )

    def look(self) -> Decision:
        """A decision, carried out."""
        decision, self.memory = decide(self.policy, self.binding, [self.situation()], self.memory, self.now_s)
        self.decisions.append(decision)
        desired = decision.targets[0].desired
        if desired is not None:
            self.set(desired)
        return decision

    def set(self, replicas: int) -> None:
        """New engines start; the newest go first."""
        if replicas != len(self._engines):
            self.history.append((self.now_s - self.began_s, replicas))
        while len(self._engines) < replicas:
            self._engines.append(self._engine(self.now_s))
        del self._engines[replicas:]

    def reversals(self) -> int:
        """Changes of direction."""
        return reversals([change for _, change in self.history])

    def _engine(self, created_s: float, ready_s: float | None = None) -> Engine:
        self._made += 1
        state = EngineState.STARTING if ready_s is None else EngineState.READY
        return Engine(f"engine-{self._made}", state, created_s, ready_s, EngineReport(self.now_s) if ready_s else None)

    def _grown(self, engine: Engine) -> Engine:
        if engine.state is EngineState.READY:
            in_flight = round(self.rate(self.now_s - self.began_s) * 3 / max(1, len(self._engines)))
            return msgspec.structs.replace(engine, report=EngineReport(self.now_s, in_flight=in_flight))
        if self.now_s - engine.created_at_s < self.start_s:
            return engine
        return Engine(engine.name, EngineState.READY, engine.created_at_s, self.now_s, EngineReport(self.now_s))

    def _totals(self) -> TrafficTotals:
        return TrafficTotals(
            arrivals=self._arrivals,
            finished=self._finished,
            prompt_tokens=self._finished * PROMPT,
            output_tokens=self._finished * OUTPUT,
            prefill_work=self._arrivals * PROMPT,
            ttft=tuple(self._ttft),
            tpot=tuple(self._tpot),
        )


def reversals(values: Sequence[float]) -> int:
    """How often a sequence of different values turns round."""
    signs = [new > old for old, new in itertools.pairwise(values)]
    return sum(old != new for old, new in itertools.pairwise(signs))


def poisson(random_: random.Random, mean: float) -> int:
    """A number of arrivals."""
    if mean > 50:
        return max(0, round(random_.gauss(mean, math.sqrt(mean))))
    limit, product, count = math.exp(-mean), random_.random(), 0
    while product > limit:
        product *= random_.random()
        count += 1
    return count
