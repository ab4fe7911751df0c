# SPDX-License-Identifier: Apache-2.0
"""Mistakes of a Model that a schema cannot express; webhooks refuse them, and a Model with one changes nothing."""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from controller.api.pod_spec_checks import pod_spec_type_errors, resources_type_errors
from controller.models.runtimes.engine_settings import BATCHED_PORT, gpus_per_pod, uses_setting
from controller.models.runtimes.prefill_connectors import gateway_connector, why_sidecar_needed
from controller.models.runtimes.presets import built_in_presets
from controller.models.runtimes.transformers_and_explainers import step_validation_errors, steps_with_own_pods
from extproc.api.model_server import oversized_models

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from controller.api.model import Backend, Disaggregation, HostedModel, ModelSpec
    from controller.api.serving_runtime import Engine, EngineConfig
    from controller.models.runtimes.presets import Preset
    from extproc.api.model_server import ServingProtocol

# Directories of nodes for ``file://`` and for caches. They must not overlap: any Model of the namespace writes to a
# cache.
FILE_PATHS: Final = ("/models", "/mnt/models")
CACHE_PATHS: Final = ("/var/lib/attache",)
# A pod's name is its host name: <ModelInfer>-<group>-<role>-<replica>-<worker>, of at most 63 characters.
LONGEST_NAME: Final = 63 - len("-9999-prefill-63-999")
# Of vLLM and SGLang.
_BLOCK_SIZES: Final = ("--block-size", "--page-size")
_LABEL: Final = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_NONE: Final[Mapping[str, tuple[HostedModel, ...]]] = MappingProxyType({})
# First words of paths that gateways serve.
_RESERVED: Final = frozenset({"v1", "v2", "publishers"})


def validation_errors(name: str, spec: ModelSpec, file_paths: Sequence[str] = FILE_PATHS) -> Iterator[str]:
    """Of a Model by itself, each with what to write instead. ``file_paths``: directories that it may name."""
    yield from _names(name, spec)
    yield from _places(spec, file_paths)
    yield from _many(spec)
    for backend in spec.backends:
        yield from _backend(backend, spec)
    if all(one.weight == 0 for one in spec.backends):
        yield "the weight of every backend is 0, so no request could go anywhere; give one a positive weight"
    yield from _autoscaling(spec)
    for step, _ in steps_with_own_pods(spec):
        yield from _too_long(f"{name}-{step}")
    yield from step_validation_errors(spec)


def _too_long(name: str) -> Iterator[str]:
    if len(name) > LONGEST_NAME:
        yield f"'{name}' is longer than {LONGEST_NAME} characters, and host names of pods begin with it; shorten it"


def _autoscaling(spec: ModelSpec) -> Iterator[str]:
    targets = Counter(name for one in spec.backends for name in one.target_names)
    if spec.autoscaling is not None and not targets:
        yield (
            "autoscaling needs a backend with maxReplicas, or with maxPrefill or maxDecode of its disaggregation; write"
            " one, or remove autoscaling"
        )
    for name, times in targets.items():
        if times > 1:
            yield f"two backends would be scaled under the name '{name}'; rename one of them"
    if spec.autoscaling is not None and spec.autoscaling.scale_to_zero is not None:
        for backend in spec.backends:
            apart = backend.disaggregation
            if apart is not None and apart.is_scaled_by_stage and not apart.can_scale_to_zero:
                yield (
                    f"backend '{backend.name}': autoscaling keeps {apart.prefill} prefill and {apart.decode} decode"
                    " engines, as they are lower bounds; with scaleToZero write prefill: 1 and decode: 1, or remove"
                    " scaleToZero"
                )


def unsupported_features(
    preset: Preset,
    backend: Backend,
    config: EngineConfig,
    *,
    protocol: ServingProtocol,
    has_adapters: bool,
    is_batched: bool,
    models: Mapping[str, tuple[HostedModel, ...]] = _NONE,
) -> Iterator[str]:
    """What ``preset`` cannot do for ``backend``, by ``protocol``. ``models``: many, by the format of each."""
    wanted = backend.disaggregation
    for field, is_written in (("disaggregation", wanted is not None), ("config.kvEvents", config.kv_events)):
        if is_written and protocol != "OpenAI":
            yield f"{field} is about prompts, which protocol {protocol} does not have; remove it"
    if wanted is not None and wanted.connector not in preset.spec.connectors:
        known = ", ".join(preset.spec.connectors) or "no connector"
        yield (
            f"{preset} has {known}, but disaggregation asks for {wanted.connector}; write another connector, engine or"
            " runtime"
        )
    if wanted is not None:
        yield from _without_effect(preset.spec.engine, wanted)
    if config.nodes > 1 and not preset.spec.multi_node:
        yield f"{preset} cannot spread one engine over {config.nodes} nodes; use one node or another runtime"
    if has_adapters and not preset.spec.adapters:
        yield f"{preset} cannot load LoRA adapters; remove adapters or use another runtime"
    if is_batched:
        yield from _cannot_batch(preset, protocol)
    yield from _cannot_host(preset, config, models)
    if not config.image and not _has_image(preset, config):
        yield f"{preset} names no image; write config.image"


def _cannot_batch(preset: Preset, protocol: ServingProtocol) -> Iterator[str]:
    spec = preset.spec
    if spec.engine == "Triton":
        yield (
            f"batching: {preset} starts Triton, which joins requests itself; write dynamic_batching into the model's"
            " config.pbtxt, and remove batching"
        )
    elif protocol not in {"V1", "V2"}:
        yield (
            f"batching: {preset} is asked by protocol {protocol}, and only requests of V1 and V2 can be joined;"
            " remove batching, or use another runtime"
        )
    elif not spec.agent.enabled:
        yield f"batching: {preset} has no sidecar, which joins requests; write agent.enabled: true, or remove batching"
    elif not uses_setting(spec.arguments, "port") or spec.port == BATCHED_PORT:
        yield (
            f"batching: the sidecar takes port {spec.port}, and the engine of {preset} has to listen on {BATCHED_PORT};"
            f" use {{port}} in the runtime's arguments, and another port than {BATCHED_PORT}, or remove batching"
        )


def _cannot_host(preset: Preset, config: EngineConfig, models: Mapping[str, tuple[HostedModel, ...]]) -> Iterator[str]:
    """Many models."""
    if models and not (preset.spec.multi_model and preset.spec.agent.enabled):
        what = "has no agent to load them" if preset.spec.multi_model else "cannot load them"
        yield f"{preset} {what}; models need a runtime with multiModel and an agent, such as mlserver or triton"
        return
    known = {one.name for one in preset.spec.supports}
    for name in sorted(models.keys() - known):
        which = models[name][0].name
        yield f"{preset} reads no format '{name}', which '{which}' of models has; put that into another Model"
    sizes = {one.name: (one.memory, one.pinned) for each in models.values() for one in each}
    yield from oversized_models(config.models.memory, sizes, "config.models.memory")


def _many(spec: ModelSpec) -> Iterator[str]:
    """Of ``models``, which take the place of one model."""
    if not spec.models:
        if spec.uri is None:
            yield "there are no weights: write uri, or models"
        return
    if spec.uri is not None:
        yield "write uri or models, not both: a model of uri beside others is one of models with pinned: true"
    beside = (("adapters", spec.adapters), ("servedName", spec.served_name), ("aliases", spec.aliases))
    steps = (("transformer", spec.transformer), ("explainer", spec.explainer), ("batching", spec.batching))
    for field, value in (*beside, *steps, ("warm", spec.warm or None)):
        if value:
            yield f"{field} is of one model, and models has many; remove it"
    if any(one.disaggregation is not None for one in spec.backends):
        yield "models have no prefill and decode; remove disaggregation"


def _without_effect(engine: Engine, wanted: Disaggregation) -> Iterator[str]:
    """Settings of a leg that the gateway does not make."""
    why = why_sidecar_needed(engine, wanted)
    if wanted.leg == "Gateway" and why:
        yield f"disaggregation.leg: {why}; leave it out, and run a sidecar"
    elif wanted.on_prefill_failure == "Fail" and gateway_connector(engine, wanted) is None:
        yield "disaggregation.onPrefillFailure has no effect where a sidecar requests the prefill; leave it out"
    elif wanted.on_prefill_failure == "Local" and gateway_connector(engine, wanted) == "bootstrap_room":
        yield "disaggregation.onPrefillFailure: decode engines of SGLang compute no prompts; write Fail or leave it out"


def block_size_mismatch(prefill: EngineConfig, decode: EngineConfig) -> Iterator[str]:
    """A KV cache is handed over in blocks, which must have one size; engines' defaults are those of the model."""
    for flag in _BLOCK_SIZES:
        sizes = [_value(flag, one.args) for one in (prefill, decode)]
        if sizes[0] != sizes[1]:
            written = " and ".join("none" if one is None else one for one in sizes)
            yield f"prefill and decode have different {flag}, {written}; write it once, into the backend's config.args"


def _value(flag: str, args: Sequence[str]) -> str | None:
    """Of the last occurrence, as ``--flag=value`` or two words; None: it is not there."""
    words = [part for one in args for part in (one.split("=", 1) if one.startswith("--") else [one])]
    return next((value for name, value in reversed(list(pairwise([*words, ""]))) if name == flag), None)


def _has_image(preset: Preset, config: EngineConfig) -> bool:
    pods = (preset.spec.pod, config.pod)
    containers = [one for pod in pods for one in pod.get("containers") or () if one.get("name") == "engine"]
    return any(one.get("image") for one in containers)


def _names(name: str, spec: ModelSpec) -> Iterator[str]:
    if not _LABEL.fullmatch(name):
        yield (
            f"the name '{name}' becomes part of host names, which have no dots and begin with a letter; "
            f"name the object otherwise and write servedName: {name}"
        )
    for backend in spec.backends:
        yield from _too_long(f"{name}-{backend.name}")
    adapters = [one.name for one in spec.declared_adapters_and_models]
    own = [] if spec.models else [spec.served_name or name]
    counts = Counter([*own, *spec.aliases, *adapters])
    for one, times in counts.items():
        if times > 1:
            yield f"'{one}' is there {times} times among the served name, aliases, adapters and models; write it once"
        if one in _RESERVED:
            yield f"'{one}' is the beginning of paths that gateways serve; use another name"


def _places(spec: ModelSpec, file_paths: Sequence[str]) -> Iterator[str]:
    for uri in (*([spec.uri] if spec.uri else []), *(one.uri for one in spec.declared_adapters_and_models)):
        scheme, _, place = uri.partition("://")
        if scheme == "file":
            yield from _outside(uri, place, file_paths)
        elif scheme == "pvc" and (not place.partition("/")[0] or ".." in PurePosixPath(place).parts):
            yield f"{uri}: write pvc://CLAIM/PATH, without '..'"
    if any(one.uri.startswith(("file://", "pvc://")) for one in spec.declared_adapters_and_models):
        what = "models" if spec.models else "adapters"
        yield f"{what} are downloaded into a running pod, which cannot mount more; use another URI than file or pvc"
    if spec.cache.host_path:
        yield from _outside("cache.hostPath", spec.cache.host_path, CACHE_PATHS)


def _outside(what: str, path: str, file_paths: Sequence[str]) -> Iterator[str]:
    place = PurePosixPath(path)
    if ".." in place.parts or not any(place.is_relative_to(one) for one in file_paths):
        yield f"{what}: the path must be below one of {', '.join(file_paths)}, without '..'"


def _backend(backend: Backend, spec: ModelSpec) -> Iterator[str]:
    where = f"backend '{backend.name}'"
    configs = [backend.config]
    if backend.disaggregation is not None:
        configs += [backend.disaggregation.prefill_config, backend.disaggregation.decode_config]
        if any(not one.pinned for one in spec.adapters):
            yield f"{where}: adapters are loaded on demand only without disaggregation; write pinned: true for each"
        yield from _cannot_disaggregate(backend, where)
        yield from _stages(backend, backend.disaggregation, where)
    for config in configs:
        if gpus_per_pod(config) is None:
            yield f"{where}: tensor x pipeline x data GPUs cannot be shared out evenly over {config.nodes} nodes"
        yield from pod_spec_type_errors(config.pod, f"{where}: config.pod")
        yield from resources_type_errors(config.resources, f"{where}: config.resources")


def _stages(backend: Backend, apart: Disaggregation, where: str) -> Iterator[str]:
    """Bounds may come from several layers, and only the whole shows whether they fit."""
    for rule, (least, most) in zip(apart.CEL, (apart.prefill_bounds, apart.decode_bounds), strict=True):
        if least > most:
            yield f"{where}: disaggregation: {rule.message}"
    if apart.ratio is not None and not apart.is_scaled_by_stage:
        yield f"{where}: disaggregation.ratio needs maxPrefill or maxDecode beside it; write one, or remove the ratio"
    if apart.is_scaled_by_stage and backend.max_replicas is None and backend.min_replicas is not None:
        yield f"{where}: {backend.CEL[1].message}"
    if apart.is_scaled_by_stage and (backend.max_replicas is not None or (backend.replicas or 0) > 1):
        yield f"{where}: {backend.CEL[-1].message}"


def _cannot_disaggregate(backend: Backend, where: str) -> Iterator[str]:
    """Only for a backend that names no runtime, and so gets a built-in preset: another preset may support it."""
    if backend.runtime is None and backend.engine not in (None, "Custom"):
        known = [one for one in built_in_presets().values() if one.spec.engine == backend.engine]
        if known and not any(one.spec.connectors for one in known):
            yield (
                f"{where}: {backend.engine} has no disaggregation here; use vLLM, SGLang or TensorRT-LLM, or name a"
                " runtime that has it"
            )
