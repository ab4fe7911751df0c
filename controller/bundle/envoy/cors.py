# SPDX-License-Identifier: Apache-2.0
"""CORS: which scripts of other origins may use the answers, as a policy of Envoy's cors filter."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from envoy_data_plane.envoy.extensions.filters.http.cors.v3 import CorsPolicy
from envoy_data_plane.envoy.type.matcher.v3 import RegexMatcher, StringMatcher

if TYPE_CHECKING:
    from extproc.api.http_route import Cors

# The filter's name in the chain, under which routes and virtual hosts have their policies.
CORS_FILTER: Final = "envoy.filters.http.cors"


def cors_policy(cors: Cors) -> CorsPolicy:
    """What the filter answers to a browser's question, and adds to answers for scripts."""
    return CorsPolicy(
        allow_origin_string_match=[_origin(one) for one in cors.allow_origins],
        allow_methods=",".join(cors.allow_methods),
        allow_headers=",".join(cors.allow_headers),
        expose_headers=",".join(cors.expose_headers),
        max_age=str(cors.max_age),
        allow_credentials=cors.allow_credentials,
        # a question is never a request of the backend's own, even if its origin may not ask
        forward_not_matching_preflights=False,
    )


def _origin(origin: str) -> StringMatcher:
    if "*" not in origin:
        return StringMatcher(exact=origin, ignore_case=True)
    # the one * stands for anything that a host name can have, any number of labels included
    regex = ".*" if origin == "*" else "(?i)" + re.escape(origin).replace(r"\*", "[A-Za-z0-9._-]+")
    return StringMatcher(safe_regex=RegexMatcher(regex=regex))
