# SPDX-License-Identifier: Apache-2.0
"""The metrics of each binding out of its last look; what is not known now stays as it was, so that no series has gaps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from controller.autoscale.situation import EngineState
from controller.roles.scaling.metrics import BindingSeries, ScalingMetrics, TargetSeries

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from controller.autoscale.situation import Engine, Situation, Target
    from controller.roles.scaling.bindings import BindingView
    from controller.roles.scaling.resolving import Resolved
    from controller.roles.scaling.telling import Looked

# A queue of so many counts as full, as in the gateways.
_FULL_QUEUE = 5.0


class Series:
    """Keeps ``metrics.series``. ``model_of``: the model that a ModelServer, by key, serves."""

    def __init__(self, metrics: ScalingMetrics, model_of: Callable[[str], str]) -> None:
        self._metrics = metrics
        self._model_of = model_of
        self.wrote = metrics.wrote

    def put(self, view: BindingView, looked: Looked) -> None:
        """After a look."""
        before = self._metrics.series.get(view.key)
        known = {one.labels[0]: one for one in before.targets} if before is not None else {}
        situated = {one.name: one for each in looked.situations for one in each.targets}
        targets = tuple(
            self._target(one, situated.get(one.spec.name), looked, known.get(one.place[3]))
            for one in looked.resolved
            if one.found is not None
        )
        stages = looked.decision.stages if looked.decision is not None else before.stages if before is not None else ()
        self._metrics.series[view.key] = BindingSeries(
            namespace=view.namespace,
            name=view.key.partition("/")[2],
            at_s=looked.now_s,
            age_s=max((one.freshness.age_s for one in looked.situations), default=0.0),
            saturation=saturation(looked.situations),
            targets=targets,
            stages=stages,
        )

    def forget(self, key: str) -> None:
        """The binding is gone."""
        self._metrics.series.pop(key, None)

    def _target(
        self, one: Resolved, target: Target | None, looked: Looked, before: TargetSeries | None
    ) -> TargetSeries:
        step = next((each for each in looked.steps if each.target.spec.name == one.spec.name), None)
        written = next((each.after for each in looked.scaled if each.name == one.spec.name), None)
        current = written if written is not None else one.found.replicas if one.found is not None else 0
        known = before.desired if before is not None else current
        desired = step.replicas if step is not None and step.replicas is not None else known
        engines = target.engines if target is not None else ()
        return TargetSeries(
            labels=(one.place[3], one.place[0], one.spec.accelerator or "", self._model_of(one.server)),
            current=current,
            desired=desired,
            ready=_count(engines, EngineState.READY),
            pending=_count(engines, EngineState.STARTING) + _count(engines, EngineState.UNSCHEDULABLE),
            blocked=target is not None and bool(target.blocked),
            held=step is not None and bool(step.held) and desired != current,
            cost=one.spec.cost * current,
            scalings=(before.scalings if before is not None else 0) + (written is not None),
        )


def _count(engines: Sequence[Engine], state: EngineState) -> int:
    return sum(one.state is state for one in engines)


def saturation(situations: Sequence[Situation]) -> float | None:
    """The mean over engines that say something of the larger of cache and queue use; None if none does."""
    found = [
        max(one.report.kv_usage or 0.0, min((one.report.waiting or 0.0) / _FULL_QUEUE, 1.0))
        for each in situations
        for one in each.ready
        if one.report is not None and (one.report.kv_usage is not None or one.report.waiting is not None)
    ]
    return sum(found) / len(found) if found else None
