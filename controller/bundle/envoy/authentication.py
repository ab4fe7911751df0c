# SPDX-License-Identifier: Apache-2.0
"""API keys, signed tokens or client certificates, checked by Envoy before any other filter.

These filters are in files of their own, which Envoy watches: a change applies from the next request on. After a change
of the listener, open connections would keep the old filters for minutes.

If a Lua script fails, Envoy lets the request pass. So a second filter behind each script checks a result that only the
script can write: a header that Envoy strips from clients' requests, or metadata.
"""

from __future__ import annotations

import base64
import json
import math
import re
from hashlib import sha256
from itertools import count, islice
from typing import TYPE_CHECKING, Final
from urllib.parse import quote, urlsplit

import msgspec
from envoy_data_plane.envoy.config.cluster.v3 import Cluster, ClusterDiscoveryType, ClusterDnsLookupFamily
from envoy_data_plane.envoy.config.core.v3 import (
    Address,
    DataSource,
    ExtensionConfigSource,
    HttpUri,
    SocketAddress,
    TransportSocket,
)
from envoy_data_plane.envoy.config.endpoint.v3 import ClusterLoadAssignment, Endpoint, LbEndpoint, LocalityLbEndpoints
from envoy_data_plane.envoy.config.rbac.v3 import (
    Permission,
    Policy,
    Principal,
    PrincipalSet,
    RbacAction,
    SourcedMetadata,
)
from envoy_data_plane.envoy.config.rbac.v3 import Rbac as Rules
from envoy_data_plane.envoy.config.route.v3 import HeaderMatcher, RouteMatch
from envoy_data_plane.envoy.extensions.filters.http.jwt_authn.v3 import (
    JwksAsyncFetch,
    JwtAuthentication,
    JwtClaimToHeader,
    JwtHeader,
    JwtProvider,
    JwtRequirement,
    JwtRequirementOrList,
    RequirementRule,
)
from envoy_data_plane.envoy.extensions.filters.http.jwt_authn.v3 import RemoteJwks as EnvoysRemoteJwks
from envoy_data_plane.envoy.extensions.filters.http.rbac.v3 import Rbac
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import HttpFilter
from envoy_data_plane.envoy.extensions.transport_sockets.tls.v3 import (
    CertificateValidationContext,
    CommonTlsContext,
    SubjectAltNameMatcher,
    SubjectAltNameMatcherSanType,
    UpstreamTlsContext,
)
from envoy_data_plane.envoy.type.matcher.v3 import (
    MetadataMatcher,
    MetadataMatcherPathSegment,
    RegexMatcher,
    StringMatcher,
    ValueMatcher,
)

from controller.bundle.envoy.bootstrap import file_config_source
from controller.bundle.envoy.envoy_json import (
    PackedMessage,
    duration,
    http_filter,
    resources_file,
    to_resource,
    type_url,
    typed_extension,
)
from controller.bundle.envoy.lua import lua_filter_config
from extproc.api.error_hints import is_ip
from extproc.wire_names import CLIENT, REPORTS, TENANT, TOKENS_NAMESPACE, USER, truncate_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from betterproto2 import Message
    from envoy_data_plane.envoy.extensions.filters.http.lua.v3 import Lua

    from extproc.api.authentication import ApiKey, Authentication, CertificateTenantPattern, JwtIssuer, RemoteJwks

KEYS_FILE: Final = "keys.json"
TOKENS_FILE: Final = "tokens.json"
CALLERS_FILE: Final = "callers.json"
CERTIFICATES_FILE: Final = "certificates.json"
AUTHENTICATION_FILES: Final = (KEYS_FILE, TOKENS_FILE, CALLERS_FILE, CERTIFICATES_FILE)
# Of a claim that names a tenant or a user.
_CLAIM_NAME: Final = r"[^\x00-\x1f\x7f]+"
# One token; of several headers Envoy compares all, with commas between them.
_BEARER: Final = "(?i)bearer +[a-z0-9._~+/=-]+"
_NOWHERE: Final = "x-attache-nowhere"
# No name that a configuration could have.
_NO_ISSUER: Final = "(none)"
_JWT_FILTER: Final = TOKENS_NAMESPACE
# Longer values are no key of ours, and are not hashed.
_MOST_KEY_BYTES: Final = 4096
# SHA-256 as FIPS 180-4 has it; numbers are 32 bits wide and signed, as LuaJIT's bit operations return them.
_KEYS_SCRIPT: Final = """
local CLIENTS = {@CLIENTS@}
local EXPIRES_AT_MS = {@EXPIRES@}
local REPORTS = {@REPORTS_OF@}
local INITIAL = {@INITIAL@}
local ROUND = {@ROUND@}
local band, bnot, bxor, bor = bit.band, bit.bnot, bit.bxor, bit.bor
local lshift, ror, rshift, tobit, tohex = bit.lshift, bit.ror, bit.rshift, bit.tobit, bit.tohex

local function compress(state, text, at, w)
  for i = 1, 16 do
    local b1, b2, b3, b4 = string.byte(text, at + 4 * i - 4, at + 4 * i - 1)
    w[i] = bor(lshift(b1, 24), lshift(b2, 16), lshift(b3, 8), b4)
  end
  for i = 17, 64 do
    local x, y = w[i - 15], w[i - 2]
    local s0 = bxor(ror(x, 7), ror(x, 18), rshift(x, 3))
    local s1 = bxor(ror(y, 17), ror(y, 19), rshift(y, 10))
    w[i] = tobit(w[i - 16] + s0 + w[i - 7] + s1)
  end
  local a, b, c, d, e, f, g, h = unpack(state)
  for i = 1, 64 do
    local s1 = bxor(ror(e, 6), ror(e, 11), ror(e, 25))
    local t1 = h + s1 + bxor(band(e, f), band(bnot(e), g)) + ROUND[i] + w[i]
    local s0 = bxor(ror(a, 2), ror(a, 13), ror(a, 22))
    local t2 = s0 + bxor(band(a, b), band(a, c), band(b, c))
    h, g, f, e, d, c, b, a = g, f, e, tobit(d + t1), c, b, a, tobit(t1 + t2)
  end
  for i, value in ipairs({a, b, c, d, e, f, g, h}) do
    state[i] = tobit(state[i] + value)
  end
end

local function sha256(text)
  local size = #text
  local bits = {}
  for i = 0, 7 do
    bits[8 - i] = string.char(math.floor(size * 8 / 256 ^ i) % 256)
  end
  text = text .. "\\128" .. string.rep("\\0", (55 - size) % 64) .. table.concat(bits)
  local state, w = {unpack(INITIAL)}, {}
  for at = 1, #text, 64 do
    compress(state, text, at, w)
  end
  for i = 1, 8 do
    state[i] = tohex(state[i])
  end
  return table.concat(state)
end

-- With or without "Bearer" before it.
local function key_in(value)
  local scheme, rest = string.match(value, "^(%a+) +(.*)$")
  return scheme and string.lower(scheme) == "bearer" and rest or value
end

function envoy_on_request(handle)
  local headers = handle:headers()
  local value = headers:get("authorization")
  if not value or value == "" then
    value = headers:get("x-api-key") or ""
  end
  local client, reports
  if #value > 0 and #value <= @MOST_BYTES@ then
    local digest = sha256(key_in(value))
    local expires_at_ms = EXPIRES_AT_MS[digest]
    if not expires_at_ms or handle:timestamp() < expires_at_ms then
      client, reports = CLIENTS[digest], REPORTS[digest]
    end
  end
  if not client then
    handle:respond({[":status"] = "401"}, "")
    return
  end
  headers:remove("authorization")
  headers:remove("x-api-key")
  headers:replace("@CLIENT@", client)
  if reports then
    headers:replace("@REPORTS@", reports)
  end
end
"""
_CERTIFICATE_NAMESPACE: Final = "attache.certificate"
_CERTIFICATE_KEY: Final = "name"
_HOLE: Final = re.compile(r"\{(tenant|user)\}")
# What {tenant} and {user} do not reach over; no control character, as the names go into headers.
_HOLE_ENDS: Final = {"URI": "/", "DNS": "%.", "CommonName": "/@"}
_CERTIFICATES_SCRIPT: Final = """
local NAMES = {@NAMES@}

local function values_of(ssl, field)
  if field == "URI" then return ssl:uriSanPeerCertificate() end
  if field == "DNS" then return ssl:dnsSansPeerCertificate() end
  local subject = ssl:parsedSubjectPeerCertificate()
  return subject and {subject:commonName()} or {}
end

-- Tenant and user; nothing if no value fits, or two do.
local function read(ssl, one)
  local found
  for _, value in ipairs(values_of(ssl, one.field)) do
    if one.field == "DNS" then value = string.lower(value) end
    local groups = {string.match(value, one.pattern)}
    if #groups > 0 then
      if found then return nil end
      found = groups
    end
  end
  return found and (one.tenant or found[one.tenant_at]), found and found[one.user_at]
end

function envoy_on_request(handle)
  local headers = handle:headers()
  headers:remove("@TENANT@")
  headers:remove("@USER@")
  local ssl = handle:streamInfo():downstreamSslConnection()
  if not ssl or not ssl:peerCertificateValidated() then
    handle:respond({[":status"] = "401"}, "")
    return
  end
  for _, one in ipairs(NAMES) do
    local tenant, user = read(ssl, one)
    if tenant then
      headers:replace("@TENANT@", tenant)
      if user then headers:replace("@USER@", user) end
      handle:streamInfo():dynamicMetadata():set("@NAMESPACE@", "@KEY@", one.name)
      return
    end
  end
end
"""
_HTTPS_PORT: Final = 443
# After a fetch that failed.
_RETRY_S: Final = 2.0


def authentication_filters(authentication: Authentication | None, directory: str) -> list[HttpFilter]:
    """The first filters of the chain. Without a valid key, token or certificate: 401; if that names no caller: 403."""
    if authentication is None:
        return []
    watched = [
        HttpFilter(
            name=name,
            config_discovery=ExtensionConfigSource(
                config_source=file_config_source(directory, file), type_urls=[type_url(message)]
            ),
        )
        for file, (name, message) in _watched_filters(authentication).items()
    ]
    if authentication.jwt:
        return watched
    if authentication.client_certificates:
        return [*watched, http_filter("attache.identified", client_certificate_rbac())]
    return [*watched, http_filter("attache.identified", api_key_rbac())]


def unused_authentication_files(authentication: Authentication | None) -> set[str]:
    """Those of AUTHENTICATION_FILES that a bundle with this authentication does not have."""
    return set(AUTHENTICATION_FILES) - (set() if authentication is None else _watched_filters(authentication).keys())


def authentication_files(authentication: Authentication | None) -> Mapping[str, str]:
    """What the filters read, by file."""
    if authentication is None:
        return {}
    return {
        file: resources_file([to_resource(typed_extension(name, message))])
        for file, (name, message) in _watched_filters(authentication).items()
    }


def _watched_filters(authentication: Authentication) -> Mapping[str, tuple[str, Message]]:
    """By file, the filter's name and configuration, in the order of the chain."""
    if authentication.client_certificates:
        script = client_certificate_filter(authentication.client_certificates)
        return {CERTIFICATES_FILE: ("attache.certificates", script)}
    if not authentication.jwt:
        return {KEYS_FILE: ("attache.keys", api_key_filter(authentication.api_keys))}
    return {
        TOKENS_FILE: (_JWT_FILTER, _tokens(authentication.jwt)),
        CALLERS_FILE: ("envoy.filters.http.rbac", _named_callers(authentication.jwt)),
    }


def _tokens(issuers: Sequence[JwtIssuer]) -> JwtAuthentication:
    any_of = [JwtRequirement(provider_name=one.name) for one in issuers]
    requires = any_of[0] if len(any_of) == 1 else JwtRequirement(requires_any=JwtRequirementOrList(requirements=any_of))
    bearer = HeaderMatcher(name="authorization", string_match=StringMatcher(safe_regex=RegexMatcher(regex=_BEARER)))
    return JwtAuthentication(
        providers={one.name: _provider(one) for one in issuers} | {_NO_ISSUER: _no_token(issuers[0])},
        rules=[
            RequirementRule(match=RouteMatch(prefix="/", headers=[bearer]), requires=requires),
            RequirementRule(match=RouteMatch(prefix="/"), requires=JwtRequirement(provider_name=_NO_ISSUER)),
        ],
    )


def _no_token(issuer: JwtIssuer) -> JwtProvider:
    """For requests without a Bearer token. Envoy strips its header from clients' requests, so it never finds a token,
    and its keys make no difference.
    """
    return JwtProvider(
        issuer=_NO_ISSUER,
        local_jwks=DataSource(inline_string=issuer.jwks or SIGNS_NOTHING),
        from_headers=[JwtHeader(name=_NOWHERE)],
    )


def _key_that_signs_nothing() -> str:
    """A key set without a known private key: a point of the curve P-256 whose x coordinate is a digest of a text.

    Source of the curve: NIST SP 800-186, 3.2.1.3.
    """
    prime = 2**256 - 2**224 + 2**192 + 2**96 - 1
    b = 0x5AC635D8AA3A93E7B3EBBD55769886BC651D06B0CC53B0F63BCE3C3E27D2604B
    x = int.from_bytes(sha256(b"attache: this key signs nothing").digest()) % prime
    while pow(x**3 - 3 * x + b, (prime - 1) // 2, prime) != 1:
        x += 1
    y = pow(x**3 - 3 * x + b, (prime + 1) // 4, prime)
    key = {"kty": "EC", "crv": "P-256", "x": _base64url(x), "y": _base64url(y), "kid": "signs-nothing"}
    return json.dumps({"keys": [key]})


def _base64url(number: int) -> str:
    return base64.urlsafe_b64encode(number.to_bytes(32)).decode().rstrip("=")


SIGNS_NOTHING: Final = _key_that_signs_nothing()


def _provider(one: JwtIssuer) -> JwtProvider:
    claims = [(TENANT, one.tenant_claim), *([] if one.user_claim is None else [(USER, one.user_claim)])]
    return JwtProvider(
        issuer=one.issuer,
        audiences=list(one.audiences),
        require_expiration=one.require_expiration,
        local_jwks=DataSource(inline_string=one.jwks or "") if one.remote_jwks is None else None,
        remote_jwks=None if one.remote_jwks is None else remote_key_set(one.name, one.remote_jwks),
        # Set explicitly: by default Envoy takes tokens from the query string as well, and query strings are logged. The
        # token follows the first space: schemes are case-insensitive, and Envoy's prefixes are not. The rules check the
        # scheme.
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
        value=ValueMatcher(string_match=StringMatcher(safe_regex=RegexMatcher(regex=_CLAIM_NAME))),
    )


def api_key_filter(keys: Sequence[ApiKey]) -> Lua:
    """The filter for API keys: it writes the name of the caller's key into a header and removes the key. If the key may
    read its tenant's usage, it writes the tenant, too.

    A request without a known key gets 401. Keys that have not been read yet are unknown. Envoy's own filter for API
    keys compares them in plain text, so every bundle, and every page of Envoy that shows its configuration, would hold
    them all. The script compares SHA-256 digests, however a key was given.
    """
    by_digest = {one.digest: one for one in reversed(keys) if one.digest is not None}
    expires = {
        digest: int(one.expires_at.timestamp() * 1000)
        for digest, one in by_digest.items()
        if one.expires_at is not None
    }
    marks = {
        "@CLIENTS@": ",".join(f'["{digest}"]="{one.name}"' for digest, one in sorted(by_digest.items())),
        "@EXPIRES@": ",".join(f'["{digest}"]={at_ms}' for digest, at_ms in sorted(expires.items())),
        "@REPORTS_OF@": ",".join(
            f'["{digest}"]="{usage_reports_header(one.tenant)}"'
            for digest, one in sorted(by_digest.items())
            if one.reports is not None
        ),
        "@INITIAL@": ",".join(f"bit.tobit({math.isqrt(prime << 64) % 2**32})" for prime in islice(_primes(), 8)),
        "@ROUND@": ",".join(f"bit.tobit({_cube_root(prime << 96) % 2**32})" for prime in islice(_primes(), 64)),
        "@MOST_BYTES@": str(_MOST_KEY_BYTES),
        "@CLIENT@": CLIENT,
        "@REPORTS@": REPORTS,
    }
    return lua_filter_config(_KEYS_SCRIPT, marks)


def usage_reports_header(tenant: str) -> str:
    """The header that lets a key read the usage of ``tenant``. No name is changed on its way, neither by Lua nor by
    HTTP, which cuts spaces off.
    """
    return quote(truncate_name(tenant), safe="")


def api_key_rbac() -> Rbac:
    """Admits callers that ``api_key_filter`` has named."""
    named = Permission(header=HeaderMatcher(name=CLIENT, present_match=True))
    policy = Policy(permissions=[named], principals=[Principal(any=True)])
    return Rbac(rules=Rules(action=RbacAction.ALLOW, policies={"identified": policy}))


def _primes() -> Iterator[int]:
    return (number for number in count(2) if all(number % lower for lower in range(2, number)))


def _cube_root(number: int) -> int:
    """Rounded down."""
    low, high = 0, 1 << (number.bit_length() // 3 + 1)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if middle**3 <= number else (low, middle - 1)
    return low


def client_certificate_filter(names: Sequence[CertificateTenantPattern]) -> Lua:
    """The filter for client certificates: it writes a certificate's tenant and user into headers.

    Envoy has checked the certificate in the handshake. The script reads its names from the connection, never from a
    request, and first removes the request's own tenant and user. Without a certificate: 401. If no name fits, it writes
    no metadata.
    """
    marks = {
        "@NAMES@": ", ".join(_name_entry(one) for one in names),
        "@TENANT@": TENANT,
        "@USER@": USER,
        "@NAMESPACE@": _CERTIFICATE_NAMESPACE,
        "@KEY@": _CERTIFICATE_KEY,
    }
    return lua_filter_config(_CERTIFICATES_SCRIPT, marks)


def client_certificate_rbac() -> Rbac:
    """Admits callers that ``client_certificate_filter`` has named; others get 403."""
    named = MetadataMatcher(
        filter=_CERTIFICATE_NAMESPACE,
        path=[MetadataMatcherPathSegment(key=_CERTIFICATE_KEY)],
        value=ValueMatcher(present_match=True),
    )
    caller = Principal(sourced_metadata=SourcedMetadata(metadata_matcher=named))
    policy = Policy(permissions=[Permission(any=True)], principals=[caller])
    return Rbac(rules=Rules(action=RbacAction.ALLOW, policies={"named": policy}))


def certificate_lua_pattern(one: CertificateTenantPattern) -> str:
    """Its pattern as Lua writes it, for the whole value."""
    text = one.pattern.lower() if one.field == "DNS" else one.pattern
    pieces = _HOLE.split(text)
    # every second piece is the name of a hole
    literals = [re.sub(r"([^A-Za-z0-9\x80-\U0010ffff])", r"%\1", piece) for piece in pieces[::2]]
    return "^" + f"([^{_HOLE_ENDS[one.field]}%c%z]+)".join(literals) + "$"


def _name_entry(one: CertificateTenantPattern) -> str:
    holes = _HOLE.findall(one.pattern)
    fields = {"name": _quoted(one.name), "field": _quoted(one.field), "pattern": _quoted(certificate_lua_pattern(one))}
    if one.tenant is not None:
        fields["tenant"] = _quoted(one.tenant)
    for hole in holes:
        fields[f"{hole}_at"] = str(holes.index(hole) + 1)
    # indexing with nil would fail: 0 is never there
    for missing in {"tenant", "user"} - set(holes):
        fields[f"{missing}_at"] = "0"
    return "{" + ", ".join(f"{name} = {value}" for name, value in sorted(fields.items())) + "}"


def _quoted(text: str) -> str:
    """As a string of Lua, which spells quotes and backslashes as JSON does; there are no control characters."""
    return msgspec.json.encode(text).decode()


def remote_key_set(issuer: str, remote: RemoteJwks) -> EnvoysRemoteJwks:
    """How Envoy fetches the key set of ``issuer``, which is its name in the configuration.

    Sets are fetched beside the requests; only the first requests after a start wait for one. A fetched set holds until
    the next one arrives, however long that takes: while an issuer is unreachable, its tokens stay valid. A set that a
    request has waited for holds for ``cacheDuration``, in which the next one is fetched. After a change of this part of
    the configuration Envoy starts again without a set.

    Envoy could hold the listener back until the first set is here, but not where the filter comes from a watched file:
    it would never fetch after a change.
    """
    return EnvoysRemoteJwks(
        http_uri=HttpUri(uri=remote.uri, cluster=_key_set_cluster_name(issuer), timeout=duration(remote.timeout)),
        cache_duration=duration(remote.cache_duration),
        # fast: the listener serves before the first set is here, and a request then waits for it
        async_fetch=JwksAsyncFetch(fast_listener=True, failed_refetch_duration=duration(_RETRY_S)),
    )


def key_set_clusters(authentication: Authentication | None) -> list[dict[str, object]]:
    """A cluster for each issuer with a remote key set, as resources of xDS."""
    issuers = () if authentication is None else authentication.jwt
    return [
        to_resource(_key_set_cluster(_key_set_cluster_name(one.name), one.remote_jwks))
        for one in issuers
        if one.remote_jwks is not None
    ]


def _key_set_cluster_name(issuer: str) -> str:
    return f"jwks/{issuer}"


def _key_set_cluster(name: str, remote: RemoteJwks) -> Cluster:
    parts = urlsplit(remote.uri)
    host, port = parts.hostname or "", parts.port or _HTTPS_PORT
    is_address = is_ip(host)
    endpoint = Endpoint(address=Address(socket_address=SocketAddress(address=host, port_value=port)))
    return Cluster(
        name=name,
        type=ClusterDiscoveryType.STATIC if is_address else ClusterDiscoveryType.STRICT_DNS,
        dns_lookup_family=ClusterDnsLookupFamily.V4_PREFERRED,
        connect_timeout=duration(remote.timeout),
        load_assignment=ClusterLoadAssignment(
            cluster_name=name, endpoints=[LocalityLbEndpoints(lb_endpoints=[LbEndpoint(endpoint=endpoint)])]
        ),
        # its keys decide which callers are admitted
        transport_socket=TransportSocket(
            name="envoy.transport_sockets.tls", typed_config=PackedMessage(upstream_tls(host, remote.ca_file))
        ),
    )


def upstream_tls(host: str, ca_file: str) -> UpstreamTlsContext:
    """TLS to a server that must show a certificate for ``host``, signed by an authority in ``ca_file``."""
    is_address = is_ip(host)
    kind = SubjectAltNameMatcherSanType.IP_ADDRESS if is_address else SubjectAltNameMatcherSanType.DNS
    return UpstreamTlsContext(
        sni="" if is_address else host,
        common_tls_context=CommonTlsContext(
            validation_context=CertificateValidationContext(
                trusted_ca=DataSource(filename=ca_file),
                match_typed_subject_alt_names=[SubjectAltNameMatcher(san_type=kind, matcher=StringMatcher(exact=host))],
            )
        ),
    )
