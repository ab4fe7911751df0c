# SPDX-License-Identifier: Apache-2.0
"""Requests in flight per replica, over a long and a short window, as Knative's KPA does.

Source: knative/serving, ``pkg/autoscaler/scaling/autoscaler.go``. With ``t = target * target_utilization``::

    stable = ceil(mean of the stable window / t)      panic = ceil(mean of the panic window / t)
    both within [floor(ready / max_scale_down_rate), ceil(ready * max_scale_up_rate)]
    panic begins when ceil(panic mean / t) >= threshold * ready, and ends when that was not so for the hold time
    in panic: max(stable, panic), never below the largest answer of this panic; otherwise: stable

Requests that wait at the gateways count as in flight: they are what Knative's activator has. After a restart with more
than one ready engine the strategy begins in panic, for without history the mean would be too small. The panic window is
``window_percent`` of the stable one; without a ``panic`` block Knative's values hold (10 %, 200 %, one stable window).
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Annotated, Final

import msgspec

from controller.api.autoscaling import Panic
from controller.api.shared_types import Positive, Utilization
from controller.api.strategies import StrategyType
from controller.autoscaler.decision.behavior import PanicState, add_panic_recommendation, next_panic_state
from controller.autoscaler.decision.decision import Recommendation
from controller.autoscaler.decision.strategies.engine_loads import (
    gateway_metric,
    ready_units,
    round_down_units,
    round_up_units,
    scale_out_only,
)
from extproc.api.quantities import Duration
from extproc.api.spec import Spec

if TYPE_CHECKING:
    from controller.autoscaler.decision.situation import Situation

_BUCKET_S: Final = 1.0


class ConcurrencyParameters(Spec, frozen=True):
    """Knative's KPA. ``target``: requests in flight that one replica should have. ``target_utilization``: the share of
    it that is aimed at. ``stable_window``: over which concurrency is averaged; the policy's ``panic`` defines panic.
    ``max_scale_up_rate`` and ``max_scale_down_rate``: the largest factors of one change.
    """

    target: Positive = 100.0
    target_utilization: Utilization = 0.7
    stable_window: Duration = Duration("60s")
    max_scale_up_rate: Annotated[float, msgspec.Meta(gt=1, le=1e6)] = 1000.0
    max_scale_down_rate: Annotated[float, msgspec.Meta(gt=1, le=1e6)] = 2.0


class InFlightSample(msgspec.Struct, frozen=True):
    """Requests in flight at an instant. ``is_lower_bound``: some engines were unknown."""

    at_s: float
    value: float
    is_lower_bound: bool = False


class ConcurrencyMemory(msgspec.Struct, frozen=True):
    """``samples``: of the stable window, by time, at most one a second. ``panic``: None if there is none."""

    samples: tuple[InFlightSample, ...] = ()
    panic: PanicState | None = None


class ConcurrencyStrategy(msgspec.Struct, frozen=True):
    """``parameters``: of the strategy. ``panic``: of the policy."""

    parameters: ConcurrencyParameters = ConcurrencyParameters()
    panic: Panic | None = None
    name: str = "Concurrency"

    def recommend(
        self, situation: Situation, memory: ConcurrencyMemory | None
    ) -> tuple[Recommendation, ConcurrencyMemory | None]:
        """The recommendation from both windows, and the samples with the current one."""
        metric = gateway_metric("requests_in_flight", situation)
        ready = ready_units(situation)
        if metric.total is None or not math.isfinite(metric.total):
            return Recommendation(self.name, None, metric.problem or "requests in flight are not a number"), memory
        before = memory if memory is not None else _after_start(situation, ready)
        samples = _with(
            before.samples, InFlightSample(situation.now_s, metric.total, metric.is_lower_bound), self._stable_s
        )
        stable = time_weighted_mean(samples, self._stable_s, situation.now_s)
        short = time_weighted_mean(samples, self._panic_s, situation.now_s)
        desired, panic = self.desired(before.panic, stable=stable, short=short, ready=ready, situation=situation)
        reason = (
            f"{stable:.1f} requests in flight over {self._stable_s:g} s, {short:.1f} over {self._panic_s:g} s, "
            f"{self._target:g} a replica{'; in panic, so not fewer than before' if panic is not None else ''}"
        )
        inputs = {"stable_requests": stable, "panic_requests": short, "ready_replicas": ready}
        after = ConcurrencyMemory(samples, panic)
        if any(sample.is_lower_bound for sample in samples):
            unsure = "the load of some engines is unknown, or was within the window"
            return scale_out_only(self.name, situation, desired, reason, inputs, unsure), after
        return Recommendation(self.name, desired, reason, inputs), after

    def desired(
        self, panic: PanicState | None, *, stable: float, short: float, ready: float, situation: Situation
    ) -> tuple[float, PanicState | None]:
        """Knative's rule: replicas from the means of both windows, and the state of panic after it."""
        there = max(ready, 1.0)
        least = round_down_units(there / self.parameters.max_scale_down_rate, situation)
        most = round_up_units(there * self.parameters.max_scale_up_rate, situation)
        asked = round_up_units(short / self._target, situation)
        state = next_panic_state(
            panic,
            asked=asked,
            ready=ready,
            threshold=self._panic.threshold_percent / 100,
            hold_s=self._hold_s,
            now_s=situation.now_s,
        )
        desired = min(max(round_up_units(stable / self._target, situation), least), most)
        if state is None:
            return desired, None
        state = add_panic_recommendation(state, max(desired, min(max(asked, least), most)))
        return state.most, state

    @property
    def _target(self) -> float:
        return self.parameters.target * self.parameters.target_utilization

    @property
    def _panic(self) -> Panic:
        return self.panic if self.panic is not None else Panic()

    @property
    def _stable_s(self) -> float:
        return float(self.parameters.stable_window)

    @property
    def _panic_s(self) -> float:
        return self._stable_s * self._panic.window_percent / 100

    @property
    def _hold_s(self) -> float:
        return float(self.panic.hold) if self.panic is not None else self._stable_s


def time_weighted_mean(samples: tuple[InFlightSample, ...], window_s: float, now_s: float) -> float:
    """The mean over the part of the window that has samples; each sample counts for the time since the one before."""
    area, span_s, began_s = 0.0, 0.0, now_s - window_s
    for before, sample in itertools.pairwise(samples):
        length_s = sample.at_s - max(before.at_s, began_s)
        if length_s > 0:
            area, span_s = area + sample.value * length_s, span_s + length_s
    return area / span_s if span_s else samples[-1].value


def _after_start(situation: Situation, ready: float) -> ConcurrencyMemory:
    return ConcurrencyMemory(panic=PanicState(situation.now_s, ready) if ready > 1.0 else None)


def _with(samples: tuple[InFlightSample, ...], new: InFlightSample, window_s: float) -> tuple[InFlightSample, ...]:
    """The samples of the window and one before it. Within a second the largest counts, so that they stay few."""
    kept = samples
    if kept and kept[-1].at_s // _BUCKET_S == new.at_s // _BUCKET_S:
        last = kept[-1]
        is_lower_bound = last.is_lower_bound or new.is_lower_bound
        kept, new = kept[:-1], InFlightSample(new.at_s, max(last.value, new.value), is_lower_bound)
    began_s = new.at_s - window_s
    first = next((index for index, sample in enumerate(kept) if sample.at_s > began_s), len(kept))
    return (*kept[max(first - 1, 0) :], new)


CONCURRENCY: Final = StrategyType(
    summary="requests in flight",
    make=lambda parameters, policy: ConcurrencyStrategy(parameters, policy.panic),
    defaults=ConcurrencyParameters(),
)
