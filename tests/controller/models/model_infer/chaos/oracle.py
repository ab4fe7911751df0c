# SPDX-License-Identifier: Apache-2.0
"""What must hold at each action of a manager, whatever happened before it."""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING, Any, Protocol

from controller.kube.api_resources import PODS, Object, key_of
from controller.kube.reconcile_plan import Annotate, Apply, Create, Delete
from tests.controller.models.model_infer.chaos.specs import duration_s, group_budget, resolved, role_of
from tests.controller.models.model_infer.chaos.view import (
    DRAINING,
    is_leaving,
    named,
    ready_groups,
    replicas_ready,
    seat_of,
    serving_groups,
    size_of,
)
from tests.virtual_cluster.clock import seconds
from tests.virtual_cluster.requests import is_ready

if TYPE_CHECKING:
    from controller.kube.reconcile_plan import Action
    from tests.virtual_cluster.manager import ReconcileRecord

_LOOKS_A_MINUTE = 400


class Broken(AssertionError):
    """An invariant does not hold. ``name``: which."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"{name}: {why}")
        self.name = name


class Truth(Protocol):
    """How things are, whatever a manager has seen of them."""

    def pods(self) -> list[Object]:
        """All pods."""
        ...

    def living(self) -> list[tuple[str, str, str]]:
        """Key, uid and node of the pods whose processes run on nodes that are up."""
        ...

    def in_flight(self, uid: str) -> int:
        """Running requests of a pod."""
        ...

    @property
    def now_s(self) -> float:
        """Seconds since the epoch."""
        ...


class Oracle:
    """A witness of all managers of a history; it forgets nothing when they are killed. ``calm``: nothing but the user's
    changes and the managers' own deaths makes pods unready, so that every serving group is protected.
    """

    def __init__(self, *, calm: bool = False) -> None:
        self.cluster: Truth | None = None
        self.looks = 0
        self.actions: Counter[str] = Counter()
        self.status_writes = 0
        self.events = 0
        self.last: ReconcileRecord | None = None
        # by the user
        self.is_deleted = False
        self.log: deque[str] = deque(maxlen=400)
        self._calm = calm
        self._withdrawn: set[str] = set()
        # pods of groups that were whole and ready once
        self._served: set[str] = set()
        self._recent: deque[float] = deque()

    def record_reconcile(self, record: ReconcileRecord) -> None:
        """Decisions must not follow each other in a hot loop."""
        self.looks += 1
        self.events += len(record.plan.events)
        self.last = record
        self._remember(record)
        self._recent.append(record.at_s)
        while self._recent[0] < record.at_s - 60:
            self._recent.popleft()
        again = record.plan.requeue_at_s
        self.note(
            f"look: {len(record.plan.actions)} actions, again in {None if again is None else again - record.at_s}"
        )
        if len(self._recent) > _LOOKS_A_MINUTE:
            raise Broken("no hot loop", f"{len(self._recent)} looks in a minute")

    def wrote_status(self, _: str) -> None:
        """A status was another before."""
        self.status_writes += 1
        self.note("status written")

    def before_action(self, record: ReconcileRecord, action: Action) -> None:
        """Check one action against what its manager had seen, and against what is true."""
        kind = type(action).__name__
        self.actions[kind] += 1
        self.note(f"{kind} {action.resource.plural} {_key(action)}{_said(action)}")
        if isinstance(action, Create | Apply):
            self._is_owned(record, action.thing)
        if action.resource != PODS:
            return
        if isinstance(action, Create):
            self._may_be_made(record, action.thing)
        elif isinstance(action, Delete):
            self._was_drained(record, action)
            self._may_be_withdrawn(record, action.key, action.uid)
        elif isinstance(action, Annotate) and action.annotations.get(DRAINING):
            self._may_be_withdrawn(record, action.key, action.uid)
        elif isinstance(action, Annotate) and DRAINING in action.annotations:
            self._withdrawn.discard(action.uid)

    def forgive(self) -> None:
        """What was withdrawn counts only as far as managers see it themselves."""
        self._withdrawn.clear()

    def note(self, what: str) -> None:
        """For whoever reads a failure."""
        assert self.cluster is not None
        self.log.append(f"{self.cluster.now_s - 1_800_000_000:10.3f} {what}")

    def _is_owned(self, record: ReconcileRecord, thing: Object) -> None:
        owners = thing["metadata"].get("ownerReferences") or []
        uid = record.observed.thing["metadata"]["uid"]
        if [(one["uid"], one.get("controller"), one.get("blockOwnerDeletion")) for one in owners] != [
            (uid, True, True)
        ]:
            raise Broken("everything has its owner", f"{named(thing)}: {owners}")

    def _may_be_made(self, record: ReconcileRecord, pod: Object) -> None:
        spec, seat = record.observed.thing["spec"], seat_of(pod)
        uid = record.observed.thing["metadata"]["uid"]
        self._is_named(record, pod)
        self._lives_once(pod)
        pods = [one for one in self._pods() if _owner(one) == uid]
        groups = {seat_of(one).group for one in pods}
        most = spec["replicas"] + group_budget(spec)[1]
        if seat.group not in groups and len(groups) >= most:
            raise Broken("no pod beyond the surge", f"{named(pod)} beside groups {sorted(groups)} of {most}")
        self._role_surge(spec, pod, pods)
        self._starts_in_order(record, pod)

    def _role_surge(self, spec: dict[str, Any], pod: Object, pods: list[Object]) -> None:
        seat = seat_of(pod)
        role = role_of(spec, seat.role)
        if role is None:
            return
        mine = [one for one in pods if (seat_of(one).group, seat_of(one).role) == (seat.group, seat.role)]
        replicas = {seat_of(one).replica for one in mine}
        wanted = role.get("replicas", 1)
        surge = resolved(role.get("maxSurge") or 0, wanted, up=True)
        if (spec.get("rollout") or {}).get("unit") == "Role" and group_budget(spec)[0] == 0:
            # no group may be unavailable, so roles change by a surplus
            surge = max(surge, 1)
        most = wanted + surge
        if seat.replica not in replicas and len(replicas) >= most:
            raise Broken("no pod beyond the surge", f"{named(pod)} beside replicas {sorted(replicas)} of {most}")
        if seat.index >= size_of(pod):
            raise Broken("no pod beyond the surge", f"{named(pod)} in a replica of {size_of(pod)} pods")

    def _is_named(self, record: ReconcileRecord, pod: Object) -> None:
        seat, owner = seat_of(pod), record.observed.thing["metadata"]["name"]
        wanted = f"{owner}-{seat.group}-{seat.role}-{seat.replica}-{seat.index}"
        if named(pod) != wanted:
            raise Broken("names say where a pod stands", f"{named(pod)} is {wanted}")

    def _lives_once(self, pod: Object) -> None:
        assert self.cluster is not None
        uids = {one["metadata"]["uid"] for one in self._pods()}
        for key, uid, node in self.cluster.living():
            if key == key_of(pod) and uid not in uids:
                raise Broken("no two live pods of one name", f"{named(pod)} still runs on {node}")

    def _starts_in_order(self, record: ReconcileRecord, pod: Object) -> None:
        seat = seat_of(pod)
        role = role_of(record.observed.thing["spec"], seat.role)
        siblings = [one for one in record.observed.pods if seat_of(one).group == seat.group]
        if role is None or any(seat_of(one).role == seat.role and not is_leaving(one) for one in siblings):
            return  # it has begun
        ready = replicas_ready(record.observed.pods, (), record.observed.lost_nodes).get(seat.group, {})
        for name in role.get("startsAfter") or ():
            before = role_of(record.observed.thing["spec"], name)
            if before is not None and ready.get(name, 0) < before.get("replicas", 1):
                raise Broken("roles start in their order", f"{named(pod)} before {name}: {ready}")

    def _may_be_withdrawn(self, record: ReconcileRecord, key: str, uid: str) -> None:
        """A ready group may be made unready by us only if enough others are left; those that are unready by themselves
        count as missing, and so does all that any manager has withdrawn before, whether this one knows it or not.
        """
        spec, seen = record.observed.thing["spec"], record.observed
        before = replicas_ready(seen.pods, self._withdrawn, seen.lost_nodes)
        self._withdrawn.add(uid)
        after = replicas_ready(seen.pods, self._withdrawn, seen.lost_nodes)
        least = spec["replicas"] - group_budget(spec)[0]
        left = ready_groups(after, spec)
        if ready_groups(before, spec) - left and len(left) < least:
            raise Broken("never fewer than maxUnavailable allows", f"without {key} {len(left)} are ready, {least} must")
        served = {seat_of(one).group for one in seen.pods if one["metadata"]["uid"] in self._served}
        serving = serving_groups(after, spec) & served
        if self._calm and (serving_groups(before, spec) & served) - serving and len(serving) < least:
            raise Broken("never fewer than maxUnavailable allows", f"without {key} {len(serving)} serve, {least} must")

    def _remember(self, record: ReconcileRecord) -> None:
        ready = ready_groups(replicas_ready(record.observed.pods, (), ()), record.observed.thing["spec"])
        self._served |= {one["metadata"]["uid"] for one in record.observed.pods if seat_of(one).group in ready}

    def _was_drained(self, record: ReconcileRecord, action: Delete) -> None:
        """No request is cut, unless its engine is dead, or has had its time to drain."""
        seen = next((one for one in record.observed.pods if one["metadata"]["uid"] == action.uid), None)
        if seen is None:
            raise Broken("only what was seen is deleted", action.key)
        if "deletionTimestamp" in seen["metadata"] and action.grace_s is None:
            raise Broken("deleted once", f"{action.key} is going already")
        dead_node = seen["spec"].get("nodeName") in record.observed.lost_nodes
        if (
            action.grace_s == 0
            and not dead_node
            and (seen.get("status") or {}).get("phase") not in ("Failed", "Succeeded")
        ):
            raise Broken("no two live pods of one name", f"{action.key} is removed by force from a node that is alive")
        if dead_node or not is_ready(seen) or "deletionTimestamp" in seen["metadata"]:
            return
        if self.is_deleted:
            return  # the garbage collector deletes the same pods now, without draining any
        if record.observed.thing["spec"].get("recovery") == "Group" and self._has_failed(record, seen):
            return  # the group is dead as a whole; what runs on its other engines has the grace of their pods
        if record.observed.thing["spec"].get("recovery") == "Role" and self._is_broken(record, seen):
            return  # so is a replica without one of its pods, even if its others still say that they are ready
        drain_s = duration_s(record.observed.thing["spec"]["template"].get("drainTimeout", "5m"))
        if not self._is_idle(record, seen, drain_s):
            raise Broken("drained before deletion", f"{action.key} has requests or was never drained")

    def _has_failed(self, record: ReconcileRecord, pod: Object) -> bool:
        """Whether its group lacks a pod that serves."""
        group, spec = seat_of(pod).group, record.observed.thing["spec"]
        serving = [
            one for one in record.observed.pods if seat_of(one).group == group and is_ready(one) and not is_leaving(one)
        ]
        roles = spec["template"]["roles"]
        return len(serving) < sum(one.get("replicas", 1) * (1 + one.get("workerReplicas", 0)) for one in roles)

    def _is_broken(self, record: ReconcileRecord, pod: Object) -> bool:
        """Whether its replica lacks a pod that serves."""
        seat, spec = seat_of(pod), record.observed.thing["spec"]
        size = next(
            (1 + one.get("workerReplicas", 0) for one in spec["template"]["roles"] if one["name"] == seat.role), 1
        )
        # those that only drain count: they have requests
        there = [one for one in record.observed.pods if is_ready(one) and "deletionTimestamp" not in one["metadata"]]
        own = (seat.group, seat.role, seat.replica)
        return len([its for its in map(seat_of, there) if (its.group, its.role, its.replica) == own]) < size

    def _is_idle(self, record: ReconcileRecord, pod: Object, drain_s: float) -> bool:
        """Whether it drains and has nothing left, or has had its time; a worker pod does what its entry pod does."""
        assert self.cluster is not None
        entry = self._entry_of(pod)
        if entry is None or not is_ready(entry):
            return True
        since = (entry["metadata"].get("annotations") or {}).get(DRAINING)
        if drain_s == 0 or (since is not None and record.at_s >= seconds(since) + drain_s):
            return True
        return is_leaving(entry) and self.cluster.in_flight(entry["metadata"]["uid"]) == 0

    def _entry_of(self, pod: Object) -> Object | None:
        seat = seat_of(pod)
        for one in self._pods():
            other = seat_of(one)
            if (other.group, other.role, other.replica, other.index) == (seat.group, seat.role, seat.replica, 0):
                return one
        return None

    def _pods(self) -> list[Object]:
        assert self.cluster is not None
        return self.cluster.pods()


def _owner(thing: Object) -> str:
    return next((one["uid"] for one in thing["metadata"].get("ownerReferences") or () if one.get("controller")), "")


def _key(action: Action) -> str:
    return key_of(action.thing) if isinstance(action, Create | Apply) else action.key


def _said(action: Action) -> str:
    return f" {dict(action.annotations)}" if isinstance(action, Annotate) else ""
