# SPDX-License-Identifier: Apache-2.0
"""A manager in virtual time: it reconciles changed objects, executes plans, and can be killed between any two calls.

Its caches lag behind the server, by a different time for each kind. Calls to the server fail as ``Faults`` specifies.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, Literal, Protocol

import msgspec

from bench.cluster.node.pod_scheduler import node_capacities
from controller.kube.api_resources import (
    CONTROLLER_REVISIONS,
    MODEL_INFER_ROLES,
    MODEL_INFERS,
    NODES,
    PODS,
    SERVICES,
    ApiResource,
    Object,
    key_of,
)
from controller.kube.reconcile_plan import Action, Annotate, Apply, Create, Delete, Plan, SetStatus
from controller.models.model_infer.model_infer_state import GangSchedulingApis, ModelInferState, NodeCapacity, PodLoad
from controller.models.model_infer_reconciler import OWNED, POD_GROUPS
from tests.fake_api.answers import ApiError
from tests.virtual_cluster.clock import rfc3339, seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.fake_api.storage import ObjectChange
    from tests.virtual_cluster.clock import Clock
    from tests.virtual_cluster.requests import Requests
    from tests.virtual_cluster.server import VirtualApiServer

Fate = Literal["done", "refused", "lost"]
"""Of a call: done, refused before it had an effect, or done while its answer was lost."""
Place = tuple[str, str]
NAME: Final = "attache-manager"
WATCHED: Final = (MODEL_INFERS, NODES, *OWNED)
_LOADS_EACH_S: Final = 1.0
_SOONEST_S: Final = 0.05


class Faults(msgspec.Struct):
    """``refused`` and ``lost``: fractions of calls. ``lags``: by plural, at most how many seconds a watch is behind;
    the rest is behind by ``lag_s`` at most.
    """

    rng: random.Random
    refused: float = 0.0
    lost: float = 0.0
    lag_s: float = 0.05
    lags: dict[str, float] = {}

    def heal(self) -> None:
        """Nothing goes wrong any more."""
        self.refused = self.lost = 0.0
        self.lags = {}

    def fate(self) -> Fate:
        """Of the next call."""
        drawn = self.rng.random()
        if drawn < self.refused:
            return "refused"
        return "lost" if drawn < self.refused + self.lost else "done"

    def lag(self, plural: str) -> float:
        """Until the next change of a kind is seen."""
        return self.rng.uniform(0.0, self.lags.get(plural, self.lag_s))


class Caches:
    """Objects that a manager listed at its start, updated by its watches. ``lag``: seconds until a change is seen."""

    def __init__(
        self,
        server: VirtualApiServer,
        clock: Clock,
        resources: Sequence[ApiResource],
        lag: Callable[[str], float],
        woken: Callable[[ObjectChange], None],
    ) -> None:
        self._clock, self._lag, self._woken = clock, lag, woken
        self._objects = {_place(one): {key_of(thing): thing for thing in server.all(one)} for one in resources}
        self._seen = dict.fromkeys(self._objects, server.storage.version)
        self._next_at_s = dict.fromkeys(self._objects, 0.0)
        self._is_open = True
        self._end = server.subscribe(self._changed)

    def close(self) -> None:
        """Take nothing in any more."""
        self._is_open = False
        self._end()

    def all(self, resource: ApiResource) -> list[Object]:
        """The cached objects of a kind, by key."""
        found = self._objects[_place(resource)]
        return [found[key] for key in sorted(found)]

    def find(self, resource: ApiResource, key: str) -> Object | None:
        """A cached object."""
        return self._objects[_place(resource)].get(key)

    def has_seen(self, resource: ApiResource, version: int) -> bool:
        """Whether the watch of this kind has delivered the change with this version, if it was one of this kind."""
        return self._seen[_place(resource)] >= version

    def _changed(self, change: ObjectChange) -> None:
        """Watches keep their order."""
        if not self._is_open or change.place not in self._objects:
            return
        at_s = max(self._clock.now_s + self._lag(change.place[1]), self._next_at_s[change.place])
        self._next_at_s[change.place] = at_s
        self._clock.after(at_s - self._clock.now_s, lambda: self._take(change))

    def _take(self, change: ObjectChange) -> None:
        if not self._is_open:
            return
        known = self._objects[change.place]
        if change.after is not None:
            known[key_of(change.after)] = change.after
        elif change.before is not None:
            known.pop(key_of(change.before), None)
        self._seen[change.place] = change.version
        self._woken(change)


def _place(resource: ApiResource) -> Place:
    return resource.group, resource.plural


def perform(server: VirtualApiServer, action: Action) -> None:
    """Raises Refused where a manager would take it for a failure."""
    match action:
        case Create():
            _create(server, action)
        case Apply():
            server.apply(action.resource, _yielded(server, action), NAME)
        case Annotate():
            changes = {"annotations": dict(action.annotations), "labels": dict(action.labels)}
            metadata = {"uid": action.uid, **{name: one for name, one in changes.items() if one}}
            server.patch(action.resource, action.key, {"metadata": metadata}, NAME)
        case Delete():
            _delete(server, action)
        case SetStatus():
            thing = server.find(action.resource, action.key)
            if thing is not None and thing["metadata"]["uid"] == action.uid:
                status = {**(thing.get("status") or {}), **msgspec.to_builtins(action.fields)}
                server.set_status(action.resource, thing, status)


def _create(server: VirtualApiServer, action: Create) -> None:
    """An existing object is no failure: its name determines its content."""
    try:
        server.create(action.resource, action.thing, NAME)
    except ApiError as error:
        if error.reason != "AlreadyExists":
            raise


def _delete(server: VirtualApiServer, action: Delete) -> None:
    """That it is gone already is no failure; another of its name is not touched."""
    try:
        server.delete(action.resource, action.key, uid=action.uid, grace_s=action.grace_s)
    except ApiError as error:
        if error.code != 404:
            raise


def _yielded(server: VirtualApiServer, action: Apply) -> Object:
    """Without the fields that others own."""
    thing: Object = msgspec.json.decode(msgspec.json.encode(action.thing))
    for path in action.yields:
        if server.is_owned_by_another(action.resource, key_of(thing), path, NAME):
            holder = thing
            for name in path[:-1]:
                holder = holder.get(name, {})
            holder.pop(path[-1], None)
    return thing


def differ(one: Mapping[str, object], other: Mapping[str, object]) -> bool:
    """Whether two statuses differ, apart from times."""
    return _without_times(one) != _without_times(other)


def with_times(status: Mapping[str, object], before: Mapping[str, object], now: str) -> dict[str, object]:
    """A status with the times at which conditions became what they are."""
    plain = msgspec.to_builtins(status)
    old = msgspec.to_builtins(before).get("conditions") or ()
    known = {(one["type"], one["status"]): one["lastTransitionTime"] for one in old}
    conditions = [
        {**one, "lastTransitionTime": known.get((one["type"], one["status"]), now)}
        for one in plain.get("conditions") or ()
    ]
    return {**plain, "conditions": conditions}


def _without_times(status: Mapping[str, object]) -> dict[str, object]:
    plain = msgspec.to_builtins(status)
    conditions = [
        {name: value for name, value in one.items() if name != "lastTransitionTime"}
        for one in plain.get("conditions") or ()
    ]
    return {**plain, "conditions": conditions}


class ClusterConditions(msgspec.Struct, frozen=True):
    """Inputs that are no objects: loads and the pods whose loads were requested, gang schedulers, whether nodes are
    read.
    """

    loads: Mapping[str, PodLoad]
    asked: frozenset[str]
    gang: GangSchedulingApis
    has_capacity: bool


def observe_model_infer(thing: Object, caches: Caches, around: ClusterConditions, now_s: float) -> ModelInferState:
    """One ModelInfer and all that it owns."""
    uid = thing["metadata"]["uid"]

    def owned(resource: ApiResource) -> list[Object]:
        return [one for one in caches.all(resource) if owner_of(one) == uid]

    pods = owned(PODS)
    return ModelInferState(
        thing=thing,
        pods=pods,
        services=owned(SERVICES),
        revisions=owned(CONTROLLER_REVISIONS),
        pod_groups=[one for resource in POD_GROUPS for one in owned(resource)],
        role_scales=owned(MODEL_INFER_ROLES),
        lost_nodes=_lost(pods, caches.all(NODES), now_s),
        node_capacities=_capacities(caches) if around.has_capacity else None,
        loads=around.loads,
        loads_asked_of=around.asked,
        log_tails={key_of(one): "CUDA error: out of memory" for one in pods if _has_crashed(one)},
        gang=around.gang,
    )


def owner_of(thing: Object) -> str:
    """The uid of the controller that owns it."""
    references = thing["metadata"].get("ownerReferences") or ()
    return next((str(one["uid"]) for one in references if one.get("controller")), "")


def _lost(pods: list[Object], nodes: list[Object], now_s: float) -> dict[str, float]:
    known = {one["metadata"]["name"]: one for one in nodes}
    lost: dict[str, float] = {}
    for pod in pods:
        name = pod["spec"].get("nodeName")
        if not name:
            continue
        if name not in known:
            # the pods have the time since when they are alone
            lost[name] = min(lost.get(name, now_s), _unready_since(pod, now_s))
            continue
        conditions = (known[name].get("status") or {}).get("conditions") or ()
        ready = next((one for one in conditions if one["type"] == "Ready"), None)
        if ready is not None and ready["status"] != "True":
            lost[name] = seconds(ready["lastTransitionTime"])
    return lost


def _unready_since(pod: Object, now_s: float) -> float:
    conditions = (pod.get("status") or {}).get("conditions") or ()
    found = [one for one in conditions if one["type"] == "Ready" and one["status"] != "True"]
    return seconds(found[0]["lastTransitionTime"]) if found else now_s


def _capacities(caches: Caches) -> list[NodeCapacity]:
    return [
        NodeCapacity(name=one.name, free=one.free, labels=one.labels, taints=[dict(taint) for taint in one.taints])
        for one in node_capacities(caches.all(NODES), caches.all(PODS))
    ]


def _has_crashed(pod: Object) -> bool:
    containers = (pod.get("status") or {}).get("containerStatuses") or ()
    return any(one.get("restartCount") for one in containers)


class ReconcileRecord(msgspec.Struct, frozen=True):
    """One decision, and what it was made from."""

    at_s: float
    observed: ModelInferState
    plan: Plan


class Witness(Protocol):
    """Sees whatever a manager does."""

    def record_reconcile(self, record: ReconcileRecord) -> None:
        """A decision was made."""
        ...

    def before_action(self, record: ReconcileRecord, action: Action, /) -> None:
        """An action is about to have its effect."""
        ...

    def wrote_status(self, key: str, /) -> None:
        """A status was written, which was another before."""
        ...


class Manager:
    """``start`` lists all objects and reconciles all ModelInfers; ``kill`` drops all state."""

    def __init__(
        self,
        server: VirtualApiServer,
        clock: Clock,
        faults: Faults,
        requests: Requests,
        reconcile: Callable[[ModelInferState, float], Plan],
        witness: Witness,
        *,
        gang: GangSchedulingApis = GangSchedulingApis(),  # noqa: B008 - frozen
        has_capacity: bool = True,
    ) -> None:
        self._server, self._clock, self._faults = server, clock, faults
        self._requests, self._reconcile, self._witness = requests, reconcile, witness
        self._gang, self._has_capacity = gang, has_capacity
        self._life = 0
        self._caches: Caches | None = None
        self._keys: dict[str, _Key] = {}
        self._calls_left: int | None = None

    @property
    def is_running(self) -> bool:
        """Whether there is one."""
        return self._caches is not None

    def start(self) -> None:
        """A new one, if there is none."""
        if self._caches is None:
            self._caches = Caches(self._server, self._clock, WATCHED, self._faults.lag, self._changed)
            for thing in self._caches.all(MODEL_INFERS):
                self._wake(key_of(thing), 0.0)

    def kill(self) -> None:
        """It is gone, whatever it was doing."""
        if self._caches is not None:
            self._caches.close()
        self._caches = None
        self._life += 1
        self._keys.clear()
        self._calls_left = None

    def kill_after(self, calls: int, back_after_s: float) -> None:
        """Kill it after so many more calls, or in the middle of the next; another starts that much later."""
        self._calls_left = calls
        life = self._life
        # a manager with nothing to do dies as well
        self._clock.after(60.0, lambda: self._die(life))
        self._back_after_s = back_after_s

    def _die(self, life: int) -> None:
        if life == self._life and self._calls_left is not None:
            self.kill()
            self._clock.after(self._back_after_s, self.start)

    def _changed(self, change: ObjectChange) -> None:
        """Wake the ModelInfers that the changed object concerns."""
        assert self._caches is not None
        thing = change.after or change.before
        assert thing is not None
        if change.place == ("", NODES.plural):
            keys = [key_of(one) for one in self._caches.all(MODEL_INFERS)]
        elif change.place[1] == MODEL_INFERS.plural:
            keys = [key_of(thing)]
        else:
            metadata = thing["metadata"]
            keys = [f"{metadata['namespace']}/{one['name']}" for one in metadata.get("ownerReferences") or ()]
        for key in keys:
            self._wake(key, 0.01)

    def _wake(self, key: str, delay_s: float) -> None:
        """Reconcile ``key`` after that delay, or earlier."""
        own = self._keys.setdefault(key, _Key())
        at_s = self._clock.now_s + delay_s
        if own.is_busy:
            own.is_dirty = True
            return
        if own.due_at_s is not None and own.due_at_s <= at_s:
            return
        own.due_at_s, life = at_s, self._life
        self._clock.after(delay_s, lambda: self._due(key, life, at_s))

    def _due(self, key: str, life: int, at_s: float) -> None:
        own = self._keys.get(key)
        if life == self._life and own is not None and own.due_at_s == at_s:
            own.due_at_s = None
            self._reconcile_key(key, own)

    def _reconcile_key(self, key: str, own: _Key) -> None:
        caches = self._caches
        assert caches is not None
        if own.not_before_s > self._clock.now_s:
            self._wake(key, own.not_before_s - self._clock.now_s)
            return
        # what was written must be seen first; its event wakes this key again
        own.expected = [(resource, at) for resource, at in own.expected if not caches.has_seen(resource, at)]
        thing = caches.find(MODEL_INFERS, key)
        if own.expected or thing is None:
            return
        asked = own.asks_loads_of
        around = ClusterConditions(self._requests.loads(asked), asked, self._gang, has_capacity=self._has_capacity)
        seen = observe_model_infer(thing, caches, around, self._clock.now_s)
        record = ReconcileRecord(self._clock.now_s, seen, self._reconcile(seen, self._clock.now_s))
        self._witness.record_reconcile(record)
        own.is_busy = True
        self._perform(key, own, record, 0)

    def _perform(self, key: str, own: _Key, record: ReconcileRecord, number: int) -> None:
        """Call for one action after the other, then write the status."""
        plan = record.plan
        if number < len(plan.actions):
            action = plan.actions[number]
            self._call(own, lambda: self._act(record, action), lambda: self._perform(key, own, record, number + 1), key)
        elif plan.status is not None and differ(record.observed.thing.get("status") or {}, plan.status):
            self._call(own, lambda: self._write_status(record), lambda: self._finish(key, own, record.plan), key)
        else:
            self._finish(key, own, plan)

    def _call(self, own: _Key, effect: Callable[[], ApiResource | None], then: Callable[[], None], key: str) -> None:
        life = self._life
        self._clock.after(self._faults.rng.uniform(0.002, 0.03), lambda: self._arrives(own, effect, then, key, life))

    def _arrives(
        self, own: _Key, effect: Callable[[], ApiResource | None], then: Callable[[], None], key: str, life: int
    ) -> None:
        """The server gets a call."""
        if life != self._life:
            return
        fate = self._faults.fate()
        dies = self._is_last_call()
        if dies and self._faults.rng.random() < 0.5:
            self._die(life)
            return
        if fate == "refused":
            self._fail(key, own)
            return
        try:
            resource = effect()
        except ApiError:
            fate, resource = "refused", None
        if dies:
            self._die(life)
            return
        if resource is not None:
            own.expected.append((resource, self._server.storage.version))
        if fate == "done":
            own.failures = 0
            then()
        else:
            self._fail(key, own)

    def _is_last_call(self) -> bool:
        if self._calls_left is None:
            return False
        self._calls_left -= 1
        return self._calls_left < 0

    def _act(self, record: ReconcileRecord, action: Action) -> ApiResource | None:
        """The kind that was written; None if nothing had to be."""
        self._witness.before_action(record, action)
        before = self._server.storage.version
        perform(self._server, action)
        return action.resource if self._server.storage.version > before else None

    def _write_status(self, record: ReconcileRecord) -> ApiResource | None:
        thing = record.observed.thing
        now = self._server.find(MODEL_INFERS, key_of(thing))
        if now is None or now["metadata"]["uid"] != thing["metadata"]["uid"] or record.plan.status is None:
            return None
        before = self._server.storage.version
        status = with_times(record.plan.status, now.get("status") or {}, rfc3339(self._clock.now_s))
        self._server.set_status(MODEL_INFERS, now, status)
        if self._server.storage.version == before:
            return None
        self._witness.wrote_status(key_of(thing))
        return MODEL_INFERS

    def _finish(self, key: str, own: _Key, plan: Plan) -> None:
        own.is_busy = False
        asks = plan.asks_loads_of
        is_new = not asks <= own.asks_loads_of
        own.asks_loads_of = asks
        if own.is_dirty or own.expected:
            own.is_dirty = False
            self._wake(key, 0.01)
        if asks:
            self._wake(key, _SOONEST_S if is_new else _LOADS_EACH_S)
        if plan.requeue_at_s is not None:
            self._wake(key, max(plan.requeue_at_s - self._clock.now_s, _SOONEST_S))

    def _fail(self, key: str, own: _Key) -> None:
        """Retry with a growing delay; whether the call had an effect is unknown."""
        own.is_busy = own.is_dirty = False
        own.failures += 1
        delay_s = min(60.0, 0.2 * 2**own.failures)
        own.not_before_s = self._clock.now_s + delay_s
        self._wake(key, delay_s)


class _Key:
    """A manager's state of one ModelInfer. ``expected``: writes that its caches lack so far."""

    def __init__(self) -> None:
        self.due_at_s: float | None = None
        self.is_busy = False
        self.is_dirty = False
        self.failures = 0
        self.not_before_s = 0.0
        self.expected: list[tuple[ApiResource, int]] = []
        self.asks_loads_of: frozenset[str] = frozenset()
