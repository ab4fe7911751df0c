# SPDX-License-Identifier: Apache-2.0
"""API keys, signed tokens or client certificates, checked by Envoy before any other filter.

These filters lie in files of their own, which Envoy follows: a change holds from the next request on. A change of the
listener would leave connections that are open with the old filters for minutes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from envoy_data_plane.envoy.config.core.v3 import DataSource, ExtensionConfigSource
from envoy_data_plane.envoy.config.rbac.v3 import (
    Permission,
    Policy,
    Principal,
    PrincipalSet,
    RbacAction,
    SourcedMetadata,
)
from envoy_data_plane.envoy.config.rbac.v3 import Rbac as Rules
from envoy_data_plane.envoy.config.route.v3 import RouteMatch
from envoy_data_plane.envoy.extensions.filters.http.jwt_authn.v3 import (
    JwtAuthentication,
    JwtClaimToHeader,
    JwtHeader,
    JwtProvider,
    JwtRequirement,
    JwtRequirementOrList,
    RequirementRule,
)
from envoy_data_plane.envoy.extensions.filters.http.rbac.v3 import Rbac
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import HttpFilter
from envoy_data_plane.envoy.type.matcher.v3 import (
    MetadataMatcher,
    MetadataMatcherPathSegment,
    RegexMatcher,
    StringMatcher,
    ValueMatcher,
)

from controller.bundle.envoy.bootstrap import file_source
from controller.bundle.envoy.client_certificates import known_certificates, named_by_certificates
from controller.bundle.envoy.envoy_json import http_filter, resources_file, to_resource, typed
from controller.bundle.envoy.key_sets import remote_key_set
from controller.bundle.envoy.keys import identified_callers, known_keys
from controller.bundle.envoy.plain import type_url
from extproc.protocol import TENANT, TOKENS_NAMESPACE, USER

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from betterproto2 import Message

    from extproc.api.authentication import Authentication, JwtIssuer

KEYS_FILE: Final = "keys.json"
TOKENS_FILE: Final = "tokens.json"
CALLERS_FILE: Final = "callers.json"
CERTIFICATES_FILE: Final = "certificates.json"
AUTHENTICATION_FILES: Final = (KEYS_FILE, TOKENS_FILE, CALLERS_FILE, CERTIFICATES_FILE)

# Of a claim that names a tenant or a user.
_NAME: Final = r"[^\x00-\x1f\x7f]+"
_JWT_FILTER: Final = TOKENS_NAMESPACE


def authentication_filters(authentication: Authentication | None, directory: str) -> list[HttpFilter]:
    """The first filters of the chain. Without a valid key, token or certificate: 401; if that does not say whose:
    403.
    """
    if authentication is None:
        return []
    followed = [
        HttpFilter(
            name=name,
            config_discovery=ExtensionConfigSource(
                config_source=file_source(directory, file), type_urls=[type_url(message)]
            ),
        )
        for file, (name, message) in _followed(authentication).items()
    ]
    if authentication.jwt:
        return followed
    if authentication.client_certificates:
        return [*followed, http_filter("attache.identified", known_certificates())]
    return [*followed, http_filter("attache.identified", identified_callers())]


def unused_files(authentication: Authentication | None) -> set[str]:
    """Those of AUTHENTICATION_FILES that a bundle with this authentication does not have."""
    return set(AUTHENTICATION_FILES) - (set() if authentication is None else _followed(authentication).keys())


def authentication_files(authentication: Authentication | None) -> Mapping[str, str]:
    """What the filters read, by file."""
    if authentication is None:
        return {}
    return {
        file: resources_file([to_resource(typed(name, message))])
        for file, (name, message) in _followed(authentication).items()
    }


def _followed(authentication: Authentication) -> Mapping[str, tuple[str, Message]]:
    """By file, the filter's name and configuration, in the order of the chain."""
    if authentication.client_certificates:
        script = named_by_certificates(authentication.client_certificates)
        return {CERTIFICATES_FILE: ("attache.certificates", script)}
    if not authentication.jwt:
        return {KEYS_FILE: ("attache.keys", known_keys(authentication.api_keys))}
    return {
        TOKENS_FILE: (_JWT_FILTER, _tokens(authentication.jwt)),
        CALLERS_FILE: ("envoy.filters.http.rbac", _named_callers(authentication.jwt)),
    }


def _tokens(issuers: Sequence[JwtIssuer]) -> JwtAuthentication:
    any_of = [JwtRequirement(provider_name=one.name) for one in issuers]
    requires = any_of[0] if len(any_of) == 1 else JwtRequirement(requires_any=JwtRequirementOrList(requirements=any_of))
    return JwtAuthentication(
        providers={one.name: _provider(one) for one in issuers},
        rules=[RequirementRule(match=RouteMatch(prefix="/"), requires=requires)],
    )


def _provider(one: JwtIssuer) -> JwtProvider:
    claims = [(TENANT, one.tenant_claim), *([] if one.user_claim is None else [(USER, one.user_claim)])]
    return JwtProvider(
        issuer=one.issuer,
        audiences=list(one.audiences),
        require_expiration=one.require_expiration,
        local_jwks=DataSource(inline_string=one.jwks or "") if one.remote_jwks is None else None,
        remote_jwks=None if one.remote_jwks is None else remote_key_set(one.name, one.remote_jwks),
        # Said here, or Envoy takes tokens from the query string as well, which lands in logs. What follows the first
        # space is the token: schemes are case-insensitive, and Envoy's prefixes are not.
        from_headers=[JwtHeader(name="authorization", value_prefix=" ")],
        payload_in_metadata=one.name,
        claim_to_headers=[JwtClaimToHeader(header_name=header, claim_name=claim) for header, claim in claims],
    )


def _named_callers(issuers: Sequence[JwtIssuer]) -> Rbac:
    """Lets tokens through that name their tenant and user as text; Envoy passes over claims that it does not find."""
    callers = []
    for one in issuers:
        claims = [one.tenant_claim, *([] if one.user_claim is None else [one.user_claim])]
        named = [
            Principal(sourced_metadata=SourcedMetadata(metadata_matcher=_is_name((one.name, *claim.split(".")))))
            for claim in claims
        ]
        callers.append(Principal(and_ids=PrincipalSet(ids=named)))
    anything = [Permission(any=True)]
    return Rbac(
        rules=Rules(action=RbacAction.ALLOW, policies={"named": Policy(permissions=anything, principals=callers)})
    )


def _is_name(path: tuple[str, ...]) -> MetadataMatcher:
    return MetadataMatcher(
        filter=_JWT_FILTER,
        path=[MetadataMatcherPathSegment(key=step) for step in path],
        value=ValueMatcher(string_match=StringMatcher(safe_regex=RegexMatcher(regex=_NAME))),
    )
