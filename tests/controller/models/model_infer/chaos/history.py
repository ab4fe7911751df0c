# SPDX-License-Identifier: Apache-2.0
"""A history on a virtual cluster: events one after the other, then peace, and what must be true then."""

from __future__ import annotations

import copy
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from controller.kube.api_resources import MODEL_INFERS, PODS, ApiResource, Object, key_of
from controller.models.model_infer.model_infer_state import GangSchedulingApis
from tests.controller.models.model_infer.chaos import events
from tests.controller.models.model_infer.chaos.oracle import Broken, Oracle
from tests.controller.models.model_infer.chaos.specs import Spec, pod_template, with_image
from tests.fake_api.answers import ApiError
from tests.virtual_cluster.cluster import VirtualCluster
from tests.virtual_cluster.engine_pod import GOOD
from tests.virtual_cluster.manager import OWNED, owner_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from controller.kube.reconcile_plan import Plan
    from controller.models.model_infer.model_infer_state import ModelInferState

KEY = "default/one"
GPUS = "4"
# of 16 GPUs: five groups and their surge of three roles of two replicas of three pods
ENOUGH_NODES = 10


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """Where a history begins. ``seed``: of everything that takes its time. ``nodes``: of four GPUs each."""

    spec: Spec
    seed: int = 0
    nodes: int = 6
    gang: GangSchedulingApis = GangSchedulingApis()
    has_capacity: bool = True
    request_each_s: float = 10.0
    noise: float = 0.0


class History:
    """``play`` events, ``settle``, then ask the oracle and ``tests...ending``."""

    def __init__(
        self, start: Start, reconcile: Callable[[ModelInferState, float], Plan], *, calm: bool = False
    ) -> None:
        self.oracle = Oracle(calm=calm)
        self.cluster = VirtualCluster(
            start.seed, reconcile, self.oracle, gang=start.gang, has_capacity=start.has_capacity
        )
        self.oracle.cluster = self.cluster
        self.spec: Spec = possible(copy.deepcopy(start.spec))
        self.start = start
        self._before: list[dict[str, Any]] = []
        self._machines = 0
        for _ in range(start.nodes):
            self._add_node()
        if start.noise:
            self.cluster.faults.refused = self.cluster.faults.lost = start.noise
        self.cluster.manager.start()
        self._make()

    @property
    def now_s(self) -> float:
        """Virtual time."""
        return self.cluster.clock.now_s

    def play(self, happenings: Sequence[events.Event]) -> None:
        """One after the other, while requests come in."""
        long_s = sum(one.for_s for one in happenings if isinstance(one, events.Wait))
        self.cluster.requests.flow(each_s=self.start.request_each_s, until_s=self.now_s + min(long_s + 300.0, 2400.0))
        for one in happenings:
            self.oracle.note(repr(one))
            self._happen(one)

    def thing(self) -> Object:
        """The ModelInfer as it is."""
        found = self.cluster.server.find(MODEL_INFERS, KEY)
        assert found is not None
        return found

    def all(self, resource: ApiResource) -> list[Object]:
        """All objects of a kind."""
        return self.cluster.server.all(resource)

    def make_peace(self, *, good: bool = True) -> None:
        """Faults stop, whoever hangs answers again, there is room, and unless not ``good`` the user wants what works,
        and what has failed made anew.
        """
        self.oracle.note("peace")
        cluster = self.cluster
        cluster.faults.heal()
        cluster.requests.answers = True
        for _ in range(ENOUGH_NODES):
            self._add_node(gpus="16")
        if not cluster.manager.is_running:
            cluster.run_for(300)
        for one in cluster.nodes.living():
            one.revive()
        rollout = {**self.spec["rollout"], "paused": False, "partition": 0}
        new = {**self.spec, "rollout": rollout}
        if good and new["recovery"] == "None":
            # nobody else would ever replace an evicted pod
            new["recovery"] = "Pod"
        self.write(with_image(new, frozenset(), f"{GOOD}-9") if good and is_bad(new) else new)

    def settle(self, *, hours: float = 10.0, quiet_s: float = 2400.0) -> None:
        """Wait until nothing is written for a while."""
        until_s = self.now_s + hours * 3600
        while self.now_s < until_s:
            before = self._done()
            self.cluster.run_for(quiet_s)
            if before == self._done():
                return
        raise Broken("every history ends", f"still writing after {hours} hours")

    def _done(self) -> tuple[int, int]:
        return sum(self.oracle.actions.values()), self.cluster.server.storage.version

    def write(self, spec: Spec) -> None:
        """The user applies this spec."""
        spec = possible(spec)
        if self.cluster.server.find(MODEL_INFERS, KEY) is None:
            self.spec = spec
            return
        if spec["template"] != self.spec["template"]:
            self._before.append(self.spec["template"])
        self.spec = spec
        self.cluster.server.change(MODEL_INFERS, KEY, lambda one: {**one, "spec": self._admitted(spec)})

    def delete(self, *, foreground: bool) -> None:
        """The user deletes the object; with ``foreground`` it is there until all that it owns is gone."""
        server = self.cluster.server
        self.oracle.is_deleted = True
        if not foreground:
            self._delete(MODEL_INFERS, KEY)
            return
        finalizers = ["foregroundDeletion"]
        server.change(MODEL_INFERS, KEY, lambda one: {**one, "metadata": {**one["metadata"], "finalizers": finalizers}})
        self._delete(MODEL_INFERS, KEY)
        self._collect()

    def _collect(self) -> None:
        """The garbage collector: what blocks the owner's deletion goes first."""
        server, thing = self.cluster.server, self.thing()
        left = [
            (resource, one)
            for resource in OWNED
            for one in server.all(resource)
            if owner_of(one) == thing["metadata"]["uid"]
        ]
        for resource, one in left:
            if "deletionTimestamp" not in one["metadata"]:
                self._delete(resource, key_of(one))
        if left:
            self.cluster.clock.after(1.0, self._collect)
        else:
            server.change(MODEL_INFERS, KEY, lambda one: {**one, "metadata": {**one["metadata"], "finalizers": []}})

    def _admitted(self, spec: Spec) -> Spec:
        """With the defaults of the schema, as the server stores it."""
        thing = {"metadata": {"name": "other", "namespace": "default"}, "spec": copy.deepcopy(spec)}
        made = self.cluster.server.dry_run(MODEL_INFERS, thing)
        result: Spec = made["spec"]
        return result

    def _make(self) -> None:
        metadata = {"name": "one", "namespace": "default"}
        self.cluster.server.create(MODEL_INFERS, {"metadata": metadata, "spec": copy.deepcopy(self.spec)})

    def _add_node(self, gpus: str = GPUS) -> None:
        self._machines += 1
        self.cluster.nodes.add(f"node-{self._machines}", {"cpu": "64", "pods": "50", "nvidia.com/gpu": gpus})

    def _happen(self, event: events.Event) -> None:
        after, faults = self.cluster.clock.after, self.cluster.faults
        match event:
            case events.Wait():
                self.cluster.run_for(event.for_s)
            case events.KillManager():
                self.cluster.manager.kill_after(event.calls, event.back_after_s)
            case events.Ill():
                faults.refused, faults.lost = event.refused, event.lost
                after(event.for_s, partial(self._calm_api))
            case events.Late():
                faults.lags[event.plural] = event.lag_s
                after(event.for_s, lambda: faults.lags.pop(event.plural, None) and None)
            case events.Silent():
                self.cluster.requests.answers = False
                after(event.for_s, self._answer)
            case events.Harm() | events.LoseNode() | events.Drift():
                self._harm(event)
            case events.Remake():
                self._remake(event)
            case _:
                self.write(self._wanted(event))

    def _wanted(self, event: events.Event) -> Spec:
        """The user's spec after this."""
        spec = copy.deepcopy(self.spec)
        roles = spec["template"]["roles"]
        match event:
            case events.Scale():
                spec["replicas"] = event.replicas
            case events.NewImage():
                return with_image(spec, event.roles, event.image)
            case events.Resize():
                role = roles[event.role % len(roles)]
                if event.replicas is not None:
                    role["replicas"] = event.replicas
                if event.workers is not None:
                    role["workerReplicas"] = event.workers
                    role.setdefault("workerTemplate", pod_template(GOOD))
            case events.GoBack():
                if self._before:
                    spec["template"] = self._before[-1]
            case events.Set():
                holder = spec if event.field == "recovery" else spec["rollout"]
                holder[event.field] = event.value
            case _:
                raise TypeError(event)
        return spec

    def _harm(self, event: events.Harm | events.LoseNode | events.Drift) -> None:
        cluster = self.cluster
        match event:
            case events.Harm():
                living = [one for one in cluster.nodes.living() if not one.machine.is_deleted]
                if living:
                    one = living[event.number % len(living)]
                    self.oracle.note(f"{event.kind}: {one.key}")
                    if event.kind == "deleted by the user":
                        self._delete(PODS, one.key)
                    else:
                        {"crash": one.crash, "hang": one.hang, "evict": one.evict}[event.kind]()
            case events.LoseNode():
                names = cluster.nodes.names()
                if len(names) > 2:
                    cluster.nodes.lose(
                        names[event.number % len(names)], back_after_s=event.back_after_s, rebooted=event.rebooted
                    )
            case events.Drift():
                resource = next(one for one in events.DRIFTING if one.plural == event.plural)
                found = cluster.server.all(resource)
                if found:
                    self._delete(resource, key_of(found[event.number % len(found)]))

    def _remake(self, event: events.Remake) -> None:
        if self.cluster.server.find(MODEL_INFERS, KEY) is None:
            return
        self._delete(MODEL_INFERS, KEY)
        self.cluster.run_for(event.after_s)
        self._make()

    def _delete(self, resource: ApiResource, key: str) -> None:
        try:
            self.cluster.server.delete(resource, key)
        except ApiError:
            return  # it is gone

    def _calm_api(self) -> None:
        self.cluster.faults.refused = self.cluster.faults.lost = 0.0

    def _answer(self) -> None:
        self.cluster.requests.answers = True


def is_bad(spec: Spec) -> bool:
    """Whether some engine would never be ready."""
    return any(
        not template["spec"]["containers"][0]["image"].startswith(GOOD)
        for role in spec["template"]["roles"]
        for name in ("entryTemplate", "workerTemplate")
        if (template := role.get(name)) is not None
    )


def possible(spec: Spec) -> Spec:
    """With ``unit: Role`` a group that may never be unavailable could only change by surplus replicas of its roles."""
    if spec["rollout"]["unit"] != "Role" or str(spec["rollout"]["maxUnavailable"]).rstrip("%") != "0":
        return spec
    return {**spec, "rollout": {**spec["rollout"], "maxUnavailable": 1}}
