# SPDX-License-Identifier: Apache-2.0
"""Classes of requests with objectives, by route and priority."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from extproc.api.slo import ObjectiveName

if TYPE_CHECKING:
    from extproc.api.config_snapshot import Snapshot
    from extproc.api.slo import Slo


class ObjectiveClass(msgspec.Struct, frozen=True):
    """A class of a ModelRoute. ``route``: ``namespace/name``. ``targets_s``: seconds, by objective. ``window_s``: over
    which ``share`` of its requests is to meet each objective. ``refuses``: requests that are predicted to miss one.
    """

    route: str
    name: str
    priority: int
    targets_s: Mapping[ObjectiveName, float]
    share: float
    window_s: float
    refuses: bool = False


class ObjectiveTable:
    """The classes of a configuration. ``routes``: the keys of the ModelRoutes that have any."""

    def __init__(self, snapshot: Snapshot | None = None) -> None:
        routes = () if snapshot is None else snapshot.routes
        self._classes = {
            route.metadata.key: sorted((_compiled(route.metadata.key, one) for one in route.spec.slo), key=_falling)
            for route in routes
            if route.spec.slo
        }
        self.routes = self._classes.keys()

    def class_of(self, route: str, priority: int) -> ObjectiveClass | None:
        """That of a request; None: it has none."""
        return next((one for one in self._classes.get(route, ()) if priority >= one.priority), None)

    def refuses_predicted_misses(self, route: str) -> bool:
        """Whether a class of the route refuses requests that are predicted to miss an objective."""
        return any(one.refuses for one in self._classes.get(route, ()))

    def all_classes(self) -> list[ObjectiveClass]:
        """Those of all routes."""
        return [one for classes in self._classes.values() for one in classes]


def _compiled(route: str, spec: Slo) -> ObjectiveClass:
    return ObjectiveClass(
        route,
        spec.name,
        spec.priority,
        dict(spec.targets()),
        spec.share,
        float(spec.window),
        refuses=spec.unmeetable == "Refuse",
    )


def _falling(one: ObjectiveClass) -> int:
    return -one.priority
