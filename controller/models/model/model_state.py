# SPDX-License-Identifier: Apache-2.0
"""What a Model is decided from: the object, presets and templates, its layers merged, and what was made of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
from msgspec.structs import replace

from controller.api.autoscaling import ScaleToZero
from controller.api.model import Backend, HostedModel, ModelFormat, ModelSpec
from controller.kube.api_resources import (
    AUTOSCALING_POLICIES,
    AUTOSCALING_POLICY_BINDINGS,
    CONFIG_MAPS,
    DAEMON_SETS,
    JOBS,
    MODEL_INFERS,
    MODEL_ROUTES,
    MODEL_SERVERS,
    ApiResource,
    Object,
)
from controller.models.runtimes import presets
from controller.models.runtimes.config_layers import LayeredModel, NotMergeable, merge_engine_config, merge_layers
from controller.models.runtimes.engine_settings import (
    BATCHED_PORT,
    EngineSettings,
    WeightsMount,
    model_format,
    repository_weights,
    unknown_settings,
    weights_from_uri,
)
from controller.models.runtimes.presets import Preset, PresetNotChosen, choose_preset
from controller.models.runtimes.transformers_and_explainers import port_conflict, step_engine, steps_with_own_pods
from controller.models.runtimes.validation import (
    FILE_PATHS,
    block_size_mismatch,
    unsupported_features,
    validation_errors,
)
from extproc.api.quantities import decode_quantity

if TYPE_CHECKING:
    from controller.api.transformers_and_explainers import Step
    from extproc.api.model_server import ServingProtocol

# In the order of application; objects that are no longer desired are deleted in reverse order.
CHILDREN: Final[tuple[ApiResource, ...]] = (
    CONFIG_MAPS,
    DAEMON_SETS,
    JOBS,
    MODEL_INFERS,
    MODEL_SERVERS,
    MODEL_ROUTES,
    AUTOSCALING_POLICIES,
    AUTOSCALING_POLICY_BINDINGS,
)
# The label of everything that is made for a Model, its pods too: the Model's name.
MODEL: Final = "attache.dev/model"
BACKEND: Final = "attache.dev/backend"
# On pods that serve nothing: ``warm`` on those that fetch weights ahead.
PURPOSE: Final = "attache.dev/purpose"
_NO_WEIGHTS: Final = WeightsMount("", (), (), is_downloaded=False)
# Of manifests/gateway, in front of the gateways' listener of steps.
STEPS_SERVICE: Final = "attache-gateway-steps"
RoleName = Literal["engine", "prefill", "decode"]


class ModelSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the manager decides for all Models. ``image``: ours, for downloads and the sidecar. ``file_paths``:
    directories of nodes that ``file://`` may name. ``steps``: where transformers and explainers reach a gateway:
    ``host`` or ``host:port``. ``gateway_wait_s``: how long a Model with ready engines waits for gateways to confirm its
    routes, before it is Ready without.
    """

    image: str = "attache"
    file_paths: tuple[str, ...] = FILE_PATHS
    steps: str = f"{STEPS_SERVICE}.attache-system.svc"
    gateway_wait_s: float = 30.0


class ReportedModel(msgspec.Struct, frozen=True):
    """As an agent lists it: ``state``: loaded, unloading, loading, failed or absent. ``message``: of a failed load."""

    id: str
    state: str
    message: str = ""


class ModelState(msgspec.Struct, frozen=True, kw_only=True):
    """``thing``: the Model as the API server has it. ``runtimes`` and ``cluster_runtimes``: all ServingRuntimes of its
    namespace, and all ClusterServingRuntimes. ``templates`` and ``shared_templates``: ModelTemplates of its namespace,
    and of the manager's. ``children``: objects of the kinds ``CHILDREN`` in its namespace that the Model owns, or that
    have the label ``MODEL`` or a name that begins with the Model's. ``pods``: with the label ``MODEL`` of this Model.
    ``gateways``: Services of gateways that serve this namespace, the preferred one for ``status.url`` first.
    ``policies``: all AutoscalingPolicies of its namespace. ``lists``: what agents report of many models, by key of
    their pods.
    """

    thing: Object
    runtimes: Sequence[Object] = ()
    cluster_runtimes: Sequence[Object] = ()
    templates: Sequence[Object] = ()
    shared_templates: Sequence[Object] = ()
    children: Sequence[Object] = ()
    pods: Sequence[Object] = ()
    gateways: Sequence[Object] = ()
    policies: Sequence[Object] = ()
    lists: Mapping[str, Sequence[ReportedModel]] = {}
    settings: ModelSettings = ModelSettings()


class ResolvedRole(msgspec.Struct, frozen=True):
    """Engines of one kind in a group. ``replicas``: in each group. ``pods``: layers of their PodSpec, the lowest
    first.
    """

    name: RoleName
    replicas: int
    engine: EngineSettings
    pods: tuple[Mapping[str, Any], ...]


class ResolvedBackend(msgspec.Struct, frozen=True):
    """``says_replicas``: the Model sets the replicas, rather than an autoscaler."""

    backend: Backend
    preset: Preset
    roles: tuple[ResolvedRole, ...]
    says_replicas: bool

    @property
    def protocol(self) -> ServingProtocol:
        """By which its engines are asked."""
        return self.roles[0].engine.protocol


class ResolvedModel(msgspec.Struct, frozen=True, kw_only=True):
    """``spec``: merged over its base references. ``served_name``: the model's name at engines. ``to_zero``: of the
    policy that it names, if it may have no engines; None otherwise. ``steps``: its transformer and explainer, as far as
    they have pods of their own.
    """

    name: str
    namespace: str
    uid: str
    spec: ModelSpec
    served_name: str
    format: ModelFormat
    weights: WeightsMount
    backends: tuple[ResolvedBackend, ...]
    to_zero: ScaleToZero | None = None
    steps: tuple[ResolvedBackend, ...] = ()

    @property
    def without_engine_fields(self) -> ResolvedModel:
        """As its steps see it: without weights and adapters."""
        return replace(self, weights=_NO_WEIGHTS, spec=replace(self.spec, adapters=()))

    def child_name(self, backend: Backend) -> str:
        """The name of what is made for a backend."""
        return f"{self.name}-{backend.name}"

    def grpc_child_name(self, backend: Backend) -> str:
        """Of its ModelServer of gRPC; backends have no dots in their names."""
        return f"{self.child_name(backend)}.grpc"


class Unresolved(msgspec.Struct, frozen=True):
    """Why nothing can be made. ``reason``: InvalidSpec, TemplateNotFound, or one of KServe's for runtimes."""

    reason: str
    message: str


def resolve_model(observed: ModelState) -> ResolvedModel | Unresolved:
    """The object merged with its templates and presets."""
    metadata = observed.thing["metadata"]
    try:
        layered = merge_layers(observed.thing, observed.templates, observed.shared_templates)
    except NotMergeable as error:
        return Unresolved("InvalidSpec", str(error))
    spec = layered.spec
    found = list(validation_errors(metadata["name"], spec, observed.settings.file_paths))
    if found:
        return Unresolved("InvalidSpec", "; ".join(found))
    spec = _of_its_namespace(spec, metadata["namespace"])
    models = _by_format(spec)
    if spec.uri is not None:
        weights, format_ = weights_from_uri(spec.uri, spec.cache), model_format(spec.uri, spec.format)
    else:
        weights, format_ = repository_weights(spec.cache), next(iter(models))
    served_name = spec.served_name or metadata["name"]
    known = presets.available_presets(observed.runtimes, observed.cluster_runtimes)
    backends = []
    for backend in spec.backends:
        fitting = (
            presets.multi_model_presets(known, [one.name for one in models])
            if models and not backend.runtime
            else known
        )
        preset = choose_preset(backend, format_, fitting, spec.protocol)
        if isinstance(preset, PresetNotChosen):
            return Unresolved(preset.reason, f"backend '{backend.name}': {preset.message}")
        made = _backend(
            layered, backend, preset, EngineSettings(**_common(served_name, weights, format_, preset, spec))
        )
        if isinstance(made, Unresolved):
            return made
        backends.append(made)
    return ResolvedModel(
        name=metadata["name"],
        namespace=metadata["namespace"],
        uid=metadata.get("uid", ""),
        spec=spec,
        served_name=served_name,
        format=format_,
        weights=weights,
        backends=tuple(backends),
        to_zero=_to_zero(spec, observed.policies),
        steps=tuple(
            _step(name, step, backends[0], observed.settings.steps) for name, step in steps_with_own_pods(spec)
        ),
    )


def _step(name: str, step: Step, of: ResolvedBackend, predictor: str) -> ResolvedBackend:
    made = step_engine(name, step, of.roles[0].engine, predictor)
    role = ResolvedRole("engine", 1, made.settings, (step.pod,))
    return ResolvedBackend(made.backend, made.preset, (role,), says_replicas=step.replicas is not None)


def _to_zero(spec: ModelSpec, policies: Sequence[Object]) -> ScaleToZero | None:
    """Of the policy that the Model names. One with a mistake reports it in its own status, and scales nothing."""
    wanted = spec.autoscaling
    for one in policies if wanted is not None else ():
        if wanted is not None and one["metadata"]["name"] == wanted.policy_ref:
            setting = (one.get("spec") or {}).get("scaleToZero")
            try:
                return None if setting is None else msgspec.convert(setting, ScaleToZero, dec_hook=decode_quantity)
            except (msgspec.ValidationError, ValueError):
                return None
    return None


def _of_its_namespace(spec: ModelSpec, namespace: str) -> ModelSpec:
    """Namespaces do not share caches on nodes: the writer of a cache determines the content that engines read."""
    if not spec.cache.host_path:
        return spec
    return replace(spec, cache=replace(spec.cache, host_path=f"{spec.cache.host_path.rstrip('/')}/{namespace}"))


def _common(name: str, weights: WeightsMount, format_: ModelFormat, preset: Preset, spec: ModelSpec) -> dict[str, Any]:
    """What all engines of a backend have in common; its config follows."""
    return {
        "served_name": name,
        "path": weights.path,
        "format": format_,
        "port": preset.spec.port if spec.batching is None else BATCHED_PORT,
        "protocol": preset.rest_protocol_for(spec.protocol) or "OpenAI",
        "grpc_port": preset.spec.grpc_port,
        "config": preset.spec.config,
        "has_adapters": bool(spec.adapters),
        "has_models": bool(spec.models),
    }


def _by_format(spec: ModelSpec) -> dict[ModelFormat, tuple[HostedModel, ...]]:
    """``models``, by the format of each."""
    found: dict[ModelFormat, tuple[HostedModel, ...]] = {}
    for one in spec.models:
        format_ = model_format(one.uri, one.format or spec.format)
        found[format_] = (*found.get(format_, ()), one)
    return found


def _backend(
    layered: LayeredModel, backend: Backend, preset: Preset, base: EngineSettings
) -> ResolvedBackend | Unresolved:
    models = {one.name: hosted for one, hosted in _by_format(layered.spec).items()}
    try:
        roles = tuple(_roles(layered, backend, preset, base))
    except NotMergeable as error:
        return Unresolved("InvalidSpec", f"backend '{backend.name}': {error}")
    wrong = [
        one
        for role in roles
        for one in unsupported_features(
            preset,
            backend,
            role.engine.config,
            protocol=base.protocol,
            has_adapters=base.has_adapters,
            is_batched=layered.spec.batching is not None,
            models=models,
        )
    ]
    if len(roles) > 1:
        wrong += block_size_mismatch(*(role.engine.config for role in roles))
    wrong += port_conflict(layered.spec, preset)
    wrong += [
        f"{preset} has a rule with '{one}', which is no setting" for one in unknown_settings(preset.spec.arguments)
    ]
    if wrong:
        return Unresolved("InvalidSpec", f"backend '{backend.name}': {'; '.join(dict.fromkeys(wrong))}")
    return ResolvedBackend(backend, preset, roles, says_replicas=backend.replicas is not None)


def _roles(layered: LayeredModel, backend: Backend, preset: Preset, base: EngineSettings) -> Iterator[ResolvedRole]:
    lower = (preset.raw_config, layered.config_of(backend.name))
    apart = backend.disaggregation
    if apart is None:
        found = merge_engine_config(*lower)
        yield ResolvedRole("engine", 1, msgspec.structs.replace(base, config=found.config), found.pods)
        return
    counts: tuple[tuple[Literal["prefill", "decode"], int], ...] = (
        ("prefill", apart.prefill),
        ("decode", apart.decode),
    )
    for role, replicas in counts:
        found = merge_engine_config(*lower, layered.role_config_of(backend.name, role))
        engine = msgspec.structs.replace(base, config=found.config, role=role, connector=apart.connector)
        yield ResolvedRole(role, replicas, engine, found.pods)
