# SPDX-License-Identifier: Apache-2.0
"""Templates of pods, ModelInfers of backends, and what puts weights on nodes ahead of pods."""

from __future__ import annotations

import math
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final

import msgspec

from controller.api.crds.schema import to_plain
from controller.kube.api_resources import DAEMON_SETS, JOBS, ApiResource
from controller.models.model.model_state import BACKEND, MODEL, PURPOSE
from controller.models.runtimes.config_layers import strategic_merge
from controller.models.runtimes.engine_settings import (
    AGENT_PORT,
    CACHE_PATH,
    MODEL_PATH,
    MODELS,
    WEIGHTS,
    build_command_line,
    cache_volume,
    engine_settings,
    gpus_per_pod,
)
from controller.models.runtimes.transformers_and_explainers import COLOCATED, TRANSFORMER, readiness_probe, step_engine

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from controller.api.serving_runtime import EngineConfig
    from controller.models.model.model_state import ModelSettings, ResolvedBackend, ResolvedModel, ResolvedRole
    from controller.models.runtimes.engine_settings import Node

Plain = dict[str, Any]
DOWNLOAD: Final = "download"
ENGINE: Final = "engine"
_AGENT: Final = "agent"
PRICE: Final = "attache.dev/price"
# Where the agent reads which adapters are declared, and the file's name in the ConfigMap.
ADAPTERS_PATH: Final = "/etc/attache/adapters"
ADAPTERS_FILE: Final = "adapters.json"
_ADAPTERS: Final = "adapters"
# In addition to the drain: SIGTERM, the sidecar's end, a slow node.
_AFTER_DRAIN_S: Final = 30
# Of prefill engines, after the drain: others fetch what they have computed. vLLM's preset has it as --shutdown-timeout.
TRANSFER_S: Final = 60
# What only a pod has that requests are sent to.
_OF_ENTRIES: Final = ("readinessProbe", "livenessProbe", "startupProbe", "lifecycle", "ports")
# What decides on which nodes a pod may run.
_PLACEMENT: Final = (
    "nodeSelector",
    "affinity",
    "tolerations",
    "runtimeClassName",
    "imagePullSecrets",
    "serviceAccountName",
)
_WARM: Final = "warm"
_METRICS_PORT: Final = 9006
# It stays, so that the weights are in use and not evicted.
_HOLD: Final = ("--hold", f"--metrics=0.0.0.0:{_METRICS_PORT}")


def short_digest(text: str) -> str:
    """Eight characters."""
    return sha256(text.encode()).hexdigest()[:8]


def pod_template(
    model: ResolvedModel, made: ResolvedBackend, role: ResolvedRole, node: Node, settings: ModelSettings
) -> Plain:
    """A PodTemplate of a ModelInfer."""
    preset, backend = made.preset.spec, made.backend
    has_agent = preset.agent.enabled and node == "entry"
    ours = _ours(model, made, role, node, settings, has_agent=has_agent)
    pods = [preset.pod, *([preset.spot_pod] if backend.spot else []), ours, *role.pods]
    spec = {name: value for name, value in strategic_merge(*pods).items() if value != []}
    if node == "worker":
        spec["containers"] = [_without_entry(one) for one in spec["containers"]]
    labels = {MODEL: model.name, BACKEND: backend.name}
    return {
        "metadata": {
            "labels": {**preset.metadata.labels, **labels},
            "annotations": {**preset.metadata.annotations, PRICE: f"{backend.cost:g}"},
        },
        "spec": spec,
    }


def _without_entry(container: Mapping[str, Any]) -> Mapping[str, Any]:
    """Workers of an engine answer no requests."""
    if container["name"] != ENGINE:
        return container
    return {name: value for name, value in container.items() if name not in _OF_ENTRIES}


def _ours(
    model: ResolvedModel,
    made: ResolvedBackend,
    role: ResolvedRole,
    node: Node,
    settings: ModelSettings,
    *,
    has_agent: bool,
) -> Plain:
    """Fields that a preset may leave out."""
    config = role.engine.config
    init = [download_container(model, settings)] if model.weights.is_downloaded else []
    volumes = list(model.weights.volumes)
    if has_agent:
        init.append(_sidecar(model, made, role, settings))
    if has_agent and model.spec.declared_adapters_and_models:
        volumes.append({"name": _ADAPTERS, "configMap": {"name": f"{model.name}-adapters"}})
        if model.spec.adapters and not model.weights.is_downloaded:
            volumes.append(cache_volume(model.spec.cache))
    return {
        "initContainers": init,
        "containers": [
            _engine(model, made, role, node, drains=has_agent),
            *(_colocated(model, made, drains=has_agent) if node == "entry" else ()),
        ],
        "volumes": volumes,
        "terminationGracePeriodSeconds": _drain_s(config)
        + _AFTER_DRAIN_S
        + (TRANSFER_S if role.name == "prefill" else 0),
    }


def _drain_s(config: EngineConfig) -> int:
    return math.ceil(config.drain_timeout)


def _engine(model: ResolvedModel, made: ResolvedBackend, role: ResolvedRole, node: Node, *, drains: bool) -> Plain:
    config, preset = role.engine.config, made.preset.spec
    generated = build_command_line(preset.arguments, engine_settings(role.engine, node))
    container: Plain = {"name": ENGINE}
    if config.image:
        container["image"] = config.image
    if config.command is not None:
        container["command"] = list(config.command)
    container["args"] = [*generated.args, *config.args]
    env = strategic_merge({"env": generated.env}, {"env": _env(config)})["env"]
    resources = _resources(config, preset.accelerator)
    mounts = [*model.weights.mounts]
    if drains and model.spec.adapters and not model.weights.is_downloaded:
        mounts.append({"name": WEIGHTS, "mountPath": CACHE_PATH, "readOnly": True})
    container |= {"ports": [{"name": "http", "containerPort": role.engine.port}], "volumeMounts": mounts}
    container |= {name: value for name, value in (("env", env), ("resources", resources)) if value}
    if drains:
        # answers when nothing runs any more; the sidecar outlives this container
        container["lifecycle"] = _drains()
    return container


def _colocated(model: ResolvedModel, made: ResolvedBackend, *, drains: bool) -> Iterator[Plain]:
    """The transformer in an engine's pod."""
    step = model.spec.transformer
    if step is None or not step.colocated:
        return
    predictor = f"localhost:{made.preset.spec.port}"
    found = step_engine(TRANSFORMER, step, made.roles[0].engine, predictor)
    generated = build_command_line(found.preset.spec.arguments, engine_settings(found.settings, "entry"))
    config = found.settings.config
    optional = (("command", list(step.command or ())), ("env", _env(config)), ("resources", step.resources))
    container: Plain = {
        "name": COLOCATED,
        "image": step.image,
        "args": [*generated.args, *step.args],
        "ports": [{"name": TRANSFORMER, "containerPort": step.port}],
        **readiness_probe(step),
        **{name: value for name, value in optional if value},
    }
    if drains:
        # it calls the engine for as long as requests run there
        container["lifecycle"] = _drains()
    yield container


def _drains() -> Plain:
    return {"preStop": {"httpGet": {"path": "/drain", "port": AGENT_PORT}}}


def _env(config: EngineConfig) -> list[Plain]:
    found = []
    for one in config.env:
        value = {"value": one.value} if one.value is not None else {}
        source = {"valueFrom": one.value_from} if one.value_from is not None else {}
        found.append({"name": one.name, **value, **source})
    return found


def _resources(config: EngineConfig, accelerator: str | None) -> Plain | None:
    """What is written; and as many accelerators as the degrees of parallelism need, if nothing is written of them."""
    written: Plain = dict(config.resources or {})
    limits = dict(written.get("limits") or {})
    gpus = gpus_per_pod(config)
    if accelerator is not None and gpus is not None and accelerator not in limits:
        written["limits"] = {**limits, accelerator: str(gpus)}
    return written or None


def download_container(model: ResolvedModel, settings: ModelSettings) -> Plain:
    """The container that fetches the weights; credentials reach no other."""
    found: Plain = {
        "name": DOWNLOAD,
        "image": settings.image,
        "args": ["download", str(model.spec.uri), f"--cache={CACHE_PATH}", f"--link={MODEL_PATH}"],
        "volumeMounts": [
            {"name": MODELS, "mountPath": MODEL_PATH.rpartition("/")[0]},
            {"name": WEIGHTS, "mountPath": CACHE_PATH},
        ],
    }
    return {**found, **_credentials(model), **_as_guest(model)}


def _as_guest(model: ResolvedModel) -> Plain:
    """No rights that are not needed: a directory that a node makes for a host path is root's."""
    user = {"runAsUser": 0, "runAsGroup": 0, "runAsNonRoot": False} if model.spec.cache.host_path else {}
    return {
        "securityContext": {**user, "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}},
    }


def agent_images(infer: Mapping[str, Any]) -> set[str]:
    """The images of the containers of ours in a ModelInfer."""
    roles = infer["spec"]["template"]["roles"]
    templates = [role[field] for role in roles for field in ("entryTemplate", "workerTemplate") if field in role]
    containers = [one for each in templates for one in each["spec"].get("initContainers") or ()]
    return {one["image"] for one in containers if one.get("name") in (DOWNLOAD, _AGENT) and one.get("image")}


def _credentials(model: ResolvedModel) -> Plain:
    return {"envFrom": [{"secretRef": {"name": model.spec.secret_ref}}]} if model.spec.secret_ref else {}


def _sidecar(model: ResolvedModel, made: ResolvedBackend, role: ResolvedRole, settings: ModelSettings) -> Plain:
    """The sidecar: it starts before the engine and ends after it."""
    preset, config = made.preset.spec, role.engine.config
    found: Plain = {
        "name": _AGENT,
        "image": settings.image,
        "restartPolicy": "Always",
        "args": [
            "agent",
            f"--listen=0.0.0.0:{AGENT_PORT}",
            f"--engine=http://127.0.0.1:{role.engine.port}",
            f"--dialect={preset.agent.dialect}",
            *([] if model.spec.models else [f"--model={model.served_name}"]),
            f"--drain-timeout={_drain_s(config)}",
            *(["--disaggregated"] if role.engine.role is not None else []),
            # every pod can reach this port, and downloads use the Model's credentials
            "--declared-only",
            *([f"--max-adapters={most}"] if model.spec.adapters and (most := config.lora.max_loaded) else []),
            *(
                [f"--adapters={ADAPTERS_PATH}/{ADAPTERS_FILE}", f"--weights-cache={CACHE_PATH}"]
                if model.spec.declared_adapters_and_models
                else []
            ),
            *_batcher(model, preset.port),
            *(_of_models(config) if model.spec.models else []),
            *preset.agent.args,
        ],
        "ports": [
            {"name": "agent", "containerPort": AGENT_PORT},
            *([{"name": "batcher", "containerPort": preset.port}] if model.spec.batching is not None else []),
        ],
        "readinessProbe": {
            "httpGet": {"path": "/ready", "port": AGENT_PORT},
            "periodSeconds": 2,
            "timeoutSeconds": 5,
            "failureThreshold": 3,
        },
        **_as_guest(model),
    }
    if model.spec.declared_adapters_and_models:
        # they are fetched by the sidecar, with the same credentials as the weights
        found["volumeMounts"] = [
            {"name": _ADAPTERS, "mountPath": ADAPTERS_PATH, "readOnly": True},
            {"name": WEIGHTS, "mountPath": CACHE_PATH},
            *([{"name": MODELS, "mountPath": MODEL_PATH}] if model.spec.models else []),
        ]
        found |= _credentials(model)
    return found


def _batcher(model: ResolvedModel, port: int) -> Iterator[str]:
    """``port``: the one that gateways know."""
    batching = model.spec.batching
    if batching is not None:
        yield f"--batch-listen=0.0.0.0:{port}"
        yield f"--batch-size={batching.max_size}"
        yield f"--batch-delay={batching.max_delay:g}"


def _of_models(config: EngineConfig) -> list[str]:
    memory = config.models.memory
    return [
        f"--link-dir={MODEL_PATH}",
        *([f"--max-memory={int(memory)}"] if memory is not None else []),
        f"--idle-unload={float(config.models.idle_unload):g}",
    ]


def model_infer_spec(model: ResolvedModel, made: ResolvedBackend, settings: ModelSettings) -> dict[str, Any]:
    """The spec of a ModelInfer. The caller that applies it leaves ``replicas`` to autoscalers."""
    group: dict[str, Any] = {
        "roles": [_role(model, made, role, settings) for role in made.roles],
        "drainTimeout": str(max((role.engine.config.drain_timeout for role in made.roles), key=float)),
    }
    if len(made.roles) > 1 or any(role.engine.config.nodes > 1 for role in made.roles):
        # half an engine, or prefill without decode, would hold GPUs for nothing
        group["gang"] = {}
        if made.backend.scales_stages:
            # engines that are added later wait alone, and those that serve stay
            group["gang"] = {"minRoleReplicas": {role.name: role.replicas for role in made.roles}}
    return {
        "replicas": 0 if model.spec.stop else initial_replicas(made),
        "template": group,
        "rollout": to_plain(made.backend.rollout),
    }


def initial_replicas(made: ResolvedBackend) -> int:
    """What is written, or where autoscaling may begin."""
    backend = made.backend
    if backend.replicas is not None:
        return backend.replicas
    return max(backend.min_replicas if backend.min_replicas is not None else 1, 0)


def _role(model: ResolvedModel, made: ResolvedBackend, role: ResolvedRole, settings: ModelSettings) -> dict[str, Any]:
    found: dict[str, Any] = {
        "name": role.name,
        "replicas": role.replicas,
        "entryTemplate": pod_template(model, made, role, "entry", settings),
        **({"scalable": True} if made.backend.scales_stages else {}),
    }
    if role.engine.config.nodes > 1:
        found["workerReplicas"] = role.engine.config.nodes - 1
        found["workerTemplate"] = pod_template(model, made, role, "worker", settings)
    return found


def why_no_warming(model: ResolvedModel) -> str:
    """Why ``warm`` has no effect; empty if it has one, or is not set."""
    if not model.spec.warm:
        return ""
    if not model.weights.is_downloaded:
        return "the weights are mounted where they are, so there is nothing to fetch ahead"
    if model.spec.cache.claim is None and model.spec.cache.host_path is None:
        return "each pod has its own copy of the weights; write cache.hostPath or cache.claim to fetch them ahead"
    return ""


def cache_warmers(model: ResolvedModel, settings: ModelSettings) -> Iterator[tuple[ApiResource, str, dict[str, Any]]]:
    """The kind, name and spec of what fetches the weights ahead."""
    if not model.spec.warm or why_no_warming(model):
        return
    if model.spec.cache.claim is not None:
        pod = {**_pod(model, settings), "restartPolicy": "OnFailure"}
        # a Job's template cannot change: another one has another name
        name = f"{model.name}-{_WARM}-{short_digest(msgspec.json.encode(pod, order='sorted').decode())}"
        yield JOBS, name, {"backoffLimit": 6, "template": {"metadata": {"labels": {MODEL: model.name}}, "spec": pod}}
        return
    seen: list[object] = []
    for made in model.backends:
        spec = pod_template(model, made, made.roles[0], "entry", settings)["spec"]
        placement = {name: spec[name] for name in _PLACEMENT if name in spec}
        if placement in seen:
            continue
        seen.append(placement)
        labels = {MODEL: model.name, BACKEND: made.backend.name, PURPOSE: _WARM}
        pod = {"metadata": {"labels": labels}, "spec": {**_pod(model, settings, *_HOLD), **placement}}
        pod["spec"]["containers"][0]["readinessProbe"] = {"httpGet": {"path": "/readyz", "port": _METRICS_PORT}}
        name = f"{model.child_name(made.backend)}-{_WARM}"
        yield DAEMON_SETS, name, {"selector": {"matchLabels": labels}, "template": pod}


def _pod(model: ResolvedModel, settings: ModelSettings, *more: str) -> dict[str, Any]:
    """Without a link: nothing here reads the weights."""
    fetching = download_container(model, settings)
    args = [one for one in fetching["args"] if not one.startswith("--link=")]
    mounts = [one for one in fetching["volumeMounts"] if one["name"] == WEIGHTS]
    return {
        "containers": [{**fetching, "args": [*args, *more], "volumeMounts": mounts}],
        "volumes": [cache_volume(model.spec.cache)],
    }
