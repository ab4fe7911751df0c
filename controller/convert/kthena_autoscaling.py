# SPDX-License-Identifier: Apache-2.0
"""Kthena's AutoscalingPolicy: with its targets inside, as it is today, or in AutoscalingPolicyBindings, as it was."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from controller.convert.foreign_fields import (
    ConversionFailed,
    ConversionResult,
    FieldReader,
    Object,
    new_object,
    parse_duration,
    parse_quantity,
    unique_target_names,
)

_LONGEST_WINDOW_S: Final = 3600
_LONGEST_PERIOD_S: Final = 1800
# Theirs, where nothing is written.
_INSTANCES: Final = 1
_PERCENT: Final = 100
_PERIOD: Final = "15s"
_PANIC_THRESHOLD: Final = 200
_PANIC_HOLD: Final = "60s"
# Theirs, where nothing is written.
_PORT: Final = 8100
_PATH: Final = "/metrics"
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
GROUP: Final = "workload.serving.volcano.sh"
KINDS: Final = frozenset({"AutoscalingPolicy", "AutoscalingPolicyBinding"})
_LONGEST: Final = 253


def behavior_and_panic(
    behavior: FieldReader, tolerance: float, warnings: list[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The blocks ``behavior`` and ``panic`` of a policy of ours; raises Invalid."""
    up = behavior.pop_fields("scaleUp")
    found = {
        "scaleUp": _rules(up.pop_fields("stablePolicy"), tolerance, warnings),
        "scaleDown": _rules(behavior.pop_fields("scaleDown"), tolerance, warnings),
    }
    # their webhook writes it where it is left out
    panic = up.pop_fields("panicPolicy")
    for name in ("percent", "period"):
        if name in panic:
            panic.pop(name)
            warnings.append(f"{panic.where}.{name}: not carried over; in a panic growth is limited by scaleUp alone")
    hold = str(panic.pop("panicModeHold", _PANIC_HOLD))
    parse_duration(hold, f"{panic.where}.panicModeHold")
    return found, {"thresholdPercent": panic.pop_number("panicThresholdPercent", _PANIC_THRESHOLD), "hold": hold}


def _rules(stable: FieldReader, tolerance: float, warnings: list[str]) -> dict[str, Any]:
    """Or takes the larger of both limits, And the smaller one; 0 allows nothing."""
    instances, percent = stable.pop_number("instances", _INSTANCES), stable.pop_number("percent", _PERCENT)
    takes_smaller = stable.pop("selectPolicy", "Or") == "And"
    period_s = _whole(stable, "period", _PERIOD, _LONGEST_PERIOD_S, warnings)
    found: dict[str, Any] = {"tolerance": tolerance}
    if "stabilizationWindow" in stable:
        found["stabilizationWindowSeconds"] = _whole(stable, "stabilizationWindow", "0s", _LONGEST_WINDOW_S, warnings)
    limits = [
        {"type": kind, "value": value, "periodSeconds": max(1, period_s)}
        for kind, value in (("Pods", instances), ("Percent", percent))
        if value > 0
    ]
    if not limits or (takes_smaller and len(limits) == 1):
        found["selectPolicy"] = "Disabled"
    else:
        found |= {"selectPolicy": "Min" if takes_smaller else "Max", "policies": limits}
    return found


def _whole(stable: FieldReader, name: str, otherwise: str, longest_s: int, warnings: list[str]) -> int:
    """Whole seconds, as HPA v2 has them."""
    where = f"{stable.where}.{name}"
    exact_s = parse_duration(stable.pop(name, otherwise), where)
    found_s = min(longest_s, math.ceil(exact_s))
    if found_s != exact_s:
        warnings.append(
            f"{where}: {found_s} s instead of {exact_s:g} s; whole seconds up to {longest_s} can be written"
        )
    return found_s


class ConvertedMetricSource(msgspec.Struct, frozen=True):
    """``name``: of the metric in the policy; empty: of all that have no other. ``block``: what ours has for it.
    ``series``: how the engine calls it, if otherwise.
    """

    name: str
    block: Mapping[str, Any]
    series: str = ""


class ReplicaMetricTargets(msgspec.Struct, frozen=True):
    """``values``: by name, what one replica should have."""

    values: Mapping[str, float]

    @staticmethod
    def read(metrics: Sequence[FieldReader]) -> ReplicaMetricTargets:
        """Raises Invalid. The first versions called the name ``metricName``."""
        return ReplicaMetricTargets(
            {
                one.pop_required("metricName" if "metricName" in one else "name"): parse_quantity(
                    one.pop("targetValue"), f"{one.where}.targetValue"
                )
                for one in metrics
            }
        )

    def policy_metrics(
        self, sources: Sequence[ConvertedMetricSource], where: str, warnings: list[str]
    ) -> list[dict[str, Any]]:
        """The metrics of a policy of ours."""
        by_name = {one.name: one for one in sources}
        found = []
        for name, value in self.values.items():
            source = by_name.get(name, by_name.get(""))
            if source is None:
                text = (
                    f"port {_PORT} and {_PATH} of the engines are written, where it was read from if nothing was said"
                )
                warnings.append(f"{where}: no source of the metric {name} is named; {text}")
                source = ConvertedMetricSource(name, _engine(_PORT, _PATH))
            found.append({"name": source.series or name, "value": value, **source.block})
        return found


def common_metrics(read: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]] | None:
    """The metrics that all targets have; None if they differ."""
    first, *others = [one for one in read if one] or [[]]
    return first if all(one == first for one in others) else None


def metric_sources(target: FieldReader, warnings: list[str]) -> list[ConvertedMetricSource]:
    """Of ``metricSources``, or of ``metricEndpoint``, as it was earlier; raises Invalid."""
    found = []
    if "metricEndpoint" in target:
        found.append(ConvertedMetricSource("", _of_endpoint(target.pop_fields("metricEndpoint"), warnings)))
    for name, one in target.pop_object_mapping("metricSources").items():
        # their earlier form has it twice
        one.pop("type")
        if "prometheus" in one:
            server = one.pop_fields("prometheus")
            block = {"address": server.pop_required("serverURL").rstrip("/"), "query": server.pop_required("query")}
            if server.pop("auth"):
                warnings.append(f"{server.where}.auth: name a Secret as secretRef in the policy")
            found.append(ConvertedMetricSource(name, {"source": "Prometheus", "prometheus": block}))
        else:
            pod = one.pop_fields("pod")
            series = str(pod.pop("name", name))
            found.append(ConvertedMetricSource(name, _of_endpoint(pod, warnings), series))
    return found


def _of_endpoint(endpoint: FieldReader, warnings: list[str]) -> dict[str, Any]:
    if endpoint.pop("labelSelector"):
        text = "not carried over; the page of each entry pod is read"
        warnings.append(f"{endpoint.where}.labelSelector: {text}")
    return _engine(endpoint.pop_number("port", _PORT), str(endpoint.pop("uri", _PATH)))


def _engine(port: int, path: str) -> dict[str, Any]:
    return {"source": "Engine", "engine": {"port": port, "path": path}}


class ScaledUnit(msgspec.Struct, frozen=True):
    """What is scaled on its own. ``sources``: where its metrics are. ``metrics``: of its own; None: the policy's."""

    sources: Sequence[ConvertedMetricSource]
    metrics: ReplicaMetricTargets | None = None
    is_fixed: bool = False

    def effective_metrics(self, of_policy: ReplicaMetricTargets) -> ReplicaMetricTargets:
        """Its own if it has any; none if nothing has to be decided."""
        return ReplicaMetricTargets({}) if self.is_fixed and self.metrics is None else self.metrics or of_policy


class BindingTargets(msgspec.Struct, frozen=True):
    """``spec``: of a binding of ours, without the policy."""

    spec: Mapping[str, Any]
    units: Sequence[ScaledUnit]


def convert_targets(spec: FieldReader, namespace: str, warnings: list[str]) -> BindingTargets:
    """Raises Invalid unless there is exactly one form."""
    found = [one for one in TARGETS if one in spec]
    if len(found) != 1:
        raise ConversionFailed(f"{spec.where}: write exactly one of {', '.join(TARGETS)}")
    block = spec.pop_fields(found[0])
    if found[0] in _ONE:
        return _one(block, namespace, warnings)
    if found[0] in _SEVERAL:
        return _several(block, namespace, warnings)
    return _roles(block, namespace, warnings)


def _one(block: FieldReader, namespace: str, warnings: list[str]) -> BindingTargets:
    inner = block.pop_fields("target")
    reference = _reference(inner.pop_fields("targetRef"), namespace, warnings)
    target = {"name": unique_target_names([reference["name"]])[0], "ref": reference, **_bounds(block)}
    return BindingTargets({"targets": [target]}, [ScaledUnit(metric_sources(inner, warnings))])


def _several(block: FieldReader, namespace: str, warnings: list[str]) -> BindingTargets:
    targets, units = [], []
    for one in block.pop_objects("params"):
        inner = one.pop_fields("target")
        reference = _reference(inner.pop_fields("targetRef"), namespace, warnings)
        cost = one.pop_number("cost", 0)
        if cost == 0:
            warnings.append(f"{one.where}.cost: is 0; {_SMALLEST} is written, since it must be above 0 here")
        targets.append({"ref": reference, **_bounds(one), "cost": float(cost or _SMALLEST)})
        units.append(ScaledUnit(metric_sources(inner, warnings)))
    if not targets:
        raise ConversionFailed(f"{block.where}.params: is empty")
    names = unique_target_names([one["ref"]["name"] for one in targets])
    named = [{"name": name, **one} for name, one in zip(names, targets, strict=True)]
    percent = block.pop_number("costExpansionRatePercent", _EXPANSION_PERCENT)
    if percent >= _LEAST_EXPANSION:
        return BindingTargets({"targets": named, "allocation": "Expansion", "expansionRatePercent": percent}, units)
    # batches that do not grow: the cheapest target is filled, then the next
    order = sorted(range(len(named)), key=lambda index: -named[index]["cost"])
    for priority, index in enumerate(order):
        named[index]["priority"] = priority
    return BindingTargets({"targets": named, "allocation": "Priority"}, units)


def _roles(block: FieldReader, namespace: str, warnings: list[str]) -> BindingTargets:
    reference = _reference(block.pop_fields("targetRef"), namespace, warnings)
    text = (
        f"roles are scaled in a ModelInfer; make one of that name from the {reference['kind']} {reference['name']},"
        " with scalable: true in its roles"
    )
    warnings.append(f"{block.where}: {text}")
    reference = {"kind": "ModelInfer", "name": reference["name"]}
    roles = block.pop_object_mapping("roles")
    names = dict(zip(roles, unique_target_names(list(roles)), strict=True))
    targets, units = [], []
    for role, one in roles.items():
        bounds = _bounds(one)
        stage = role.capitalize() if role in {"prefill", "decode"} else "Both"
        if stage == "Both":
            warnings.append(f"{one.where}: is taken for engines that do both prefill and decode; write stage if not")
        targets.append({"name": names[role], "ref": reference, "role": role, "stage": stage, **bounds})
        metrics = ReplicaMetricTargets.read(one.pop_objects("metrics")) if "metrics" in one else None
        is_fixed = bounds["minReplicas"] == bounds["maxReplicas"]
        units.append(ScaledUnit(metric_sources(one, warnings), metrics, is_fixed))
    spec: dict[str, Any] = {"targets": targets}
    if "ratioConstraint" in block:
        spec["ratios"] = [_ratio(block.pop_fields("ratioConstraint"), names, warnings)]
    return BindingTargets(spec, units)


def _ratio(block: FieldReader, names: Mapping[str, str], warnings: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field, role in (("numerator", "numeratorRole"), ("denominator", "denominatorRole")):
        name = block.pop_required(role)
        if name not in names:
            raise ConversionFailed(f"{block.where}.{role}: there is no role {name}")
        found[field] = names[name]
    for field, theirs in (("min", "minRatio"), ("max", "maxRatio")):
        value = parse_quantity(block.pop(theirs), f"{block.where}.{theirs}")
        if value <= 0:
            warnings.append(f"{block.where}.{theirs}: is 0; {_SMALLEST} is written, since it must be above 0 here")
        found[field] = value if value > 0 else _SMALLEST
    return found


def _bounds(block: FieldReader) -> dict[str, Any]:
    return {"minReplicas": block.pop_number("minReplicas", 0), "maxReplicas": block.pop_number("maxReplicas", 1)}


def _reference(reference: FieldReader, namespace: str, warnings: list[str]) -> dict[str, str]:
    theirs = reference.pop("namespace", namespace)
    if theirs != namespace:
        warnings.append(f"{reference.where}.namespace: {theirs} is another namespace; a binding scales its own alone")
    kind = str(reference.pop("kind", _KIND))
    return {
        "apiVersion": str(reference.pop("apiVersion", _API_VERSION)),
        "kind": kind,
        "name": reference.pop_required("name"),
    }


class _Policy:
    """A policy of theirs. Each target says where its metrics are read, and ours says it in the policy: so one of theirs
    becomes one of ours for each list of metrics.
    """

    def __init__(self, thing: Object, title: str) -> None:
        self.thing = thing
        self.spec = FieldReader(thing.get("spec") or {}, f"{title}: spec")
        self.warnings = [f"{title}: delete it, or their autoscaler, before ours is applied: else both write replicas"]
        tolerance = self.spec.pop_number("tolerancePercent", 10) / 100
        self._behavior, self._panic = behavior_and_panic(self.spec.pop_fields("behavior"), tolerance, self.warnings)
        self.metrics = ReplicaMetricTargets.read(self.spec.pop_objects("metrics"))
        # ours, each with its name
        self._specs: list[tuple[str, dict[str, Any]]] = []

    @property
    def has_targets(self) -> bool:
        """Whether it is a binding, too."""
        return any(name in self.spec for name in TARGETS)

    def ours_with(self, metrics: Sequence[Mapping[str, Any]], binding: str) -> str:
        """The name of our policy with these metrics, which is made for ``binding`` if there is none. Without metrics it
        has our default strategy.
        """
        spec: dict[str, Any] = {"behavior": self._behavior, "panic": self._panic}
        if metrics:
            spec = {"strategies": [{"name": "Target"}], "metrics": list(metrics), **spec}
        for name, other in self._specs:
            if other == spec:
                return name
        name = _key(self.thing)[1]
        if self._specs:
            name = f"{name}-{binding}"[:_LONGEST]
        self._specs.append((name, spec))
        return name

    def ours(self) -> list[Object]:
        """Our policies. One that no binding uses becomes one of ours, with metrics of their default port and path."""
        if not self._specs:
            self.ours_with(self.metrics.policy_metrics([], self.spec.where, self.warnings), binding="")
        return [new_object("AutoscalingPolicy", self.thing, name, spec) for name, spec in self._specs]


def convert(objects: Sequence[tuple[Object, str]]) -> ConversionResult:
    """``objects``: each with what it is called in messages. Raises Invalid."""
    policies = {_key(thing): _Policy(thing, title) for thing, title in objects if thing["kind"] == "AutoscalingPolicy"}
    warnings: list[str] = []
    bindings = [_binding(one.thing, one.spec, one, warnings) for one in policies.values() if one.has_targets]
    for thing, title in objects:
        if thing["kind"] == "AutoscalingPolicyBinding":
            spec = FieldReader(thing.get("spec") or {}, f"{title}: spec")
            bindings.append(_binding(thing, spec, _policy_of(thing, spec, title, policies), warnings))
            warnings += spec.unused_warnings()
    # bindings come first: they decide which policies are made
    made = [one for policy in policies.values() for one in policy.ours()]
    of_policies = [text for policy in policies.values() for text in (*policy.warnings, *policy.spec.unused_warnings())]
    return ConversionResult((*made, *bindings), (*of_policies, *warnings))


def _policy_of(binding: Object, spec: FieldReader, title: str, policies: Mapping[tuple[str, str], _Policy]) -> _Policy:
    name = spec.pop_fields("policyRef").pop_required("name")
    found = policies.get((_key(binding)[0], name))
    if found is None:
        raise ConversionFailed(
            f"{title}: convert it together with the AutoscalingPolicy {name}, whose metrics it reads"
        )
    return found


def _key(thing: Object) -> tuple[str, str]:
    metadata = thing.get("metadata") or {}
    return str(metadata.get("namespace", "")), str(metadata.get("name", ""))


def _binding(thing: Object, spec: FieldReader, policy: _Policy, warnings: list[str]) -> Object:
    namespace, name = _key(thing)
    found = convert_targets(spec, namespace, warnings)
    read = [
        one.effective_metrics(policy.metrics).policy_metrics(one.sources, spec.where, warnings) for one in found.units
    ]
    metrics = common_metrics(read)
    if metrics is None:
        names = sorted({metric["name"] for one in read for metric in one})
        warnings.append(
            f"{spec.where}: its targets have different metrics ({', '.join(names)}), and a policy of ours has one list:"
            " the strategy Work is written instead, which measures prefill and decode apart"
        )
    elif not metrics:
        warnings.append(f"{spec.where}: no metrics are named; the strategy is Work, which needs none")
    return new_object(
        "AutoscalingPolicyBinding", thing, name, {"policyRef": policy.ours_with(metrics or (), name), **found.spec}
    )
