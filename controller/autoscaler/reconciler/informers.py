# SPDX-License-Identifier: Apache-2.0
"""The informers of one term of leadership, the index of pods by label, and the bindings that a change concerns."""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING, Final

from controller.autoscaler.reconciler.bindings import (
    BindingView,
    PolicyView,
    autoscaler_trimmer,
    hpas_misusing_metric,
    targets_of_other_autoscalers,
    trimmed_binding,
    trimmed_policy,
)
from controller.autoscaler.reconciler.polled_targets import PolledTargets
from controller.autoscaler.reconciler.scalables import KINDS, Scalable, ScalableKind, find_scalable_kind, parse_scalable
from controller.kube.api_resources import (
    AUTOSCALING_POLICIES,
    AUTOSCALING_POLICY_BINDINGS,
    MODEL_SERVERS,
    PODS,
    ApiResource,
    Object,
    key_of,
    partial_metadata,
)
from controller.kube.informer import Selection, view_transform
from controller.kube.pod_views import POD_VIEW
from controller.models.kind_reconciler import WorkKey
from extproc.api.spec import namespace_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from controller.autoscaler.reconciler.bindings import ScalableRef, TargetClaim
    from controller.kube.client import Client
    from controller.kube.informer import Informer
    from controller.kube.pod_views import PodView
    from controller.kube.shared_informers import InformerSet, SharedInformers

_Bucket = tuple[str, str, str]
_Query = tuple[str, tuple[tuple[str, str], ...]]
# a watch is a connection and a task
_MOST: Final = 16
_HPAS: Final = ApiResource("autoscaling", "v2", "horizontalpodautoscalers", "HorizontalPodAutoscaler")
_SCALED_OBJECTS: Final = ApiResource("keda.sh", "v1alpha1", "scaledobjects", "ScaledObject")


class PodIndex:
    """Pods by label. Only labels of selectors that were queried are indexed. A query's result is cached until one of
    its pods changes, or another pod with one of its labels appears.
    """

    def __init__(self) -> None:
        self._pods: dict[str, PodView] = {}
        self._labels: set[str] = set()
        self._keys: dict[_Bucket, set[str]] = {}
        self._found: dict[_Query, list[PodView]] = {}
        self._queries: dict[_Bucket, set[_Query]] = {}
        # grows with each change
        self.version = 0

    def set_pod(self, key: str, pod: PodView | None) -> None:
        """Add or replace a pod; None removes it."""
        before = self._pods.pop(key, None)
        if before is None and pod is None:
            return
        self.version += 1
        if before is not None:
            for bucket in self._buckets(before, self._labels):
                found = self._keys[bucket]
                found.discard(key)
                if not found:
                    del self._keys[bucket]
                self._forget(bucket)
        if pod is not None:
            self._pods[key] = pod
            for bucket in self._add(pod, self._labels):
                self._forget(bucket)

    def find_pods(self, namespace: str, selector: Mapping[str, str]) -> list[PodView]:
        """Pods with all of these labels, by name; none where ``selector`` is empty. The list must not be changed."""
        query = namespace, tuple(selector.items())
        found = self._found.get(query)
        if found is None and selector:
            found = self._found[query] = self._select(namespace, selector)
            for name, value in selector.items():
                self._queries.setdefault((namespace, name, value), set()).add(query)
        return [] if found is None else found

    def _select(self, namespace: str, selector: Mapping[str, str]) -> list[PodView]:
        missing = selector.keys() - self._labels
        if missing:
            self._labels |= missing
            for pod in self._pods.values():
                self._add(pod, missing)
        buckets = [self._keys.get((namespace, name, value)) for name, value in selector.items()]
        full = [one for one in buckets if one]
        if len(full) < len(buckets):
            return []
        keys = min(full, key=len)
        return [self._pods[key] for key in sorted(keys) if all(key in one for one in full)]

    def _forget(self, bucket: _Bucket) -> None:
        for query in self._queries.pop(bucket, ()):
            self._found.pop(query, None)

    def _add(self, pod: PodView, labels: Iterable[str]) -> list[_Bucket]:
        buckets = self._buckets(pod, labels)
        for bucket in buckets:
            self._keys.setdefault(bucket, set()).add(pod.key)
        return buckets

    def _buckets(self, pod: PodView, labels: Iterable[str]) -> list[_Bucket]:
        namespace = pod.key.partition("/")[0]
        return [(namespace, name, pod.labels[name]) for name in labels if name in pod.labels]


class NamespacedPodInformers:
    """Pods of the namespaces given to ``set_wanted``; ``index`` has them. Where others of this leader watch the pods of
    all namespaces, or there are many namespaces, that one informer is read.
    """

    def __init__(self, shared: SharedInformers, synced: Callable[[], None]) -> None:
        self._shared = shared
        self._synced = synced
        self._informers: dict[str | None, Informer] = {}
        self._listeners: dict[str | None, Callable[[str], None]] = {}
        self._tasks: dict[str | None, asyncio.Task[None]] = {}
        self._namespaces: frozenset[str] = frozenset()
        self._wake = asyncio.Event()
        self.index = PodIndex()
        shared.add_usage_listener(self._wake.set)

    def set_wanted(self, namespaces: Collection[str]) -> None:
        """Replace the namespaces whose pods are indexed."""
        before, self._namespaces = self._namespaces, frozenset(namespaces)
        changed = before ^ self._namespaces
        for name, informer in self._informers.items() if changed else ():
            for key in informer.objects:
                if namespace_of(key) in changed:
                    self._listeners[name](key)
        self._wake.set()

    def has_synced(self, namespace: str) -> bool:
        """Whether all pods of a namespace have been listed."""
        return any(one.synced.is_set() for one in self._of(namespace))

    def disconnected_s(self, namespace: str) -> float | None:
        """For how many seconds the watch of a namespace's pods has been broken; None if it is not."""
        return next((one.disconnected_for_s() for one in self._of(namespace) if one.synced.is_set()), None)

    def on_write_answered(self, pod: Object) -> None:
        """What the server answered to a write of a pod."""
        self._shared.apply_write_answer(PODS, pod)

    async def run(self) -> None:
        """Start and stop informers as ``set_wanted`` demands, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._wake.clear()
                wanted = self._wanted()
                for one in wanted - self._informers.keys():
                    self._take(one)
                    self._tasks[one] = tasks.create_task(self._follow(one), name=f"informer of pods in {one or 'all'}")
                # informers that are no longer needed stop once all needed ones have synced: no pod is missed in between
                if all(self._informers[one].synced.is_set() for one in wanted):
                    self._drop(self._informers.keys() - wanted)
                await self._wake.wait()

    def _of(self, namespace: str) -> list[Informer]:
        return [self._informers[one] for one in (namespace, None) if one in self._informers]

    def _wanted(self) -> frozenset[str | None]:
        others = self._shared.count_users(PODS, Selection(), POD_VIEW) - (None in self._informers)
        is_wide = len(self._namespaces) > _MOST or others > 0
        return frozenset({None} if is_wide and self._namespaces else self._namespaces)

    def _take(self, namespace: str | None) -> None:
        informer = self._shared.acquire(PODS, Selection(namespace), POD_VIEW)

        def changed(key: str) -> None:
            found = informer.get(key) if namespace_of(key) in self._namespaces else None
            self.index.set_pod(key, None if found is None else found["view"])

        self._informers[namespace], self._listeners[namespace] = informer, changed
        informer.subscribe(changed)
        # others may have taken it before
        for key in informer.objects:
            changed(key)

    async def _follow(self, namespace: str | None) -> None:
        await self._informers[namespace].synced.wait()
        self._wake.set()
        self._synced()

    def _drop(self, namespaces: Collection[str | None]) -> None:
        kept = [one for name, one in self._informers.items() if name not in namespaces]
        for name in list(namespaces):
            self._tasks.pop(name).cancel()
            informer = self._informers.pop(name)
            informer.unsubscribe(self._listeners.pop(name))
            for key in informer.objects:
                if not any(key in one.objects for one in kept):
                    self.index.set_pod(key, None)
            self._shared.release(informer)


class ScalingInformers:
    """``run`` does the work. ``changed``: called with each binding or policy about which something has changed."""

    def __init__(self, client: Client, cache: InformerSet, changed: Callable[[WorkKey], None]) -> None:
        self._changed = changed
        self._cache = cache
        add = cache.add
        self._policies = add(AUTOSCALING_POLICIES, transform=trimmed_policy)
        self._bindings = add(AUTOSCALING_POLICY_BINDINGS, transform=trimmed_binding)
        self._servers = add(MODEL_SERVERS, transform=_trimmed_server)
        self._scalables: Mapping[ApiResource, Informer] = {
            one.resource: add(
                one.resource, transform=view_transform(partial(parse_scalable, one)), optional=one.optional
            )
            for one in KINDS
        }
        # a fake cluster lacks HorizontalPodAutoscalers, and so may one whose account may not list them
        self._others = [
            add(_HPAS, transform=autoscaler_trimmer(_HPAS.kind), optional=True),
            add(
                _SCALED_OBJECTS, transform=autoscaler_trimmer(_SCALED_OBJECTS.kind, "Deployment", "apps"), optional=True
            ),
        ]
        self.pods = NamespacedPodInformers(cache.shared, lambda: self._notify(self._known))
        self.other_kinds = PolledTargets(client, lambda place: self._notify(self._by_place.get(place, ())))
        self._by_place: dict[ScalableRef, set[str]] = defaultdict(set)
        self._by_policy: dict[str, set[str]] = defaultdict(set)
        self._known: dict[str, BindingView] = {}
        self._claims: dict[str, str] = {}
        self._others_scale: Mapping[ScalableRef, str] | None = None
        # the relevant content of ModelServers, by key, and those with a selector by its namespace and first label
        self._served: dict[str, tuple[object, ...]] = {}
        self._selectors: dict[tuple[str, str, str], list[tuple[str, Mapping[str, str]]]] | None = None
        # each grows with each relevant change: of a ModelServer, of a binding's targets, of the targets of other
        # autoscalers
        self.servers_version = 0
        self.owners_version = 0
        self._scalables_version = 0
        self._bindings.subscribe(self._binding_changed)
        self._policies.subscribe(self._policy_changed)
        self._servers.subscribe(self._server_changed)
        for one in self._others:
            one.subscribe(self._other_changed(one))
        for resource, informer in self._scalables.items():
            informer.subscribe(self._scalable_changed(resource))

    async def run(self) -> None:
        """Follow pods and targets where there are bindings, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.pods.run(), name="pods of targets")
            tasks.create_task(self.other_kinds.run(), name="targets of others' kinds")

    def target_change_token(self) -> tuple[int, ...]:
        """While they are the same, all targets resolve to the same."""
        served = sum(self._cache.is_synced(one) for one in self._scalables.values())
        scalables = self._scalables_version + self.other_kinds.version
        return self.servers_version, self.owners_version, scalables, self.pods.index.version, served

    def has_synced(self, view: BindingView) -> bool:
        """Whether the pods and the targets of a binding have been listed."""
        return self.pods.has_synced(view.namespace) and self.other_kinds.are_targets_read(view.key)

    def disconnected_s(self, namespace: str) -> float | None:
        """For how many seconds the watches of a namespace's pods or of scalable kinds have been broken; None if they
        are not.
        """
        found = [self.pods.disconnected_s(namespace), self.other_kinds.disconnected_s(namespace)]
        found += [one.disconnected_for_s() for one in self._scalables.values()]
        return max((one for one in found if one is not None), default=None)

    def binding(self, key: str) -> BindingView | None:
        """As the informer has it."""
        found = self._bindings.get(key)
        return None if found is None else found["view"]

    def binding_keys(self) -> Iterable[str]:
        """The keys of all."""
        return self._known

    def policy(self, key: str) -> PolicyView | None:
        """As the informer has it."""
        found = self._policies.get(key)
        return None if found is None else found["view"]

    def policy_keys(self) -> Iterable[str]:
        """The keys of all."""
        return list(self._policies.objects)

    def count_policy_users(self, policy: str) -> int:
        """How many bindings use a policy."""
        return len(self._by_policy.get(policy, ()))

    def scalable_kind(self, place: ScalableRef) -> ScalableKind | None:
        """The kind that a place names, if it can be scaled here."""
        kind = find_scalable_kind(place[1], place[2])
        return kind if kind is not None and self._cache.is_synced(self._scalables[kind.resource]) else None

    def scalable(self, kind: ScalableKind, place: ScalableRef) -> Scalable | None:
        """As the informer has it."""
        found = self._scalables[kind.resource].get(f"{place[0]}/{place[3]}")
        return None if found is None else found["view"]

    def on_write_answered(
        self, place: ScalableRef, resource: ApiResource, thing: Object, scale: Object | None = None
    ) -> None:
        """A target was written: what the server answered, for the object and for its scale."""
        if not is_foreign_kind(place):
            self._cache.apply_write_answer(resource, thing)
        elif scale is not None:
            self.other_kinds.on_write_answered(place, thing, scale)

    def target_claims(self, place: ScalableRef) -> list[TargetClaim]:
        """Of all bindings that have this target."""
        return [self._known[key].claim for key in self._by_place.get(place, ())]

    def claim_exists(self, claim: str) -> bool:
        """Whether the binding with this claim is still there."""
        return claim in self._claims

    def other_autoscaler(self, place: ScalableRef) -> str:
        """Another autoscaler that scales it; empty if none does."""
        if self._others_scale is None:
            self._others_scale = targets_of_other_autoscalers(
                one for each in self._others for one in each.objects.values()
            )
        return self._others_scale.get(place, "")

    def hpa_misusing_metric(self, place: ScalableRef) -> str:
        """The HorizontalPodAutoscaler that scales it by our metric, but takes that for a ratio; empty if none does."""
        return (
            hpas_misusing_metric(self._others[0].objects.values()).get(place, "")
            if self.other_autoscaler(place)
            else ""
        )

    def has_server(self, key: str) -> bool:
        """Whether this ModelServer is there."""
        return key in self._servers.objects

    def servers_selecting(self, namespace: str, labels: Mapping[str, str]) -> list[tuple[str, Mapping[str, str]]]:
        """Keys and selectors of ModelServers that select pods with these labels."""
        if self._selectors is None:
            self._selectors = defaultdict(list)
            for key, one in self._servers.objects.items():
                # a pod that is selected has each label of the selector: one of them is enough to find it by
                for label in itertools.islice(one["selector"].items(), 1):
                    self._selectors[(key.partition("/")[0], *label)].append((key, one["selector"]))
        return [
            (key, selector)
            for label in labels.items()
            for key, selector in self._selectors.get((namespace, *label), ())
            if selector.items() <= labels.items()
        ]

    def model_of_server(self, server: str) -> str:
        """The model of a ModelServer; its key if the spec has none, empty if there is no such ModelServer."""
        found = self._servers.get(server)
        return "" if found is None else str(found["model"])

    def port_of_server(self, server: str) -> int | None:
        """Where the engines of a ModelServer serve; None if there is none."""
        found = self._servers.get(server)
        return None if found is None else found["port"]

    def _binding_changed(self, key: str) -> None:
        before, now = self._known.pop(key, None), self.binding(key)
        if before is not None:
            self._claims.pop(before.claim.annotation_value, None)
            self._by_policy[before.policy_key].discard(key)
            for place in before.places:
                self._by_place[place].discard(key)
                self._notify(self._by_place[place])
                if not self._by_place[place]:
                    del self._by_place[place]
        if now is not None:
            self._known[key] = now
            self._claims[now.claim.annotation_value] = key
            self._by_policy[now.policy_key].add(key)
            for place in now.places:
                self._by_place[place].add(key)
        # an event of our own write changes nothing
        if _asks(before) != _asks(now):
            self.owners_version += 1
            self.pods.set_wanted({one.namespace for one in self._known.values()})
            self.other_kinds.set_wanted(key, _foreign(now))
            self._notify([key, *(other for place in now.places for other in self._by_place[place])] if now else [key])
            for one in {each.policy_key for each in (before, now) if each is not None} - {""}:
                self._changed(WorkKey(AUTOSCALING_POLICIES.kind, one))

    def _policy_changed(self, key: str) -> None:
        self._changed(WorkKey(AUTOSCALING_POLICIES.kind, key))
        self._notify(self._by_policy.get(key, ()))

    def _server_changed(self, key: str) -> None:
        found = self._servers.get(key)
        now = None if found is None else (found["selector"], found["model"], found["port"])
        # most changes are of statuses, and a resync changes nothing
        if _is_new(self._served, key, now):
            self._selectors = None
            self.servers_version += 1

    def _other_changed(self, informer: Informer) -> Callable[[str], None]:
        versions: dict[str, tuple[object, ...]] = {}

        def changed(key: str) -> None:
            found = informer.get(key)
            now = None if found is None else (found["ref"], found["misuses"])
            # most changes are of statuses
            if _is_new(versions, key, now):
                self._others_scale = None
                self.owners_version += 1

        return changed

    def _scalable_changed(self, resource: ApiResource) -> Callable[[str], None]:
        informer, versions = self._scalables[resource], dict[str, tuple[object, ...]]()

        def changed(key: str) -> None:
            self._scalables_version += 1
            namespace, _, name = key.partition("/")
            concerned = self._by_place.get((namespace, resource.group, resource.kind, name))
            found = informer.get(key)
            view: Scalable | None = None if found is None else found["view"]
            now = () if view is None else (view.uid, view.replicas, view.scaled_by, view.is_going, view.template)
            # most changes are of statuses
            if not concerned:
                versions.pop(key, None)
            elif versions.get(key) != now:
                versions[key] = now
                self._notify(concerned)

        return changed

    def _notify(self, keys: Iterable[str]) -> None:
        for key in set(keys):
            self._changed(WorkKey(AUTOSCALING_POLICY_BINDINGS.kind, key))


def _is_new(versions: dict[str, tuple[object, ...]], key: str, now: tuple[object, ...] | None) -> bool:
    """Whether the content ``now`` of an object differs from the one in ``said``, which is updated; ``now``: None if the
    object is gone.
    """
    if versions.get(key) == now:
        return False
    if now is None:
        del versions[key]
    else:
        versions[key] = now
    return True


def _asks(view: BindingView | None) -> tuple[object, ...] | None:
    return None if view is None else (view.claim, view.thing["metadata"].get("generation"), view.problem)


def is_foreign_kind(place: ScalableRef) -> bool:
    """Whether its kind is not one of ``KINDS``."""
    return find_scalable_kind(place[1], place[2]) is None


def _foreign(view: BindingView | None) -> dict[ScalableRef, str]:
    if view is None or view.binding is None:
        return {}
    pairs = zip(view.places, view.binding.spec.targets, strict=True)
    return {place: one.ref.api_version for place, one in pairs if is_foreign_kind(place)}


def _trimmed_server(thing: Object) -> Object:
    spec = thing.get("spec") or {}
    selector = (spec.get("workloadSelector") or {}).get("matchLabels") or {}
    port = (spec.get("workloadPort") or {}).get("port")
    model = spec.get("model") or key_of(thing)
    return {"metadata": partial_metadata(thing), "selector": selector, "model": model, "port": port}
