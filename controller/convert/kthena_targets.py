# SPDX-License-Identifier: Apache-2.0
"""Kthena's three forms of targets: one object, several that differ in cost, and roles of one object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from controller.convert.kthena_metrics import Metrics, Source, sources_of
from controller.convert.reading import Invalid, quantity, target_names

if TYPE_CHECKING:
    from controller.convert.reading import Fields

# Each with what the first versions called it; roles came later.
_ONE: Final = ("homogeneousTarget", "scalingConfiguration")
_SEVERAL: Final = ("heterogeneousTarget", "optimizerConfiguration")
_ROLES: Final = "disaggregatedTarget"
TARGETS: Final = (*_ONE, *_SEVERAL, _ROLES)
_API_VERSION: Final = "workload.serving.volcano.sh/v1alpha1"
_KIND: Final = "ModelServing"
_EXPANSION_PERCENT: Final = 200
_LEAST_EXPANSION: Final = 101
# Ours must be above 0.
_SMALLEST: Final = 0.001


class Unit(msgspec.Struct, frozen=True):
    """What is scaled on its own. ``sources``: where its metrics are. ``metrics``: of its own; None: the policy's."""

    sources: Sequence[Source]
    metrics: Metrics | None = None
    is_fixed: bool = False

    def metrics_over(self, of_policy: Metrics) -> Metrics:
        """Its own if it has any; none if nothing has to be decided."""
        return Metrics({}) if self.is_fixed and self.metrics is None else self.metrics or of_policy


class Targets(msgspec.Struct, frozen=True):
    """``spec``: of a binding of ours, without the policy."""

    spec: Mapping[str, Any]
    units: Sequence[Unit]


def of_targets(spec: Fields, namespace: str, warnings: list[str]) -> Targets:
    """Raises Invalid unless there is exactly one form."""
    found = [one for one in TARGETS if one in spec]
    if len(found) != 1:
        raise Invalid(f"{spec.where}: write exactly one of {', '.join(TARGETS)}")
    block = spec.below(found[0])
    if found[0] in _ONE:
        return _one(block, namespace, warnings)
    if found[0] in _SEVERAL:
        return _several(block, namespace, warnings)
    return _roles(block, namespace, warnings)


def _one(block: Fields, namespace: str, warnings: list[str]) -> Targets:
    inner = block.below("target")
    reference = _reference(inner.below("targetRef"), namespace, warnings)
    target = {"name": target_names([reference["name"]])[0], "ref": reference, **_bounds(block)}
    return Targets({"targets": [target]}, [Unit(sources_of(inner, warnings))])


def _several(block: Fields, namespace: str, warnings: list[str]) -> Targets:
    targets, units = [], []
    for one in block.each("params"):
        inner = one.below("target")
        reference = _reference(inner.below("targetRef"), namespace, warnings)
        cost = one.number("cost", 0)
        if cost == 0:
            warnings.append(f"{one.where}.cost: is 0; {_SMALLEST} is written, since it must be above 0 here")
        targets.append({"ref": reference, **_bounds(one), "cost": float(cost or _SMALLEST)})
        units.append(Unit(sources_of(inner, warnings)))
    if not targets:
        raise Invalid(f"{block.where}.params: is empty")
    names = target_names([one["ref"]["name"] for one in targets])
    named = [{"name": name, **one} for name, one in zip(names, targets, strict=True)]
    percent = block.number("costExpansionRatePercent", _EXPANSION_PERCENT)
    if percent >= _LEAST_EXPANSION:
        return Targets({"targets": named, "allocation": "Expansion", "expansionRatePercent": percent}, units)
    # batches that do not grow: the cheapest target is filled, then the next
    order = sorted(range(len(named)), key=lambda index: -named[index]["cost"])
    for priority, index in enumerate(order):
        named[index]["priority"] = priority
    return Targets({"targets": named, "allocation": "Priority"}, units)


def _roles(block: Fields, namespace: str, warnings: list[str]) -> Targets:
    reference = _reference(block.below("targetRef"), namespace, warnings)
    text = (
        f"roles are scaled in a ModelInfer; make one of that name from the {reference['kind']} {reference['name']},"
        " with scalable: true in its roles"
    )
    warnings.append(f"{block.where}: {text}")
    reference = {"kind": "ModelInfer", "name": reference["name"]}
    roles = block.by_name("roles")
    names = dict(zip(roles, target_names(list(roles)), strict=True))
    targets, units = [], []
    for role, one in roles.items():
        bounds = _bounds(one)
        stage = role.capitalize() if role in {"prefill", "decode"} else "Both"
        if stage == "Both":
            warnings.append(f"{one.where}: is taken for engines that do both prefill and decode; write stage if not")
        targets.append({"name": names[role], "ref": reference, "role": role, "stage": stage, **bounds})
        metrics = Metrics.read(one.each("metrics")) if "metrics" in one else None
        is_fixed = bounds["minReplicas"] == bounds["maxReplicas"]
        units.append(Unit(sources_of(one, warnings), metrics, is_fixed))
    spec: dict[str, Any] = {"targets": targets}
    if "ratioConstraint" in block:
        spec["ratios"] = [_ratio(block.below("ratioConstraint"), names, warnings)]
    return Targets(spec, units)


def _ratio(block: Fields, names: Mapping[str, str], warnings: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field, role in (("numerator", "numeratorRole"), ("denominator", "denominatorRole")):
        name = block.need(role)
        if name not in names:
            raise Invalid(f"{block.where}.{role}: there is no role {name}")
        found[field] = names[name]
    for field, theirs in (("min", "minRatio"), ("max", "maxRatio")):
        value = quantity(block.take(theirs), f"{block.where}.{theirs}")
        if value <= 0:
            warnings.append(f"{block.where}.{theirs}: is 0; {_SMALLEST} is written, since it must be above 0 here")
        found[field] = value if value > 0 else _SMALLEST
    return found


def _bounds(block: Fields) -> dict[str, Any]:
    return {"minReplicas": block.number("minReplicas", 0), "maxReplicas": block.number("maxReplicas", 1)}


def _reference(reference: Fields, namespace: str, warnings: list[str]) -> dict[str, str]:
    theirs = reference.take("namespace", namespace)
    if theirs != namespace:
        warnings.append(f"{reference.where}.namespace: {theirs} is another namespace; a binding scales its own alone")
    kind = str(reference.take("kind", _KIND))
    return {
        "apiVersion": str(reference.take("apiVersion", _API_VERSION)),
        "kind": kind,
        "name": reference.need("name"),
    }
