# SPDX-License-Identifier: Apache-2.0
"""From targets and demand to situations, one for each stage of a binding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from controller.autoscale.situation import EngineState, Freshness, Situation, Speed, Target
from controller.roles.scaling.engines import engines_of

if TYPE_CHECKING:
    from controller.resources.autoscaling import AutoscalingPolicySpec
    from controller.roles.scaling.demand import DemandView
    from controller.roles.scaling.resolving import Resolved

View = Callable[[Sequence[str]], "DemandView"]
"""What is known of the demand for some ModelServers together."""


def situations_of(
    resolved: Sequence[Resolved], policy: AutoscalingPolicySpec, view: View, now_s: float
) -> tuple[Situation, ...]:
    """One for each stage that targets have, in the order of the first target of each."""
    stages = dict.fromkeys(one.spec.stage for one in resolved)
    return tuple(
        _situation([one for one in resolved if one.spec.stage == stage], policy, view, now_s) for stage in stages
    )


def _situation(resolved: Sequence[Resolved], policy: AutoscalingPolicySpec, view: View, now_s: float) -> Situation:
    servers = sorted({one.server for one in resolved if one.server})
    demand = view(servers)
    targets = tuple(_target(one, demand) for one in resolved)
    unreported = tuple(_unreported(targets, now_s - float(policy.staleness.soft)))
    return Situation(
        now_s=now_s,
        targets=targets,
        traffic=demand.traffic,
        waiting=demand.waiting,
        freshness=_with(demand.freshness, unreported),
        objective=policy.objective,
    )


def _with(freshness: Freshness, unreported: tuple[str, ...]) -> Freshness:
    return (
        freshness if freshness.unreported == unreported else msgspec.structs.replace(freshness, unreported=unreported)
    )


def _target(one: Resolved, demand: DemandView) -> Target:
    if one.found is None or one.kind is None:
        return Target(spec=one.spec, current=None)
    return Target(
        spec=one.spec,
        current=one.found.replicas,
        engines=engines_of(one.kind, one.pods, demand.reports),
        speed=speed_of([demand.speeds[pod.ip] for pod in one.pods if pod.ip in demand.speeds]),
    )


def speed_of(speeds: Sequence[Speed]) -> Speed | None:
    """The middle one by prefill, of those that were measured if any was."""
    known = [one for one in speeds if one.is_measured] or list(speeds)
    return sorted(known, key=lambda one: one.prefill_tokens_per_s)[len(known) // 2] if known else None


def _unreported(targets: Sequence[Target], since_s: float) -> Iterator[str]:
    """Ready engines of which nobody has said anything since then."""
    for target in targets:
        for one in target.engines:
            if one.state is EngineState.READY and (one.report is None or one.report.at_s < since_s):
                yield one.name
