# SPDX-License-Identifier: Apache-2.0
"""Carries a decision out: claims targets, drains engines, writes replicas; each target for itself.

Where the target's own controller would delete engines at once, those that go are marked first, so that gateways send
them nothing new; the replicas are lowered once these engines are idle.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from controller.api.drain_mark import DELETION_COST, DRAINING, HEARD_S, drain_recheck_at
from controller.audit import caused_by
from controller.autoscaler.reconciler.result import ReconciliationResult, ReplicaUpdate
from controller.autoscaler.reconciler.scalables import SCALED_BY, SCALED_TO
from controller.autoscaler.reconciler.target_resolver import server_keys
from controller.kube.api_resources import PODS, split_key, timestamp_of
from controller.kube.errors import ApiError, ClusterError, Conflict, NotFound, TooManyRequests
from controller.kube.reconcile_plan import Annotate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from controller.autoscaler.decision.situation import EngineReport
    from controller.autoscaler.reconciler.bindings import BindingView, ScalableRef, TargetClaim
    from controller.autoscaler.reconciler.demand import DemandSource
    from controller.autoscaler.reconciler.informers import ScalingInformers
    from controller.autoscaler.reconciler.result import TargetAction
    from controller.autoscaler.reconciler.scalables import Scalable
    from controller.kube.api_resources import Object
    from controller.kube.client import Client
    from controller.kube.pod_views import PodView

log = logging.getLogger(__name__)
SOON_S: Final = 0.2
_SCALING: Final = ("Auto", "ScaleUpOnly")
_SERVER_FAULTS: Final = 500
_LOOK_EACH_S: Final = 1.0
# far below what people write
_FIRST: Final = "-1000000"


class DrainProgress(msgspec.Struct, frozen=True):
    """``marks``: to write now. ``may_go``: the replicas may be lowered. ``requeue_at_s``: when this may change by
    itself. ``waits_for``: pods that have something left, by name.
    """

    marks: tuple[Annotate, ...] = ()
    may_go: bool = False
    requeue_at_s: float | None = None
    waits_for: tuple[str, ...] = ()


def drain_pods(
    pods: Sequence[PodView],
    excess: int,
    reports: Mapping[str, EngineReport],
    *,
    is_ordered: bool,
    now_s: float,
    drain_s: float,
) -> DrainProgress:
    """``excess``: number of replicas to remove. ``is_ordered``: those with the highest ordinals are removed.
    ``drain_s``: longest wait for requests in flight. ``reports``: by IP address; a report from before the draining mark
    was received does not count.
    """
    leaving = choose_pods_to_remove(pods, excess, reports, is_ordered=is_ordered)
    names = {one.key for one in leaving}
    marks = drain_mark_removals(one for one in pods if one.key not in names)
    # what never served has nothing to finish
    serving = [one for one in leaving if one.is_ready]

    def kept_until_s(one: PodView) -> float | None:
        is_idle = _is_idle(one, reports)
        return drain_recheck_at([one.draining_at_s], is_idle=is_idle, now_s=now_s, drain_s=drain_s, each_s=_LOOK_EACH_S)

    until_s = {one.name: at_s for one in serving if (at_s := kept_until_s(one)) is not None}
    if until_s:
        unmarked = [one for one in serving if one.draining_at_s is None]
        marks += [_mark(one, {DRAINING: timestamp_of(now_s), DELETION_COST: _FIRST}) for one in unmarked]
        waits_for = () if unmarked else tuple(sorted(until_s))
        return DrainProgress(tuple(marks), requeue_at_s=max(until_s.values()), waits_for=waits_for)
    if drain_s <= 0 and not is_ordered:
        marks += [_mark(one, {DELETION_COST: _FIRST}) for one in leaving if one.deletion_cost != _FIRST]
    return DrainProgress(tuple(marks), may_go=True)


def _mark(pod: PodView, annotations: Mapping[str, str | None]) -> Annotate:
    return Annotate(PODS, pod.key, pod.uid, annotations)


def drain_mark_removals(pods: Iterable[PodView]) -> list[Annotate]:
    """Marks taken off pods that stay."""
    found: list[Annotate] = []
    for one in pods:
        gone: dict[str, str | None] = {DRAINING: None} if one.draining_at_s is not None else {}
        if one.deletion_cost == _FIRST:
            gone[DELETION_COST] = None
        if gone and not one.is_going:
            found.append(_mark(one, gone))
    return found


def choose_pods_to_remove(
    pods: Sequence[PodView], excess: int, reports: Mapping[str, EngineReport], *, is_ordered: bool
) -> list[PodView]:
    """Pods to remove: the highest ordinals; or first those that do not serve, then those that drain, then the least
    busy; among equals the youngest.
    """
    live = [one for one in pods if not one.is_ended and not one.is_going]
    if is_ordered:
        return sorted(live, key=_ordinal, reverse=True)[: max(0, excess)]

    def order(one: PodView) -> tuple[bool, bool, float, float, str]:
        return one.is_ready, one.draining_at_s is None, _busy_with(one, reports), -one.created_at_s, one.key

    return sorted(live, key=order)[: max(0, excess)]


def _ordinal(pod: PodView) -> tuple[int, str]:
    number = pod.name.rpartition("-")[2]
    return (int(number) if number.isdecimal() else -1), pod.name


def _busy_with(pod: PodView, reports: Mapping[str, EngineReport]) -> float:
    """An engine of unknown load counts as fully busy."""
    report = reports.get(pod.ip)
    return float("inf") if report is None else requests_in_flight(report)


def requests_in_flight(report: EngineReport) -> float:
    """The larger of what gateways sent there and what the engine reports: other clients may send requests, too."""
    return max(float(report.in_flight), (report.running or 0.0) + (report.waiting or 0.0))


def _is_idle(pod: PodView, reports: Mapping[str, EngineReport]) -> bool:
    """By a report from after the time when the last request could have been on its way."""
    report, since_s = reports.get(pod.ip), pod.draining_at_s
    return (
        report is not None
        and since_s is not None
        and report.at_s >= since_s + HEARD_S
        and requests_in_flight(report) == 0
    )


class DecisionOutdated(Exception):
    """A target is not what was decided about any more."""


class ActuationResult(msgspec.Struct, frozen=True, kw_only=True):
    """``result``: with what drains and what was refused. ``scaled``: what was written. ``again_s``: in how many seconds
    more is to be done. ``is_stale``: a target is not what was decided about any more. ``error``: why something could
    not be written; the reconciliation has failed then.
    """

    result: ReconciliationResult
    scaled: tuple[ReplicaUpdate, ...] = ()
    again_s: float = float("inf")
    is_stale: bool = False
    error: ClusterError | None = None


class Actuator:
    """Writes under our own manager's name. What is wrong with one target keeps no other one of its binding from being
    scaled. ``counted``: called with kind and verb of each write.
    """

    def __init__(
        self,
        client: Client,
        demand: DemandSource,
        informers: ScalingInformers,
        counted: Callable[[str, str], None],
    ) -> None:
        self._client = client
        self._demand = demand
        self._informers = informers
        self._counted = counted

    async def actuate(self, view: BindingView, result: ReconciliationResult) -> ActuationResult:
        """All steps of a decision."""
        again_s, is_stale, errors = float("inf"), False, list[ClusterError]()
        waits_for, refused = dict[str, Sequence[str]](), dict[str, str]()
        scaled: list[ReplicaUpdate] = []
        reports = _reports(self._demand, result)
        for step in result.steps:
            if not step.target.may_write or result.policy is None or result.policy.mode not in _SCALING:
                continue
            name = step.target.spec.name
            try:
                if await self._claimed(view, step):
                    again_s = min(again_s, SOON_S)
                if not step.is_written_by_us or step.is_in_effect:
                    continue
                may_go, next_check_s, waits = await self._drained(step, reports, result)
                again_s = min(again_s, next_check_s)
                if waits:
                    waits_for[name] = waits
                if may_go and (one := await self._scaled(step)) is not None:
                    scaled.append(one)
            except DecisionOutdated:
                is_stale = True
            except ClusterError as error:
                errors.append(error)
                log.warning("%s: the target %s is not scaled: %s", view.key, name, error)
                if _is_refusal(error):
                    refused[name] = str(error)
        result = msgspec.structs.replace(result, waits_for=waits_for, refused=refused)
        # of several, the one with the longest back-off
        worst = max(errors, key=_asked_s, default=None)
        return ActuationResult(result=result, scaled=tuple(scaled), again_s=again_s, is_stale=is_stale, error=worst)

    async def _claimed(self, view: BindingView, step: TargetAction) -> bool:
        """Claim the target for the binding where it has no claim yet; whether that was written."""
        found = step.target.found
        if found is None or found.scaled_by == view.claim.annotation_value:
            return False
        await self._claim(step.target.place, found, view.claim)
        return True

    async def _drained(
        self, step: TargetAction, reports: Mapping[str, EngineReport], result: ReconciliationResult
    ) -> tuple[bool, float, Sequence[str]]:
        """Whether the replicas may be written, seconds until the next reconcile, and the pods that still drain."""
        target = step.target
        if target.kind is None or target.found is None or step.replicas is None or result.policy is None:
            return False, float("inf"), ()
        if target.kind.drains_itself:
            return True, float("inf"), ()
        excess = target.found.replicas - step.replicas
        if excess <= 0:
            await self._mark(drain_mark_removals(target.pods))
            return True, float("inf"), ()
        plan = drain_pods(
            [one for one in target.pods if target.kind.serves(one)],
            excess,
            reports,
            is_ordered=target.kind.is_ordered,
            now_s=result.now_s,
            drain_s=float(result.policy.drain),
        )
        await self._mark(plan.marks)
        again_s = float("inf") if plan.requeue_at_s is None else plan.requeue_at_s - result.now_s
        return plan.may_go, max(SOON_S, again_s), plan.waits_for

    async def _scaled(self, step: TargetAction) -> ReplicaUpdate | None:
        target = step.target
        if target.found is None or step.replicas is None or step.replicas == target.found.replicas:
            return None
        old, new = ({"replicas": count} for count in (target.found.replicas, step.replicas))
        with caused_by(reason=step.decided.reason, old=old, new=new):
            await self._scale(target.place, target.found, step.replicas)
        what = f"{target.place[2]} {target.place[3]}"
        return ReplicaUpdate(target.spec.name, what, target.found.replicas, step.replicas, step.decided.reason)

    async def _claim(self, place: ScalableRef, found: Scalable, mine: TargetClaim) -> None:
        """Write the claim ``mine`` to the target. Raises DecisionOutdated if it has changed since."""
        try:
            claim = {SCALED_BY: mine.annotation_value, SCALED_TO: str(found.replicas)}
            self._informers.on_write_answered(place, found.resource, await self._annotate(found, claim, found.version))
        finally:
            self._informers.other_kinds.read_soon(place)

    async def _scale(self, place: ScalableRef, found: Scalable, replicas: int) -> None:
        """Write the replicas of a target, unless its replicas have changed since the decision; writes to other fields
        do not matter. Raises DecisionOutdated otherwise.

        The intention is written first: a leader that ends between the two writes leaves a number that its successor
        recognises.
        """
        try:
            await self._write_scale(place, found, replicas)
        finally:
            self._informers.other_kinds.read_soon(place)

    async def _write_scale(self, place: ScalableRef, found: Scalable, replicas: int) -> None:
        namespace, name = split_key(found.key)
        version = found.version
        for _ in range(3):
            try:
                intended = {SCALED_TO: f"{replicas} from {found.replicas}"}
                version = (await self._patch(found, intended, version))["metadata"]["resourceVersion"]
                patch = {"metadata": {"resourceVersion": version}, "spec": {"replicas": replicas}}
                scale = await self._client.merge_patch(found.resource, name, namespace, patch, subresource="scale")
                break
            except NotFound as error:
                raise DecisionOutdated(f"{found.key} is gone") from error
            except Conflict:
                scale = await self._scale_of(found)
                if (scale["metadata"].get("uid"), scale["spec"].get("replicas", 0)) != (found.uid, found.replicas):
                    raise DecisionOutdated(f"{found.key} has changed") from None
                version = str(scale["metadata"]["resourceVersion"])
        else:
            raise DecisionOutdated(f"{found.key} changes all the time")
        self._counted(found.resource.kind, "scale")
        # by this a later change by another writer is detected
        written = await self._annotate(found, {SCALED_TO: str(replicas)})
        self._informers.on_write_answered(place, found.resource, written, scale)

    async def _mark(self, marks: Sequence[Annotate]) -> None:
        """Pods that are gone, or others of the same name by now, need no marks."""
        for one in marks:
            namespace, name = split_key(one.key)
            patch = {"metadata": {"uid": one.uid, "annotations": one.annotations}}
            try:
                self._informers.pods.on_write_answered(await self._client.merge_patch(PODS, name, namespace, patch))
            except (NotFound, Conflict):
                continue
            self._counted(PODS.kind, "mark")

    async def _scale_of(self, found: Scalable) -> dict[str, dict[str, object]]:
        namespace, name = split_key(found.key)
        try:
            return await self._client.get(found.resource, name, namespace, subresource="scale")
        except NotFound as error:
            raise DecisionOutdated(f"{found.key} is gone") from error

    async def _annotate(self, found: Scalable, annotations: dict[str, str], version: str = "") -> Object:
        """The object after that. Raises DecisionOutdated."""
        try:
            return await self._patch(found, annotations, version)
        except (NotFound, Conflict) as error:
            raise DecisionOutdated(f"{found.key} has changed") from error

    async def _patch(self, found: Scalable, annotations: dict[str, str], version: str) -> Object:
        namespace, name = split_key(found.key)
        metadata: dict[str, object] = {"uid": found.uid, "annotations": annotations}
        if version:
            metadata["resourceVersion"] = version
        written = await self._client.merge_patch(found.resource, name, namespace, {"metadata": metadata})
        self._counted(found.resource.kind, "claim")
        return written


def _is_refusal(error: ClusterError) -> bool:
    """Whether the error is permanent, so that the status must report it. A busy server's is not."""
    return (
        isinstance(error, ApiError)
        and error.status < _SERVER_FAULTS
        and not isinstance(error, Conflict | TooManyRequests)
    )


def _asked_s(error: ClusterError) -> float:
    asked_s = error.retry_after_s if isinstance(error, ApiError) else None
    return 0.0 if asked_s is None else asked_s


def _reports(demand: DemandSource, result: ReconciliationResult) -> Mapping[str, EngineReport]:
    """By IP address of a pod. Only where something may drain: what each engine does."""
    if not result.situations or all(one.target.kind is None or one.target.kind.drains_itself for one in result.steps):
        return {}
    return demand.view(server_keys(result.resolved), result.now_s).reports
