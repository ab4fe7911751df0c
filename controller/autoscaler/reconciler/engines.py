# SPDX-License-Identifier: Apache-2.0
"""From pods to engines: which pods make one replica together, in which state it is, and what is known of its load."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final

from controller.autoscaler.decision.situation import Engine, EngineReport, EngineState

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from controller.autoscaler.reconciler.pods import PodView
    from controller.autoscaler.reconciler.scalables import ScalableKind

# A replica of several pods is what the worst of them is.
_WORST_FIRST: Final = (
    EngineState.DRAINING,
    EngineState.FAILING,
    EngineState.UNSCHEDULABLE,
    EngineState.STARTING,
    EngineState.READY,
)


def engines_of(kind: ScalableKind, pods: Iterable[PodView], reports: Mapping[str, EngineReport]) -> tuple[Engine, ...]:
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


def _engine(pods: Sequence[PodView], reports: Mapping[str, EngineReport]) -> Engine:
    if len(pods) == 1:
        pod = pods[0]
        report = reports.get(pod.ip) if pod.ip else None
        return Engine(pod.name, pod.state, pod.created_at_s, pod.ready_at_s, report)
    states = {one.state for one in pods}
    found = [report for one in pods if one.ip and (report := reports.get(one.ip)) is not None]
    ready_at_s = [one.ready_at_s for one in pods if one.ready_at_s is not None]
    return Engine(
        name=min(one.name for one in pods),
        state=next(one for one in _WORST_FIRST if one in states),
        created_at_s=min(one.created_at_s for one in pods),
        ready_at_s=max(ready_at_s) if len(ready_at_s) == len(pods) else None,
        report=together(found) if found else None,
    )


def together(reports: Sequence[EngineReport]) -> EngineReport:
    """Of several engines as one: amounts add up, the oldest one says how old it is, and the fullest cache counts."""
    if len(reports) == 1:
        return reports[0]
    return EngineReport(
        at_s=min(one.at_s for one in reports),
        in_flight=sum(one.in_flight for one in reports),
        in_flight_tokens=sum(one.in_flight_tokens for one in reports),
        waiting=_sum(one.waiting for one in reports),
        running=_sum(one.running for one in reports),
        kv_usage=max((one.kv_usage for one in reports if one.kv_usage is not None), default=None),
        kv_capacity_tokens=sum(one.kv_capacity_tokens for one in reports),
    )


def _sum(values: Iterable[float | None]) -> float | None:
    known = [one for one in values if one is not None]
    return sum(known) if known else None
