# SPDX-License-Identifier: Apache-2.0
"""AutoscalingPolicies and their bindings as informers keep them: decoded once, when they change."""

from __future__ import annotations

from typing import Final, TypeVar

import msgspec

from controller.api.autoscaling import AutoscalingPolicy
from controller.api.autoscaling_binding import AutoscalingPolicyBinding
from controller.autoscaler.reconciler.names import LEARNED
from controller.autoscaler.reconciler.owning import Claim, Place, claim_of, place_of
from controller.kube.resources import AUTOSCALING_POLICIES, AUTOSCALING_POLICY_BINDINGS, Object, key_of
from extproc.api.quantities import decode_quantity

_METADATA: Final = ("name", "namespace", "uid", "resourceVersion", "generation", "creationTimestamp")
Decoded = TypeVar("Decoded")


class PolicyView(msgspec.Struct, frozen=True):
    """``thing``: the object without its spec. ``policy``: None if it has a mistake; ``problem`` says which."""

    thing: Object
    policy: AutoscalingPolicy | None
    problem: str = ""


class BindingView(msgspec.Struct, frozen=True):
    """``thing``: the object without its spec. ``binding``: None if it has a mistake; ``problem`` says which. ``claim``:
    its right to targets. ``places``: of its targets, in their order. ``learned``: what was kept of an earlier life.
    """

    thing: Object
    binding: AutoscalingPolicyBinding | None
    claim: Claim
    places: tuple[Place, ...] = ()
    learned: str = ""
    problem: str = ""

    @property
    def key(self) -> str:
        """``namespace/name``."""
        return self.claim.key

    @property
    def namespace(self) -> str:
        """Of the binding, its policy and its targets."""
        return self.claim.key.partition("/")[0]

    @property
    def policy_key(self) -> str:
        """Of its policy; empty if it has a mistake."""
        return "" if self.binding is None else f"{self.namespace}/{self.binding.spec.policy_ref}"


def slim_policy(thing: Object) -> Object:
    """See the module."""
    policy, problem = _decoded(thing, AutoscalingPolicy)
    small = _small(thing, AUTOSCALING_POLICIES.kind)
    return {**small, "view": PolicyView(small, policy, problem)}


def slim_binding(thing: Object) -> Object:
    """See the module."""
    binding, problem = _decoded(thing, AutoscalingPolicyBinding)
    small, claim = _small(thing, AUTOSCALING_POLICY_BINDINGS.kind), claim_of(thing)
    namespace = claim.key.partition("/")[0]
    places = () if binding is None else tuple(place_of(namespace, one) for one in binding.spec.targets)
    learned = (thing["metadata"].get("annotations") or {}).get(LEARNED, "")
    return {**small, "view": BindingView(small, binding, claim, places, learned, problem)}


def _small(thing: Object, kind: str) -> Object:
    metadata = thing["metadata"]
    return {
        "apiVersion": thing["apiVersion"],
        "kind": kind,
        "metadata": {name: metadata[name] for name in _METADATA if name in metadata},
        "status": thing.get("status") or {},
    }


def _decoded(thing: Object, type_: type[Decoded]) -> tuple[Decoded | None, str]:
    """The object without its status, which others than we may have written."""
    metadata = {name: thing["metadata"][name] for name in ("name", "namespace") if name in thing["metadata"]}
    try:
        made = msgspec.convert({"metadata": metadata, "spec": thing.get("spec") or {}}, type_, dec_hook=decode_quantity)
    except (msgspec.ValidationError, ValueError) as error:
        return None, f"{key_of(thing)}: {error}"
    return made, ""
