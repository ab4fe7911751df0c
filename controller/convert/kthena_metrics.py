# SPDX-License-Identifier: Apache-2.0
"""Kthena's metrics with their sources, as the metrics of a policy of ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from controller.convert.reading import quantity

if TYPE_CHECKING:
    from controller.convert.reading import Fields

# Theirs, where nothing is written.
_PORT: Final = 8100
_PATH: Final = "/metrics"


class Source(msgspec.Struct, frozen=True):
    """``name``: of the metric in the policy; empty: of all that have no other. ``block``: what ours has for it.
    ``series``: how the engine calls it, if otherwise.
    """

    name: str
    block: Mapping[str, Any]
    series: str = ""


class Metrics(msgspec.Struct, frozen=True):
    """``values``: by name, what one replica should have."""

    values: Mapping[str, float]

    @staticmethod
    def read(metrics: Sequence[Fields]) -> Metrics:
        """Raises Invalid. The first versions called the name ``metricName``."""
        return Metrics(
            {
                one.need("metricName" if "metricName" in one else "name"): quantity(
                    one.take("targetValue"), f"{one.where}.targetValue"
                )
                for one in metrics
            }
        )

    def resolved(self, sources: Sequence[Source], where: str, warnings: list[str]) -> list[dict[str, Any]]:
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
                source = Source(name, _engine(_PORT, _PATH))
            found.append({"name": source.series or name, "value": value, **source.block})
        return found


def same_everywhere(read: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]] | None:
    """The metrics that all targets have; None if they differ."""
    first, *others = [one for one in read if one] or [[]]
    return first if all(one == first for one in others) else None


def sources_of(target: Fields, warnings: list[str]) -> list[Source]:
    """Of ``metricSources``, or of ``metricEndpoint``, as it was earlier; raises Invalid."""
    found = []
    if "metricEndpoint" in target:
        found.append(Source("", _of_endpoint(target.below("metricEndpoint"), warnings)))
    for name, one in target.by_name("metricSources").items():
        # said twice in their earlier form
        one.take("type")
        if "prometheus" in one:
            server = one.below("prometheus")
            block = {"address": server.need("serverURL").rstrip("/"), "query": server.need("query")}
            if server.take("auth"):
                warnings.append(f"{server.where}.auth: name a Secret as secretRef in the policy")
            found.append(Source(name, {"source": "Prometheus", "prometheus": block}))
        else:
            pod = one.below("pod")
            series = str(pod.take("name", name))
            found.append(Source(name, _of_endpoint(pod, warnings), series))
    return found


def _of_endpoint(endpoint: Fields, warnings: list[str]) -> dict[str, Any]:
    if endpoint.take("labelSelector"):
        text = "not carried over; the page of each entry pod is read"
        warnings.append(f"{endpoint.where}.labelSelector: {text}")
    return _engine(endpoint.number("port", _PORT), str(endpoint.take("uri", _PATH)))


def _engine(port: int, path: str) -> dict[str, Any]:
    return {"source": "Engine", "engine": {"port": port, "path": path}}
