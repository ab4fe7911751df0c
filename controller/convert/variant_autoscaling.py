# SPDX-License-Identifier: Apache-2.0
"""llm-d's VariantAutoscaling: all variants of one model become one binding with a target each, and its policy."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import msgspec

from controller.convert.foreign_fields import (
    ConversionFailed,
    ConversionResult,
    FieldReader,
    Object,
    new_object,
    parse_quantity,
    to_object_name,
    unique_target_names,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

KIND: Final = "VariantAutoscaling"
GROUPS: Final = frozenset({"llmd.ai", "llm-d.ai"})

_ACCELERATOR_LABEL: Final = "inference.optimization/acceleratorName"
_INSTANCE_LABEL: Final = "wva.llmd.ai/controller-instance"
_API_VERSIONS: Final = {
    "Deployment": "apps/v1",
    "StatefulSet": "apps/v1",
    "LeaderWorkerSet": "leaderworkerset.x-k8s.io/v1",
}
_COST: Final = "10.0"
_LEAST: Final = 1
_MOST: Final = 2


class _Variant(msgspec.Struct, frozen=True):
    source: Object
    model: str
    target: dict[str, Any]
    warnings: list[str]


def convert(objects: Sequence[tuple[Object, str]]) -> ConversionResult:
    """``objects``: each with what it is called in messages. Raises Invalid."""
    by_model: dict[tuple[str, str], list[_Variant]] = {}
    for thing, name in objects:
        variant = _variant(thing, name)
        namespace = (thing.get("metadata") or {}).get("namespace", "")
        by_model.setdefault((namespace, variant.model), []).append(variant)
    made: list[Object] = []
    warnings: list[str] = []
    taken: set[tuple[str, str]] = set()
    counts = Counter[tuple[str, str]]()
    for (namespace, model), variants in by_model.items():
        # two models may differ in nothing but what a name may not have
        name = to_object_name(model.rsplit("/", 1)[-1])
        stem = namespace, name[:56]
        while (namespace, name) in taken:
            counts[stem] += 1
            name = f"{stem[1]}-{counts[stem] + 1}"
        taken.add((namespace, name))
        made += _objects(name, variants)
        warnings += [text for one in variants for text in one.warnings]
        warnings += _of_model(f"model {model}", variants)
    return ConversionResult(tuple(made), tuple(warnings))


def _variant(thing: Object, name: str) -> _Variant:
    fields = FieldReader(thing.get("spec") or {}, f"{name}: spec")
    metadata = thing.get("metadata") or {}
    labels = metadata.get("labels") or {}
    warnings: list[str] = []
    model = fields.pop_required("modelID")
    target: dict[str, Any] = {"ref": _reference(fields, str(metadata.get("name", "")), warnings)}
    if "variantCost" not in fields:
        warnings.append(f"{fields.where}.variantCost: is not there; {_COST} is what it counts as")
    target["cost"] = parse_quantity(fields.pop("variantCost", _COST), f"{fields.where}.variantCost")
    if "maxReplicas" not in fields:
        text = f"{_MOST} is the default of later versions; earlier ones had their bounds from the HPA"
        warnings.append(f"{fields.where}.maxReplicas: is not there; {text}")
    target["minReplicas"] = fields.pop_number("minReplicas", _LEAST)
    target["maxReplicas"] = fields.pop_number("maxReplicas", _MOST)
    accelerator = fields.pop("accelerator", labels.get(_ACCELERATOR_LABEL))
    if accelerator is not None:
        target["accelerator"] = accelerator
        if "acceleratorCount" not in fields:
            warnings.append(
                f"{fields.where}: how many accelerators a replica has is not said; write accelerators if not 1"
            )
    target["accelerators"] = fields.pop_number("acceleratorCount", 1)
    if target["cost"] <= 0:
        raise ConversionFailed(f"{fields.where}.variantCost: must be more than 0 here")
    profile = fields.pop_fields("variantProfile" if "variantProfile" in fields else "modelProfile")
    capacity = _capacity(profile, warnings)
    if capacity:
        target["capacity"] = capacity
    # its name of the variant; ours is the target's
    fields.pop("variantID")
    if "sloClassRef" in fields:
        fields.pop("sloClassRef")
        text = "its latencies are in a ConfigMap; write them as objective (ttft, tpot) into the policy"
        warnings.append(f"{fields.where}.sloClassRef: {text}")
    if _INSTANCE_LABEL in labels:
        warnings.append(
            f"{name}: the label {_INSTANCE_LABEL} says nothing here: one manager decides about all bindings"
        )
    return _Variant(thing, model, target, [*warnings, *fields.unused_warnings()])


def _reference(fields: FieldReader, own_name: str, warnings: list[str]) -> dict[str, str]:
    reference = fields.pop_fields("scaleTargetRef")
    if "scaleTargetRef" not in fields:
        warnings.append(f"{fields.where}.scaleTargetRef: is not there; the Deployment of the same name is meant")
        return {"apiVersion": "apps/v1", "kind": "Deployment", "name": own_name}
    kind = str(reference.pop("kind", "Deployment"))
    version = reference.pop("apiVersion", _API_VERSIONS.get(kind))
    if version is None:
        raise ConversionFailed(f"{reference.where}.apiVersion: is missing, and {kind} is not known")
    return {"apiVersion": version, "kind": kind, "name": reference.pop_required("name")}


def _capacity(profile: FieldReader, warnings: list[str]) -> dict[str, Any]:
    """Of its model of latencies, in milliseconds: alpha + beta * batch, and gamma + delta * tokens * batch."""
    performance = profile.pop_fields("perfParms")
    decode, prefill = performance.pop_fields("decodeParms"), performance.pop_fields("prefillParms")
    found: dict[str, Any] = {}
    if "alpha" in decode:
        alpha, beta = (parse_quantity(decode.pop(one, "0"), f"{decode.where}.{one}") for one in ("alpha", "beta"))
        found["step"] = f"{alpha + beta:g}ms"
        warnings.append(f"{decode.where}: only a step with one request is carried over; the rest is measured")
    if "delta" in prefill:
        delta = parse_quantity(prefill.pop("delta"), f"{prefill.where}.delta")
        prefill.pop("gamma")
        if delta > 0:
            found["prefillTokensPerSecond"] = round(1000 / delta, 1)
    return found


def _objects(name: str, variants: Sequence[_Variant]) -> list[Object]:
    names = unique_target_names([str((one.source.get("metadata") or {}).get("name", "")) for one in variants])
    targets = [{"name": short, **one.target} for short, one in zip(names, variants, strict=True)]
    like = {"metadata": _common(variants)}
    return [
        new_object("AutoscalingPolicy", like, name, {"mode": "Export"}),
        new_object("AutoscalingPolicyBinding", like, name, {"policyRef": name, "targets": targets}),
    ]


def _common(variants: Sequence[_Variant]) -> dict[str, Any]:
    """The namespace, and labels and annotations that all variants have."""
    first, *others = (one.source.get("metadata") or {} for one in variants)
    found: dict[str, Any] = {"namespace": first.get("namespace")}
    for field in ("labels", "annotations"):
        found[field] = {
            key: value
            for key, value in (first.get(field) or {}).items()
            if key not in {_ACCELERATOR_LABEL, _INSTANCE_LABEL}
            and all((one.get(field) or {}).get(key) == value for one in others)
        }
    return found


def _of_model(name: str, variants: Sequence[_Variant]) -> list[str]:
    found = [
        f"{name}: mode is Export, since an HPA or a ScaledObject reads wva_desired_replicas; delete that and write "
        "mode: Auto to have replicas written here",
        f"{name}: the strategy is Work; the ones that were chosen in a ConfigMap are SpareCapacity and Tokens here",
    ]
    if all(one.target["minReplicas"] == 0 for one in variants):
        found.append(
            f"{name}: whether it may go to zero was said in a ConfigMap; write scaleToZero into the policy if it may"
        )
    return found
