# SPDX-License-Identifier: Apache-2.0
"""API keys or signed tokens, checked by Envoy before any other filter."""

from __future__ import annotations

from typing import TYPE_CHECKING

from envoy_data_plane.envoy.config.core.v3 import DataSource
from envoy_data_plane.envoy.config.route.v3 import RouteMatch
from envoy_data_plane.envoy.extensions.filters.http.api_key_auth.v3 import ApiKeyAuth, Credential, Forwarding, KeySource
from envoy_data_plane.envoy.extensions.filters.http.jwt_authn.v3 import (
    JwtAuthentication,
    JwtClaimToHeader,
    JwtProvider,
    JwtRequirement,
    JwtRequirementOrList,
    RequirementRule,
)

from controller.gateway.envoy_json import http_filter
from extproc.protocol import CLIENT, TENANT, USER

if TYPE_CHECKING:
    from collections.abc import Sequence

    from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import HttpFilter

    from extproc.config.authentication import ApiKey, Authentication, JwtIssuer


def authentication_filters(authentication: Authentication | None) -> list[HttpFilter]:
    """The first filters of the chain. A request without a valid key or token gets 401."""
    if authentication is None:
        return []
    if authentication.api_keys:
        return [http_filter("envoy.filters.http.api_key_auth", _api_keys(authentication.api_keys))]
    return [http_filter("envoy.filters.http.jwt_authn", _tokens(authentication.jwt))]


def _api_keys(keys: Sequence[ApiKey]) -> ApiKeyAuth:
    return ApiKeyAuth(
        credentials=[Credential(key=one.key, client=one.name) for one in keys],
        # with or without "Bearer "
        key_sources=[KeySource(header="authorization"), KeySource(header="x-api-key")],
        forwarding=Forwarding(header=CLIENT, hide_credentials=True),
    )


def _tokens(issuers: Sequence[JwtIssuer]) -> JwtAuthentication:
    any_of = [JwtRequirement(provider_name=one.name) for one in issuers]
    requires = any_of[0] if len(any_of) == 1 else JwtRequirement(requires_any=JwtRequirementOrList(requirements=any_of))
    return JwtAuthentication(
        providers={one.name: _provider(one) for one in issuers},
        rules=[RequirementRule(match=RouteMatch(prefix="/"), requires=requires)],
    )


def _provider(one: JwtIssuer) -> JwtProvider:
    return JwtProvider(
        issuer=one.issuer,
        audiences=list(one.audiences),
        local_jwks=DataSource(filename=one.jwks_file),
        claim_to_headers=[
            JwtClaimToHeader(header_name=TENANT, claim_name=one.tenant_claim),
            JwtClaimToHeader(header_name=USER, claim_name=one.user_claim),
        ],
    )
