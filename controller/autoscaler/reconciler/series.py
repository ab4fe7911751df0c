# SPDX-License-Identifier: Apache-2.0
"""The metrics of each binding, from when it was last looked at.

What is not known now keeps its value, so that no series has gaps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from controller.autoscaler.decision.situation import EngineState
from controller.autoscaler.decision.traffic import Traffic
from controller.autoscaler.reconciler.metrics import BindingSeries, ScalingMetrics, TargetSeries

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from controller.autoscaler.decision.decision import StageDecision
    from controller.autoscaler.decision.situation import Situation, Target
    from controller.autoscaler.reconciler.bindings import BindingView
    from controller.autoscaler.reconciler.deciding import Step
    from controller.autoscaler.reconciler.resolving import Resolved
    from controller.autoscaler.reconciler.telling import Looked

# A queue of so many counts as full, as in the gateways.
_FULL_QUEUE = 5.0
_NOT_KEPT: Final = Traffic()


class Series:
    """Makes the series at the scrape: looks are more frequent. ``model_of``: the model that a ModelServer, by key,
    serves.
    """

    def __init__(self, metrics: ScalingMetrics, model_of: Callable[[str], str]) -> None:
        self._model_of = model_of
        self._looked: dict[str, tuple[BindingView, Looked]] = {}
        self._desired: dict[str, dict[str, int]] = {}
        self._scalings: dict[tuple[str, str], int] = {}
        self._stages: dict[str, tuple[StageDecision, ...]] = {}
        self.wrote = metrics.wrote
        metrics.follow(self.made)

    def put(self, view: BindingView, looked: Looked) -> None:
        """After a look."""
        # two hours of traffic must not be kept twice
        situations = [msgspec.structs.replace(one, traffic=_NOT_KEPT) for one in looked.situations]
        self._looked[view.key] = view, msgspec.structs.replace(looked, situations=situations)
        if looked.decision is not None:
            self._stages[view.key] = looked.decision.stages
        desired = {step.target.spec.name: step.replicas for step in looked.steps if step.replicas is not None}
        if desired:
            self._desired[view.key] = self._desired.get(view.key, {}) | desired

    def scaled(self, key: str, name: str) -> None:
        """The replicas of a target were written."""
        self._scalings[key, name] = self._scalings.get((key, name), 0) + 1

    def forget(self, key: str) -> None:
        """The binding is gone."""
        self._looked.pop(key, None)
        self._stages.pop(key, None)
        self._desired.pop(key, None)
        for place in [one for one in self._scalings if one[0] == key]:
            del self._scalings[place]

    def made(self) -> list[BindingSeries]:
        """Called in the thread of a scrape."""
        return [self._binding(view, looked) for view, looked in list(self._looked.values())]

    def _binding(self, view: BindingView, looked: Looked) -> BindingSeries:
        situated = {one.spec.name: one for each in looked.situations for one in each.targets}
        steps = {one.target.spec.name: one for one in looked.steps}
        written = {one.name: one.after for one in looked.scaled}
        return BindingSeries(
            namespace=view.namespace,
            name=view.key.partition("/")[2],
            at_s=looked.now_s,
            age_s=max((one.freshness.age_s for one in looked.situations), default=0.0),
            saturation=saturation(looked.situations),
            targets=tuple(
                self._target(
                    view.key, one, situated.get(one.spec.name), steps.get(one.spec.name), written.get(one.spec.name)
                )
                for one in looked.resolved
                if one.found is not None
            ),
            stages=self._stages.get(view.key, ()),
        )

    def _target(
        self, key: str, one: Resolved, target: Target | None, step: Step | None, written: int | None
    ) -> TargetSeries:
        place = (key, one.spec.name)
        current = written if written is not None else one.found.replicas if one.found is not None else 0
        desired = self._desired.get(key, {}).get(one.spec.name, current)
        return TargetSeries(
            labels=(one.place[3], one.place[0], one.spec.accelerator or "", self._model_of(one.server), one.place[2]),
            current=current,
            desired=desired,
            ready=_count(target, EngineState.READY),
            pending=_count(target, EngineState.STARTING) + _count(target, EngineState.UNSCHEDULABLE),
            blocked=target is not None and bool(target.blocked),
            held=step is not None and bool(step.held) and desired != current,
            cost=one.spec.cost * current,
            scalings=self._scalings.get(place, 0),
        )


def _count(target: Target | None, state: EngineState) -> int:
    return 0 if target is None else len(target.having(state))


def saturation(situations: Sequence[Situation]) -> float | None:
    """The mean over engines that say something of the larger of cache and queue use; None if none does."""
    found = [
        max(one.report.kv_usage or 0.0, min((one.report.waiting or 0.0) / _FULL_QUEUE, 1.0))
        for each in situations
        for one in each.ready
        if one.report is not None and (one.report.kv_usage is not None or one.report.waiting is not None)
    ]
    return sum(found) / len(found) if found else None
