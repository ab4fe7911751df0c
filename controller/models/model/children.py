# SPDX-License-Identifier: Apache-2.0
"""Every object that a Model wants, with its name, labels and owner."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import msgspec

from controller.kube.resources import (
    AUTOSCALING_POLICIES,
    AUTOSCALING_POLICY_BINDINGS,
    CONFIG_MAPS,
    MODEL_INFERS,
    MODEL_ROUTES,
    MODEL_SERVERS,
    Object,
    Resource,
)
from controller.models.model.infers import infer_spec
from controller.models.model.observed import BACKEND, CHILDREN, MODEL
from controller.models.model.pods import ADAPTERS_FILE
from controller.models.model.scaling import binding_spec, policy_spec
from controller.models.model.serving import routes, server_spec, shares
from controller.models.model.warming import warmers
from extproc.api.spec import API_VERSION

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from controller.models.model.observed import Settings
    from controller.models.model.resolved import Resolved

_MANAGED_BY: Final = {"app.kubernetes.io/managed-by": "attache"}
_REPLICAS: Final = ("spec", "replicas")
_UNKNOWN: Final[Mapping[str, str]] = MappingProxyType({})


class Child(msgspec.Struct, frozen=True):
    """``yields``: fields that others may own."""

    resource: Resource
    thing: Object
    yields: tuple[tuple[str, ...], ...] = ()


def children(
    model: Resolved, settings: Settings, ready: Mapping[str, int], start_times: Mapping[str, str] = _UNKNOWN
) -> list[Child]:
    """In the order in which they are applied. ``ready``: replicas that serve, by backend; ``start_times``: what starts
    take.
    """
    found = [*_of_backends(model, settings, start_times), *_of_model(model, settings, ready)]
    return sorted(found, key=lambda one: CHILDREN.index(one.resource))


def _of_backends(model: Resolved, settings: Settings, start_times: Mapping[str, str]) -> Iterator[Child]:
    for made in model.backends:
        name, labels = model.child(made.backend), {BACKEND: made.backend.name}
        infer = _object(model, MODEL_INFERS, name, {"spec": infer_spec(model, made, settings)}, labels)
        # a stopped Model runs nothing, whoever scales it
        is_scaled_by_others = not model.spec.stop and (model.spec.autoscaling is not None or not made.says_replicas)
        yield Child(MODEL_INFERS, infer, (_REPLICAS,) if is_scaled_by_others else ())
        spec = server_spec(model, made, start_times)
        yield Child(MODEL_SERVERS, _object(model, MODEL_SERVERS, name, {"spec": spec}, labels))


def _of_model(model: Resolved, settings: Settings, ready: Mapping[str, int]) -> Iterator[Child]:
    if model.spec.adapters:
        declared = {one.name: {"uri": one.uri, "pinned": one.pinned} for one in model.spec.adapters}
        text = msgspec.json.format(msgspec.json.encode(declared, order="sorted"), indent=2).decode()
        yield Child(CONFIG_MAPS, _object(model, CONFIG_MAPS, f"{model.name}-adapters", {"data": {ADAPTERS_FILE: text}}))
    for resource, name, spec in warmers(model, settings):
        yield Child(resource, _object(model, resource, name, {"spec": spec}))
    for name, spec in routes(model, shares(model, ready)):
        yield Child(MODEL_ROUTES, _object(model, MODEL_ROUTES, name, {"spec": spec}))
    for resource, found in (
        (AUTOSCALING_POLICIES, policy_spec(model)),
        (AUTOSCALING_POLICY_BINDINGS, binding_spec(model)),
    ):
        if found is not None:
            yield Child(resource, _object(model, resource, model.name, {"spec": found}))


def _object(
    model: Resolved, resource: Resource, name: str, content: Mapping[str, Any], labels: Mapping[str, str] | None = None
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
    """The Model owns what it made: it goes with the Model."""
    return {
        "apiVersion": API_VERSION,
        "kind": "Model",
        "name": name,
        "uid": uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }
