# SPDX-License-Identifier: Apache-2.0
"""ModelInfers: what is followed for them, and what of it each is decided from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from controller.kube.informer import Index, owner_key, owner_uid, slim, slim_node, slim_pod
from controller.kube.plan import Plan
from controller.kube.resources import (
    CONTROLLER_REVISIONS,
    MODEL_INFER_ROLES,
    MODEL_INFERS,
    NODES,
    PODS,
    SCHEDULER_POD_GROUPS,
    SERVICES,
    VOLCANO_POD_GROUPS,
    Object,
    Resource,
)
from controller.models.keeper import Trouble, WorkKey
from controller.models.log_tails import LogTails
from controller.models.model_infer import labels
from controller.models.model_infer.observed import Observed, PodGroups
from controller.models.node_room import LostNodes, not_ready_since_s, room, slim_to_requests

if TYPE_CHECKING:
    from controller.kube.client import Client
    from controller.kube.following import Following
    from controller.kube.informer import Informer, Slim
    from controller.models.keeper import Changed, Owned
    from controller.models.loads import Asked

Decide = Callable[[Observed, float], Plan]

# Kueue's own objects of pods that wait in its queues.
WORKLOADS: Final = Resource("kueue.x-k8s.io", "v1beta1", "workloads", "Workload")
_POD_GROUPS: Final = (VOLCANO_POD_GROUPS, SCHEDULER_POD_GROUPS)
_SLIM: Final[Mapping[Resource, Slim]] = {PODS: slim_pod}
# of other projects, or younger than the manager's other kinds
_OPTIONAL: Final = (MODEL_INFER_ROLES, *_POD_GROUPS)
_OWNED: Final = (PODS, SERVICES, CONTROLLER_REVISIONS, MODEL_INFER_ROLES, *_POD_GROUPS)
# A decision without the nodes that it needs waits this long for them.
_SOON_S: Final = 0.5


class ModelInferKeeper:
    """See ``Keeper``. ``changed``: called for a ModelInfer when something that it owns, or a node of its pods,
    changes.
    """

    resource = MODEL_INFERS
    trouble = Trouble("Degraded", "True")

    def __init__(self, client: Client, following: Following, changed: Changed, decide: Decide) -> None:
        self._client = client
        self._following = following
        self._changed = changed
        self._decide = decide
        self._things = following.add(MODEL_INFERS, slim=slim)
        self._informers: dict[Resource, Informer] = {
            one: following.add(one, labels=labels.MODEL_INFER, slim=_SLIM.get(one, slim), optional=one in _OPTIONAL)
            for one in _OWNED
        }
        self._indexes = {one: Index(informer, _owner) for one, informer in self._informers.items()}
        # a second index tells who is concerned, because the first one's uids are no keys
        self._owners = [Index(informer, owner_key, self._owner_changed) for informer in self._informers.values()]
        self._nodes = following.add(NODES, slim=slim_node)
        self._on_node = Index(self._informers[PODS], _node_of)
        self._lost = LostNodes(self._nodes.get)
        self._was_ready: dict[str, bool] = {}
        self._nodes.subscribe(self._node_changed)
        self._queues = following.add(WORKLOADS, labels=labels.MODEL_INFER, slim=slim, optional=True)
        self._everything: Informer | None = None
        self.log_tails = LogTails(client, self._pod_changed)

    def get(self, key: str) -> Object | None:
        """See ``Keeper``."""
        return self._things.get(key)

    @property
    def infers(self) -> Informer:
        """Follows ModelInfers."""
        return self._things

    @property
    def pods(self) -> Informer:
        """Follows their pods."""
        return self._informers[PODS]

    def pod(self, key: str) -> Object | None:
        """A pod of a ModelInfer."""
        return self._informers[PODS].get(key)

    def concerned(self, kind: str, key: str) -> Sequence[WorkKey]:
        """See ``Keeper``."""
        if kind == MODEL_INFERS.kind:
            return [WorkKey(kind, key)]
        role = self._informers[MODEL_INFER_ROLES].get(key) if kind == MODEL_INFER_ROLES.kind else None
        owner, _, name = ("" if role is None else owner_key(role)).partition("/")
        return [WorkKey(owner, name)] if owner == MODEL_INFERS.kind else []

    def subscribe(self, listener: Callable[[str], None]) -> None:
        """Call ``listener`` with the key of each ModelInfer that changes."""
        self._things.subscribe(listener)

    def owned(self, thing: Object) -> Owned:
        """See ``Keeper``."""
        metadata = thing["metadata"]
        return {one: index.of(f"{metadata['namespace']}/{metadata['uid']}") for one, index in self._indexes.items()}

    async def listed(self, thing: Object) -> Owned:
        """See ``Keeper``."""
        metadata = thing["metadata"]
        found: dict[Resource, list[Object]] = {}
        for one, informer in self._informers.items():
            if not self._following.serves(informer):
                continue
            listed = await self._client.list(one, metadata["namespace"], labels=labels.MODEL_INFER)
            lean = _SLIM.get(one, slim)
            found[one] = [lean(each) for each in listed.items if owner_uid(each) == metadata["uid"]]
        return found

    def decide(self, thing: Object, owned: Owned, asked: Asked, now_s: float) -> Plan:
        """See ``Keeper``."""
        gang = self._gang()
        waits = ((thing.get("spec") or {}).get("template") or {}).get("gang") is not None and gang == PodGroups()
        everything = self._all_pods() if waits else None
        if everything is not None and not everything.synced.is_set():
            return Plan(look_again_at_s=now_s + _SOON_S)
        pods = owned.get(PODS, ())
        observed = Observed(
            thing=thing,
            pods=pods,
            services=owned.get(SERVICES, ()),
            revisions=owned.get(CONTROLLER_REVISIONS, ()),
            pod_groups=[each for one in _POD_GROUPS for each in owned.get(one, ())],
            role_scales=owned.get(MODEL_INFER_ROLES, ()),
            lost_nodes=self._lost.among({name for one in pods if (name := _node_of(one))}, now_s),
            room=None if everything is None else room(self._nodes.objects.values(), everything.objects.values()),
            loads=asked.loads,
            loads_asked_of=asked.pods,
            log_tails=self.log_tails.of(pods),
            gang=gang,
        )
        return self._decide(observed, now_s)

    def _gang(self) -> PodGroups:
        return PodGroups(
            volcano=self._following.serves(self._informers[VOLCANO_POD_GROUPS]),
            scheduler_plugins=self._following.serves(self._informers[SCHEDULER_POD_GROUPS]),
            kueue=self._following.serves(self._queues),
        )

    def _all_pods(self) -> Informer:
        """Followed from the first time that somebody waits for room: pods of everybody take it."""
        if self._everything is None:
            self._everything = self._following.add_late(PODS, slim=slim_to_requests)
        return self._everything

    def _owner_changed(self, owner: str, _: str) -> None:
        kind, _, key = owner.partition("/")
        if kind == MODEL_INFERS.kind:
            self._changed(WorkKey(kind, key))

    def _pod_changed(self, pod: Object) -> None:
        self._owner_changed(owner_key(pod), "")

    def _node_changed(self, name: str) -> None:
        node = self._nodes.get(name)
        is_ready = node is not None and not_ready_since_s(node) is None
        was_ready = self._was_ready.get(name)
        if node is None:
            self._was_ready.pop(name, None)
        else:
            self._was_ready[name] = is_ready
        if was_ready != is_ready:
            for pod in self._on_node.of(name):
                self._pod_changed(pod)


def _owner(thing: Object) -> str:
    """Owners are of the same namespace: elsewhere, anybody may write any uid."""
    uid = owner_uid(thing)
    return f"{thing['metadata'].get('namespace', '')}/{uid}" if uid else ""


def _node_of(pod: Object) -> str:
    return str((pod.get("spec") or {}).get("nodeName") or "")
