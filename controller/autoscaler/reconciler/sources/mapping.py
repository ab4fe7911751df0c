# SPDX-License-Identifier: Apache-2.0
"""From what sources say to metrics by engine or in total, with their age; pure."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import msgspec

from controller.autoscaler.decision.situation import EngineState, Metric
from controller.autoscaler.reconciler.sources.answers import PodUsage, Value
from controller.models.model_infer.times import seconds_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from controller.api.autoscaling import AutoscalingPolicySpec
    from controller.autoscaler.reconciler.pods import PodView
    from controller.autoscaler.reconciler.resolving import Resolved


class Taken(msgspec.Struct, frozen=True):
    """A value and when it was so, since the epoch."""

    value: Value
    at_s: float


def total_of(taken: Taken, now_s: float, policy: AutoscalingPolicySpec) -> Metric:
    """Older than soft: it may ask for more alone. Older than hard: it says nothing."""
    value, age_s = taken.value, now_s - taken.at_s
    if value.number is None:
        return Metric(at_s=taken.at_s, problem=value.problem)
    if age_s > policy.staleness.hard:
        return Metric(at_s=taken.at_s, problem=f"the last sample is {age_s:.0f} s old")
    is_old = age_s > policy.staleness.soft
    return Metric(at_s=taken.at_s, total=value.number, is_lower_bound=is_old or value.is_partial)


def entry_pods(target: Resolved) -> list[tuple[str, PodView]]:
    """The pod of each ready engine that has its page, by the engine's name: of a group the first one."""
    if target.kind is None:
        return []
    units: dict[str, list[PodView]] = defaultdict(list)
    for pod in target.pods:
        if not pod.is_ended:
            units[target.kind.unit_of(pod)].append(pod)
    entries = [min(pods, key=lambda pod: pod.name) for pods in units.values()]
    return [(one.name, one) for one in entries if one.ip and one.state is EngineState.READY]


def shares_of(
    name: str, used: Mapping[str, PodUsage], resolved: Sequence[Resolved], now_s: float, hard_s: float
) -> Metric:
    """Usage over requests of each engine, all of its pods together. One with a pod of unknown usage is missing."""
    values, at_s, lacks = dict[str, float](), now_s, False
    for target in resolved:
        if target.kind is None:
            continue
        units: dict[str, list[PodView]] = defaultdict(list)
        for pod in target.pods:
            if not pod.is_ended:
                units[target.kind.unit_of(pod)].append(pod)
        for pods in units.values():
            found = [used.get(pod.name) for pod in pods]
            known = [one for one in found if one is not None and now_s - (seconds_of(one.at) or now_s) <= hard_s]
            requested = sum(pod.cpu if name == "cpu" else pod.memory for pod in pods)
            lacks = lacks or not requested
            if len(known) == len(pods) and requested > 0:
                amount = sum(one.cpu if name == "cpu" else one.memory for one in known)
                values[min(pod.name for pod in pods)] = amount / requested
                at_s = min([at_s, *(seconds_of(one.at) or now_s for one in known)])
    if not values:
        why = f"the pods request no {name}" if lacks else f"there is no recent {name} usage of any engine"
        return Metric(at_s=now_s, problem=why)
    return Metric(at_s=at_s, by_engine=values)
