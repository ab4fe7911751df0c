# SPDX-License-Identifier: Apache-2.0
"""Copies of requests: the routes that make them, and the listener to which they go.

Envoy's mirror knows no metadata of the request, so an engine cannot be chosen for the copy in advance. It goes to a
listener of Envoy's own instead, which asks extproc again. The streams of that listener have a mark, and the copies a
header with what extproc has ordered; elsewhere that header is removed and means nothing. The listener's socket is in
the bundle's directory, and only Envoy's user can connect to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, cast

from envoy_data_plane.envoy.config.common.mutation_rules.v3 import HeaderMutation
from envoy_data_plane.envoy.config.core.v3 import (
    HeaderValue,
    HeaderValueOption,
    HeaderValueOptionHeaderAppendAction,
)
from envoy_data_plane.envoy.config.route.v3 import (
    HeaderMatcher,
    Route,
    RouteAction,
    RouteActionRequestMirrorPolicy,
    RouteMatch,
)

from controller.bundle.envoy.envoy_json import to_plain
from extproc.wire_names import MIRROR, MIRROR_CLUSTER, NAMESPACE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from extproc.api.model_route import ModelRoute

# The listener and its routes; as part of the names of Envoy's statistics, too.
MIRRORED: Final = "attache_mirrored"
MIRRORED_ROUTES_FILE: Final = "rds/mirrored.json"


def has_mirror(routes: Iterable[ModelRoute]) -> bool:
    """Whether some request is."""
    return any(rule.mirror is not None for route in routes for rule in route.spec.rules)


def mirrored_routes(decided: Iterable[dict[str, object]]) -> list[dict[str, object]]:
    """The same routes for requests of which extproc has ordered a copy: they stand before ``decided``."""
    frame = cast("dict[str, Any]", to_plain(_mirrored()))
    found = []
    for one in cast("Iterable[dict[str, Any]]", decided):
        headers = [*frame["match"]["headers"], *one["match"].get("headers", ())]
        policies = frame["route"]["request_mirror_policies"]
        found.append(
            {
                **one,
                "name": f"{one['name']}/mirrored",
                "match": {**one["match"], "headers": headers},
                "route": {**one["route"], "request_mirror_policies": policies},
            }
        )
    return found


def _mirrored() -> Route:
    ordered = HeaderValueOption(
        header=HeaderValue(key=MIRROR, value=f"%DYNAMIC_METADATA({NAMESPACE}:{MIRROR})%"),
        append_action=HeaderValueOptionHeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD,
    )
    policy = RouteActionRequestMirrorPolicy(
        cluster=MIRROR_CLUSTER,
        disable_shadow_host_suffix_append=True,
        request_headers_mutations=[HeaderMutation(append=ordered)],
    )
    return Route(
        match=RouteMatch(prefix="/", headers=[HeaderMatcher(name=MIRROR, present_match=True)]),
        route=RouteAction(cluster=MIRROR_CLUSTER, request_mirror_policies=[policy]),
    )
