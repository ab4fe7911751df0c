# SPDX-License-Identifier: Apache-2.0
"""Broken objects of a cluster at random: ``python -m tests.fuzz objects --minutes 10``.

Valid objects of every kind that the controller reads are broken below their metadata's identity, and given to what
informers give them to, beside honest objects. Nothing may be raised, the honest objects must come to what they come to
alone, and a directory that is made of all must be one that extproc and Envoy's bundle can use.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from typing import TYPE_CHECKING, Final, cast

import msgspec
import yaml

from controller.autoscaler.reconciler.informers import ScalingInformers
from controller.autoscaler.reconciler.target_resolver import TargetResolver
from controller.bundle.envoy.bundle import build_bundle
from controller.gateway.compile.compiler import Compiler, file_name
from controller.gateway.compile.gateway_api.backends import trim_endpoint_slice
from controller.gateway.compile.gateway_api.gateways import GatewayApiSettings
from controller.gateway.compile.inference_pool_compiler import InferencePoolCompiler
from controller.gateway.compile.pods import trimmed_engine_pod
from controller.kube.api_resources import Object, key_of, parse_selector
from controller.kube.client import ObjectList, WatchEvent
from controller.kube.custom_resources import KINDS, crd_object
from controller.kube.informer import InformerTiming, Store
from controller.kube.shared_informers import InformerSet, SharedInformers
from controller.models.kind_reconciler import PodLoads
from controller.models.model.model_state import ModelSettings
from controller.models.model.reconcile import reconcile as reconcile_model
from controller.models.model_infer.reconcile import reconcile as reconcile_model_infer
from controller.models.model_infer_reconciler import ModelInferReconciler
from controller.models.model_reconciler import ModelReconciler, SharedNamespaces
from controller.webhooks.admission.checks import read_review, review_object
from extproc.api.config_loader import load_snapshot
from extproc.llmd.picker_builder import InstalledPluginChecker
from tests.fake_api.kinds import faults_in, kinds_of, unknown_fields, with_defaults, without_fields
from tests.fuzz.loop import Attempt, Attempts, run_inputs
from tests.fuzz.values import JSON_VALUES, changed

if TYPE_CHECKING:
    import random
    from collections.abc import AsyncIterator, Mapping, Sequence

    from controller.kube.api_resources import ApiResource
    from controller.kube.client import Client

HONEST: Final = "default"
ODD: Final = "odd"
_LABELS: Final = "{app: llama, attache.dev/model: llama}"
_CREATED: Final = "2026-01-01T00:00:00Z"
_LATER: Final = "2026-02-01T00:00:00Z"
_NOW_S: Final = 1_800_000_000.0
# Objects of the core API: an API server has checked their types, but not what is in a text.
_CORE: Final = ("v1", "apps/v1", "discovery.k8s.io/v1")

_GATEWAY_OBJECTS: Final = f"""
apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {{name: llama}}
spec:
  model: org/llama
  workloadSelector: {{matchLabels: {{app: llama}}}}
  workloadPort: {{port: 8000, rankPorts: [8001]}}
  trafficPolicy: {{timeout: 5m, retry: {{attempts: 1}}}}
  flowControl: {{timeout: 10s, maxBytes: 1Gi}}
  kvEvents: {{port: 5557}}
---
apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {{name: listed}}
spec: {{model: org/listed, pickerConfig: picker, endpoints: [{{address: "10.1.0.1:8000", labels: {{a: b}}}}]}}
---
apiVersion: attache.dev/v1alpha1
kind: ModelRoute
metadata: {{name: llama}}
spec:
  modelName: NAMESPACE-llama
  loraAdapters: [NAMESPACE-sql]
  rateLimits: [{{per: Tenant, unit: minute, requests: 10, users: [ann]}}]
  rules:
  - {{modelMatch: {{headers: {{x-a: {{exact: b}}}}}}, targetModels: [{{modelServerName: llama, weight: 10}}]}}
  - targetModels: [{{modelServerName: llama}}, {{modelServerName: listed}}]
---
apiVersion: attache.dev/v1alpha1
kind: ModelAccessPolicy
metadata: {{name: policy}}
spec:
  targetRefs: [{{kind: ModelRoute, name: llama}}]
  rules: [{{from: [{{tenants: [a]}}, {{apiKeys: [b]}}], models: [NAMESPACE-llama]}}]
---
apiVersion: inference.networking.x-k8s.io/v1alpha2
kind: InferenceObjective
metadata: {{name: objective}}
spec: {{priority: 10, poolRef: {{name: llama}}}}
---
apiVersion: v1
kind: ConfigMap
metadata: {{name: picker, labels: {{attache.dev/picker-config: ""}}}}
data:
  config.yaml: |
    apiVersion: llm-d.ai/v1alpha1
    kind: EndpointPickerConfig
    plugins: [{{type: queue-scorer}}, {{type: max-score-picker}}]
    schedulingProfiles: [{{name: default, plugins: [{{pluginRef: queue-scorer}}, {{pluginRef: max-score-picker}}]}}]
---
apiVersion: v1
kind: Pod
metadata:
  name: llama-0
  labels: {_LABELS}
  annotations: {{attache.dev/price: "2", llm-d.ai/active-ports: "8000,8001"}}
spec: {{nodeName: gpu-1, containers: [{{name: engine, resources: {{requests: {{cpu: "2", memory: 1Gi}}}}}}]}}
status:
  phase: Running
  podIP: 10.0.0.1
  startTime: {_CREATED}
  conditions: [{{type: Ready, status: "True", lastTransitionTime: {_CREATED}}}]
  containerStatuses:
  - {{name: engine, ready: true, restartCount: 0, state: {{running: {{startedAt: {_CREATED}}}}}}}
---
apiVersion: gateway.networking.k8s.io/v1
kind: Gateway
metadata: {{name: web}}
spec:
  gatewayClassName: attache
  listeners:
  - name: http
    protocol: HTTP
    port: 80
    hostname: "*.NAMESPACE.example.org"
    allowedRoutes: {{namespaces: {{from: Same}}}}
---
apiVersion: gateway.networking.k8s.io/v1
kind: HTTPRoute
metadata: {{name: app}}
spec:
  parentRefs: [{{group: gateway.networking.k8s.io, kind: Gateway, name: web, sectionName: http}}]
  hostnames: [web.NAMESPACE.example.org]
  rules:
  - matches: [{{path: {{type: PathPrefix, value: /a}}, headers: [{{name: x, value: "y"}}]}}]
    filters: [{{type: RequestHeaderModifier, requestHeaderModifier: {{set: [{{name: x-b, value: c}}]}}}}]
    timeouts: {{request: 10s}}
    backendRefs: [{{group: "", kind: Service, name: app, port: 8080, weight: 1}}]
  - backendRefs: [{{group: inference.networking.k8s.io, kind: InferencePool, name: pool}}]
---
apiVersion: gateway.networking.k8s.io/v1
kind: GRPCRoute
metadata: {{name: calls}}
spec:
  parentRefs: [{{group: gateway.networking.k8s.io, kind: Gateway, name: web, sectionName: http}}]
  hostnames: [calls.NAMESPACE.example.org]
  rules:
  - matches: [{{method: {{type: RegularExpression, service: a.B, method: C}}, headers: [{{name: x, value: "y"}}]}}]
    filters: [{{type: RequestHeaderModifier, requestHeaderModifier: {{set: [{{name: x-b, value: c}}]}}}}]
    backendRefs: [{{group: "", kind: Service, name: app, port: 8080, weight: 1}}]
---
apiVersion: gateway.networking.k8s.io/v1beta1
kind: ReferenceGrant
metadata: {{name: grant}}
spec:
  from: [{{namespace: other, group: gateway.networking.k8s.io, kind: HTTPRoute}}]
  to: [{{group: "", kind: Service, name: app}}]
---
apiVersion: inference.networking.k8s.io/v1
kind: InferencePool
metadata: {{name: pool, annotations: {{attache.dev/model-server: "engine: SGLang"}}}}
spec:
  selector: {{matchLabels: {{app: llama}}}}
  targetPorts: [{{number: 8000}}]
  endpointPickerRef: {{group: "", kind: Service, name: app, port: {{number: 9002}}}}
---
apiVersion: v1
kind: Service
metadata: {{name: app}}
spec: {{type: ClusterIP, ports: [{{name: http, port: 8080, protocol: TCP, targetPort: 3000}}]}}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {{name: app-1, labels: {{kubernetes.io/service-name: app}}}}
addressType: IPv4
endpoints: [{{addresses: [10.2.0.1], conditions: {{ready: true, serving: true}}, nodeName: gpu-1}}]
ports: [{{name: http, port: 3000, protocol: TCP}}]
"""
_CLASS: Final[Object] = {
    "apiVersion": "gateway.networking.k8s.io/v1",
    "kind": "GatewayClass",
    "metadata": {"name": "attache", "generation": 1, "creationTimestamp": _CREATED},
    "spec": {"controllerName": "attache.dev/gateway"},
}

_MANAGER_OBJECTS: Final = f"""
apiVersion: attache.dev/v1alpha1
kind: Model
metadata: {{name: llama}}
spec:
  uri: hf://org/llama
  servedName: NAMESPACE/llama
  adapters: [{{name: sql, uri: "hf://org/sql"}}]
  cache: {{hostPath: /var/lib/attache/weights}}
  backends:
  - name: apart
    replicas: 2
    config: {{parallelism: {{tensor: 4}}}}
    disaggregation: {{prefill: 2, decode: 2, connector: NIXL}}
  - {{name: plain, minReplicas: 1, maxReplicas: 3, weight: 10}}
---
apiVersion: attache.dev/v1alpha1
kind: ModelInfer
metadata: {{name: engines}}
spec:
  replicas: 1
  template:
    roles:
    - name: server
      replicas: 1
      entryTemplate: {{spec: {{containers: [{{name: engine, image: vllm, ports: [{{containerPort: 8000}}]}}]}}}}
---
apiVersion: attache.dev/v1alpha1
kind: AutoscalingPolicy
metadata: {{name: policy}}
spec:
  mode: Recommend
  objective: {{ttft: 2s, tpot: 40ms, percentile: 90}}
  scaleToZero: {{idle: 10m, activationReplicas: 1, holdTimeout: 10m}}
  schedules: [{{start: "0 8 * * 1-5", duration: 10h, timeZone: Europe/Berlin, minReplicas: 4}}]
---
apiVersion: attache.dev/v1alpha1
kind: AutoscalingPolicyBinding
metadata: {{name: binding}}
spec:
  policyRef: policy
  targets:
  - name: main
    ref: {{apiVersion: attache.dev/v1alpha1, kind: ModelInfer, name: engines}}
    minReplicas: 1
    maxReplicas: 8
---
apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {{name: llama}}
spec:
  model: org/llama
  workloadSelector: {{matchLabels: {{app: llama}}}}
  workloadPort: {{port: 8000}}
---
apiVersion: attache.dev/v1alpha1
kind: ServingRuntime
metadata: {{name: own}}
spec:
  engine: vLLM
  arguments: [{{args: ["--model={{model}}"]}}, {{when: {{tensor: "*"}}, args: ["--tensor-parallel-size={{tensor}}"]}}]
---
apiVersion: attache.dev/v1alpha1
kind: ModelTemplate
metadata: {{name: template}}
spec: {{cache: {{hostPath: /var/lib/attache/weights}}}}
---
apiVersion: v1
kind: Pod
metadata:
  name: engines-0
  labels:
    app: llama
    attache.dev/model: llama
    attache.dev/model-infer: engines
    attache.dev/group: "0"
    attache.dev/role: server
  annotations: {{controller.kubernetes.io/pod-deletion-cost: "5", attache.dev/draining: "{_CREATED}"}}
  ownerReferences: [OWNER]
spec: {{nodeName: gpu-1, containers: [{{name: engine, resources: {{requests: {{cpu: "2"}}}}}}]}}
status:
  phase: Running
  podIP: 10.0.0.1
  startTime: {_CREATED}
  conditions: [{{type: Ready, status: "False", lastTransitionTime: {_CREATED}}}]
  containerStatuses:
  - name: engine
    ready: false
    restartCount: 3
    state: {{waiting: {{reason: CrashLoopBackOff}}}}
    lastState: {{terminated: {{exitCode: 1, finishedAt: {_CREATED}, reason: Error}}}}
---
apiVersion: v1
kind: Service
metadata: {{name: gateway, labels: {{app.kubernetes.io/name: attache-gateway}}}}
spec: {{type: LoadBalancer, ports: [{{name: http, port: 80}}]}}
status: {{loadBalancer: {{ingress: [{{ip: 192.0.2.1}}]}}}}
---
apiVersion: apps/v1
kind: Deployment
metadata:
  name: other
  managedFields:
  - {{manager: kubectl, operation: Update, time: {_CREATED}, fieldsV1: {{"f:spec": {{"f:replicas": {{}}}}}}}}
spec: {{replicas: 2, selector: {{matchLabels: {{app: llama}}}}, template: {{metadata: {{labels: {{app: llama}}}}}}}}
---
apiVersion: apps/v1
kind: ControllerRevision
metadata:
  name: engines-1
  labels: {{attache.dev/model-infer: engines}}
  ownerReferences: [OWNER]
data: {{template: {{roles: []}}}}
revision: 1
"""
_PICKER_OBJECTS: Final = """
apiVersion: inference.networking.x-k8s.io/v1alpha2
kind: InferenceObjective
metadata: {name: objective}
spec: {priority: 10, poolRef: {name: pool}}
---
apiVersion: inference.networking.x-k8s.io/v1alpha2
kind: InferenceModelRewrite
metadata: {name: rewrite}
spec:
  poolRef: {name: pool}
  rules:
  - {matches: [{model: {type: Exact, value: a}}], targets: [{modelRewrite: b, weight: 1}, {modelRewrite: c, weight: 2}]}
"""


def _objects(text: str, namespace: str) -> list[Object]:
    """The valid objects of ``text`` in a namespace."""
    found: list[Object] = []
    mark = "u" if namespace == HONEST else namespace
    owner = (
        f"{{kind: ModelInfer, apiVersion: attache.dev/v1alpha1, name: engines, uid: {mark}-engines, controller: true}}"
    )
    for thing in yaml.safe_load_all(text.replace("NAMESPACE", namespace).replace("OWNER", owner)):
        plain = msgspec.json.decode(msgspec.json.encode(thing))
        plain["metadata"] |= {
            "namespace": namespace,
            "uid": f"{mark}-{plain['metadata']['name']}",
            "generation": 1,
            "resourceVersion": "1",
            "creationTimestamp": _CREATED if namespace == HONEST else _LATER,
        }
        found.append(plain)
    return found


def odd_object(thing: Object, rng: random.Random) -> Object:
    """``thing`` with something odd below its identity."""
    is_core = thing["apiVersion"] in _CORE
    new = {**thing, "metadata": dict(thing["metadata"])}
    new["metadata"]["resourceVersion"] = str(rng.randrange(10**9))
    for _ in range(rng.choice((1, 1, 2, 4))):
        part = rng.choice([name for name in new if name not in {"apiVersion", "kind", "metadata"}] or ["spec"])
        if rng.random() < 0.15:
            labels = rng.choice(("labels", "annotations"))
            named = new["metadata"].get(labels) or {"attache.dev/drain": ""}
            texts = [one for one in JSON_VALUES if isinstance(one, str)]
            new["metadata"][labels] = {**named, rng.choice(list(named)): rng.choice(texts)}
        elif is_core:
            new[part] = _with_odd_scalar(new.get(part), rng)
        else:
            new[part] = changed(new.get(part) or {}, rng, lambda: rng.choice(JSON_VALUES), ("status", "spec", "name"))
    if rng.random() < 0.1:
        new["status"] = rng.choice(([], {}, {"conditions": None}, {"conditions": [{}]}, {"addresses": [{}]}, None))
        if is_core and new["status"] is not None and not isinstance(new["status"], dict):
            new["status"] = {}
    return new


def _with_odd_scalar(value: object, rng: random.Random) -> object:
    """``value`` with a scalar of the same type in place of one."""
    kinds: Mapping[type, Sequence[object]] = {
        str: [one for one in JSON_VALUES if isinstance(one, str)],
        bool: [True, False],
        int: [0, 1, -1, 2**31 - 1],
    }
    if isinstance(value, dict) and value:
        key = rng.choice(list(value))
        return {**value, key: _with_odd_scalar(value[key], rng)}
    if isinstance(value, list) and value:
        index = rng.randrange(len(value))
        return [*value[:index], _with_odd_scalar(value[index], rng), *value[index + 1 :]]
    return rng.choice(kinds[type(value)]) if type(value) in kinds else value


@functools.cache
def _schemas() -> dict[str, dict[str, object]]:
    """Of our kinds, by name."""
    return {one.resource.kind: one.schema for crd in map(crd_object, KINDS) for one in kinds_of(crd)}


def admitted(thing: Object, schemas: Mapping[str, dict[str, object]]) -> Object | None:
    """``thing`` as an API server stores it; None if its kind's schema refuses it."""
    schema = schemas.get(thing["kind"])
    if not schema:
        return thing
    new: Object = with_defaults(without_fields(thing, unknown_fields(thing, schema)), schema)
    return None if faults_in(new, schema) else new


class Harmed(AssertionError):
    """An odd object has changed what becomes of an honest one; the message says of which."""


# the gateway


def _gateway() -> Attempt:
    """Odd objects come and go beside honest ones, as informers deliver them."""
    compiler = Compiler(
        settings=GatewayApiSettings(bind=("10.9.0.1",)), check_picker=InstalledPluginChecker(), grace_s=0.0
    )
    store = {"Pod": Store(trimmed_engine_pod), "EndpointSlice": Store(trim_endpoint_slice)}
    honest = _objects(_GATEWAY_OBJECTS, HONEST)
    for thing in (_CLASS, *honest):
        _put(compiler, store, thing)
    alone = compiler.compile().files
    names = [
        file_name(one["kind"], key_of(one))
        for one in honest
        if one["kind"] in {"ModelServer", "ModelRoute", "HTTPRoute", "GRPCRoute"}
    ]
    kept = {name: alone[name] for name in names}
    odd = _objects(_GATEWAY_OBJECTS, ODD)
    odd.append({**_gateway_config(), "metadata": {**odd[0]["metadata"], "name": "config"}})

    def attempt(rng: random.Random) -> bool:
        for thing in rng.choices(odd, k=rng.randint(1, 4)):
            if rng.random() < 0.1:
                compiler.update_object(thing["kind"], key_of(thing), None)
            else:
                _put(compiler, store, odd_object(thing, rng))
        result = compiler.compile()
        for name, content in kept.items():
            if result.files.get(name) != content:
                raise Harmed(f"{name} is another one")
        snapshot = load_snapshot(result.files)
        if rng.random() < 0.002:
            build_bundle(snapshot, "/nowhere")
        return len(result.files) > len(kept)

    return attempt


def _gateway_config() -> Object:
    authentication = {"apiKeys": [{"name": "a", "keySecretRef": {"name": "s", "key": "k"}, "tenant": "t"}]}
    spec = {"maxBodySize": "64Mi", "authentication": authentication, "cors": {"allowOrigins": ["*"]}}
    return {"apiVersion": "attache.dev/v1alpha1", "kind": "GatewayConfig", "metadata": {}, "spec": spec}


def _put(compiler: Compiler, store: Mapping[str, Store], thing: Object) -> None:
    kind, key = thing["kind"], key_of(thing)
    if kind in store:
        known = store[kind]
        known.apply_event(WatchEvent("MODIFIED", thing))
        compiler.update_object(kind, key, known.objects.get(key))
    else:
        compiler.update_object(kind, key, thing)


def _picker() -> Attempt:
    """A pool of another gateway: its objectives and rewrites are odd, its pods come and go."""
    compiler = InferencePoolCompiler("odd/pool", check_picker=InstalledPluginChecker())
    things = [*_objects(_GATEWAY_OBJECTS, ODD), *_objects(_PICKER_OBJECTS, ODD)]
    chosen = [
        one for one in things if one["kind"] in {"InferencePool", "Pod", "ConfigMap"} or "Inference" in one["kind"]
    ]
    store = Store(trimmed_engine_pod)
    for thing in chosen:
        compiler.put(thing["kind"], key_of(thing), thing)
    if compiler.compile().files is None:
        raise Harmed(f"the valid pool is not served: {compiler.compile().problems}")

    def attempt(rng: random.Random) -> bool:
        for thing in rng.choices(chosen, k=rng.randint(1, 3)):
            new: Object | None = odd_object(thing, rng)
            if thing["kind"] == "Pod" and new is not None:
                store.apply_event(WatchEvent("MODIFIED", new))
                new = store.objects.get(key_of(thing))
            compiler.put(thing["kind"], key_of(thing), new)
        result = compiler.compile()
        if result.files is None:
            raise Harmed(f"the pool of before is not served: {result.problems}")
        load_snapshot(result.files)
        return not result.problems

    return attempt


# the manager


class _Cluster:
    """What a client lists and watches: some objects, and no more after that."""

    def __init__(self, things: Sequence[Object]) -> None:
        self._schemas = _schemas()
        found = [(one, admitted(one, self._schemas)) for one in things]
        if refused := [one for one, as_stored in found if as_stored is None]:
            raise Harmed(f"a valid object is refused: {refused[0]}")
        self.things = [as_stored for _, as_stored in found if as_stored is not None]

    async def list(
        self, resource: ApiResource, namespace: str | None = None, *, labels: str = "", **_: object
    ) -> ObjectList:
        """Those of a kind, by labels."""
        chosen = parse_selector(labels)
        return ObjectList(
            [
                one
                for one in self.things
                if (one["apiVersion"], one["kind"]) == (resource.api_version, resource.kind)
                and namespace in {None, one["metadata"]["namespace"]}
                and chosen(one["metadata"].get("labels") or {})
            ],
            "1",
        )

    async def watch(self, *_: object, **__: object) -> AsyncIterator[WatchEvent]:
        """Nothing changes."""
        await asyncio.Event().wait()
        yield WatchEvent("", {})

    async def serves(self, _: ApiResource) -> bool:
        """All kinds."""
        return True

    def with_odd(self, odd: Sequence[Object], rng: random.Random) -> None:
        """Replace what is odd."""
        self.things = [one for one in self.things if one["metadata"]["namespace"] == HONEST]
        for thing in rng.sample(odd, rng.randint(1, len(odd))):
            new = admitted(odd_object(thing, rng), self._schemas) if rng.random() < 0.5 else thing
            self.things.append(new or thing)


def _models() -> Attempt:
    """Models and ModelInfers, with what they are decided from."""
    cluster = _Cluster(_objects(_MANAGER_OBJECTS, HONEST))
    client = cast("Client", cluster)
    cache = InformerSet(SharedInformers(client, InformerTiming(resync_s=0)))
    infers = ModelInferReconciler(client, cache, _ignore, reconcile_model_infer, hasten=_ignore)
    models = ModelReconciler(
        client,
        cache,
        _ignore,
        reconcile_model,
        infers=infers.informer,
        infer_pods=infers.pod_informer,
        shared=SharedNamespaces("shared", ()),
        settings=ModelSettings(),
    )
    odd = _objects(_MANAGER_OBJECTS, ODD)

    def plans(namespace: str) -> dict[tuple[str, str], object]:
        return {
            (reconciler.resource.kind, key): reconciler.plan(
                thing, reconciler.cached_children(thing), PodLoads(), _NOW_S
            )
            for reconciler in (infers, models)
            for key, thing in reconciler.informer.objects.items()
            if key.startswith(namespace)
        }

    asyncio.run(cache.list_once())
    alone = plans(HONEST)

    def attempt(rng: random.Random) -> bool:
        cluster.with_odd(odd, rng)
        asyncio.run(cache.list_once())
        for about, plan in plans(HONEST).items():
            if plan != alone[about]:
                raise Harmed(f"the plan of {about} is another one")
        return bool(plans(ODD))

    return attempt


def _ignore(_: object) -> None:
    """Nothing is reconciled by events here."""


def _scaling() -> Attempt:
    """Policies, bindings, and what they scale."""
    honest, odd = _objects(_MANAGER_OBJECTS, HONEST), _objects(_MANAGER_OBJECTS, ODD)
    alone = asyncio.run(_resolved(_Cluster(honest)))[0]
    if not alone:
        raise Harmed("the honest binding is not resolved")

    def attempt(rng: random.Random) -> bool:
        cluster = _Cluster(honest)
        cluster.with_odd(odd, rng)
        found, others = asyncio.run(_resolved(cluster))
        if found != alone:
            raise Harmed("the honest binding resolves to something else")
        return bool(others)

    return attempt


async def _resolved(cluster: _Cluster) -> tuple[list[object], list[object]]:
    """The targets of the honest bindings, and of the odd ones."""
    client = cast("Client", cluster)
    cache = InformerSet(SharedInformers(client, InformerTiming(resync_s=0)))
    informers = ScalingInformers(client, cache, lambda _: None)
    resolver = TargetResolver(informers)
    async with asyncio.TaskGroup() as tasks:
        reading = tasks.create_task(cache.shared.run())
        running = tasks.create_task(informers.run())
        await cache.wait_until_synced()
        found: tuple[list[object], list[object]] = [], []
        for key in list(informers.binding_keys()):
            view = informers.binding(key)
            if view is None:
                continue
            while not informers.pods.has_synced(view.namespace) and not running.done():  # noqa: ASYNC110 - others wake them
                await asyncio.sleep(0)  # a turn of the informers
            targets = resolver.resolve_targets(view, None).targets
            policy = informers.policy(view.policy_key)
            problem = view.problem or (policy is not None and policy.problem)
            found[not key.startswith(HONEST)].append(msgspec.to_builtins((targets, problem), enc_hook=str))
        running.cancel()
        reading.cancel()
    return found


# webhooks


def _webhooks() -> Attempt:
    """Reviews of objects that have passed their schemas."""
    schemas = _schemas()
    things = [
        one
        for one in (*_objects(_GATEWAY_OBJECTS, ODD), *_objects(_MANAGER_OBJECTS, ODD))
        if one["apiVersion"].startswith("attache.dev")
    ]

    def attempt(rng: random.Random) -> bool:
        thing = rng.choice(things)
        known: dict[str, dict[str, Object]] = {}
        for other in rng.sample(things, 4):
            known.setdefault(other["kind"], {})[key_of(other)] = admitted(odd_object(other, rng), schemas) or other
        new = admitted(odd_object(thing, rng), schemas)
        if new is None:
            return False
        metadata = thing["metadata"]
        request = {
            "uid": "u",
            "kind": {"group": "attache.dev", "version": "v1alpha1", "kind": thing["kind"]},
            "operation": rng.choice(("CREATE", "UPDATE", "DELETE")),
            "name": metadata["name"],
            "namespace": metadata["namespace"],
            "object": new,
            "oldObject": thing,
        }
        review = read_review(msgspec.json.encode({"kind": "AdmissionReview", "request": request}))
        return not review_object(review, known, InstalledPluginChecker()).refused

    return attempt


INPUTS: Final[Attempts] = {
    "gateway": _gateway,
    "picker": _picker,
    "models": _models,
    "scaling": _scaling,
    "webhooks": _webhooks,
}


def main(words: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 1 if something was wrong."""
    # what cannot be read is logged
    logging.disable(logging.ERROR)
    with contextlib.suppress(KeyboardInterrupt):
        return run_inputs("python -m tests.fuzz objects", __doc__ or "", INPUTS, words)
    return 1
