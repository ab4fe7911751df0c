# SPDX-License-Identifier: Apache-2.0
"""The scale subresource of custom resources, by the paths that their definition names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping


class ScalePaths(msgspec.Struct, frozen=True):
    """Each a path of dots, such as ``.spec.replicas``. ``selector``: empty if the definition names none."""

    replicas: str
    status: str
    selector: str = ""


def paths_of(version: Mapping[str, Any]) -> ScalePaths | None:
    """Of a version of a CustomResourceDefinition; None if it has no scale."""
    said = (version.get("subresources") or {}).get("scale")
    if not said:
        return None
    return ScalePaths(said["specReplicasPath"], said["statusReplicasPath"], said.get("labelSelectorPath", ""))


def scale_of(thing: Mapping[str, Any], paths: ScalePaths) -> dict[str, Any]:
    """The scale of an object."""
    kept = ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")
    status: dict[str, Any] = {"replicas": _at(thing, paths.status) or 0}
    if paths.selector:
        status["selector"] = _at(thing, paths.selector) or ""
    return {
        "apiVersion": "autoscaling/v1",
        "kind": "Scale",
        "metadata": {name: thing["metadata"][name] for name in kept if name in thing["metadata"]},
        "spec": {"replicas": _at(thing, paths.replicas) or 0},
        "status": status,
    }


def scaling(patch: Mapping[str, Any], paths: ScalePaths) -> dict[str, Any]:
    """A merge patch of the object that does what a merge patch of its scale asks for."""
    value: Any = (patch.get("spec") or {}).get("replicas")
    for name in reversed(paths.replicas.strip(".").split(".")):
        value = {name: value}
    return {"metadata": patch.get("metadata") or {}, **value}


def _at(thing: Any, path: str) -> Any:  # noqa: ANN401 - JSON
    for name in path.strip(".").split("."):
        thing = thing.get(name) if isinstance(thing, dict) else None
    return thing
