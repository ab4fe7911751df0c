# SPDX-License-Identifier: Apache-2.0
"""A group starts whole: by a PodGroup, by Kueue's marks, or by our own hold until all of its pods have capacity."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from controller.api.pod_spec_checks import resource_requests
from controller.kube.api_resources import SCHEDULER_POD_GROUPS, VOLCANO_POD_GROUPS, key_of
from controller.kube.reconcile_plan import Apply, Create, Delete, KubeEvent
from controller.models.model_infer import names
from controller.models.model_infer.desired_state import owner_reference
from controller.models.model_infer.pod_changes import MissingPod
from controller.models.model_infer.pod_removal import pod_deletion
from controller.models.model_infer.pod_state import is_owned
from controller.models.model_infer.recovery import FORGOTTEN_AFTER_S, NO_ROOM, RecoveryAttempt, recorded_attempts
from controller.models.model_infer.status import DegradedReason
from extproc.api.spec import requirement_holds

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from controller.kube.api_resources import ApiResource, Object
    from controller.models.model_infer.desired_state import DesiredState, Revision
    from controller.models.model_infer.groups import Group
    from controller.models.model_infer.model_infer_state import ModelInferState, NodeCapacity
    from controller.models.model_infer.names import PodPosition

# Of a bound in a node affinity.
_MOST_DIGITS: Final = 18
_EFFECTS: Final = ("NoSchedule", "NoExecute")
Form = Literal["Kueue", "Volcano", "SchedulerPlugins", "Hold"]
_KUEUE_QUEUE: Final = "kueue.x-k8s.io/queue-name"
_VOLCANO_QUEUE: Final = "scheduling.volcano.sh/queue-name"
_VOLCANO: Final = "volcano"
# nodes change without an event for us
_LOOK_EACH_S: Final = 15.0


def total_requests(specs: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Of several pods, as Kubernetes writes quantities."""
    sums: dict[str, float] = {}
    for spec in specs:
        for name, amount in resource_requests(spec).items():
            sums[name] = sums.get(name, 0.0) + amount
    return {name: _written(amount) for name, amount in sorted(sums.items()) if amount}


def _written(amount: float) -> str:
    thousandths = round(amount * 1000)
    return str(thousandths // 1000) if thousandths % 1000 == 0 else f"{thousandths}m"


class PodPlacer:
    """Free resources of nodes, minus those of placed pods. Pods are placed largest first, each on the first node that
    fits.
    """

    def __init__(self, nodes: Sequence[NodeCapacity]) -> None:
        self._nodes = sorted(nodes, key=lambda one: one.name)
        self._free = {one.name: dict(one.free) for one in nodes}

    def place_all(self, specs: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
        """The first that finds no place, and then none of them is placed; None if all have one."""
        before = {name: dict(free) for name, free in self._free.items()}
        for spec in sorted(specs, key=_size, reverse=True):
            if not self._place(spec):
                self._free = before
                return spec
        return None

    def _place(self, spec: Mapping[str, Any]) -> bool:
        requests = {**resource_requests(spec), "pods": 1.0}
        for node in self._nodes:
            free = self._free[node.name]
            fits = all(free.get(name, 0.0) >= amount for name, amount in requests.items() if amount)
            if fits and is_schedulable(node, spec):
                for name, amount in requests.items():
                    free[name] = free.get(name, 0.0) - amount
                return True
        return False


def _size(spec: Mapping[str, Any]) -> tuple[float, float, float]:
    """Accelerators decide, then cores, then memory."""
    requests = resource_requests(spec)
    devices = sum(amount for name, amount in requests.items() if "/" in name)
    return devices, requests.get("cpu", 0.0), requests.get("memory", 0.0)


def is_schedulable(node: NodeCapacity, spec: Mapping[str, Any]) -> bool:
    """Whether a node may run a pod, room aside."""
    selector = spec.get("nodeSelector") or {}
    tolerations = spec.get("tolerations") or ()
    return (
        all(node.labels.get(name) == value for name, value in selector.items())
        and all(_tolerates(tolerations, one) for one in node.taints if one.get("effect") in _EFFECTS)
        and _has_affinity(spec, node)
    )


def _tolerates(tolerations: Sequence[Mapping[str, Any]], taint: Mapping[str, Any]) -> bool:
    return any(
        one.get("effect") in (None, "", taint.get("effect"))
        and (
            (one.get("operator") == "Exists" and one.get("key") in (None, "", taint.get("key")))
            or (one.get("key") == taint.get("key") and (one.get("value") or "") == (taint.get("value") or ""))
        )
        for one in tolerations
    )


def _has_affinity(spec: Mapping[str, Any], node: NodeCapacity) -> bool:
    """One of the terms, if there are any, and of that all expressions."""
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    terms = (affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}).get("nodeSelectorTerms")
    if not terms:
        return True
    return any(all(_holds(one, node.labels) for one in term.get("matchExpressions") or ()) for term in terms)


def _holds(expression: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    operator, key, values = expression.get("operator"), str(expression.get("key")), list(expression.get("values") or ())
    if operator in ("Gt", "Lt"):
        value, bound = labels.get(key, ""), "".join(map(str, values))
        if not (value.isdecimal() and bound.isdecimal() and len(bound) <= _MOST_DIGITS):
            return False
        return int(value) > int(bound) if operator == "Gt" else int(value) < int(bound)
    return requirement_holds(key, str(operator), values, labels)


class GangMetadata(msgspec.Struct, frozen=True):
    """Labels and annotations by which a scheduler identifies a pod's group."""

    labels: Mapping[str, str] = {}
    annotations: Mapping[str, str] = {}


def gang_scheduler(target: DesiredState, observed: ModelInferState) -> Form | None:
    """None without ``gang``. A PodGroup has an effect only with a scheduler that reads it, so one must be named."""
    if target.spec.template.gang is None:
        return None
    if observed.gang.kueue and _queue(target):
        return "Kueue"
    if target.spec.scheduler_name == _VOLCANO and observed.gang.volcano:
        return "Volcano"
    if target.spec.scheduler_name not in (None, _VOLCANO) and observed.gang.scheduler_plugins:
        return "SchedulerPlugins"
    return "Hold"


def _queue(target: DesiredState) -> str:
    """Kueue's label of the ModelInfer, which its pods inherit."""
    return str((target.owner["metadata"].get("labels") or {}).get(_KUEUE_QUEUE, ""))


def gang_pod_metadata(place: PodPosition, revision: Revision, target: DesiredState, form: Form | None) -> GangMetadata:
    """Of one pod."""
    name = names.pod_group_name(target.name, place.group)
    match form:
        case "Kueue":
            count = len(gang_pod_specs(revision, target, everything=True))
            return GangMetadata(
                {_KUEUE_QUEUE: _queue(target), "kueue.x-k8s.io/pod-group-name": name},
                {"kueue.x-k8s.io/pod-group-total-count": str(count), "kueue.x-k8s.io/pod-group-serving": "true"},
            )
        case "Volcano":
            task = f"{place.role}-{place.replica}"
            return GangMetadata({}, {"scheduling.k8s.io/group-name": name, "volcano.sh/task-spec": task})
        case "SchedulerPlugins":
            return GangMetadata({"scheduling.x-k8s.io/pod-group": name})
    return GangMetadata()


def gang_pod_specs(revision: Revision, target: DesiredState, *, everything: bool = False) -> list[Mapping[str, Any]]:
    """PodSpecs of a group: of those that must start together, or of all. Roles that start after others cannot be waited
    for: they are made only when the first ones are ready.
    """
    gang = target.spec.template.gang
    least = gang.min_role_replicas if gang is not None else {}
    later = {one.name for one in target.spec.template.roles if one.starts_after}
    found: list[Mapping[str, Any]] = []
    for role in revision.roles:
        count = target.replicas_of(revision, role.name)
        if not everything:
            count = 0 if role.name in later else min(count, least.get(role.name, count))
        worker = role.worker or role.entry
        found += [*[role.entry.spec], *([worker.spec] * role.workers)] * count
    return found


def pod_group_actions(
    wanted: Mapping[int, Revision], target: DesiredState, observed: ModelInferState, form: Form | None
) -> Iterator[Create | Apply]:
    """PodGroups that are missing or differ. ``wanted``: revisions of the groups that should exist."""
    kind = _kind(form)
    if kind is None:
        return
    known = {one["metadata"]["name"]: one for one in observed.pod_groups}
    for ordinal, revision in sorted(wanted.items()):
        thing = _pod_group(ordinal, revision, target, kind)
        old = known.get(thing["metadata"]["name"])
        if old is None:
            yield Create(kind, thing)
        elif not thing["spec"].items() <= (old.get("spec") or {}).items():
            yield Apply(kind, thing)


def pod_group_deletions(
    wanted: Mapping[int, Revision], target: DesiredState, observed: ModelInferState, form: Form | None
) -> Iterator[Delete]:
    """Of groups that are no more, or of another kind than is used now."""
    kind = _kind(form)
    names_used = {names.pod_group_name(target.name, one) for one in wanted} if kind is not None else set()
    for one in observed.pod_groups:
        found = SCHEDULER_POD_GROUPS if _is_of(one, SCHEDULER_POD_GROUPS) else VOLCANO_POD_GROUPS
        if is_owned(one, target.uid) and (found != kind or one["metadata"]["name"] not in names_used):
            yield Delete(found, key_of(one), one["metadata"].get("uid", ""))


def _kind(form: Form | None) -> ApiResource | None:
    kinds: Mapping[str | None, ApiResource] = {"Volcano": VOLCANO_POD_GROUPS, "SchedulerPlugins": SCHEDULER_POD_GROUPS}
    return kinds.get(form)


def _is_of(thing: Object, kind: ApiResource) -> bool:
    return str(thing.get("apiVersion", "")).partition("/")[0] == kind.group


def _pod_group(ordinal: int, revision: Revision, target: DesiredState, kind: ApiResource) -> Object:
    together = gang_pod_specs(revision, target)
    spec: dict[str, Any] = {"minMember": len(together)}
    resources = total_requests(together)
    if resources:
        spec["minResources"] = resources
    gang = target.spec.template.gang
    metadata = target.owner["metadata"]
    queue = (metadata.get("annotations") or {}).get(_VOLCANO_QUEUE)
    if kind == VOLCANO_POD_GROUPS and queue:
        spec["queue"] = queue
    if kind == SCHEDULER_POD_GROUPS and gang is not None:
        spec["scheduleTimeoutSeconds"] = max(1, int(gang.timeout))
    return {
        "apiVersion": kind.api_version,
        "kind": kind.kind,
        "metadata": {
            "name": names.pod_group_name(target.name, ordinal),
            "namespace": metadata["namespace"],
            "labels": {names.MODEL_INFER: target.name, names.GROUP: str(ordinal)},
            "ownerReferences": [owner_reference(target.owner)],
        },
        "spec": spec,
    }


class GangResult(msgspec.Struct, frozen=True, kw_only=True):
    """``form``: how groups are held together. ``missing``: pods that may be made. ``problems``: of groups that wait.
    ``deleted``: pods of groups that are given up. ``attempts``: for the status.
    """

    form: Form | None
    missing: tuple[MissingPod, ...] = ()
    problems: tuple[DegradedReason, ...] = ()
    deleted: tuple[Delete, ...] = ()
    attempts: tuple[RecoveryAttempt, ...] = ()
    events: tuple[KubeEvent, ...] = ()
    requeue_at_s: float | None = None


class _Held(msgspec.Struct, frozen=True, kw_only=True):
    missing: tuple[MissingPod, ...] = ()
    problems: tuple[DegradedReason, ...] = ()
    requeue_at_s: float | None = None


class _GivenUp(msgspec.Struct, frozen=True, kw_only=True):
    groups: frozenset[int] = frozenset()
    deleted: tuple[Delete, ...] = ()
    attempts: tuple[RecoveryAttempt, ...] = ()
    events: tuple[KubeEvent, ...] = ()
    requeue_at_s: float | None = None


def schedule_gangs(
    missing: Sequence[MissingPod],
    groups: Sequence[Group],
    target: DesiredState,
    observed: ModelInferState,
    now_s: float,
) -> GangResult:
    """Gang schedulers need only the marks."""
    form = gang_scheduler(target, observed)
    if form != "Hold":
        return GangResult(form=form, missing=tuple(missing))
    known = _known(target, now_s)
    gone = _given_up(groups, target, observed, known, now_s)
    attempts = tuple({one.name: one for one in (*known, *gone.attempts)}.values())
    rest = [one for one in missing if one.place.group not in gone.groups]
    kept = _held(rest, groups, target, observed, attempts, now_s)
    times = [one for one in (gone.requeue_at_s, kept.requeue_at_s) if one is not None]
    times += [_forgotten_s(one, target) for one in attempts]
    return GangResult(
        form=form,
        missing=kept.missing,
        problems=kept.problems,
        deleted=gone.deleted,
        attempts=attempts,
        events=gone.events,
        requeue_at_s=min(times, default=None),
    )


def _known(target: DesiredState, now_s: float) -> list[RecoveryAttempt]:
    """Groups that were given up, until they have had time to try again and to run for a while."""
    found = recorded_attempts(target.owner.get("status") or {})
    return [one for one in found if one.reason == NO_ROOM and now_s < _forgotten_s(one, target)]


def _forgotten_s(attempt: RecoveryAttempt, target: DesiredState) -> float:
    gang = target.spec.template.gang
    return attempt.at_s + FORGOTTEN_AFTER_S + (gang.timeout if gang is not None else 0.0)


def _held(
    missing: Sequence[MissingPod],
    groups: Sequence[Group],
    target: DesiredState,
    observed: ModelInferState,
    attempts: Sequence[RecoveryAttempt],
    now_s: float,
) -> _Held:
    """Of the ``missing`` pods, those of groups for which there is room."""
    by_group: dict[int, list[MissingPod]] = defaultdict(list)
    for one in missing:
        by_group[one.place.group].append(one)
    waits = {one.name: one.at_s + one.wait_s for one in attempts}
    places = None if observed.node_capacities is None else PodPlacer(observed.node_capacities)
    if places is not None:
        for pod in (pod for group in groups for pod in group.pods if pod.is_waiting):
            places.place_all([pod.thing.get("spec") or {}])
    begun = {one.ordinal for one in groups if not one.is_being_deleted}
    # what an autoscaler adds to a group that serves waits for nothing else, and nothing for it
    growing = {one.ordinal for one in groups if one.is_serving and not one.is_ready}
    made: list[MissingPod] = []
    problems: list[DegradedReason] = []
    times: list[float] = []
    for ordinal, found in sorted(by_group.items()):
        until_s = waits.get(_name(ordinal), 0.0)
        pods = [_spec(one) for one in found] if ordinal in begun else gang_pod_specs(found[0].revision, target)
        left_over = None if places is None or now_s < until_s or ordinal in growing else places.place_all(pods)
        if now_s < until_s:
            problems.append(DegradedReason(NO_ROOM, f"group {ordinal} was given up for want of room, and waits"))
            times.append(until_s)
        elif left_over is not None:
            problems.append(DegradedReason(NO_ROOM, _no_capacity_message(ordinal, len(pods), left_over)))
            times.append(now_s + _LOOK_EACH_S)
        else:
            made += found
    return _Held(missing=tuple(made), problems=tuple(problems), requeue_at_s=min(times, default=None))


def _given_up(
    groups: Sequence[Group],
    target: DesiredState,
    observed: ModelInferState,
    known: Sequence[RecoveryAttempt],
    now_s: float,
) -> _GivenUp:
    """Delete the pods of groups that hold nodes but cannot start, so that others get the capacity. The retry is later
    each time.
    """
    gang = target.spec.template.gang
    before = {one.name: one for one in known}
    ordinals: set[int] = set()
    deleted: list[Delete] = []
    attempts: list[RecoveryAttempt] = []
    events: list[KubeEvent] = []
    times: list[float] = []
    for group in groups:
        since_s = _incomplete_since(group, target)
        if gang is None or since_s is None:
            continue
        if now_s < since_s + gang.timeout:
            times.append(since_s + gang.timeout)
            continue
        ordinals.add(group.ordinal)
        deleted += [pod_deletion(one, observed.lost_nodes) for one in group.pods if not one.is_going]
        old = before.get(_name(group.ordinal))
        attempts.append(
            RecoveryAttempt(name=_name(group.ordinal), count=old.count + 1 if old else 1, at_s=now_s, reason=NO_ROOM)
        )
        message = (
            f"group {group.ordinal} found no room for all of its pods within {gang.timeout}, and gives up what it has"
        )
        events.append(KubeEvent("Warning", NO_ROOM, message))
    return _GivenUp(
        groups=frozenset(ordinals),
        deleted=tuple(deleted),
        attempts=tuple(attempts),
        events=tuple(events),
        requeue_at_s=min(times, default=None),
    )


def _incomplete_since(group: Group, target: DesiredState) -> float | None:
    """When the oldest pod without a node was made. None if enough replicas have one to start, or no pod has: those that
    wait hold nothing.
    """
    gang = target.spec.template.gang
    waiting = [one.created_at_s for one in group.pods if one.is_waiting]
    if gang is None or not waiting or len(waiting) == len(group.pods) or group.is_serving:
        return None
    later = {one.name for one in target.spec.template.roles if one.starts_after}
    for role in group.revision.roles:
        count = target.replicas_of(group.revision, role.name)
        needed = 0 if role.name in later else min(count, gang.min_role_replicas.get(role.name, count))
        placed = [
            one
            for one in group.replicas_of_role(role.name)
            if one.live_pods and not any(pod.is_waiting for pod in one.live_pods)
        ]
        if len(placed) < needed:
            return min(waiting)
    return None


def _spec(missing: MissingPod) -> Mapping[str, Any]:
    template = missing.role.entry if missing.place.index == 0 or missing.role.worker is None else missing.role.worker
    return template.spec


def _no_capacity_message(ordinal: int, count: int, spec: Mapping[str, Any]) -> str:
    message = ", ".join(f"{amount} {name}" for name, amount in total_requests([spec]).items()) or "a place"
    return f"group {ordinal} waits until its {count} pods find room together; one of them asks for {message}"


def _name(ordinal: int) -> str:
    return f"{ordinal}/gang"
