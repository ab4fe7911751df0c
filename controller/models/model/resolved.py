# SPDX-License-Identifier: Apache-2.0
"""A Model with its layers merged and a preset for each backend."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from msgspec.structs import replace

from controller.api.autoscaling import ScaleToZero
from controller.api.model import Backend, ModelFormat, ModelSpec
from controller.models.runtimes import presets
from controller.models.runtimes.layers import Layered, NotMergeable, engine_config, merged
from controller.models.runtimes.mistakes import mistakes, unsupported
from controller.models.runtimes.presets import NotChosen, Preset, choose
from controller.models.runtimes.settings import Engine, Weights, format_of, unknown_settings, weights_of
from extproc.api.quantities import decode_quantity

if TYPE_CHECKING:
    from controller.kube.resources import Object
    from controller.models.model.observed import Observed

RoleName = Literal["engine", "prefill", "decode"]


class ResolvedRole(msgspec.Struct, frozen=True):
    """Engines of one kind in a group. ``replicas``: in each group. ``pods``: layers of their PodSpec, the lowest
    first.
    """

    name: RoleName
    replicas: int
    engine: Engine
    pods: tuple[Mapping[str, Any], ...]


class ResolvedBackend(msgspec.Struct, frozen=True):
    """``says_replicas``: somebody wrote a number, and it is not left to autoscalers."""

    backend: Backend
    preset: Preset
    roles: tuple[ResolvedRole, ...]
    says_replicas: bool


class Resolved(msgspec.Struct, frozen=True, kw_only=True):
    """``spec``: over its base references. ``served_name``: what engines call the model. ``to_zero``: what the policy
    says that it names, if it may have no engines; None otherwise.
    """

    name: str
    namespace: str
    uid: str
    spec: ModelSpec
    served_name: str
    format: ModelFormat
    weights: Weights
    backends: tuple[ResolvedBackend, ...]
    to_zero: ScaleToZero | None = None

    def child(self, backend: Backend) -> str:
        """The name of what is made for a backend."""
        return f"{self.name}-{backend.name}"


class Unresolved(msgspec.Struct, frozen=True):
    """Why nothing can be made. ``reason``: InvalidSpec, TemplateNotFound, or one of KServe's for runtimes."""

    reason: str
    message: str


def resolve(observed: Observed) -> Resolved | Unresolved:
    """Everything that the object, its templates and the presets say together."""
    metadata = observed.thing["metadata"]
    try:
        layered = merged(observed.thing, observed.templates, observed.shared_templates)
    except NotMergeable as error:
        return Unresolved("InvalidSpec", str(error))
    spec = layered.spec
    found = list(mistakes(metadata["name"], spec, observed.settings.file_paths))
    if found:
        return Unresolved("InvalidSpec", "; ".join(found))
    spec = _of_its_namespace(spec, metadata["namespace"])
    weights, format_ = weights_of(spec.uri, spec.cache), format_of(spec.uri, spec.format)
    served_name = spec.served_name or metadata["name"]
    known = presets.available(observed.runtimes, observed.cluster_runtimes)
    backends = []
    for backend in spec.backends:
        preset = choose(backend, format_, known)
        if isinstance(preset, NotChosen):
            return Unresolved(preset.reason, f"backend '{backend.name}': {preset.message}")
        made = _backend(layered, backend, preset, Engine(**_common(served_name, weights, format_, preset, spec)))
        if isinstance(made, Unresolved):
            return made
        backends.append(made)
    return Resolved(
        name=metadata["name"],
        namespace=metadata["namespace"],
        uid=metadata.get("uid", ""),
        spec=spec,
        served_name=served_name,
        format=format_,
        weights=weights,
        backends=tuple(backends),
        to_zero=_to_zero(spec, observed.policies),
    )


def _to_zero(spec: ModelSpec, policies: Sequence[Object]) -> ScaleToZero | None:
    """Of the policy that the Model names. One that has a mistake says so itself, and scales nothing."""
    wanted = spec.autoscaling
    for one in policies if wanted is not None else ():
        if wanted is not None and one["metadata"]["name"] == wanted.policy_ref:
            said = (one.get("spec") or {}).get("scaleToZero")
            try:
                return None if said is None else msgspec.convert(said, ScaleToZero, dec_hook=decode_quantity)
            except (msgspec.ValidationError, ValueError):
                return None
    return None


def _of_its_namespace(spec: ModelSpec, namespace: str) -> ModelSpec:
    """Namespaces do not share what is cached on nodes: whoever fills a cache decides what others' engines read."""
    if not spec.cache.host_path:
        return spec
    return replace(spec, cache=replace(spec.cache, host_path=f"{spec.cache.host_path.rstrip('/')}/{namespace}"))


def _common(name: str, weights: Weights, format_: ModelFormat, preset: Preset, spec: ModelSpec) -> dict[str, Any]:
    """What all engines of a backend have in common; its config follows."""
    return {
        "served_name": name,
        "path": weights.path,
        "format": format_,
        "port": preset.spec.port,
        "config": preset.spec.config,
        "has_adapters": bool(spec.adapters),
    }


def _backend(layered: Layered, backend: Backend, preset: Preset, base: Engine) -> ResolvedBackend | Unresolved:
    try:
        roles = tuple(_roles(layered, backend, preset, base))
    except NotMergeable as error:
        return Unresolved("InvalidSpec", f"backend '{backend.name}': {error}")
    wrong = [
        one
        for role in roles
        for one in unsupported(preset, backend, role.engine.config, has_adapters=base.has_adapters)
    ]
    wrong += [
        f"{preset} has a rule with '{one}', which is no setting" for one in unknown_settings(preset.spec.arguments)
    ]
    if wrong:
        return Unresolved("InvalidSpec", f"backend '{backend.name}': {'; '.join(dict.fromkeys(wrong))}")
    return ResolvedBackend(backend, preset, roles, says_replicas=backend.replicas is not None)


def _roles(layered: Layered, backend: Backend, preset: Preset, base: Engine) -> Iterator[ResolvedRole]:
    lower = (preset.raw_config, layered.config_of(backend.name))
    apart = backend.disaggregation
    if apart is None:
        found = engine_config(*lower)
        yield ResolvedRole("engine", 1, msgspec.structs.replace(base, config=found.config), found.pods)
        return
    counts: tuple[tuple[Literal["prefill", "decode"], int], ...] = (
        ("prefill", apart.prefill),
        ("decode", apart.decode),
    )
    for role, replicas in counts:
        found = engine_config(*lower, layered.role_config_of(backend.name, role))
        engine = msgspec.structs.replace(base, config=found.config, role=role, connector=apart.connector)
        yield ResolvedRole(role, replicas, engine, found.pods)
