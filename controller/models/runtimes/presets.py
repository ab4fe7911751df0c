# SPDX-License-Identifier: Apache-2.0
"""The presets that a namespace has: its own, over the cluster's, over those that are built in, by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import IntEnum
from functools import cache
from importlib import resources
from typing import Any

import msgspec
import yaml

from controller.api.pod_shapes import wrong_resources, wrong_shapes
from controller.api.serving_runtime import ServingRuntimeSpec
from extproc.api.quantities import decode_quantity


class Scope(IntEnum):
    """Where a preset comes from; what is nearer to the Model is higher."""

    BUILT_IN = 0
    CLUSTER = 1
    NAMESPACE = 2


class Preset(msgspec.Struct, frozen=True):
    """``name``: what Models call it. ``scope``: where it comes from. ``spec``: how an engine is started.
    ``raw_config``: ``spec.config`` as it is written, without defaults. ``problem``: why it cannot be used, empty if it
    can.
    """

    name: str
    scope: Scope
    spec: ServingRuntimeSpec
    raw_config: Mapping[str, Any] = {}
    problem: str = ""

    def __str__(self) -> str:
        """For people: ``ServingRuntime llama``, ``ClusterServingRuntime vllm``, ``built-in runtime vllm``."""
        kinds = {Scope.NAMESPACE: "ServingRuntime", Scope.CLUSTER: "ClusterServingRuntime"}
        return f"{kinds.get(self.scope, 'built-in runtime')} {self.name}"


def available(own: Iterable[Mapping[str, Any]], cluster: Iterable[Mapping[str, Any]]) -> dict[str, Preset]:
    """By name. ``own``: ServingRuntimes of the Model's namespace. ``cluster``: ClusterServingRuntimes."""
    found = dict(built_in())
    for things, scope in ((cluster, Scope.CLUSTER), (own, Scope.NAMESPACE)):
        found.update({one.name: one for one in (preset_of(thing, scope) for thing in things)})
    return found


def preset_of(thing: Mapping[str, Any], scope: Scope) -> Preset:
    """An object that this release cannot read is there all the same: another preset must not take its place."""
    name, raw = thing["metadata"]["name"], thing.get("spec") or {}
    try:
        spec = msgspec.convert(raw, ServingRuntimeSpec, dec_hook=decode_quantity)
    except (msgspec.ValidationError, ValueError) as error:
        return _unusable(name, scope, str(error))
    config = raw.get("config") or {}
    written = (("pod", spec.pod), ("spotPod", spec.spot_pod), ("config.pod", config.get("pod") or {}))
    wrong = [said for field, pod in written for said in wrong_shapes(pod, field)]
    wrong += wrong_resources(config.get("resources"), "config.resources")
    if wrong:
        return _unusable(name, scope, "; ".join(wrong))
    return Preset(name, scope, spec, config)


def _unusable(name: str, scope: Scope, mistake: str) -> Preset:
    return Preset(name, scope, ServingRuntimeSpec(engine="Custom"), problem=f"it has a mistake: {mistake}")


@cache
def built_in() -> Mapping[str, Preset]:
    """Those that every release brings, the same as in manifests/runtimes."""
    found = (preset_of(thing, Scope.BUILT_IN) for thing in objects())
    return {one.name: one for one in found}


def objects() -> list[dict[str, Any]]:
    """The built-in presets as ClusterServingRuntimes."""
    folder = resources.files("controller.models.runtimes") / "builtin"
    files = sorted((one for one in folder.iterdir() if one.name.endswith(".yaml")), key=lambda one: one.name)
    return [yaml.safe_load(one.read_text()) for one in files]
