# SPDX-License-Identifier: Apache-2.0
"""What must be true once a history has ended and peace has come."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Protocol

from controller.kube.api_resources import CONTROLLER_REVISIONS, MODEL_INFERS, PODS, SERVICES, ApiResource, Object
from tests.controller.models.model_infer.chaos.oracle import Broken
from tests.controller.models.model_infer.chaos.specs import group_budget, image_of
from tests.controller.models.model_infer.chaos.view import (
    P,
    is_leaving,
    named,
    ready_groups,
    replicas_ready,
    seat_of,
)
from tests.virtual_cluster.manager import OWNED, owner_of
from tests.virtual_cluster.requests import is_ready

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.controller.models.model_infer.chaos.history import History
    from tests.controller.models.model_infer.chaos.specs import Spec

_LOOKS_AN_HOUR = 12
# of each pod that crashes: in five minutes its kubelet starts it about five times, and then it is deleted, gone, made,
# and seen on its node, which makes ten at most; the status tells the restarts
_STATUSES_AN_HOUR = 120


class Ended(Protocol):
    """A cluster at peace. ``spec``: what the user wants."""

    @property
    def spec(self) -> Spec:
        """Of the ModelInfer."""
        ...

    def thing(self) -> Object:
        """The ModelInfer."""
        ...

    def all(self, resource: ApiResource) -> list[Object]:
        """Objects that a ModelInfer may own, and ModelInfers."""
        ...


def has_what_it_should(history: Ended) -> None:
    """Exactly the pods and Services of the spec, all ready and of its template, and a status that says so."""
    pods = history.all(PODS)
    spec = history.spec
    no_orphans(history)
    for pod in pods:
        if is_leaving(pod) or not is_ready(pod):
            raise Broken("ends in the desired state", f"{named(pod)} is not ready or going")
    groups = sorted({seat_of(one).group for one in pods})
    if any(_pods_of_group(spec)) and len(groups) != spec["replicas"]:
        raise Broken("ends in the desired state", f"groups {groups} of {spec['replicas']}")
    wanted = Counter((group, *seat) for group in groups for seat in _pods_of_group(spec))
    found = Counter(_compact(pods))
    if wanted != found:
        raise Broken("ends in the desired state", f"missing {wanted - found}, too many {found - wanted}")
    for pod in pods:
        seat = seat_of(pod)
        image = pod["spec"]["containers"][0]["image"]
        if image != image_of(spec, seat.role, seat.index):
            raise Broken("ends in the desired state", f"{named(pod)} runs {image}")
    _services(history, pods)
    _revisions(history, pods)
    if any(_pods_of_group(spec)):
        _status(history, pods, groups)


def no_orphans(history: Ended) -> None:
    """Whatever is owned has a living owner."""
    living = {one["metadata"]["uid"] for one in history.all(MODEL_INFERS)}
    for resource in OWNED:
        for thing in history.all(resource):
            if owner_of(thing) not in living:
                raise Broken("no orphan", f"{resource.plural} {named(thing)}")


def stays_as_it_is(history: History, *, hours: int = 6) -> None:
    """A settled object causes no action, no write and hardly a look."""
    oracle, cluster = history.oracle, history.cluster
    before = (sum(oracle.actions.values()), oracle.status_writes, oracle.events, cluster.server.storage.version)
    looks = oracle.looks
    cluster.run_for(hours * 3600.0)
    after = (sum(oracle.actions.values()), oracle.status_writes, oracle.events, cluster.server.storage.version)
    if before != after:
        raise Broken("settled means no write", f"actions, statuses, events, version {before} became {after}")
    if oracle.looks - looks > _LOOKS_AN_HOUR * hours:
        raise Broken("settled means hardly a look", f"{oracle.looks - looks} in {hours} hours")


def leaves_what_serves(history: History, old: Spec, *, hours: int = 1) -> None:
    """What cannot serve may be made anew every five minutes, as ``recovery`` says; the old revision is not touched."""
    before, writes, bad = _serving(history, old), history.oracle.status_writes, _bad(history)
    history.cluster.run_for(hours * 3600.0)
    if not before <= _serving(history, old):
        raise Broken(
            "a stopped rollout stands still", f"of {len(before)} old pods {len(_serving(history, old))} are left"
        )
    bad = max(bad, _bad(history), 2)
    if history.oracle.status_writes - writes > _STATUSES_AN_HOUR * hours * bad:
        raise Broken("a stopped rollout stands still", f"{history.oracle.status_writes - writes} statuses")


def _serving(history: History, old: Spec) -> set[str]:
    """Ready pods of the old revision; with ``recovery: Group`` those of groups that serve, for one that does not is
    made anew with all its pods.
    """
    ready = [one for one in history.all(PODS) if _is_of(one, old) and is_ready(one)]
    if old["recovery"] == "Group":
        groups = ready_groups(replicas_ready(ready, (), ()), old)
        ready = [one for one in ready if seat_of(one).group in groups]
    return {one["metadata"]["uid"] for one in ready}


def _bad(history: History) -> int:
    return len([one for one in history.all(PODS) if not is_ready(one)])


def a_new_manager_changes_nothing(history: History) -> None:
    """What is decided does not come from memory."""
    oracle, manager = history.oracle, history.cluster.manager
    before = (sum(oracle.actions.values()), oracle.status_writes)
    manager.kill()
    manager.start()
    history.cluster.run_for(600.0)
    after = (sum(oracle.actions.values()), oracle.status_writes)
    if before != after:
        raise Broken("settled means no write", f"after a restart: {before} became {after}, {list(oracle.log)[-5:]}")


def old_revision_serves(history: History, old: Spec) -> None:
    """A rollout that cannot succeed has stopped, and enough groups of the revision before serve."""
    pods = history.all(PODS)
    serving = [one for one in pods if _is_of(one, old)]
    ready = ready_groups(replicas_ready(serving, (), ()), old)
    least = old["replicas"] - group_budget(old)[0]
    if len(ready) < least:
        raise Broken("the old revision serves", f"groups {sorted(ready)}, {least} must")
    conditions = {one["type"]: one for one in history.thing()["status"]["conditions"]}
    told = [one["reason"] for one in conditions.values()]
    if "BlockedByFailedLoad" not in told:
        raise Broken("a failed rollout is told", str(conditions))


def _is_of(pod: Object, spec: Spec) -> bool:
    seat = seat_of(pod)
    return bool(pod["spec"]["containers"][0]["image"] == image_of(spec, seat.role, seat.index))


def _pods_of_group(spec: Spec) -> list[tuple[str, int, int]]:
    return [
        (role["name"], replica, index)
        for role in spec["template"]["roles"]
        for replica in range(role.get("replicas", 1))
        for index in range(1 + role.get("workerReplicas", 0))
    ]


def _compact(pods: Sequence[Object]) -> list[tuple[int, str, int, int]]:
    """Where pods sit, with replicas numbered anew: their ordinals may have gaps."""
    seats = [seat_of(one) for one in pods]
    ordinals = sorted({(one.group, one.role, one.replica) for one in seats})
    order = {one: [other[2] for other in ordinals if other[:2] == one[:2]].index(one[2]) for one in ordinals}
    return [(one.group, one.role, order[one.group, one.role, one.replica], one.index) for one in seats]


def _services(history: Ended, pods: Sequence[Object]) -> None:
    """One for each replica of more than one pod."""
    seats = [seat_of(one) for one in pods]
    name = history.thing()["metadata"]["name"]
    wanted = {f"{name}-{one.group}-{one.role}-{one.replica}" for one in seats if one.index}
    found = {named(one) for one in history.all(SERVICES)}
    if wanted != found:
        raise Broken("ends in the desired state", f"services: missing {wanted - found}, too many {found - wanted}")


def _revisions(history: Ended, pods: Sequence[Object]) -> None:
    """The one in use, and no more old ones than the user wants."""
    kept = history.all(CONTROLLER_REVISIONS)
    hashes = {one["metadata"]["labels"][P + "revision"] for one in kept}
    used = {one["metadata"]["labels"][P + "revision"] for one in pods}
    status = history.thing()["status"]
    if not used <= hashes or status["updateRevision"] not in hashes:
        raise Broken("ends in the desired state", f"revisions {hashes}, of pods {used}, status {status}")
    limit = history.spec.get("revisionHistoryLimit", 10)
    if len(hashes - used - {status["updateRevision"]}) > limit:
        raise Broken("ends in the desired state", f"{len(hashes)} revisions, {limit} old ones are wanted")
    if used - {status["updateRevision"]}:
        raise Broken("ends in the desired state", f"pods of {used}, the template is {status['updateRevision']}")


def _status(history: Ended, pods: Sequence[Object], groups: Sequence[int]) -> None:
    thing, spec = history.thing(), history.spec
    status: dict[str, Any] = thing["status"]
    count = len(groups)
    wanted = {
        "observedGeneration": thing["metadata"]["generation"],
        "replicas": count,
        "readyReplicas": count,
        "updatedReplicas": count,
        "currentRevision": status["updateRevision"],
    }
    said = {name: status.get(name) for name in wanted}
    if said != wanted:
        raise Broken("the status is true", f"{said} should be {wanted}")
    roles = {one["name"]: one for one in status["roles"]}
    for role in spec["template"]["roles"]:
        total = role.get("replicas", 1) * count
        one = roles.get(role["name"], {})
        if [one.get(name, 0) for name in ("replicas", "ready", "updated")] != [total] * 3:
            raise Broken("the status is true", f"{one} should all be {total}")
    conditions = {one["type"]: one["status"] for one in status["conditions"]}
    if conditions.get("Available") != "True" or conditions.get("Degraded") == "True":
        raise Broken("the status is true", str(status["conditions"]))
    selected = [one for one in pods if _matches(one, status["labelSelector"])]
    if len(selected) != count:
        raise Broken("the status is true", f"{status['labelSelector']} selects {len(selected)} pods of {count} groups")


def _matches(pod: Object, selector: str) -> bool:
    own = pod["metadata"]["labels"]
    return all(own.get(name) == value for name, value in (one.split("=") for one in selector.split(",")))
