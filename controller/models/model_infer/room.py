# SPDX-License-Identifier: Apache-2.0
"""What pods ask for, and whether all of some pods find room on nodes at once.

Node selectors, required node affinity and taints are looked at; affinity between pods and topology spread are the
scheduler's. So a yes may turn out wrong, and whoever has got no place after all is given up later.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any, Final

from extproc.api.spec import requirement_holds

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from controller.models.model_infer.observed import NodeRoom

_QUANTITY: Final = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:([numkMGTPE]|[KMGTPE]i)|[eE]([+-]?[0-9]+))?", re.ASCII)
_FACTORS: Final = {
    "n": 1e-9,
    "u": 1e-6,
    "m": 1e-3,
    "k": 1e3,
    **{letter: 1000.0**power for power, letter in enumerate("MGTPE", start=2)},
    **{f"{letter}i": 1024.0**power for power, letter in enumerate("KMGTPE", start=1)},
}
# Of a bound in a node affinity.
_MOST_DIGITS: Final = 18
_EFFECTS: Final = ("NoSchedule", "NoExecute")


def quantity(value: object) -> float:
    """In base units; 0 of what is no quantity, which the API server refuses when the pod is made."""
    match = _QUANTITY.fullmatch(str(value))
    if match is None:
        return 0.0
    number, unit, exponent = match.groups()
    found = float(number) * _FACTORS[unit] if unit else float(f"{number}e{exponent or 0}")
    return found if math.isfinite(found) else 0.0


def asked_by(spec: Mapping[str, Any]) -> dict[str, float]:
    """What a pod asks for: its containers together, or its largest init container where that is more."""
    found: dict[str, float] = {}
    for one in spec.get("containers") or ():
        for name, amount in _requests(one).items():
            found[name] = found.get(name, 0.0) + amount
    for one in spec.get("initContainers") or ():
        is_sidecar = one.get("restartPolicy") == "Always"
        for name, amount in _requests(one).items():
            found[name] = found.get(name, 0.0) + amount if is_sidecar else max(found.get(name, 0.0), amount)
    for name, amount in (spec.get("overhead") or {}).items():
        found[name] = found.get(name, 0.0) + quantity(amount)
    return found


def _requests(container: Mapping[str, Any]) -> dict[str, float]:
    """A limit without a request is one."""
    resources = container.get("resources") or {}
    given = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    return {name: quantity(value) for name, value in given.items()}


def total(specs: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Of several pods, as Kubernetes writes quantities."""
    sums: dict[str, float] = {}
    for spec in specs:
        for name, amount in asked_by(spec).items():
            sums[name] = sums.get(name, 0.0) + amount
    return {name: _written(amount) for name, amount in sorted(sums.items()) if amount}


def _written(amount: float) -> str:
    thousandths = round(amount * 1000)
    return str(thousandths // 1000) if thousandths % 1000 == 0 else f"{thousandths}m"


class Places:
    """Room on nodes, less what is placed there. Pods are placed largest first, each on the first node that takes it."""

    def __init__(self, nodes: Sequence[NodeRoom]) -> None:
        self._nodes = sorted(nodes, key=lambda one: one.name)
        self._free = {one.name: dict(one.free) for one in nodes}

    def place(self, specs: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
        """The first that finds no place, and then none of them is placed; None if all have one."""
        before = {name: dict(free) for name, free in self._free.items()}
        for spec in sorted(specs, key=_size, reverse=True):
            if not self._place(spec):
                self._free = before
                return spec
        return None

    def _place(self, spec: Mapping[str, Any]) -> bool:
        asked = {**asked_by(spec), "pods": 1.0}
        for node in self._nodes:
            free = self._free[node.name]
            fits = all(free.get(name, 0.0) >= amount for name, amount in asked.items() if amount)
            if fits and takes(node, spec):
                for name, amount in asked.items():
                    free[name] = free.get(name, 0.0) - amount
                return True
        return False


def _size(spec: Mapping[str, Any]) -> tuple[float, float, float]:
    """Accelerators decide, then cores, then memory."""
    asked = asked_by(spec)
    devices = sum(amount for name, amount in asked.items() if "/" in name)
    return devices, asked.get("cpu", 0.0), asked.get("memory", 0.0)


def takes(node: NodeRoom, spec: Mapping[str, Any]) -> bool:
    """Whether a node may run a pod, room aside."""
    selector = spec.get("nodeSelector") or {}
    tolerations = spec.get("tolerations") or ()
    return (
        all(node.labels.get(name) == value for name, value in selector.items())
        and all(_tolerates(tolerations, one) for one in node.taints if one.get("effect") in _EFFECTS)
        and _has_affinity(spec, node)
    )


def _tolerates(tolerations: Sequence[Mapping[str, Any]], taint: Mapping[str, Any]) -> bool:
    return any(
        one.get("effect") in (None, "", taint.get("effect"))
        and (
            (one.get("operator") == "Exists" and one.get("key") in (None, "", taint.get("key")))
            or (one.get("key") == taint.get("key") and (one.get("value") or "") == (taint.get("value") or ""))
        )
        for one in tolerations
    )


def _has_affinity(spec: Mapping[str, Any], node: NodeRoom) -> bool:
    """One of the terms, if there are any, and of that all expressions."""
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    terms = (affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}).get("nodeSelectorTerms")
    if not terms:
        return True
    return any(all(_holds(one, node.labels) for one in term.get("matchExpressions") or ()) for term in terms)


def _holds(expression: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    operator, key, values = expression.get("operator"), str(expression.get("key")), list(expression.get("values") or ())
    if operator in ("Gt", "Lt"):
        value, bound = labels.get(key, ""), "".join(map(str, values))
        if not (value.isdecimal() and bound.isdecimal() and len(bound) <= _MOST_DIGITS):
            return False
        return int(value) > int(bound) if operator == "Gt" else int(value) < int(bound)
    return requirement_holds(key, str(operator), values, labels)
