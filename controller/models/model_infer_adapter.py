# SPDX-License-Identifier: Apache-2.0
"""ModelInfers for their controller: informers, what each is decided from, and logs of containers that crashed."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from controller.kube.errors import ClusterError
from controller.kube.informer import Index, owner_key, owner_uid, trimmed_node, trimmed_pod, without_managed_fields
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
    key_of,
)
from controller.models.adapter import Failure, WorkKey
from controller.models.model_infer import names
from controller.models.model_infer.observed import Observed, PodGroups
from controller.models.node_capacity import LostNodes, not_ready_since_s, room, trimmed_to_requests

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from controller.kube.cache import Cache
    from controller.kube.client import Client
    from controller.kube.informer import Informer, Transform
    from controller.models.adapter import Asked, Enqueue, Owned

log = logging.getLogger(__name__)
_LINES: Final = 10
_BYTES: Final = 4096
_REMEMBERED: Final = 1000
# At once: a node that is gone keeps each of them waiting.
_READERS: Final = 4


class Crash(msgspec.Struct, frozen=True):
    """A container that has ended badly. ``is_over``: it has been started again since, so the log is the previous
    one's.
    """

    pod: str
    uid: str
    container: str
    restarts: int
    is_over: bool


class LogTails:
    """``of`` answers with what is known and has the rest read by ``run``, which calls ``read`` with the pod when it
    has.
    """

    def __init__(self, client: Client, read: Callable[[Object], None]) -> None:
        self._client = client
        self._read = read
        # the oldest go; None: being read
        self._known: OrderedDict[Crash, str | None] = OrderedDict()
        self._wanted: asyncio.Queue[tuple[Crash, Object]] = asyncio.Queue(_REMEMBERED)

    def of(self, pods: Iterable[Object]) -> dict[str, str]:
        """By key of those pods whose containers crashed, as far as they have been read."""
        found: dict[str, str] = {}
        for pod in pods:
            crash = crash_of(pod)
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
        """Until cancelled."""
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

    async def _tail(self, crash: Crash) -> str:
        try:
            return await self._client.log_tail(
                crash.pod, crash.container, previous=crash.is_over, lines=_LINES, most_bytes=_BYTES
            )
        except ClusterError as error:
            log.info("the log of %s in %s cannot be read: %s", crash.container, crash.pod, error)
            return ""


def crash_of(pod: Object) -> Crash | None:
    """The last crash of the first container that has crashed and is not well again."""
    status = pod.get("status") or {}
    for one in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())):
        if not one.get("ready") and any(_is_crash(state) for state in _ended(one)):
            is_over = not _is_crash((one.get("state") or {}).get("terminated") or {})
            restarts = int(one.get("restartCount") or 0)
            return Crash(key_of(pod), pod["metadata"]["uid"], one["name"], restarts, is_over)
    return None


def _ended(container: Object) -> Iterator[Object]:
    for name in ("state", "lastState"):
        yield (container.get(name) or {}).get("terminated") or {}


def _is_crash(terminated: Object) -> bool:
    return int(terminated.get("exitCode") or 0) != 0


Decide = Callable[[Observed, float], Plan]
# Kueue's own objects of pods that wait in its queues.
WORKLOADS: Final = Resource("kueue.x-k8s.io", "v1beta1", "workloads", "Workload")
_POD_GROUPS: Final = (VOLCANO_POD_GROUPS, SCHEDULER_POD_GROUPS)
_TRANSFORMS: Final[Mapping[Resource, Transform]] = {PODS: trimmed_pod}
# of other projects, or younger than the manager's other kinds
_OPTIONAL: Final = (MODEL_INFER_ROLES, *_POD_GROUPS)
_OWNED: Final = (PODS, SERVICES, CONTROLLER_REVISIONS, MODEL_INFER_ROLES, *_POD_GROUPS)
# A decision without the nodes that it needs waits this long for them.
_SOON_S: Final = 0.5


class ModelInferAdapter:
    """See ``Adapter``. ``enqueue``: called for a ModelInfer when something that it owns, or a node of its pods,
    changes.
    """

    resource = MODEL_INFERS
    failure = Failure("Degraded", "True")

    def __init__(self, client: Client, cache: Cache, enqueue: Enqueue, decide: Decide) -> None:
        self._client = client
        self._cache = cache
        self._enqueue = enqueue
        self._decide = decide
        self.informer = cache.add(MODEL_INFERS, transform=without_managed_fields)
        self._informers: dict[Resource, Informer] = {
            one: cache.add(
                one,
                labels=names.MODEL_INFER,
                transform=_TRANSFORMS.get(one, without_managed_fields),
                optional=one in _OPTIONAL,
            )
            for one in _OWNED
        }
        self._indexes = {one: Index(informer, _owner) for one, informer in self._informers.items()}
        # a second index tells who is concerned, because the first one's uids are no keys
        self._owners = [Index(informer, owner_key, self._owner_changed) for informer in self._informers.values()]
        self._nodes = cache.add(NODES, transform=trimmed_node)
        self._on_node = Index(self._informers[PODS], _node_of)
        self._lost = LostNodes(self._nodes.get)
        self._was_ready: dict[str, bool] = {}
        self._nodes.subscribe(self._node_changed)
        self._queues = cache.add(WORKLOADS, labels=names.MODEL_INFER, transform=without_managed_fields, optional=True)
        self._everything: Informer | None = None
        self.log_tails = LogTails(client, self._pod_changed)

    @property
    def pods(self) -> Informer:
        """Of their pods."""
        return self._informers[PODS]

    def concerned(self, kind: str, key: str) -> Sequence[WorkKey]:
        """See ``Adapter``."""
        if kind == MODEL_INFERS.kind:
            return [WorkKey(kind, key)]
        role = self._informers[MODEL_INFER_ROLES].get(key) if kind == MODEL_INFER_ROLES.kind else None
        owner, _, name = ("" if role is None else owner_key(role)).partition("/")
        return [WorkKey(owner, name)] if owner == MODEL_INFERS.kind else []

    def owned(self, thing: Object) -> Owned:
        """See ``Adapter``."""
        metadata = thing["metadata"]
        return {one: index.of(f"{metadata['namespace']}/{metadata['uid']}") for one, index in self._indexes.items()}

    async def listed(self, thing: Object) -> Owned:
        """See ``Adapter``."""
        metadata = thing["metadata"]
        found: dict[Resource, list[Object]] = {}
        for one, informer in self._informers.items():
            if not self._cache.serves(informer):
                continue
            listed = await self._client.list(one, metadata["namespace"], labels=names.MODEL_INFER)
            lean = _TRANSFORMS.get(one, without_managed_fields)
            found[one] = [lean(each) for each in listed.items if owner_uid(each) == metadata["uid"]]
        return found

    def decide(self, thing: Object, owned: Owned, asked: Asked, now_s: float) -> Plan:
        """See ``Adapter``."""
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
            volcano=self._cache.serves(self._informers[VOLCANO_POD_GROUPS]),
            scheduler_plugins=self._cache.serves(self._informers[SCHEDULER_POD_GROUPS]),
            kueue=self._cache.serves(self._queues),
        )

    def _all_pods(self) -> Informer:
        """Read from the first time that a gang waits for capacity: pods of everybody use it."""
        if self._everything is None:
            self._everything = self._cache.add(PODS, transform=trimmed_to_requests, all_namespaces=True, private=True)
        return self._everything

    def _owner_changed(self, owner: str, _: str) -> None:
        kind, _, key = owner.partition("/")
        if kind == MODEL_INFERS.kind:
            self._enqueue(WorkKey(kind, key))

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
