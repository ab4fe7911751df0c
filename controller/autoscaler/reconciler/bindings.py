# SPDX-License-Identifier: Apache-2.0
"""AutoscalingPolicies and their bindings, decoded when they change, and which binding may write a target's replicas."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

import msgspec

from controller.api.autoscaling import schedule_mistakes
from controller.api.autoscaling_binding import AutoscalingPolicyBinding
from controller.api.autoscaling_policy import AutoscalingPolicy
from controller.autoscaler.reconciler.scalables import LEARNED
from controller.kube.api_resources import (
    AUTOSCALING_POLICIES,
    AUTOSCALING_POLICY_BINDINGS,
    MODEL_INFER_ROLES,
    MODEL_INFERS,
    Object,
    key_of,
    partial_metadata,
)
from controller.models.model_infer.names import role_scale_name
from extproc.api.quantities import decode_quantity

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from controller.api.autoscaling_binding import ScaleTarget
    from controller.autoscaler.reconciler.scalables import Scalable


# Metrics of ours that are numbers of replicas, with the older prefix, too.
_REPLICAS: Final = ("wva_desired_replicas", "inferno_desired_replicas")
ScalableRef = tuple[str, str, str, str]
"""What is scaled: namespace, group, kind, name."""
_METADATA: Final = ("name", "namespace", "uid", "resourceVersion", "generation", "creationTimestamp")
Decoded = TypeVar("Decoded")


class TargetClaim(NamedTuple):
    """A binding's. The older one has the right; between equally old ones the name decides."""

    created: str
    key: str
    uid: str

    @property
    def annotation_value(self) -> str:
        """As the target's annotation has it."""
        return f"{self.key}/{self.uid}"


class ManualOverride(msgspec.Struct, frozen=True):
    """Replicas set by another writer are kept for a while. ``writer``: its name in managedFields."""

    writer: str
    replicas: int
    until_s: float


def target_claim(binding: Object) -> TargetClaim:
    """A binding's."""
    metadata = binding["metadata"]
    return TargetClaim(metadata.get("creationTimestamp", ""), key_of(binding), metadata.get("uid", ""))


def scalable_ref(namespace: str, target: ScaleTarget) -> ScalableRef:
    """What a target of a binding in ``namespace`` scales: the roles of a ModelInfer are objects of their own."""
    ref, group = target.ref, target.ref.api_version.rpartition("/")[0]
    if target.role is not None and (group, ref.kind) == (MODEL_INFERS.group, MODEL_INFERS.kind):
        return namespace, group, MODEL_INFER_ROLES.kind, role_scale_name(ref.name, target.role)
    return namespace, group, ref.kind, ref.name


def prior_claimant(mine: TargetClaim, others: Iterable[TargetClaim]) -> str:
    """The binding that has the right instead; empty if ``mine`` has it."""
    first = min((*others, mine))
    return "" if first == mine else first.key


def other_annotated_owner(found: Scalable, mine: TargetClaim, exists: Callable[[str], bool]) -> str:
    """The binding that the target's annotation names, if it is another one that is still there. ``exists``: by the text
    of its claim.
    """
    said = found.scaled_by
    return said.rpartition("/")[0] if said and said != mine.annotation_value and exists(said) else ""


def targets_of_other_autoscalers(autoscalers: Iterable[Object]) -> Mapping[ScalableRef, str]:
    """What HorizontalPodAutoscalers and ScaledObjects scale, with their kind and name."""
    found: dict[ScalableRef, str] = {}
    for one in autoscalers:
        reference, namespace = one["ref"], one["metadata"].get("namespace", "")
        if reference is None:
            continue
        place = namespace, reference[0], reference[1], reference[2]
        found.setdefault(place, f"{one['kind']} {one['metadata']['name']}")
    return found


def hpas_misusing_metric(autoscalers: Iterable[Object]) -> Mapping[ScalableRef, str]:
    """HorizontalPodAutoscalers that take our metric for a ratio, by what they scale."""
    return {
        (one["metadata"].get("namespace", ""), *one["ref"]): one["metadata"]["name"]
        for one in autoscalers
        if one["ref"] and one["misuses"]
    }


def autoscaler_trimmer(kind: str, default_kind: str = "", default_group: str = "") -> Callable[[Object], Object]:
    """Keeps what an autoscaler scales."""

    def trim(thing: Object) -> Object:
        said = (thing.get("spec") or {}).get("scaleTargetRef") or {}
        named = said.get("kind") or default_kind
        group = str(said["apiVersion"]).rpartition("/")[0] if said.get("apiVersion") else default_group
        ref = (group, named, said["name"]) if said.get("name") else None
        return {"metadata": partial_metadata(thing), "kind": kind, "ref": ref, "misuses": _misuses(thing)}

    return trim


def _misuses(autoscaler: Object) -> bool:
    """By a target of type Value an HPA multiplies the replicas that there are by those that there should be."""
    for one in (autoscaler.get("spec") or {}).get("metrics") or ():
        external = one.get("external") or {}
        name = (external.get("metric") or {}).get("name", "")
        if name in _REPLICAS and (external.get("target") or {}).get("type") == "Value":
            return True
    return False


def is_changed_by_others(found: Scalable, mine: TargetClaim) -> bool:
    """Whether another writer has changed the replicas since we took the target over, or last wrote them."""
    is_known = found.scaled_by == mine.annotation_value and bool(found.scaled_to)
    return is_known and found.replicas not in found.scaled_to and not found.is_ours


def manual_override(
    found: Scalable, mine: TargetClaim, noticed_at_s: float, hold_s: float, now_s: float
) -> ManualOverride | None:
    """The override while it is in force; None otherwise. ``noticed_at_s``: when we first saw it, which counts where the
    object has no time of the change.
    """
    if not is_changed_by_others(found, mine):
        return None
    until_s = (found.written_at_s or noticed_at_s) + hold_s
    return ManualOverride(found.writer or "somebody", found.replicas, until_s) if now_s < until_s else None


class PolicyView(msgspec.Struct, frozen=True):
    """``thing``: the object without its spec. ``policy``: None if it is invalid; ``problem`` has the mistake.
    ``bad_schedules``: a message for each schedule that cannot be read, which counts for nothing.
    """

    thing: Object
    policy: AutoscalingPolicy | None
    problem: str = ""
    bad_schedules: tuple[str, ...] = ()


class BindingView(msgspec.Struct, frozen=True):
    """``thing``: the object without its spec. ``binding``: None if it is invalid; ``problem`` has the mistake.
    ``claim``: its right to targets. ``places``: of its targets, in their order. ``learned``: what an earlier leader
    stored.
    """

    thing: Object
    binding: AutoscalingPolicyBinding | None
    claim: TargetClaim
    places: tuple[ScalableRef, ...] = ()
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


def trimmed_policy(thing: Object) -> Object:
    """The object as the cache keeps it: its identity, and a PolicyView in ``view``."""
    policy, problem = _decoded(thing, AutoscalingPolicy)
    small = _small(thing, AUTOSCALING_POLICIES.kind)
    bad_schedules = () if policy is None else tuple(schedule_mistakes(policy.spec.schedules))
    return {**small, "view": PolicyView(small, policy, problem, bad_schedules)}


def trimmed_binding(thing: Object) -> Object:
    """The object as the cache keeps it: its identity, and a BindingView in ``view``."""
    binding, problem = _decoded(thing, AutoscalingPolicyBinding)
    small, claim = _small(thing, AUTOSCALING_POLICY_BINDINGS.kind), target_claim(thing)
    namespace = claim.key.partition("/")[0]
    places = () if binding is None else tuple(scalable_ref(namespace, one) for one in binding.spec.targets)
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
