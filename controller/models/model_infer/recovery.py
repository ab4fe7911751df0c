# SPDX-License-Identifier: Apache-2.0
"""Recreates pods after a failure, with a back-off that grows with each further failure.

The count and time of recreations are in the status: they survive a restart of the manager, and users see them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from controller.kube.api_resources import parse_timestamp, timestamp_of
from controller.kube.reconcile_plan import Delete, KubeEvent
from controller.models.model_infer.names import PodPosition
from controller.models.model_infer.pod_removal import pod_deletion
from controller.models.model_infer.pod_state import LOST_AFTER_S, Pod, PodFailure, pod_failure

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from controller.kube.api_resources import Object
    from controller.models.model_infer.desired_state import DesiredState, Revision
    from controller.models.model_infer.groups import Group, Replica
    from controller.models.model_infer.model_infer_state import ModelInferState

_FIRST_WAIT_S: Final = 10.0
_LONGEST_WAIT_S: Final = 300.0
# what has run for so long has recovered
FORGOTTEN_AFTER_S: Final = 600.0
_MOST: Final = 256
# reason of groups that were given up because they did not fit, which are counted apart
NO_ROOM: Final = "NoRoom"


class RecoveryAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """``name``: of the recreated unit: its group, then role, replica and pod if only those were recreated. ``count``:
    consecutive recreations. ``at_s``: time of the last one.
    """

    name: str
    count: int
    at_s: float
    reason: str

    @property
    def wait_s(self) -> float:
        """How long after ``at_s`` the next one may be."""
        return min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2.0 ** min(self.count - 1, 10))


class RecoveryScope(msgspec.Struct, frozen=True, kw_only=True):
    """Pods that are recreated together. ``pods``: those that do not terminate yet. ``places``: of replicas."""

    name: str
    pods: tuple[Pod, ...]
    places: frozenset[PodPosition]
    is_ready: bool


class RecoveryResult(msgspec.Struct, frozen=True, kw_only=True):
    """``places``: replicas that are recreated. ``attempts``: for the status."""

    deleted: tuple[Delete, ...] = ()
    places: frozenset[PodPosition] = frozenset()
    attempts: tuple[RecoveryAttempt, ...] = ()
    events: tuple[KubeEvent, ...] = ()
    requeue_at_s: float | None = None


def recover(
    groups: Sequence[Group],
    target: DesiredState,
    observed: ModelInferState,
    unwanted: Collection[PodPosition],
    now_s: float,
) -> RecoveryResult:
    """``unwanted``: replicas that go anyway."""
    known = {one.name: one for one in recorded_attempts(target.owner.get("status") or {}) if one.reason != NO_ROOM}
    deleted: list[Delete] = list(_forced(groups, observed, now_s))
    places: set[PodPosition] = set()
    events: list[KubeEvent] = []
    times: list[float] = []
    attempts: list[RecoveryAttempt] = []
    for scope, failure in _failing(groups, target, observed, unwanted, now_s):
        before = known.pop(scope.name, None)
        if failure is None:
            kept = _remembered_attempts(scope, before, now_s)
            attempts += kept
            times += [one.at_s + FORGOTTEN_AFTER_S for one in kept if scope.is_ready]
            continue
        at_s = _due_s(failure, before, target)
        if at_s is None or now_s < at_s:
            times += [] if at_s is None else [at_s]
            attempts += [before] if before is not None else []
            continue
        deleted += [pod_deletion(one, observed.lost_nodes) for one in scope.pods]
        places |= scope.places
        attempts.append(_next(scope.name, before, failure, now_s))
        events.append(
            KubeEvent("Warning", "Recovering", f"pod {failure.pod.key}: {failure.message}; {scope.name} is made anew")
        )
    # of what is not there yet again
    rest = [one for one in known.values() if now_s < one.at_s + FORGOTTEN_AFTER_S]
    attempts += rest
    times += [one.at_s + FORGOTTEN_AFTER_S for one in rest]
    return RecoveryResult(
        deleted=tuple({one.uid: one for one in deleted}.values()),
        places=frozenset(places),
        attempts=tuple(attempts),
        events=tuple(events),
        requeue_at_s=min(times, default=None),
    )


def recorded_attempts(status: Object) -> Iterator[RecoveryAttempt]:
    """As the status has them."""
    for one in status.get("recoveries") or ():
        at_s = parse_timestamp(one.get("at"))
        if at_s is not None:
            yield RecoveryAttempt(name=one["name"], count=one["count"], at_s=at_s, reason=one.get("reason", ""))


def attempts_status(attempts: Iterable[RecoveryAttempt]) -> list[Mapping[str, Any]]:
    """For the status, which has room for so many: the latest."""
    latest = sorted(attempts, key=lambda one: -one.at_s)[:_MOST]
    return [
        {"name": one.name, "count": one.count, "at": timestamp_of(one.at_s), "reason": one.reason}
        for one in sorted(latest, key=lambda one: one.name)
    ]


def _remembered_attempts(scope: RecoveryScope, before: RecoveryAttempt | None, now_s: float) -> list[RecoveryAttempt]:
    """Until it has been well for long enough."""
    if before is None or (scope.is_ready and now_s >= before.at_s + FORGOTTEN_AFTER_S):
        return []
    return [before]


def _due_s(failure: PodFailure, before: RecoveryAttempt | None, target: DesiredState) -> float | None:
    """The time at which to recreate; None: never."""
    if target.spec.recovery == "None":
        return None
    grace_s = 0.0 if failure.is_final else target.spec.template.restart_grace_period
    at_s = failure.at_s + max(failure.due_s, grace_s)
    return at_s if before is None else max(at_s, before.at_s + before.wait_s)


def _next(name: str, before: RecoveryAttempt | None, failure: PodFailure, now_s: float) -> RecoveryAttempt:
    is_in_a_row = before is not None and failure.at_s - before.at_s < FORGOTTEN_AFTER_S
    count = before.count + 1 if before is not None and is_in_a_row else 1
    return RecoveryAttempt(name=name, count=count, at_s=now_s, reason=failure.reason)


def _forced(groups: Sequence[Group], observed: ModelInferState, now_s: float) -> Iterator[Delete]:
    """Pods being deleted on a lost node: no kubelet will report their end."""
    for group in groups:
        for one in group.pods:
            since_s = observed.lost_nodes.get(one.node)
            if one.is_going and since_s is not None and now_s >= since_s + LOST_AFTER_S:
                yield pod_deletion(one, observed.lost_nodes)


def _failing(
    groups: Sequence[Group],
    target: DesiredState,
    observed: ModelInferState,
    unwanted: Collection[PodPosition],
    now_s: float,
) -> Iterator[tuple[RecoveryScope, PodFailure | None]]:
    """Each scope with the failure that is due first, if it has one."""
    unresponsive_s = target.spec.template.unresponsive_timeout
    revisions = {one.ordinal: one.revision for one in groups}
    for scope, replicas in _scopes(groups, target, unwanted):
        size = sum(one.size for one in replicas)
        found = [pod_failure(one, observed, unresponsive_s) for one in scope.pods]
        if len(scope.pods) == 1 and size == 1 and target.spec.recovery != "None":
            # its kubelet restarts the only container in place, with the downloaded weights
            found = [one for one in found if one is not None and not one.is_restarted]
        if target.spec.recovery in ("Group", "Role"):
            found += _vanished(replicas, revisions, now_s)
        known = [one for one in found if one is not None]
        yield scope, min(known, key=lambda one: one.at_s + one.due_s, default=None)


def _vanished(replicas: Sequence[Replica], revisions: Mapping[int, Revision], now_s: float) -> list[PodFailure | None]:
    """Groups of which some pods were deleted: the others cannot work without them. ``revisions``: of groups."""
    live = [pod for one in replicas for pod in one.live_pods]
    going = [
        pod for one in replicas if not _is_intended(one, revisions[one.place.group]) for pod in one.pods if pod.is_going
    ]
    is_broken = any(len(one.pods) < one.size and any(pod.is_ready for pod in one.live_pods) for one in replicas)
    if not live or not (going or is_broken):
        return []
    message = "a pod that it works with was deleted"
    return [PodFailure(pod=live[0], at_s=now_s, reason="PodDeleted", message=message, is_final=True)]


def _is_intended(replica: Replica, revision: Revision) -> bool:
    """It was drained, or is of another revision than its group is to have."""
    role = revision.role(replica.place.role)
    return any(
        one.draining_at_s is not None or (one.is_going and (role is None or one.role_revision != role.hash))
        for one in replica.pods
    )


def _scopes(
    groups: Sequence[Group], target: DesiredState, unwanted: Collection[PodPosition]
) -> Iterator[tuple[RecoveryScope, list[Replica]]]:
    """Pods that are recreated together. A group that serves without the failed replica, which is one of a rollout's
    surplus, continues to serve: only that replica is recreated.
    """
    for group in groups:
        wanted = [one for one in group.replicas if one.place not in unwanted]
        match target.spec.recovery:
            case "Group" if not group.is_ready:
                yield _scope(str(group.ordinal), wanted, is_ready=group.is_ready), wanted
            case "Role" | "Group":
                for one in wanted:
                    name = f"{group.ordinal}/{one.place.role}/{one.place.replica}"
                    yield _scope(name, [one], is_ready=one.is_ready), [one]
            case _:
                for one in wanted:
                    for pod in one.live_pods:
                        name = f"{group.ordinal}/{one.place.role}/{one.place.replica}/{pod.place.index}"
                        alone = msgspec.structs.replace(one, pods=(pod,), size=1)
                        yield _scope(name, [alone], is_ready=pod.is_ready), [alone]


def _scope(name: str, replicas: Sequence[Replica], *, is_ready: bool) -> RecoveryScope:
    return RecoveryScope(
        name=name,
        pods=tuple(pod for one in replicas for pod in one.live_pods),
        places=frozenset(one.place for one in replicas),
        is_ready=is_ready,
    )
