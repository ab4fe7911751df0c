# SPDX-License-Identifier: Apache-2.0
"""The child objects of a Model, with name, labels and owner, and whether each has to be applied again."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from hashlib import sha256
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import msgspec

from controller.api.crds.schema import to_plain
from controller.kube.api_resources import (
    AUTOSCALING_POLICIES,
    AUTOSCALING_POLICY_BINDINGS,
    CONFIG_MAPS,
    MODEL_INFERS,
    MODEL_ROUTES,
    MODEL_SERVERS,
    ApiResource,
    Object,
)
from controller.kube.reconcile_plan import without_paths
from controller.models.model.model_state import BACKEND, CHILDREN, MODEL
from controller.models.model.workload_templates import ADAPTERS_FILE, cache_warmers, model_infer_spec, short_digest
from controller.models.model_infer.names import ENTRY, GROUP_REVISION, MODEL_INFER, ROLE
from controller.models.runtimes.engine_settings import AGENT_PORT, model_format
from controller.models.runtimes.prefill_connectors import gateway_connector
from controller.models.runtimes.transformers_and_explainers import (
    EXPLAIN_MATCH,
    EXPLAINER,
    TRANSFORMER,
    transformer_and_explainer,
)
from extproc.api.quantities import Duration
from extproc.api.spec import API_VERSION

if TYPE_CHECKING:
    from collections.abc import Iterator

    from controller.api.model import Backend, Disaggregation
    from controller.api.serving_runtime import EngineConfig, ServingRuntimeSpec
    from controller.api.transformers_and_explainers import Transformer
    from controller.models.model.model_state import ModelSettings, ResolvedBackend, ResolvedModel
    from controller.models.runtimes.presets import Preset

# A digest of the applied object. Only the digest shows fields that are no longer desired.
APPLIED: Final = "attache.dev/applied"
_SPANS: Final = ("schedulingSeconds", "downloadSeconds", "loadSeconds")
# Measured start times are written in such steps, up to so many seconds: otherwise each start would change the
# ModelServer.
_STEPS: Final = ((120.0, 15.0), (600.0, 30.0), (math.inf, 60.0))
# The reported start time stays while the measured one differs by no more than this share.
_TOLERATED: Final = 0.25
# As the presets' flags have it.
_KV_EVENTS: Final = {"port": 5557, "replayPort": 5657, "topic": "kv-events"}
_MANAGED_BY: Final = {"app.kubernetes.io/managed-by": "attache"}
_REPLICAS: Final = ("spec", "replicas")
_UNKNOWN: Final[Mapping[str, str]] = MappingProxyType({})


def add_digest_annotation(thing: Object) -> Object:
    """With its digest."""
    digest = sha256(msgspec.json.encode(thing, order="sorted")).hexdigest()[:16]
    metadata = {**thing["metadata"], "annotations": {**(thing["metadata"].get("annotations") or {}), APPLIED: digest}}
    return {**thing, "metadata": metadata}


def stamped_digest(thing: Object) -> str | None:
    """None if it was never stamped."""
    return (thing["metadata"].get("annotations") or {}).get(APPLIED)


def is_up_to_date(wanted: Object, found: Object, yields: Iterable[tuple[str, ...]]) -> bool:
    """``wanted``: stamped. Fields of ``yields`` may have any value: others may own them."""
    wanted = without_paths(wanted, yields)
    owners = [one.get("uid") for one in found["metadata"].get("ownerReferences") or ()]
    is_owned = all(one["uid"] in owners for one in wanted["metadata"].get("ownerReferences") or ())
    metadata = {name: value for name, value in wanted["metadata"].items() if name != "ownerReferences"}
    return is_owned and _covers({**wanted, "metadata": metadata}, found)


def _covers(wanted: object, found: object) -> bool:
    """Whether ``found`` has all desired fields; the server adds defaults."""
    if isinstance(wanted, Mapping):
        return isinstance(found, Mapping) and all(
            name in found and _covers(one, found[name]) for name, one in wanted.items()
        )
    if isinstance(wanted, (list, tuple)):
        return (
            isinstance(found, (list, tuple))
            and len(wanted) == len(found)
            and all(_covers(one, other) for one, other in zip(wanted, found, strict=True))
        )
    return wanted == found


def may_be_at_zero(model: ResolvedModel, backend: Backend) -> bool:
    """Whether autoscaling may take the last replica of a backend. A stopped Model has none, and nothing starts one."""
    wanted, apart = model.spec.autoscaling, backend.disaggregation
    if wanted is None or model.spec.stop or not backend.target_names:
        return False
    if apart is not None and apart.is_scaled_by_stage:
        return apart.can_scale_to_zero and _least(model) == 0
    says_so = backend.min_replicas is None and model.to_zero is not None
    return wanted.scale_to_zero is not None or backend.min_replicas == 0 or says_so


def activation_spec(
    model: ResolvedModel, made: ResolvedBackend, start_times: Mapping[str, str]
) -> dict[str, Any] | None:
    """``start_times``: measured start times, by backend. None: it is never scaled to zero."""
    if not may_be_at_zero(model, made.backend):
        return None
    start_time = start_times.get(made.backend.name)
    spec = {} if start_time is None else {"startTime": start_time}
    return spec if model.to_zero is None else {**spec, "holdTimeout": str(model.to_zero.hold_timeout)}


def reported_start_times(
    model: ResolvedModel, status: Mapping[str, Any], servers: Mapping[str, Object]
) -> dict[str, str]:
    """By backend. ``status``: of the Model. ``servers``: ModelServers as they are, by name."""
    measured = {
        one["name"]: sum(one["start"].get(span) or 0.0 for span in _SPANS)
        for one in status.get("backends") or ()
        if one.get("start")
    }
    found = {}
    for made in model.backends:
        server = servers.get(model.child_name(made.backend), {})
        told = ((server.get("spec") or {}).get("activation") or {}).get("startTime")
        start_time = smoothed_start_time(measured.get(made.backend.name), told)
        if start_time is not None:
            found[made.backend.name] = start_time
    return found


def smoothed_start_time(measured_s: float | None, told: str | None) -> str | None:
    """The start time to write for a start that took ``measured_s``; ``told``: the one written before; None: unknown."""
    if not measured_s:
        return told
    if told is not None and abs(measured_s - Duration(told)) <= _TOLERATED * Duration(told):
        return told
    step_s = next(step for most_s, step in _STEPS if measured_s <= most_s)
    return f"{math.ceil(measured_s / step_s) * step_s:g}s"


def server_spec(model: ResolvedModel, made: ResolvedBackend, start_times: Mapping[str, str]) -> dict[str, Any]:
    """The ModelServer of one backend. ``start_times``: measured start times, by backend."""
    preset, config = made.preset.spec, made.roles[0].engine.config
    spec: dict[str, Any] = {
        # no model of many has such a name
        "model": f"{model.served_name}/*" if model.spec.models else model.served_name,
        "workloadSelector": {"matchLabels": {MODEL_INFER: model.child_name(made.backend), ENTRY: "true"}},
        **_ports(model.spec.transformer, preset),
    }
    if made.protocol != "OpenAI":
        spec["protocol"] = made.protocol
    elif preset.openai_path_prefix:
        spec["pathPrefix"] = preset.openai_path_prefix
    if preset.metrics is not None:
        spec["engine"] = preset.metrics
    else:
        spec["scrapeInterval"] = "0s"
    if made.backend.disaggregation is not None:
        spec["pdGroup"] = _pd_group(made.preset, made.backend.disaggregation)
    if config.kv_events:
        ranks = {"dataParallelSize": config.parallelism.data} if config.parallelism.data > 1 else {}
        spec["kvEvents"] = {**_KV_EVENTS, **ranks}
    if (loading := _loading(model, config)) is not None and preset.agent.enabled:
        spec["adapterLoading"] = loading
    activation = activation_spec(model, made, start_times)
    if activation is not None:
        spec["activation"] = activation
    return spec


def _ports(transformer: Transformer | None, preset: ServingRuntimeSpec) -> dict[str, Any]:
    if transformer is None or not transformer.colocated:
        return {"workloadPort": {"port": preset.port}}
    metrics = {} if preset.metrics is None else {"metricsPort": preset.port}
    return {"workloadPort": {"port": transformer.port}, **metrics}


def step_server_spec(model: ResolvedModel, made: ResolvedBackend) -> dict[str, Any]:
    """The ModelServer of a step. The gateway has repeated what the predictor refuses; once more would multiply it."""
    step = dict(transformer_and_explainer(model.spec))[made.backend.name]
    return {**server_spec(model, made, {}), "trafficPolicy": {"timeout": str(step.timeout), "retry": {"attempts": 1}}}


def grpc_server_spec(
    model: ResolvedModel, made: ResolvedBackend, start_times: Mapping[str, str]
) -> dict[str, Any] | None:
    """The ModelServer of the same pods over gRPC; None if they do not serve that."""
    preset = made.preset.spec
    # of many models a second ModelServer would not know what the first one has loaded
    if preset.grpc_protocol is None or model.spec.models:
        return None
    return {
        **server_spec(model, made, start_times),
        "protocol": preset.grpc_protocol,
        "workloadPort": {"port": preset.grpc_port},
    }


def _loading(model: ResolvedModel, config: EngineConfig) -> dict[str, Any] | None:
    """What is loaded when requests name it. Of many models also the pinned ones, as not every server may have them."""
    asked_for = [one for one in model.spec.adapters if not one.pinned]
    found: dict[str, Any] = {"port": AGENT_PORT}
    if asked_for:
        found["adapters"] = [{"name": one.name, "source": one.uri} for one in asked_for]
        return found if config.lora.max_loaded is None else {**found, "slots": config.lora.max_loaded}
    if not model.spec.models:
        return None
    found["adapters"] = [
        {
            "name": one.name,
            "source": one.uri,
            **({} if one.memory is None else {"memory": str(one.memory)}),
            **({"pinned": True} if one.pinned else {}),
        }
        for one in model.spec.models
    ]
    memory = config.models.memory
    return found if memory is None else {**found, "memory": str(memory)}


def _pd_group(preset: Preset, wanted: Disaggregation) -> dict[str, Any]:
    """Both engines of a pair are of one group and one revision: those of two versions may not understand each other."""
    found: dict[str, Any] = {
        "prefillLabels": {ROLE: "prefill"},
        "decodeLabels": {ROLE: "decode"},
        "groupKey": GROUP_REVISION,
    }
    connector = gateway_connector(preset.spec.engine, wanted)
    if connector is None:
        return {**found, "leg": "Sidecar"}
    found |= {"leg": "Gateway", "connector": connector}
    return found if wanted.on_prefill_failure is None else {**found, "onPrefillFailure": wanted.on_prefill_failure}


def traffic_weights(model: ResolvedModel, ready: Mapping[str, int]) -> dict[str, int]:
    """Weights by backend. ``ready``: replicas that serve, by backend.

    A backend without a ready replica gets no requests while another has one, so that a canary that does not start loses
    none. If none has one, all keep their weights, so that a request can activate one that is scaled to zero.
    """
    written = {one.backend.name: one.backend.weight for one in model.backends}
    serving = {name: weight for name, weight in written.items() if ready.get(name, 0) > 0 and weight > 0}
    return {name: serving.get(name, 0) for name in written} if serving else written


def model_routes(model: ResolvedModel, weights: Mapping[str, int]) -> Iterator[tuple[str, dict[str, Any]]]:
    """ModelRoutes by name: one for the served name and the adapters, one by which steps call the predictor, and one for
    each alias.
    """
    # a request goes to those of its protocol, by their weights among themselves
    targets = [(model.child_name(one.backend), weights[one.backend.name]) for one in model.backends]
    if model.spec.transformer is None and not model.spec.models:
        targets += [
            (model.grpc_child_name(one.backend), weights[one.backend.name])
            for one in model.backends
            if one.preset.spec.grpc_protocol is not None
        ]
    predictor = {"targetModels": [{"modelServerName": name, "weight": weight} for name, weight in targets]}
    steps = {one.backend.name: [{"modelServerName": model.child_name(one.backend)}] for one in model.steps}
    rules: list[dict[str, Any]] = (
        [{"modelMatch": EXPLAIN_MATCH, "targetModels": steps[EXPLAINER]}] if EXPLAINER in steps else []
    )
    rules.append({"targetModels": steps[TRANSFORMER]} if TRANSFORMER in steps else predictor)
    shared: dict[str, Any] = {"rules": rules}
    if model.spec.parent_refs:
        shared["parentRefs"] = [to_plain(one) for one in model.spec.parent_refs]
    adapters = [one.name for one in model.spec.declared_adapters_and_models]
    if model.spec.models:
        yield model.name, {"loraAdapters": adapters, **shared}
        return
    own = {"modelName": model.served_name, **shared}
    names = {"loraAdapters": adapters} if adapters else {}
    yield model.name, {**own, **names}
    if steps:
        yield (
            f"{model.name}-predictor",
            {
                "modelName": model.served_name,
                **names,
                "rules": [predictor],
                "callers": "Steps",
            },
        )
    for alias in model.spec.aliases:
        yield alias_route(model.name, alias), {"modelName": alias, **shared}


def alias_route(model: str, alias: str) -> str:
    """Aliases may have characters that names of objects must not."""
    return f"{model}-alias-{short_digest(alias)}"


def policy_spec(model: ResolvedModel) -> dict[str, Any] | None:
    """The default policy; None where the Model names one, or does not scale."""
    wanted = model.spec.autoscaling
    if wanted is None or wanted.policy_ref is not None or model.spec.stop:
        return None
    return {"scaleToZero": {"idle": str(wanted.scale_to_zero)}} if wanted.scale_to_zero is not None else {}


def binding_spec(model: ResolvedModel) -> dict[str, Any] | None:
    """Backends that have bounds are its targets. A stopped Model is not scaled."""
    wanted = model.spec.autoscaling
    if wanted is None or model.spec.stop:
        return None
    found = {
        "policyRef": wanted.policy_ref or model.name,
        "targets": [target for one in model.backends for target in _targets(model, one.backend)],
    }
    ratios = [ratio for one in model.backends for ratio in _ratio(one.backend)]
    return {**found, "ratios": ratios} if ratios else found


def _targets(model: ResolvedModel, backend: Backend) -> Iterator[dict[str, Any]]:
    """Its groups, or its two stages, whose lower bounds hold even at no load, unless both go to zero together."""
    common: dict[str, Any] = {
        "ref": {"apiVersion": API_VERSION, "kind": "ModelInfer", "name": model.child_name(backend)},
        "cost": backend.cost,
        "spot": backend.spot,
        **({"accelerator": backend.accelerator} if backend.accelerator else {}),
    }
    apart = backend.disaggregation
    if apart is not None and apart.is_scaled_by_stage:
        stages = (("prefill", "Prefill", apart.prefill_bounds), ("decode", "Decode", apart.decode_bounds))
        for name, (role, stage, (least, most)) in zip(backend.target_names, stages, strict=True):
            bounds = {"minReplicas": 0 if may_be_at_zero(model, backend) else least, "maxReplicas": most}
            yield {"name": name, **common, "role": role, "stage": stage, **bounds}
    elif backend.max_replicas is not None:
        least = backend.min_replicas if backend.min_replicas is not None else _least(model)
        yield {"name": backend.name, **common, "minReplicas": least, "maxReplicas": backend.max_replicas}


def _ratio(backend: Backend) -> Iterator[dict[str, Any]]:
    apart = backend.disaggregation
    if apart is not None and apart.is_scaled_by_stage and apart.ratio is not None:
        prefill, decode = backend.target_names
        yield {"numerator": prefill, "denominator": decode, "min": apart.ratio.min, "max": apart.ratio.max}


def _least(model: ResolvedModel) -> int:
    """A Model is scaled to zero only with ``scaleToZero`` in its spec or in its policy."""
    wanted = model.spec.autoscaling
    return 0 if model.to_zero is not None or (wanted is not None and wanted.scale_to_zero is not None) else 1


class ChildObject(msgspec.Struct, frozen=True):
    """``yields``: fields that others may own."""

    resource: ApiResource
    thing: Object
    yields: tuple[tuple[str, ...], ...] = ()


def child_objects(
    model: ResolvedModel, settings: ModelSettings, ready: Mapping[str, int], start_times: Mapping[str, str] = _UNKNOWN
) -> list[ChildObject]:
    """In the order in which they are applied. ``ready``: replicas that serve, by backend; ``start_times``: what starts
    take.
    """
    found = [*_of_backends(model, settings, start_times), *_of_model(model, settings, ready)]
    return sorted(found, key=lambda one: CHILDREN.index(one.resource))


def _of_backends(
    model: ResolvedModel, settings: ModelSettings, start_times: Mapping[str, str]
) -> Iterator[ChildObject]:
    for made in model.backends:
        # stages are scaled within one group
        is_scaled = not made.backend.scales_stages and (model.spec.autoscaling is not None or not made.says_replicas)
        spec = server_spec(model, made, start_times)
        yield from _of_group(model, made, settings, spec, is_scaled=is_scaled)
        calls = grpc_server_spec(model, made, start_times)
        if calls is not None:
            called, labels = model.grpc_child_name(made.backend), {BACKEND: made.backend.name}
            yield ChildObject(MODEL_SERVERS, _object(model, MODEL_SERVERS, called, {"spec": calls}, labels))
    for made in model.steps:
        spec = step_server_spec(model.without_engine_fields, made)
        yield from _of_group(model.without_engine_fields, made, settings, spec, is_scaled=not made.says_replicas)


def _of_group(
    model: ResolvedModel, made: ResolvedBackend, settings: ModelSettings, server: Mapping[str, Any], *, is_scaled: bool
) -> Iterator[ChildObject]:
    """What runs a backend or a step, and how gateways see it. ``is_scaled``: others write how many there are."""
    name, labels = model.child_name(made.backend), {BACKEND: made.backend.name}
    infer = _object(model, MODEL_INFERS, name, {"spec": model_infer_spec(model, made, settings)}, labels)
    # a stopped Model has no replicas, even if another writer scales it
    yield ChildObject(MODEL_INFERS, infer, (_REPLICAS,) if is_scaled and not model.spec.stop else ())
    yield ChildObject(MODEL_SERVERS, _object(model, MODEL_SERVERS, name, {"spec": server}, labels))


def _of_model(model: ResolvedModel, settings: ModelSettings, ready: Mapping[str, int]) -> Iterator[ChildObject]:
    if model.spec.declared_adapters_and_models:
        declared: dict[str, dict[str, Any]] = {
            one.name: {"uri": one.uri, "pinned": one.pinned} for one in model.spec.declared_adapters_and_models
        }
        for one in model.spec.models:
            weights_format = model_format(one.uri, one.format or model.spec.format).name
            declared[one.name] |= {"memory": int(one.memory or 0), "format": weights_format}
        text = msgspec.json.format(msgspec.json.encode(declared, order="sorted"), indent=2).decode()
        yield ChildObject(
            CONFIG_MAPS, _object(model, CONFIG_MAPS, f"{model.name}-adapters", {"data": {ADAPTERS_FILE: text}})
        )
    for resource, name, spec in cache_warmers(model, settings):
        yield ChildObject(resource, _object(model, resource, name, {"spec": spec}))
    for name, spec in model_routes(model, traffic_weights(model, ready)):
        yield ChildObject(MODEL_ROUTES, _object(model, MODEL_ROUTES, name, {"spec": spec}))
    for resource, found in (
        (AUTOSCALING_POLICIES, policy_spec(model)),
        (AUTOSCALING_POLICY_BINDINGS, binding_spec(model)),
    ):
        if found is not None:
            yield ChildObject(resource, _object(model, resource, model.name, {"spec": found}))


def _object(
    model: ResolvedModel,
    resource: ApiResource,
    name: str,
    content: Mapping[str, Any],
    labels: Mapping[str, str] | None = None,
) -> Object:
    return {
        "apiVersion": resource.api_version,
        "kind": resource.kind,
        "metadata": {
            "name": name,
            "namespace": model.namespace,
            "labels": {**_MANAGED_BY, MODEL: model.name, **(labels or {})},
            "ownerReferences": [owner_reference(model.name, model.uid)],
        },
        **content,
    }


def owner_reference(name: str, uid: str) -> dict[str, Any]:
    """The Model owns its children: they are deleted with it."""
    return {
        "apiVersion": API_VERSION,
        "kind": "Model",
        "name": name,
        "uid": uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }
