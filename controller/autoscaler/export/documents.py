# SPDX-License-Identifier: Apache-2.0
"""The documents of the external metrics API, external.metrics.k8s.io/v1beta1; pure."""

from __future__ import annotations

from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

from controller.autoscaler.export.exported import METRICS, Exported

if TYPE_CHECKING:
    from collections.abc import Iterable

GROUP: Final = "external.metrics.k8s.io"
VERSION: Final = "v1beta1"
GROUP_VERSION: Final = f"{GROUP}/{VERSION}"
ROOT: Final = f"/apis/{GROUP_VERSION}"


def groups() -> dict[str, Any]:
    """What is served at /apis."""
    return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [_group()]}


def group() -> dict[str, Any]:
    """What is served at /apis/GROUP."""
    return {"kind": "APIGroup", "apiVersion": "v1", **_group()}


def resources() -> dict[str, Any]:
    """The metrics, as resources, which is how this API lists them."""
    one = {"singularName": "", "namespaced": True, "kind": "ExternalMetricValueList", "verbs": ["get"]}
    found = [{"name": name, **one} for name in METRICS]
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": GROUP_VERSION, "resources": found}


def values(metric: str, found: Iterable[Exported], at: str) -> dict[str, Any]:
    """The values of a metric. No value at all is an error to an HPA, which then changes nothing."""
    items = [
        {
            "metricName": metric,
            "metricLabels": dict(one.labels),
            "timestamp": at,
            "value": quantity(one.value(metric)),
        }
        for one in found
    ]
    return {"kind": "ExternalMetricValueList", "apiVersion": GROUP_VERSION, "metadata": {}, "items": items}


def status(code: int, reason: str, message: str) -> dict[str, Any]:
    """A failure, as the API tells it."""
    said = {"status": "Failure", "message": message, "reason": reason, "code": code}
    return {"kind": "Status", "apiVersion": "v1", "metadata": {}, **said}


def quantity(value: float) -> str:
    """As Kubernetes writes it, to the thousandth."""
    milli = int((Decimal(str(value)) * 1000).to_integral_value())
    return str(milli // 1000) if milli % 1000 == 0 else f"{milli}m"


def _group() -> dict[str, Any]:
    version = {"groupVersion": GROUP_VERSION, "version": VERSION}
    return {"name": GROUP, "versions": [version], "preferredVersion": version}
