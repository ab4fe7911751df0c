# SPDX-License-Identifier: Apache-2.0
"""From targets, pods and demand to situations, one for each stage of a binding."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from controller.api.autoscaling_binding import EngineCapacity
from controller.autoscaler.decision.replica_performance import estimate_speed
from controller.autoscaler.decision.situation import (
    Engine,
    EngineReport,
    EngineState,
    Freshness,
    ReplicaSpeed,
    Situation,
    TargetSituation,
    objective_of_stage,
)
from controller.autoscaler.reconciler.demand import merge_engine_reports
from controller.autoscaler.reconciler.target_resolver import server_keys

if TYPE_CHECKING:
    from collections.abc import Iterable

    from controller.api.autoscaling_policy import AutoscalingPolicySpec
    from controller.autoscaler.reconciler.bindings import ManualOverride
    from controller.autoscaler.reconciler.demand import DemandView
    from controller.autoscaler.reconciler.scalables import ScalableKind
    from controller.autoscaler.reconciler.target_resolver import ResolvedTarget
    from controller.kube.pod_views import PodView

# A replica of several pods is what the worst of them is.
_WORST_FIRST: Final = (
    EngineState.DRAINING,
    EngineState.FAILING,
    EngineState.UNSCHEDULABLE,
    EngineState.STARTING,
    EngineState.READY,
)
_UNDECLARED: Final = EngineCapacity()
View = Callable[[Sequence[str]], "DemandView"]


def engines_from_pods(
    kind: ScalableKind, pods: Iterable[PodView], reports: Mapping[str, EngineReport]
) -> tuple[Engine, ...]:
    """One for each replica, by name. Pods that have ended are none: their controller replaces them.

    ``reports``: by the IP address of a pod.
    """
    living = [one for one in pods if not one.is_ended]
    if len(living) == 1:
        return (_engine(living, reports),)
    units: dict[str, list[PodView]] = defaultdict(list)
    for pod in living:
        units[kind.unit_of(pod)].append(pod)
    return tuple([_engine(units[one], reports) for one in sorted(units)])


def engine_state(pod: PodView) -> EngineState:
    """Of the engine in it."""
    if pod.is_leaving:
        return EngineState.DRAINING
    if pod.is_ready:
        return EngineState.READY
    if not pod.node:
        return EngineState.UNSCHEDULABLE if pod.is_unschedulable else EngineState.STARTING
    return EngineState.FAILING if pod.is_failing else EngineState.STARTING


def _engine(pods: Sequence[PodView], reports: Mapping[str, EngineReport]) -> Engine:
    if len(pods) == 1:
        pod = pods[0]
        report = reports.get(pod.ip) if pod.ip else None
        return Engine(pod.name, engine_state(pod), pod.created_at_s, pod.ready_at_s, report)
    states = {engine_state(one) for one in pods}
    found = [report for one in pods if one.ip and (report := reports.get(one.ip)) is not None]
    ready_at_s = [one.ready_at_s for one in pods if one.ready_at_s is not None]
    return Engine(
        name=min(one.name for one in pods),
        state=next(one for one in _WORST_FIRST if one in states),
        created_at_s=min(one.created_at_s for one in pods),
        ready_at_s=max(ready_at_s) if len(ready_at_s) == len(pods) else None,
        report=merge_engine_reports(found) if found else None,
    )


def build_situations(
    resolved: Sequence[ResolvedTarget],
    policy: AutoscalingPolicySpec,
    view: View,
    now_s: float,
    *,
    holds: Mapping[str, ManualOverride],
) -> tuple[Situation, ...]:
    """One for each stage of the targets, in the order of the first target of each. ``holds``: manual overrides by
    target.
    """
    stages: dict[str, list[ResolvedTarget]] = {}
    for one in resolved:
        stages.setdefault(one.spec.stage, []).append(one)
    found = []
    for several in stages.values():
        demand = view(server_keys(several))
        targets = tuple(_target(one, demand, holds.get(one.spec.name), policy) for one in several)
        unreported = tuple(_unreported(targets, now_s - policy.staleness.soft))
        found.append(
            Situation(
                now_s=now_s,
                targets=targets,
                traffic=demand.traffic,
                waiting=demand.waiting,
                freshness=_with(demand.freshness, unreported),
                objective=objective_of_stage(policy.objective, targets[0].spec.stage),
            )
        )
    return tuple(found)


def with_headroom(
    situations: Sequence[Situation], headroom: Mapping[str, int], pools: Mapping[str, tuple[str, ...]]
) -> tuple[Situation, ...]:
    """``headroom``: for how many more replicas nodes have accelerators, by target, where that limits it. ``pools``:
    what these accelerators are counted in, by target.
    """
    if not headroom:
        return tuple(situations)
    return tuple(
        msgspec.structs.replace(
            each,
            targets=tuple(_with_headroom(one, headroom.get(one.name), pools.get(one.name)) for one in each.targets),
        )
        for each in situations
    )


def _with_headroom(target: TargetSituation, headroom: int | None, pools: tuple[str, ...] | None) -> TargetSituation:
    return target if headroom is None else msgspec.structs.replace(target, headroom=headroom, pools=pools)


def _with(freshness: Freshness, unreported: tuple[str, ...]) -> Freshness:
    return (
        freshness if freshness.unreported == unreported else msgspec.structs.replace(freshness, unreported=unreported)
    )


def _target(
    one: ResolvedTarget,
    demand: DemandView,
    hold: ManualOverride | None,
    policy: AutoscalingPolicySpec,
) -> TargetSituation:
    if one.found is None or one.kind is None:
        return TargetSituation(spec=one.spec, current=None)
    return TargetSituation(
        spec=one.spec,
        current=one.found.replicas,
        engines=engines_from_pods(one.kind, one.pods, demand.reports),
        speed=_speed(one, demand),
        start_s=float(one.spec.start_time),
        set_by=hold.writer if hold is not None else "",
        set_at_s=hold.until_s - policy.manual_hold if hold is not None else 0.0,
    )


def _speed(one: ResolvedTarget, demand: DemandView) -> ReplicaSpeed | None:
    """Of a replica: several engines in one work side by side."""
    known = [(pod, learned) for pod in one.pods if (learned := demand.learned.get(pod.ip)) is not None]
    if not known and one.spec.capacity == _UNDECLARED:
        return None
    speed = estimate_speed(one.spec.capacity, [learned for _, learned in known])
    if speed is None or one.kind is None or len(known) <= 1:
        return speed
    number = len(known) / len({one.kind.unit_of(pod) for pod, _ in known})
    if number == 1:
        return speed
    return msgspec.structs.replace(
        speed,
        prefill_tokens_per_s=speed.prefill_tokens_per_s * number,
        step_s_per_token=speed.step_s_per_token / number,
        kv_tokens=None if speed.kv_tokens is None else speed.kv_tokens * number,
    )


def _unreported(targets: Sequence[TargetSituation], since_s: float) -> Iterator[str]:
    """Ready engines without a report since then."""
    for target in targets:
        for one in target.engines:
            if one.state is EngineState.READY and (one.report is None or one.report.at_s < since_s):
                yield one.name
