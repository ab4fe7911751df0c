# SPDX-License-Identifier: Apache-2.0
"""Which pods of a ModelInfer that have to go are marked to drain now, and which are deleted: those that are idle."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final

import msgspec

from controller.api.drain_mark import DRAINING, drain_recheck_at
from controller.kube.api_resources import PODS, timestamp_of
from controller.kube.reconcile_plan import Annotate, Delete
from controller.models.model_infer.groups import entry_pods

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from controller.models.model_infer.groups import Group, Replica
    from controller.models.model_infer.model_infer_state import ModelInferState
    from controller.models.model_infer.pod_state import Pod

_ASK_EACH_S: Final = 2.0


class DrainResult(msgspec.Struct, frozen=True, kw_only=True):
    """``marked``: annotations to write. ``deleted``: pods that may go now. ``asks_loads_of`` and ``requeue_at_s``:
    as in a plan.
    """

    marked: tuple[Annotate, ...] = ()
    deleted: tuple[Delete, ...] = ()
    asks_loads_of: frozenset[str] = frozenset()
    requeue_at_s: float | None = None


def drain(
    leaving: Sequence[Replica], groups: Sequence[Group], observed: ModelInferState, now_s: float, drain_s: float
) -> DrainResult:
    """A group that is removed whole drains as one unit: its prefill engines are needed until its decode engines have
    finished. Drain marks of pods that stay after all are removed.
    """
    places = {one.place for one in leaving}
    found = [_scope(one, observed, now_s, drain_s) for one in _scopes(leaving, groups)]
    stays = [
        pod
        for group in groups
        for one in group.replicas
        if one.place not in places
        for pod in one.live_pods
        if pod.draining_at_s is not None
    ]
    times = [one.requeue_at_s for one in found if one.requeue_at_s is not None]
    return DrainResult(
        marked=(*(mark_draining(one, None) for one in stays), *(each for one in found for each in one.marked)),
        deleted=tuple(each for one in found for each in one.deleted),
        asks_loads_of=frozenset().union(*(one.asks_loads_of for one in found)),
        requeue_at_s=min(times, default=None),
    )


def mark_draining(pod: Pod, at_s: float | None) -> Annotate:
    """None takes the mark off."""
    return Annotate(PODS, pod.key, pod.uid, {DRAINING: None if at_s is None else timestamp_of(at_s)})


def pod_deletion(pod: Pod, lost_nodes: Collection[str]) -> Delete:
    """A lost node's kubelet confirms nothing: its pods go without."""
    return Delete(PODS, pod.key, pod.uid, 0 if pod.node in lost_nodes else None)


def _scopes(leaving: Sequence[Replica], groups: Sequence[Group]) -> Iterator[list[Replica]]:
    by_group: dict[int, list[Replica]] = defaultdict(list)
    for one in leaving:
        by_group[one.place.group].append(one)
    for group in groups:
        found = by_group[group.ordinal]
        if len(found) == len([one for one in group.replicas if not one.is_being_deleted]):
            yield found
        else:
            yield from ([one] for one in found)


def _scope(replicas: Sequence[Replica], observed: ModelInferState, now_s: float, drain_s: float) -> DrainResult:
    live = [pod for one in replicas for pod in one.live_pods]
    serving = [one for one in entry_pods(replicas) if not one.is_going and _may_serve(one, observed)]
    again_s = drain_recheck_at(
        [one.draining_at_s for one in serving],
        is_idle=_is_idle(serving, observed),
        now_s=now_s,
        drain_s=drain_s,
        each_s=_ASK_EACH_S,
    )
    if again_s is None:
        return DrainResult(deleted=tuple(pod_deletion(one, observed.lost_nodes) for one in live))
    return DrainResult(
        marked=tuple(mark_draining(one, now_s) for one in serving if one.draining_at_s is None),
        asks_loads_of=frozenset(one.key for one in serving),
        requeue_at_s=again_s,
    )


def _may_serve(pod: Pod, observed: ModelInferState) -> bool:
    """It gets requests, or has some left from when it did."""
    load = observed.loads.get(pod.key)
    return pod.is_ready or (load is not None and load.in_flight > 0 and pod.node not in observed.lost_nodes)


def _is_idle(pods: Sequence[Pod], observed: ModelInferState) -> bool:
    """Whether a pod has no requests; one of unknown load counts as busy."""
    found = [observed.loads.get(one.key) for one in pods]
    return all(one is not None and one.in_flight == 0 for one in found)
