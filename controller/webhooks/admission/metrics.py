# SPDX-License-Identifier: Apache-2.0
"""Metrics of AutoscalingPolicies that are taken, and will not do what their author expects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from controller.api.autoscaling_mistakes import GATEWAY_METRICS
from controller.api.autoscaling_policy import STRATEGIES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


def metric_warnings(spec: Mapping[str, Any]) -> Iterator[str]:
    """About the metrics of a policy without mistakes."""
    metrics = spec.get("metrics") or ()
    users = [name for name, one in STRATEGIES.items() if one.needs == "metrics"]
    if metrics and all(one.get("name") not in users for one in spec.get("strategies") or ()):
        yield f"metrics are for the strategy {' or '.join(users)}, which the policy does not name; they have no effect"
    for one in metrics:
        name, source = one.get("name"), one.get("prometheus") or {}
        if one.get("source", "Gateway") == "Gateway" and name not in GATEWAY_METRICS:
            yield f"the gateway has no metric {name}; it has {', '.join(GATEWAY_METRICS)}"
        if one.get("source") == "Resource" and name == "memory":
            yield (
                "engines take their memory when they start, whatever their load: the metric memory scales nothing well"
            )
        if one.get("source") == "Resource" and name not in {"cpu", "memory"}:
            yield f"there is no resource metric {name}; there are cpu and memory"
        if source.get("secretRef") and str(source.get("address", "")).startswith("http:"):
            yield f"the metric {name} has no value: credentials are sent with https alone"
