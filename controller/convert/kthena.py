# SPDX-License-Identifier: Apache-2.0
"""Kthena's AutoscalingPolicy: with its targets inside, as it is today, or in AutoscalingPolicyBindings, as it was."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from controller.convert.kthena_behavior import behavior_and_panic
from controller.convert.kthena_metrics import Metrics, same_everywhere
from controller.convert.kthena_targets import TARGETS, of_targets
from controller.convert.reading import Converted, Fields, Invalid, Object, ours

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

GROUP: Final = "workload.serving.volcano.sh"
KINDS: Final = frozenset({"AutoscalingPolicy", "AutoscalingPolicyBinding"})
_LONGEST: Final = 253


class _Policy:
    """A policy of theirs, from which one of ours is made for each different way to read its metrics."""

    def __init__(self, thing: Object, name: str) -> None:
        self.thing = thing
        self.spec = Fields(thing.get("spec") or {}, f"{name}: spec")
        self.warnings = [f"{name}: delete it, or their autoscaler, before ours is applied: else both write replicas"]
        tolerance = self.spec.number("tolerancePercent", 10) / 100
        self._behavior, self._panic = behavior_and_panic(self.spec.below("behavior"), tolerance, self.warnings)
        self.metrics = Metrics.read(self.spec.each("metrics"))
        self._made: list[tuple[str, dict[str, Any]]] = []

    @property
    def name(self) -> str:
        return str((self.thing.get("metadata") or {}).get("name", ""))

    def named_for(self, metrics: Sequence[Mapping[str, Any]] | None, user: str) -> str:
        """The name of the policy of ours with these metrics; None: they cannot be carried over."""
        spec: dict[str, Any] = {"behavior": self._behavior, "panic": self._panic}
        if metrics:
            spec = {"strategies": [{"name": "Target"}], "metrics": list(metrics), **spec}
        for name, made in self._made:
            if made == spec:
                return name
        name = f"{self.name}-{user}"[:_LONGEST] if self._made else self.name
        self._made.append((name, spec))
        return name

    def objects(self) -> list[Object]:
        if not self._made:
            # nobody uses it
            self.named_for(self.metrics.resolved([], self.spec.where, self.warnings), "")
        return [ours("AutoscalingPolicy", self.thing, name, spec) for name, spec in self._made]


def convert(objects: Sequence[tuple[Object, str]]) -> Converted:
    """``objects``: each with what it is called in messages. Raises Invalid."""
    policies: dict[tuple[str, str], _Policy] = {}
    for thing, title in objects:
        if thing["kind"] == "AutoscalingPolicy":
            policies[_key(thing)] = _Policy(thing, title)
    bindings: list[Object] = []
    warnings: list[str] = []
    inline = [one for one in policies.values() if any(name in one.spec for name in TARGETS)]
    bindings += [_binding(one.thing, one.spec, one, warnings) for one in inline]
    for thing, title in objects:
        if thing["kind"] == "AutoscalingPolicyBinding":
            spec = Fields(thing.get("spec") or {}, f"{title}: spec")
            wanted = spec.below("policyRef").need("name")
            found = policies.get((_key(thing)[0], wanted))
            if found is None:
                raise Invalid(
                    f"{title}: convert it together with the AutoscalingPolicy {wanted}, whose metrics it reads"
                )
            bindings.append(_binding(thing, spec, found, warnings))
            warnings += spec.left()
    made = [one for policy in policies.values() for one in policy.objects()]
    told = [text for policy in policies.values() for text in (*policy.warnings, *policy.spec.left())]
    return Converted((*made, *bindings), (*told, *warnings))


def _key(thing: Object) -> tuple[str, str]:
    metadata = thing.get("metadata") or {}
    return str(metadata.get("namespace", "")), str(metadata.get("name", ""))


def _binding(thing: Object, spec: Fields, policy: _Policy, warnings: list[str]) -> Object:
    name = _key(thing)[1]
    found = of_targets(spec, _key(thing)[0], warnings)
    read = [one.metrics_over(policy.metrics).resolved(one.sources, spec.where, warnings) for one in found.units]
    metrics = same_everywhere(read)
    if metrics is None:
        names = sorted({metric["name"] for one in read for metric in one})
        warnings.append(
            f"{spec.where}: its targets have different metrics ({', '.join(names)}), and a policy of ours has one list:"
            " the strategy Work is written instead, which measures prefill and decode apart"
        )
    elif not metrics:
        warnings.append(f"{spec.where}: no metrics are named; the strategy is Work, which needs none")
    return ours("AutoscalingPolicyBinding", thing, name, {"policyRef": policy.named_for(metrics, name), **found.spec})
