# SPDX-License-Identifier: Apache-2.0
"""The layers of a Model merged: preset, then base references, then the object.

Plain merge: maps are merged, everything else is replaced; lists of named items (backends, adapters, models, env) are
merged by name. Strategic merge: as the API server's strategic merge patch does it for a PodSpec. Its lists are merged
by the keys of Kubernetes' API ("patch merge key" in its reference), or replaced where Kubernetes has none, such as
``tolerations``. ``$patch: delete`` removes an item or a map's contents, ``$patch: replace`` drops what the lower layer
has, and null removes a field.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import msgspec

from controller.api.model import ModelSpec
from controller.api.pod_spec_checks import pod_spec_type_errors
from controller.api.serving_runtime import EngineConfig
from extproc.api.config_errors import format_path
from extproc.api.quantities import decode_quantity
from extproc.api.schema_validation import check_shape

_DIRECTIVE: Final = "$patch"
# By the field's name, which has one meaning in a PodSpec.
_POD_KEYS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "containers": "name",
        "initContainers": "name",
        "ephemeralContainers": "name",
        "env": "name",
        "ports": "containerPort",
        "volumeMounts": "mountPath",
        "volumeDevices": "devicePath",
        "volumes": "name",
        "imagePullSecrets": "name",
        "hostAliases": "ip",
        "topologySpreadConstraints": "topologyKey",
        "schedulingGates": "name",
        "resourceClaims": "name",
    }
)
_TYPED_KEYS: Final[Mapping[str, str]] = MappingProxyType(
    {"backends": "name", "adapters": "name", "models": "name", "env": "name"}
)
# An item of these has one source, of its value or its files: another kind of source replaces it.
_ONE_SOURCE: Final = frozenset({"volumes", "env"})
# Fields of typed layers that hold partial PodSpecs.
_POD_FIELDS: Final = frozenset({"pod", "spotPod"})


def merge_all_but_pod_specs(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Partial ModelSpecs or EngineConfigs as plain data, the lowest first.

    Partial PodSpecs are collected in a list, the lowest first: what one of them deletes may stand in a runtime's
    PodSpec, which is below all of them.
    """
    return _all(layers, _TYPED_KEYS)


def strategic_merge(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Partial PodSpecs, the lowest first."""
    return _all(layers, _POD_KEYS)


def _all(layers: Iterable[Mapping[str, Any]], keyed: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for layer in layers:
        found = _merged(found, layer, keyed)
    return found


def merge_pod_spec_layers(value: Any) -> Any:  # noqa: ANN401 - any JSON value
    """The result of ``merge_all_but_pod_specs`` as documents have it: one PodSpec where it has collected several."""
    if isinstance(value, Mapping):
        return {
            name: strategic_merge(*pod_spec_layers(one)) if name in _POD_FIELDS else merge_pod_spec_layers(one)
            for name, one in value.items()
        }
    return [merge_pod_spec_layers(one) for one in value] if isinstance(value, list) else value


def pod_specs_in(value: object, where: str = "spec") -> Iterator[tuple[str, object]]:
    """The partial PodSpecs of a typed layer, each with the field that it stands in."""
    if isinstance(value, Mapping):
        for name, one in value.items():
            if name in _POD_FIELDS:
                yield f"{where}.{name}", one or {}
            else:
                yield from pod_specs_in(one, f"{where}.{name}")
    elif isinstance(value, list):
        for number, one in enumerate(value):
            yield from pod_specs_in(one, f"{where}[{number}]")


def pod_spec_layers(value: object) -> list[Mapping[str, Any]]:
    """The partial PodSpecs of a field, the lowest first."""
    if isinstance(value, list):
        return value
    return [value] if isinstance(value, Mapping) else []


def _merged(lower: Mapping[str, Any], upper: Mapping[str, Any], keyed: Mapping[str, str]) -> dict[str, Any]:
    directive = upper.get(_DIRECTIVE)
    if directive == "delete":
        return {}
    found = {} if directive == "replace" else dict(lower)
    for name, value in upper.items():
        if name == _DIRECTIVE:
            continue
        if value is None:
            found.pop(name, None)
            continue
        if name in _POD_FIELDS and keyed is _TYPED_KEYS:
            found[name] = [*pod_spec_layers(found.get(name)), *pod_spec_layers(value)]
        else:
            found[name] = _value(name, found.get(name), value, keyed)
    return found


def _value(name: str, lower: object, upper: object, keyed: Mapping[str, str]) -> object:
    if isinstance(upper, Mapping):
        return _merged(lower if isinstance(lower, Mapping) else {}, upper, keyed)
    if isinstance(upper, (list, tuple)):
        if name not in keyed or not _are_items([*upper, *_listed(lower)]):
            return list(upper)
        return _items(_listed(lower), upper, name, keyed)
    return upper


def _listed(value: object) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else ()


def _are_items(values: Sequence[object]) -> bool:
    return all(isinstance(one, Mapping) for one in values)


def _items(
    lower: Sequence[Mapping[str, Any]], upper: Sequence[Mapping[str, Any]], name: str, keyed: Mapping[str, str]
) -> list[Mapping[str, Any]]:
    """In the lower layer's order, and then what is new."""
    if any(one == {_DIRECTIVE: "replace"} for one in upper):
        lower, upper = (), [one for one in upper if one != {_DIRECTIVE: "replace"}]
    key = keyed[name]
    found: dict[object, Mapping[str, Any]] = {_identity(one, key): one for one in lower}
    for item in upper:
        identity = _identity(item, key)
        if item.get(_DIRECTIVE) == "delete":
            found.pop(identity, None)
            continue
        before = found.get(identity, {})
        if name in _ONE_SOURCE and set(before) != set(item) - {_DIRECTIVE}:
            before = {}
        found[identity] = _merged(before, item, keyed)
    return list(found.values())


def _identity(item: Mapping[str, Any], key: str) -> object:
    """A name or number; of fields without a schema, any value."""
    found = item.get(key)
    return found if isinstance(found, Hashable) else repr(found)


class LayeredModel(msgspec.Struct, frozen=True):
    """A Model over its base references. ``spec``: with defaults. ``raw``: without."""

    spec: ModelSpec
    raw: Mapping[str, Any]

    def config_of(self, backend: str) -> Mapping[str, Any]:
        """What is written as ``config`` of a backend."""
        return self._backend(backend).get("config") or {}

    def role_config_of(self, backend: str, role: str) -> Mapping[str, Any]:
        """What is written as ``prefillConfig`` or ``decodeConfig``."""
        return (self._backend(backend).get("disaggregation") or {}).get(f"{role}Config") or {}

    def _backend(self, name: str) -> Mapping[str, Any]:
        return next((one for one in self.raw.get("backends") or () if one["name"] == name), {})


class NotMergeable(ValueError):
    """The message has the correction."""


def merge_layers(
    model: Mapping[str, Any], own: Iterable[Mapping[str, Any]], shared: Iterable[Mapping[str, Any]]
) -> LayeredModel:
    """``own`` and ``shared``: ModelTemplates of the Model's namespace, and of the manager's. Raises NotMergeable."""
    raw = model.get("spec") or {}
    templates = {one["metadata"]["name"]: one for one in (*shared, *own)}
    missing = [name for name in raw.get("baseRefs") or () if name not in templates]
    if missing:
        raise NotMergeable(f"there is no ModelTemplate {', '.join(missing)}, here or in the manager's namespace")
    layers = [templates[name].get("spec") or {} for name in raw.get("baseRefs") or ()]
    for name, layer in (*zip(raw.get("baseRefs") or (), layers, strict=True), ("", raw)):
        if wrong := [one for field, pod in pod_specs_in(layer) for one in pod_spec_type_errors(pod, field)]:
            raise NotMergeable((f"ModelTemplate {name}: " if name else "") + "; ".join(wrong))
    found = merge_all_but_pod_specs(*layers, raw)
    folded = merge_pod_spec_layers(found)
    try:
        return LayeredModel(msgspec.convert(folded, ModelSpec, dec_hook=decode_quantity), found)
    except (msgspec.ValidationError, ValueError):
        (path, message), *_ = check_shape(folded, ModelSpec)
        place = format_path(("spec", *path))
        raise NotMergeable(f"the object over its base references has a mistake: {place}: {message}") from None


class MergedEngineConfig(msgspec.Struct, frozen=True):
    """``config``: merged. ``pods``: the layers' parts of the PodSpec, the lowest first."""

    config: EngineConfig
    pods: tuple[Mapping[str, Any], ...]


def merge_engine_config(*layers: Mapping[str, Any]) -> MergedEngineConfig:
    """``layers``: the lowest first. Raises NotMergeable."""
    found = merge_all_but_pod_specs(*layers)
    try:
        config = msgspec.convert(merge_pod_spec_layers(found), EngineConfig, dec_hook=decode_quantity)
    except (msgspec.ValidationError, ValueError) as error:
        raise NotMergeable(f"the config over the runtime's has a mistake: {error}") from None
    return MergedEngineConfig(config, tuple(pod_spec_layers(found.get("pod"))))
