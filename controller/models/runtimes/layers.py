# SPDX-License-Identifier: Apache-2.0
"""The layers of a Model merged: preset, then base references, then the object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from controller.api.engine import EngineConfig
from controller.api.model import ModelSpec
from controller.api.pod_shapes import wrong_shapes
from controller.models.runtimes.merging import folded, pod_layers, pods_in, typed
from extproc.api.quantities import decode_quantity

if TYPE_CHECKING:
    from collections.abc import Iterable


class Layered(msgspec.Struct, frozen=True):
    """A Model over its base references. ``spec``: with the defaults of what nobody wrote. ``raw``: without."""

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
    """The message says what to correct."""


def merged(model: Mapping[str, Any], own: Iterable[Mapping[str, Any]], shared: Iterable[Mapping[str, Any]]) -> Layered:
    """``own`` and ``shared``: ModelTemplates of the Model's namespace, and of the manager's. Raises NotMergeable."""
    raw = model.get("spec") or {}
    templates = {one["metadata"]["name"]: one for one in (*shared, *own)}
    missing = [name for name in raw.get("baseRefs") or () if name not in templates]
    if missing:
        raise NotMergeable(f"there is no ModelTemplate {', '.join(missing)}, here or in the manager's namespace")
    layers = [templates[name].get("spec") or {} for name in raw.get("baseRefs") or ()]
    for name, layer in (*zip(raw.get("baseRefs") or (), layers, strict=True), ("", raw)):
        if wrong := [one for field, pod in pods_in(layer) for one in wrong_shapes(pod, field)]:
            raise NotMergeable((f"ModelTemplate {name}: " if name else "") + "; ".join(wrong))
    found = typed(*layers, raw)
    try:
        return Layered(msgspec.convert(folded(found), ModelSpec, dec_hook=decode_quantity), found)
    except (msgspec.ValidationError, ValueError) as error:
        raise NotMergeable(f"the object over its base references has a mistake: {error}") from None


class ConfigLayers(msgspec.Struct, frozen=True):
    """``config``: merged. ``pods``: what the layers say of the PodSpec, the lowest first."""

    config: EngineConfig
    pods: tuple[Mapping[str, Any], ...]


def engine_config(*layers: Mapping[str, Any]) -> ConfigLayers:
    """``layers``: the lowest first. Raises NotMergeable."""
    found = typed(*layers)
    try:
        config = msgspec.convert(folded(found), EngineConfig, dec_hook=decode_quantity)
    except (msgspec.ValidationError, ValueError) as error:
        raise NotMergeable(f"the config over the runtime's has a mistake: {error}") from None
    return ConfigLayers(config, tuple(pod_layers(found.get("pod"))))
