# SPDX-License-Identifier: Apache-2.0
"""Models for their controller: informers, and what each is decided from."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from controller.kube.api_resources import (
    AUTOSCALING_POLICIES,
    CLUSTER_SERVING_RUNTIMES,
    CONFIG_MAPS,
    DAEMON_SETS,
    JOBS,
    MODEL_INFERS,
    MODEL_TEMPLATES,
    MODELS,
    PODS,
    SERVICES,
    SERVING_RUNTIMES,
    ApiResource,
    Object,
    split_key,
)
from controller.kube.conditions import with_failure
from controller.kube.informer import Index, owner_uid, without_managed_fields
from controller.kube.pod_views import trimmed_pod
from controller.kube.reconcile_plan import Plan
from controller.models.kind_reconciler import WorkKey
from controller.models.model.model_state import CHILDREN, MODEL, ModelSettings, ModelState
from controller.models.model_infer import names

if TYPE_CHECKING:
    from controller.kube.client import Client
    from controller.kube.informer import Informer
    from controller.kube.shared_informers import InformerSet
    from controller.models.kind_reconciler import Enqueue, Owned, PodLoads

DecideModel = Callable[[ModelState, float], Plan]
# Kinds that others use, too: only objects with our label are watched.
_EVERYBODYS: Final = (CONFIG_MAPS, DAEMON_SETS, JOBS)
_GATEWAYS: Final = "app.kubernetes.io/name=attache-gateway"


class SharedNamespaces(NamedTuple):
    """Namespaces whose objects serve all others. ``templates``: that whose ModelTemplates all Models may name.
    ``gateways``: those whose gateways serve all; gateways elsewhere serve their own namespace, as any Service can carry
    the label.
    """

    templates: str
    gateways: tuple[str, ...]


class ModelReconciler:
    """See ``KindReconciler``. ``infers`` and ``infer_pods`` follow ModelInfers and their pods. ``enqueue``: called for
    a Model when something that it is decided from changes.
    """

    resource = MODELS

    def __init__(
        self,
        client: Client,
        cache: InformerSet,
        enqueue: Enqueue,
        decide: DecideModel,
        *,
        infers: Informer,
        infer_pods: Informer,
        shared: SharedNamespaces,
        settings: ModelSettings,
    ) -> None:
        self._client = client
        self._cache = cache
        self._enqueue = enqueue
        self._decide = decide
        self._shared = shared.templates
        self._serves = shared.gateways
        self._settings = settings
        self.informer = cache.add(MODELS, transform=without_managed_fields, optional=True)
        self._in_namespace = Index(self.informer, _namespace)
        self._children = {one: infers if one == MODEL_INFERS else self._follow(one) for one in CHILDREN}
        self._by_namespace = {
            one: Index(informer, _namespace, self._all_in if one == AUTOSCALING_POLICIES else self._child_changed)
            for one, informer in self._children.items()
        }
        # those of warm-ups; the others belong to ModelInfers
        warming = cache.add(PODS, labels=f"{MODEL},!{names.MODEL_INFER}", transform=trimmed_pod)
        self._pods = [Index(one, _model, self._pod_changed) for one in (infer_pods, warming)]
        self._runtimes = Index(
            cache.add(SERVING_RUNTIMES, transform=without_managed_fields, optional=True),
            _namespace,
            self._all_in,
        )
        self._cluster_runtimes = cache.add(CLUSTER_SERVING_RUNTIMES, transform=without_managed_fields, optional=True)
        self._cluster_runtimes.subscribe(lambda _: self._everybody())
        templates = cache.add(MODEL_TEMPLATES, transform=without_managed_fields, optional=True, all_namespaces=True)
        self._templates = Index(templates, _namespace, self._all_in)
        self._gateways = cache.add(SERVICES, labels=_GATEWAYS, transform=without_managed_fields, all_namespaces=True)
        self._gateways.subscribe(lambda _: self._everybody())

    def status_of_failure(
        self, planned: Mapping[str, Any] | None, before: Mapping[str, Any], *, reason: str, message: str
    ) -> Mapping[str, Any]:
        return with_failure(planned, before, "Ready", "False", reason=reason, message=message)

    def keys_to_reconcile(self, kind: str, key: str) -> Sequence[WorkKey]:
        namespace, _ = split_key(key)
        if kind == MODELS.kind:
            return [WorkKey(kind, key)]
        if kind == CLUSTER_SERVING_RUNTIMES.kind or (kind == MODEL_TEMPLATES.kind and namespace == self._shared):
            return [WorkKey(MODELS.kind, one) for one in self.informer.objects]
        if kind in {SERVING_RUNTIMES.kind, MODEL_TEMPLATES.kind}:
            return [_work(one) for one in self._in_namespace.objects_with(str(namespace))]
        return []

    def cached_children(self, thing: Object) -> Owned:
        namespace = thing["metadata"]["namespace"]
        found: dict[ApiResource, Sequence[Object]] = {
            one: [each for each in index.objects_with(namespace) if _is_about(each, thing)]
            for one, index in self._by_namespace.items()
        }
        found[PODS] = [
            each for index in self._pods for each in index.objects_with(f"{namespace}/{thing['metadata']['name']}")
        ]
        return found

    async def list_children(self, thing: Object) -> Owned:
        metadata = thing["metadata"]
        found: dict[ApiResource, Sequence[Object]] = {}
        for one, informer in self._children.items():
            if self._cache.is_synced(informer):
                chosen = MODEL if one in _EVERYBODYS else ""
                listed = await self._client.list(one, metadata["namespace"], labels=chosen)
                found[one] = [without_managed_fields(each) for each in listed.items if _is_about(each, thing)]
        pods = await self._client.list(PODS, metadata["namespace"], labels=f"{MODEL}={metadata['name']}")
        found[PODS] = [trimmed_pod(each) for each in pods.items]
        return found

    def plan(self, thing: Object, owned: Owned, pod_loads: PodLoads, now_s: float) -> Plan:
        namespace = thing["metadata"]["namespace"]
        observed = ModelState(
            thing=thing,
            runtimes=self._runtimes.objects_with(namespace),
            cluster_runtimes=list(self._cluster_runtimes.objects.values()),
            templates=self._templates.objects_with(namespace),
            shared_templates=self._templates.objects_with(self._shared),
            children=list(itertools.chain.from_iterable(owned.get(one, ()) for one in CHILDREN)),
            pods=owned.get(PODS, ()),
            gateways=sorted(
                (one for one in self._gateways.objects.values() if _namespace(one) in (*self._serves, namespace)),
                key=_worth,
            ),
            policies=self._by_namespace[AUTOSCALING_POLICIES].objects_with(namespace),
            lists=pod_loads.models,
            settings=self._settings,
        )
        return self._decide(observed, now_s)

    def _follow(self, resource: ApiResource) -> Informer:
        if resource in _EVERYBODYS:
            return self._cache.add(resource, labels=MODEL, transform=without_managed_fields)
        return self._cache.add(resource, transform=without_managed_fields, optional=True)

    def _child_changed(self, namespace: str, key: str) -> None:
        """Also of what has such a name and is not ours: it may have made room."""
        _, name = split_key(key)
        for thing in self._in_namespace.objects_with(namespace):
            if name.startswith(thing["metadata"]["name"]):
                self._enqueue(_work(thing))

    def _pod_changed(self, model: str, _: str) -> None:
        if model in self.informer.objects:
            self._enqueue(WorkKey(MODELS.kind, model))

    def _all_in(self, namespace: str, _: str) -> None:
        things = (
            self.informer.objects.values() if namespace == self._shared else self._in_namespace.objects_with(namespace)
        )
        for thing in things:
            self._enqueue(_work(thing))

    def _everybody(self) -> None:
        for key in self.informer.objects:
            self._enqueue(WorkKey(MODELS.kind, key))


def _work(thing: Object) -> WorkKey:
    return WorkKey(MODELS.kind, f"{thing['metadata']['namespace']}/{thing['metadata']['name']}")


def _namespace(thing: Object) -> str:
    return str(thing["metadata"].get("namespace", ""))


def _model(pod: Object) -> str:
    name = (pod["metadata"].get("labels") or {}).get(MODEL, "")
    return f"{pod['metadata']['namespace']}/{name}" if name else ""


def _is_about(thing: Object, model: Object) -> bool:
    """Whether the Model owns an object, or it has its label, or a name like those of the Model's children."""
    metadata, name = thing["metadata"], model["metadata"]["name"]
    return (
        str(metadata["name"]).startswith(name)
        or (metadata.get("labels") or {}).get(MODEL) == name
        or owner_uid(thing) == model["metadata"]["uid"]
    )


def _worth(service: Object) -> tuple[bool, str, str]:
    """Services with an external address come first."""
    ingress = ((service.get("status") or {}).get("loadBalancer") or {}).get("ingress")
    return not ingress, service["metadata"]["namespace"], service["metadata"]["name"]
