# SPDX-License-Identifier: Apache-2.0
"""The presets that a namespace has, its own over the cluster's over those built in, and which a backend gets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import IntEnum
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

import msgspec
import yaml

from controller.api.pod_spec_checks import pod_spec_type_errors, resources_type_errors
from controller.api.serving_runtime import ServingRuntimeSpec
from extproc.api.model_server import ServingProtocol
from extproc.api.quantities import decode_quantity
from extproc.api.yaml_documents import YamlLoader

if TYPE_CHECKING:
    from controller.api.model import Backend, ModelFormat

_REST: Final[tuple[ServingProtocol, ...]] = get_args(ServingProtocol)
Reason = Literal[
    "NoSupportingRuntime", "RuntimeDisabled", "RuntimeNotRecognized", "AmbiguousRuntime", "ProtocolNotServed"
]


class PresetScope(IntEnum):
    """The source of a preset; a source nearer to the Model is higher."""

    BUILT_IN = 0
    CLUSTER = 1
    NAMESPACE = 2


class Preset(msgspec.Struct, frozen=True):
    """``name``: as in Models. ``scope``: its source. ``spec``: how an engine is started. ``raw_config``:
    ``spec.config`` as it is written, without defaults. ``problem``: why it cannot be used, empty if it can.
    """

    name: str
    scope: PresetScope
    spec: ServingRuntimeSpec
    raw_config: Mapping[str, Any] = {}
    problem: str = ""

    def rest_protocol_for(self, wanted: ServingProtocol | None) -> ServingProtocol | None:
        """The protocol of Models that ask for ``wanted``, None for the first; None: it does not serve it over REST."""
        served = sorted((one for one in _REST if one in self.spec.protocols), key=self.spec.protocols.index)
        return next((one for one in served if wanted in (None, one)), None)

    def __str__(self) -> str:
        """For people: ``ServingRuntime llama``, ``ClusterServingRuntime vllm``, ``built-in runtime vllm``."""
        kinds = {PresetScope.NAMESPACE: "ServingRuntime", PresetScope.CLUSTER: "ClusterServingRuntime"}
        return f"{kinds.get(self.scope, 'built-in runtime')} {self.name}"


def available_presets(own: Iterable[Mapping[str, Any]], cluster: Iterable[Mapping[str, Any]]) -> dict[str, Preset]:
    """By name. ``own``: ServingRuntimes of the Model's namespace. ``cluster``: ClusterServingRuntimes."""
    found = dict(built_in_presets())
    for things, scope in ((cluster, PresetScope.CLUSTER), (own, PresetScope.NAMESPACE)):
        found.update({one.name: one for one in (preset_of(thing, scope) for thing in things)})
    return found


def preset_of(thing: Mapping[str, Any], scope: PresetScope) -> Preset:
    """An object that this release cannot read is there all the same: another preset must not take its place."""
    name, raw = thing["metadata"]["name"], thing.get("spec") or {}
    try:
        spec = msgspec.convert(raw, ServingRuntimeSpec, dec_hook=decode_quantity)
    except (msgspec.ValidationError, ValueError) as error:
        return _unusable(name, scope, str(error))
    config = raw.get("config") or {}
    written = (("pod", spec.pod), ("spotPod", spec.spot_pod), ("config.pod", config.get("pod") or {}))
    wrong = [mistake for field, pod in written for mistake in pod_spec_type_errors(pod, field)]
    wrong += resources_type_errors(config.get("resources"), "config.resources")
    if wrong:
        return _unusable(name, scope, "; ".join(wrong))
    return Preset(name, scope, spec, config)


def _unusable(name: str, scope: PresetScope, mistake: str) -> Preset:
    return Preset(name, scope, ServingRuntimeSpec(engine="Custom"), problem=f"it has a mistake: {mistake}")


@cache
def built_in_presets() -> Mapping[str, Preset]:
    """Those that every release brings, the same as in manifests/runtimes."""
    found = (preset_of(thing, PresetScope.BUILT_IN) for thing in built_in_objects())
    return {one.name: one for one in found}


def built_in_objects() -> list[dict[str, Any]]:
    """The built-in presets as ClusterServingRuntimes."""
    folder = resources.files("controller.models.runtimes") / "builtin"
    files = sorted((one for one in folder.iterdir() if one.name.endswith(".yaml")), key=lambda one: one.name)
    return [yaml.load(one.read_text(), YamlLoader) for one in files]  # noqa: S506 - a safe one


def multi_model_presets(presets: Mapping[str, Preset], formats: Iterable[str]) -> Mapping[str, Preset]:
    """Those that load many models, of all these formats; if there are none, any that loads many."""
    many = {name: one for name, one in presets.items() if one.spec.multi_model}
    wanted = set(formats)
    return {name: one for name, one in many.items() if wanted <= {each.name for each in one.spec.supports}} or many


class PresetNotChosen(msgspec.Struct, frozen=True):
    """``reason``: in KServe's words, and AmbiguousRuntime. ``message``: for people, and what to do."""

    reason: Reason
    message: str


class _Candidate(msgspec.Struct, frozen=True, order=True):
    """Compared in this order. ``is_exact``: the version was named, and is the same."""

    scope: int
    is_exact: bool
    priority: int


def choose_preset(
    backend: Backend, wanted: ModelFormat, presets: Mapping[str, Preset], protocol: ServingProtocol | None = None
) -> Preset | PresetNotChosen:
    """``presets``: all that the namespace has, by name. ``protocol``: that the Model asks for."""
    if backend.runtime is not None:
        return _named(backend.runtime, presets, protocol)
    matching = {name: rank for name, one in presets.items() if (rank := _rank(one, backend, wanted)) is not None}
    usable = {name: rank for name, rank in matching.items() if not presets[name].spec.disabled}
    if not usable:
        return _none(backend, wanted, [presets[name] for name in matching])
    serving = {name: rank for name, rank in usable.items() if presets[name].rest_protocol_for(protocol) is not None}
    if not serving:
        return _not_served(protocol, [presets[name] for name in usable])
    best = max(serving.values())
    found = sorted(name for name, rank in serving.items() if rank == best)
    if len(found) > 1:
        names = ", ".join(str(presets[name]) for name in found)
        message = f"{names} fit equally well; name one as 'runtime', or give them different priorities"
        return PresetNotChosen("AmbiguousRuntime", message)
    return presets[found[0]]


def _named(name: str, presets: Mapping[str, Preset], protocol: ServingProtocol | None) -> Preset | PresetNotChosen:
    preset = presets.get(name)
    if preset is None:
        return PresetNotChosen(
            "RuntimeNotRecognized", f"there is no runtime '{name}'; there are: {', '.join(sorted(presets))}"
        )
    if preset.problem:
        return PresetNotChosen("RuntimeNotRecognized", f"{preset} cannot be used: {preset.problem}")
    if preset.spec.disabled:
        return PresetNotChosen("RuntimeDisabled", f"{preset} is disabled; name another, or set its 'disabled' to false")
    return preset if preset.rest_protocol_for(protocol) is not None else _not_served(protocol, [preset])


def _rank(preset: Preset, backend: Backend, wanted: ModelFormat) -> _Candidate | None:
    """None if the preset does not fit."""
    if preset.problem or (backend.engine is not None and preset.spec.engine != backend.engine):
        return None
    ranks = [
        _Candidate(preset.scope, one.version is not None and one.version == wanted.version, one.priority)
        for one in preset.spec.supports
        if one.name == wanted.name
        and (wanted.version is None or one.version in (None, wanted.version))
        # a backend that names an engine has made the choice
        and (one.auto_select or backend.engine is not None)
    ]
    return max(ranks, default=None)


def _not_served(protocol: ServingProtocol | None, fitting: list[Preset]) -> PresetNotChosen:
    """``fitting``: but for the protocol."""
    served = "; ".join(f"{one} serves {', '.join(one.spec.protocols)}" for one in fitting)
    asked = "is served over REST, which needs" if protocol is None else f"asks for protocol {protocol}: write"
    return PresetNotChosen("ProtocolNotServed", f"{served}; the Model {asked} another protocol or runtime")


def _none(backend: Backend, wanted: ModelFormat, disabled: list[Preset]) -> PresetNotChosen:
    if disabled:
        names = ", ".join(str(one) for one in disabled)
        return PresetNotChosen("RuntimeDisabled", f"{names} would fit, but is disabled; name another as 'runtime'")
    what = f"format '{wanted.name}'" + (f" version '{wanted.version}'" if wanted.version else "")
    engine = f" with engine {backend.engine}" if backend.engine else ""
    return PresetNotChosen("NoSupportingRuntime", f"no runtime supports {what}{engine}; name one as 'runtime'")
