# SPDX-License-Identifier: Apache-2.0
"""ModelInfers for their controller: informers, what each is decided from, and logs of containers that crashed."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from controller.kube.api_resources import (
    CONTROLLER_REVISIONS,
    MODEL_INFER_ROLES,
    MODEL_INFERS,
    NODES,
    PODS,
    SCHEDULER_POD_GROUPS,
    SERVICES,
    VOLCANO_POD_GROUPS,
    ApiResource,
    Object,
    key_of,
)
from controller.kube.conditions import with_failure
from controller.kube.errors import ClusterError
from controller.kube.informer import Index, owner_key, owner_uid, without_managed_fields
from controller.kube.pod_views import POD_VIEW, trimmed_pod
from controller.kube.reconcile_plan import Plan
from controller.models.kind_reconciler import WorkKey
from controller.models.model_infer import names
from controller.models.model_infer.model_infer_state import GangSchedulingApis, ModelInferState
from controller.models.model_infer.status import add_summary
from controller.models.node_capacity import LostNodes, node_capacities, not_ready_since_s, trimmed_node

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from controller.kube.client import Client
    from controller.kube.informer import Informer, Transform
    from controller.kube.shared_informers import InformerSet
    from controller.models.kind_reconciler import Enqueue, Owned, PodLoads

log = logging.getLogger(__name__)
_LINES: Final = 10
_BYTES: Final = 4096
_REMEMBERED: Final = 1000
# At once: a node that is gone keeps each of them waiting.
_READERS: Final = 4
Decide = Callable[[ModelInferState, float], Plan]
# Kueue's own objects of pods that wait in its queues.
WORKLOADS: Final = ApiResource("kueue.x-k8s.io", "v1beta1", "workloads", "Workload")
POD_GROUPS: Final = (VOLCANO_POD_GROUPS, SCHEDULER_POD_GROUPS)
_TRANSFORMS: Final[Mapping[ApiResource, Transform]] = {PODS: trimmed_pod}
# of other projects, or younger than the manager's other kinds
_OPTIONAL: Final = (MODEL_INFER_ROLES, *POD_GROUPS)
OWNED: Final = (PODS, SERVICES, CONTROLLER_REVISIONS, MODEL_INFER_ROLES, *POD_GROUPS)
# A decision without the nodes that it needs waits this long for them.
_SOON_S: Final = 0.5


class ContainerCrash(msgspec.Struct, frozen=True):
    """A container that has ended badly. ``is_over``: it has been started again since, so the log is the previous
    one's.
    """

    pod: str
    uid: str
    container: str
    restarts: int
    is_over: bool


class LogTails:
    """Last log lines of crashed containers. ``of`` returns those already read; ``run`` reads the rest and calls
    ``read`` with the pod.
    """

    def __init__(self, client: Client, read: Callable[[Object], None]) -> None:
        self._client = client
        self._read = read
        # the oldest go; None: being read
        self._known: OrderedDict[ContainerCrash, str | None] = OrderedDict()
        self._wanted: asyncio.Queue[tuple[ContainerCrash, Object]] = asyncio.Queue(_REMEMBERED)

    def tails_of_crashed(self, pods: Iterable[Object]) -> dict[str, str]:
        """Log tails by the key of pods with crashed containers, as far as they have been read."""
        found: dict[str, str] = {}
        for pod in pods:
            crash = last_crash(pod)
            if crash is None:
                continue
            if crash not in self._known and not self._wanted.full():
                self._known[crash] = None
                self._wanted.put_nowait((crash, pod))
            tail = self._known.get(crash)
            if tail:
                found[crash.pod] = tail
        while len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        return found

    async def run(self) -> None:
        """Read logs until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(_READERS):
                tasks.create_task(self._follow(), name="reader of logs")

    async def _follow(self) -> None:
        while True:
            crash, pod = await self._wanted.get()
            tail = await self._tail(crash)
            if tail and crash in self._known:
                self._known[crash] = tail
                self._read(pod)

    async def _tail(self, crash: ContainerCrash) -> str:
        try:
            return await self._client.log_tail(
                crash.pod, crash.container, previous=crash.is_over, lines=_LINES, most_bytes=_BYTES
            )
        except ClusterError as error:
            log.info("the log of %s in %s cannot be read: %s", crash.container, crash.pod, error)
            return ""


def last_crash(pod: Object) -> ContainerCrash | None:
    """The last crash of the first container that has crashed and is not well again."""
    status = pod.get("status") or {}
    for one in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())):
        if not one.get("ready") and any(_is_crash(state) for state in _ended(one)):
            is_over = not _is_crash((one.get("state") or {}).get("terminated") or {})
            restarts = int(one.get("restartCount") or 0)
            return ContainerCrash(key_of(pod), pod["metadata"]["uid"], one["name"], restarts, is_over)
    return None


def _ended(container: Object) -> Iterator[Object]:
    for name in ("state", "lastState"):
        yield (container.get(name) or {}).get("terminated") or {}


def _is_crash(terminated: Object) -> bool:
    return int(terminated.get("exitCode") or 0) != 0


class ModelInferReconciler:
    """See ``KindReconciler``. ``enqueue``: called for a ModelInfer when something that it owns, or a node of its pods,
    changes; ``hasten``: when something that it owned is gone.
    """

    resource = MODEL_INFERS

    def __init__(
        self, client: Client, cache: InformerSet, enqueue: Enqueue, decide: Decide, *, hasten: Enqueue
    ) -> None:
        self._client = client
        self._cache = cache
        self._enqueue = enqueue
        self._hasten = hasten
        self._decide = decide
        self.informer = cache.add(MODEL_INFERS, transform=without_managed_fields)
        self._informers: dict[ApiResource, Informer] = {
            one: cache.add(
                one,
                labels=names.MODEL_INFER,
                transform=_TRANSFORMS.get(one, without_managed_fields),
                optional=one in _OPTIONAL,
            )
            for one in OWNED
        }
        self._indexes = {one: Index(informer, _owner) for one, informer in self._informers.items()}
        # a second index has the owners' keys, as the first one has uids
        self._owners = [Index(one, owner_key, self._owner_changed(one)) for one in self._informers.values()]
        self._nodes = cache.add(NODES, transform=trimmed_node)
        self._on_node = Index(self._informers[PODS], _node_of)
        self._lost = LostNodes(self._nodes.get)
        self._was_ready: dict[str, bool] = {}
        self._nodes.subscribe(self._node_changed)
        self._queues = cache.add(WORKLOADS, labels=names.MODEL_INFER, transform=without_managed_fields, optional=True)
        self._everything: Informer | None = None
        self.log_tails = LogTails(client, self._pod_changed)

    @property
    def pod_informer(self) -> Informer:
        """Of their pods."""
        return self._informers[PODS]

    def status_of_failure(
        self, planned: Mapping[str, Any] | None, before: Mapping[str, Any], *, reason: str, message: str
    ) -> Mapping[str, Any]:
        failed = with_failure(planned, before, "Degraded", "True", reason=reason, message=message)
        return add_summary(failed)

    def keys_to_reconcile(self, kind: str, key: str) -> Sequence[WorkKey]:
        if kind == MODEL_INFERS.kind:
            return [WorkKey(kind, key)]
        role = self._informers[MODEL_INFER_ROLES].get(key) if kind == MODEL_INFER_ROLES.kind else None
        owner, _, name = ("" if role is None else owner_key(role)).partition("/")
        return [WorkKey(owner, name)] if owner == MODEL_INFERS.kind else []

    def cached_children(self, thing: Object) -> Owned:
        metadata = thing["metadata"]
        return {
            one: index.objects_with(f"{metadata['namespace']}/{metadata['uid']}")
            for one, index in self._indexes.items()
        }

    async def list_children(self, thing: Object) -> Owned:
        metadata = thing["metadata"]
        found: dict[ApiResource, list[Object]] = {}
        for one, informer in self._informers.items():
            if not self._cache.is_synced(informer):
                continue
            listed = await self._client.list(one, metadata["namespace"], labels=names.MODEL_INFER)
            lean = _TRANSFORMS.get(one, without_managed_fields)
            found[one] = [lean(each) for each in listed.items if owner_uid(each) == metadata["uid"]]
        return found

    def plan(self, thing: Object, owned: Owned, pod_loads: PodLoads, now_s: float) -> Plan:
        gang = self._gang()
        waits = ((thing.get("spec") or {}).get("template") or {}).get(
            "gang"
        ) is not None and gang == GangSchedulingApis()
        everything = self._all_pods() if waits else None
        if everything is not None and not everything.synced.is_set():
            return Plan(requeue_at_s=now_s + _SOON_S)
        pods = owned.get(PODS, ())
        observed = ModelInferState(
            thing=thing,
            pods=pods,
            services=owned.get(SERVICES, ()),
            revisions=owned.get(CONTROLLER_REVISIONS, ()),
            pod_groups=[each for one in POD_GROUPS for each in owned.get(one, ())],
            role_scales=owned.get(MODEL_INFER_ROLES, ()),
            lost_nodes=self._lost.lost_since({name for one in pods if (name := _node_of(one))}, now_s),
            node_capacities=None
            if everything is None
            else node_capacities(self._nodes.objects.values(), (one["view"] for one in everything.objects.values())),
            loads=pod_loads.loads,
            loads_asked_of=pod_loads.pods,
            log_tails=self.log_tails.tails_of_crashed(pods),
            gang=gang,
        )
        return self._decide(observed, now_s)

    def _gang(self) -> GangSchedulingApis:
        return GangSchedulingApis(
            volcano=self._cache.is_synced(self._informers[VOLCANO_POD_GROUPS]),
            scheduler_plugins=self._cache.is_synced(self._informers[SCHEDULER_POD_GROUPS]),
            kueue=self._cache.is_synced(self._queues),
        )

    def _all_pods(self) -> Informer:
        """The informer of all pods, as all of them use capacity; started when a gang first waits for it."""
        if self._everything is None:
            self._everything = self._cache.add(PODS, transform=POD_VIEW, all_namespaces=True, private=True)
        return self._everything

    def _owner_changed(self, informer: Informer) -> Callable[[str, str], None]:
        def changed(owner: str, key: str) -> None:
            kind, _, name = owner.partition("/")
            if kind == MODEL_INFERS.kind:
                # what is gone may have had the name of what could not be made
                enqueue = self._hasten if informer.get(key) is None else self._enqueue
                enqueue(WorkKey(kind, name))

        return changed

    def _pod_changed(self, pod: Object) -> None:
        kind, _, name = owner_key(pod).partition("/")
        if kind == MODEL_INFERS.kind:
            self._enqueue(WorkKey(kind, name))

    def _node_changed(self, name: str) -> None:
        node = self._nodes.get(name)
        is_ready = node is not None and not_ready_since_s(node) is None
        was_ready = self._was_ready.get(name)
        if node is None:
            self._was_ready.pop(name, None)
        else:
            self._was_ready[name] = is_ready
        if was_ready != is_ready:
            for pod in self._on_node.objects_with(name):
                self._pod_changed(pod)


def _owner(thing: Object) -> str:
    """The owner's uid, in the object's namespace alone: elsewhere, any object can claim any uid."""
    uid = owner_uid(thing)
    return f"{thing['metadata'].get('namespace', '')}/{uid}" if uid else ""


def _node_of(pod: Object) -> str:
    return str((pod.get("spec") or {}).get("nodeName") or "")
