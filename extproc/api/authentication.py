# SPDX-License-Identifier: Apache-2.0
"""How Envoy identifies callers: API keys, tokens and certificates."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from extproc.api.config_errors import Finding, Path


from datetime import datetime
from hashlib import sha256
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from extproc.api import spec as patterns
from extproc.api.admission import KeyRateLimit
from extproc.api.budgets import KeyBudget, check_key_budgets
from extproc.api.quantities import Duration
from extproc.api.spec import CelRule, Name, NonEmpty, Spec, exactly_one, list_map_keys

# Key sets are fetched anew within a day.
_LONGEST_S: Final = 86400.0
_ONE_OF: Final = "write apiKeys (or apiKeySecrets, or virtualKeys), jwt or clientCertificates, one of the three"
_DIGEST: Final = re.compile("[0-9a-fA-F]{64}")
# Of patterns of certificates' names; a brace by itself is one, too.
_HOLE: Final = re.compile(r"\{[^{}]*\}|[{}]")
_NEIGHBOURS: Final = re.compile(r"\}\{")
# By kind of key, the members of RFC 7518 and RFC 8037 that Envoy reads.
_MEMBERS: Final = {"RSA": {"n", "e"}, "EC": {"x", "y"}, "oct": {"k"}, "OKP": {"x"}}
Secret = Annotated[str, msgspec.Meta(min_length=8, max_length=512, pattern=patterns.KEY)]
Claim = Annotated[str, msgspec.Meta(min_length=1, max_length=512, pattern=patterns.CLAIM)]
# A name that clients ask for, or its beginning or end: ``llama``, ``sql-*``, ``*-instruct``, ``*``.
ModelPattern = Annotated[str, msgspec.Meta(min_length=1, max_length=512, pattern=patterns.WILDCARD)]
# Names that clients ask for; None: all of them.
Models = Annotated[tuple[ModelPattern, ...], msgspec.Meta(min_length=1, max_length=10_000)] | None
# Whose usage a key may read: that of its whole tenant; None: its own.
Reports = Literal["Tenant"] | None
KeyRateLimits = Annotated[tuple[KeyRateLimit, ...], msgspec.Meta(max_length=4)]
KeyBudgets = Annotated[tuple[KeyBudget, ...], msgspec.Meta(max_length=4)]


class _KeySet(msgspec.Struct, frozen=True):
    """As RFC 7517 has it."""

    keys: list[dict[str, Any]]


def jwks_has_usable_key(text: str | bytes) -> bool:
    """Whether ``text`` is a key set with a key of a kind that Envoy supports. Envoy validates the key's content."""
    try:
        keys = msgspec.json.decode(text, type=_KeySet).keys
    except msgspec.DecodeError:
        return False
    return any(_MEMBERS.get(str(key.get("kty")), {"none"}) <= key.keys() for key in keys)


class ApiKey(Spec, frozen=True):
    """A key that clients send as ``authorization: Bearer KEY`` or ``x-api-key: KEY``, and the caller's identity.

    It has one of ``key``, ``keyFile``, ``keyEnv`` and ``keySHA256``.

    ``name``: for limits by API key and for people. ``key``: the secret. ``key_file``: a file that holds it; the
    bundle's writer reloads it. ``key_env``: a variable of the bundle writer's environment that holds it.
    ``key_sha256``: its SHA-256 in hexadecimal. ``expires_at``: from then on it is refused; ``2030-01-31T00:00:00Z``.
    ``tenant``: the caller's tenant. ``user``: the caller's user, of that tenant. ``id``: in usage; keys of one id are
    one caller, as while a virtual key is rotated. ``rate_limits``, ``budgets``: of this key alone, over all routes.
    """

    CEL: ClassVar = (exactly_one("key", "keyFile", "keyEnv", "keySHA256"),)

    name: Name
    tenant: NonEmpty
    key: Secret | None = None
    key_file: NonEmpty | None = None
    key_env: NonEmpty | None = None
    key_sha256: NonEmpty | None = msgspec.field(default=None, name="keySHA256")
    expires_at: Annotated[datetime, msgspec.Meta(tz=True)] | None = None
    user: Annotated[str, msgspec.Meta(max_length=512, pattern=patterns.NO_CONTROL)] = ""
    # The models and adapters that it is good for, by the names that clients ask for; without it, those of its tenant.
    models: Models = None
    id: Annotated[str, msgspec.Meta(pattern=patterns.KEY_ID)] | None = None
    rate_limits: KeyRateLimits = ()
    budgets: KeyBudgets = ()
    # The key may read the usage of its whole tenant; without it, its own.
    reports: Reports = None

    @property
    def digest(self) -> str | None:
        """The SHA-256 of the key in lower case, None if it is to be read first."""
        if self.key is not None:
            return sha256(self.key.encode()).hexdigest()
        return None if self.key_sha256 is None else self.key_sha256.lower()

    @property
    def usage_id(self) -> str:
        """Its id, else the beginning of its digest; empty if it is to be read first."""
        return self.id or (self.digest or "")[:12]

    def __repr__(self) -> str:
        return f"ApiKey({self.name!r})"


class Tenant(Spec, frozen=True):
    """The models of one tenant. ``name``: as in API keys or tokens. ``models``: by the names that clients ask for."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    models: Models = None


class ApiKeySecret(Spec, frozen=True):
    """API keys in a Secret of a cluster: each key of its data is the name of a client, and its value that client's API
    key. The gateway role watches it and passes on only digests.

    ``name``: of a Secret in the GatewayConfig's namespace. ``tenant``: the keys' tenant; without it, the Secret's
    annotation ``attache.dev/tenant``, or else each client is its own tenant. ``user``: of that tenant; without it,
    the annotation ``attache.dev/user``.
    """

    name: Name
    tenant: NonEmpty | None = None
    user: NonEmpty | None = None
    # The models and adapters that these keys are good for, by the names that clients ask for; without it, those of
    # their tenant.
    models: Models = None
    # These keys may read the usage of their whole tenant; without it, each its own.
    reports: Reports = None


class VirtualKeys(Spec, frozen=True):
    """Keys that ``attache keys`` makes and revokes, in a KeyStore of the directory. ``secret``: in a cluster, the
    Secret in the GatewayConfig's namespace that holds it, under ``keys.json``.
    """

    secret: Name | None = None


class SecretKeyRef(Spec, frozen=True):
    """One value of a Secret in the same namespace. ``name``: the Secret's. ``key``: of its data."""

    name: Name
    key: NonEmpty = "jwks"


class RemoteJwks(Spec, frozen=True):
    """A key set that Envoy fetches from its issuer over TLS at intervals. While the issuer cannot be reached, the last
    set holds.

    ``uri``: its address; the server's certificate must be valid for the host. ``ca_file``: the authorities that sign
    that certificate, in PEM. ``cache_duration``: until the next fetch; the issuer's new keys are accepted after it at
    the latest. ``timeout``: of one fetch.
    """

    uri: Annotated[str, msgspec.Meta(min_length=1, max_length=2048, pattern=patterns.HTTPS_URL)]
    ca_file: NonEmpty = "/etc/ssl/certs/ca-certificates.crt"
    cache_duration: Duration = Duration("5m")
    timeout: Duration = Duration("5s")


class JwtIssuer(Spec, frozen=True):
    """Tokens of one issuer, and the claims that identify the caller. Its key set is one of ``jwks``, ``jwks_file``,
    ``jwks_secret`` and ``remote_jwks``.

    ``name``: for people. ``issuer``: the claim ``iss``. ``jwks_file``: a file with the keys that verify their
    signatures, which the bundle's writer reloads. ``jwks``: the same keys, as text. ``jwks_secret``: the same in a
    Secret of a cluster, which the gateway role watches. ``remote_jwks``: Envoy fetches them. ``audiences``: accepted
    ones. ``tenant_claim`` and ``user_claim``: the claims that name them; a token in which one is missing or is no text
    is refused. No ``user_claim``: users are not distinguished.
    """

    CEL: ClassVar = (
        exactly_one("jwks", "jwksFile", "jwksSecret", "remoteJwks"),
        CelRule("has(self.audiences) != self.anyAudience", "write audiences, or anyAudience: true"),
    )

    name: Name
    issuer: NonEmpty
    jwks_file: NonEmpty | None = None
    jwks: Annotated[str, msgspec.Meta(min_length=1, max_length=1_000_000)] | None = None
    jwks_secret: SecretKeyRef | None = None
    remote_jwks: RemoteJwks | None = None
    audiences: Annotated[tuple[NonEmpty, ...], msgspec.Meta(max_length=32)] = ()
    # Accept tokens that were issued for other services, too.
    any_audience: bool = False
    # Refuse tokens without the claim exp, which would be valid for ever.
    require_expiration: bool = True
    tenant_claim: Claim = "tenant"
    user_claim: Claim | None = "sub"

    @property
    def referenced_file(self) -> str | None:
        """The file that it names: its key set, or who signs the certificate of the host that has it."""
        return self.jwks_file if self.remote_jwks is None else self.remote_jwks.ca_file

    def __repr__(self) -> str:
        return f"JwtIssuer({self.name!r})"


class CertificateTenantPattern(Spec, frozen=True):
    """How client certificates name a tenant. ``name``: for people.

    ``field``: ``URI`` and ``DNS`` are alternative names, ``CommonName`` is of the subject. ``pattern``: the whole
    value, in which ``{tenant}`` and ``{user}`` stand for one or more characters that are not ``/`` (URI), ``.`` (DNS),
    or ``@`` and ``/`` (CommonName): ``spiffe://example.com/{tenant}/{user}``. ``tenant``: the caller's tenant, where
    the pattern has no ``{tenant}``.
    """

    name: Name
    field: Literal["URI", "DNS", "CommonName"]
    pattern: NonEmpty
    tenant: NonEmpty | None = None


class Authentication(Spec, frozen=True):
    """By keys, tokens or client certificates; a request that brings none is answered 401.

    ``api_keys``: known keys. ``api_key_secrets``: more of them, in Secrets of a cluster. ``virtual_keys``: more of
    them, which change without the configuration. ``jwt``: issuers of signed
    tokens. ``client_certificates``: the tenants of client certificates; the first that matches applies; a certificate
    that matches none gets 403.
    """

    CEL: ClassVar = (
        CelRule(
            "(has(self.apiKeys) || has(self.apiKeySecrets) || has(self.virtualKeys) ? 1 : 0) + "
            "(has(self.jwt) ? 1 : 0) + (has(self.clientCertificates) ? 1 : 0) == 1",
            _ONE_OF,
        ),
    )

    api_keys: Annotated[
        tuple[ApiKey, ...], msgspec.Meta(max_length=10_000, extra_json_schema=list_map_keys("name"))
    ] = ()
    api_key_secrets: Annotated[
        tuple[ApiKeySecret, ...], msgspec.Meta(max_length=256, extra_json_schema=list_map_keys("name"))
    ] = ()
    virtual_keys: VirtualKeys | None = None
    jwt: Annotated[tuple[JwtIssuer, ...], msgspec.Meta(max_length=16, extra_json_schema=list_map_keys("name"))] = ()
    client_certificates: Annotated[
        tuple[CertificateTenantPattern, ...], msgspec.Meta(max_length=16, extra_json_schema=list_map_keys("name"))
    ] = ()


def check_authentication(authentication: Authentication) -> Iterator[Finding]:
    """Keys, tokens or certificates, each with a name of its own."""
    path: Path = ("spec", "authentication")
    keys = authentication.api_keys or authentication.api_key_secrets or authentication.virtual_keys is not None
    if sum(map(bool, (keys, authentication.jwt, authentication.client_certificates))) != 1:
        yield path, _ONE_OF
    for field, names in (
        ("apiKeys", [(one.name, one.id) for one in authentication.api_keys]),
        ("apiKeySecrets", [(one.name, None) for one in authentication.api_key_secrets]),
        ("jwt", [(one.name, None) for one in authentication.jwt]),
        ("clientCertificates", [(one.name, None) for one in authentication.client_certificates]),
    ):
        seen: dict[str, str | None] = {}
        for index, (name, key_id) in enumerate(names):
            if name in seen and (key_id is None or seen[name] != key_id):
                yield (*path, field, index, "name"), f"'{name}' is there already; give each a name of its own"
            seen.setdefault(name, key_id)
    yield from _check_keys(authentication.api_keys, path)
    for index, issuer in enumerate(authentication.jwt):
        yield from _check_issuer(issuer, (*path, "jwt", index))
    for index, named in enumerate(authentication.client_certificates):
        yield from _check_certificate_name(named, (*path, "clientCertificates", index))


def _check_keys(keys: Sequence[ApiKey], path: Path) -> Iterator[Finding]:
    known: set[str] = set()
    for index, key in enumerate(keys):
        where: Path = (*path, "apiKeys", index)
        given = (key.key, key.key_file, key.key_env, key.key_sha256)
        if sum(one is not None for one in given) != 1:
            yield where, "write one of key, keyFile, keyEnv and keySHA256"
        if key.key_sha256 is not None and not _DIGEST.fullmatch(key.key_sha256):
            yield (*where, "keySHA256"), "is not a SHA-256; write 64 hexadecimal digits"
        digest = key.digest
        if digest is not None and digest in known:
            field = "keySHA256" if key.key is None else "key"
            yield (*where, field), "another name has this key already; keys tell callers apart"
        known.update(() if digest is None else (digest,))
        yield from check_key_limits(key.rate_limits, key.budgets, where)


def check_key_limits(
    rate_limits: Sequence[KeyRateLimit], budgets: Sequence[KeyBudget], path: Path
) -> Iterator[Finding]:
    """Each of its own limits and budgets limits something."""
    for index, limit in enumerate(rate_limits):
        if limit.is_empty:
            yield (*path, "rateLimits", index), KeyRateLimit.CEL[0].message
    yield from check_key_budgets(budgets, path)


def check_tenants(tenants: Sequence[Tenant]) -> Iterator[Finding]:
    """Each is there once."""
    seen: set[str] = set()
    for index, one in enumerate(tenants):
        if one.name in seen:
            yield ("spec", "tenants", index, "name"), f"'{one.name}' is there already; write each tenant once"
        seen.add(one.name)


def _check_certificate_name(named: CertificateTenantPattern, path: Path) -> Iterator[Finding]:
    holes = _HOLE.findall(named.pattern)
    if any(one not in {"{tenant}", "{user}"} for one in holes) or len(set(holes)) != len(holes):
        yield (*path, "pattern"), "may have {tenant} and {user}, each once, and no other { or }"
    elif _NEIGHBOURS.search(named.pattern):
        yield (*path, "pattern"), "does not say where {tenant} ends and {user} begins; write something between them"
    if ("{tenant}" in holes) == (named.tenant is not None):
        yield path, "write {tenant} in the pattern or tenant, one of the two"


def _check_issuer(issuer: JwtIssuer, path: Path) -> Iterator[Finding]:
    given = (issuer.jwks, issuer.jwks_file, issuer.jwks_secret, issuer.remote_jwks)
    if sum(one is not None for one in given) != 1:
        yield path, "write one of jwks, jwksFile, jwksSecret and remoteJwks"
    if issuer.jwks is not None and not jwks_has_usable_key(issuer.jwks):
        yield (*path, "jwks"), "is no JSON Web Key Set with an RSA, EC, OKP or oct key; copy what the issuer publishes"
    if issuer.remote_jwks is not None:
        yield from _check_remote(issuer.remote_jwks, (*path, "remoteJwks"))
    if bool(issuer.audiences) == issuer.any_audience:
        yield path, "write audiences, or anyAudience: true to accept tokens made out to other services, too"


def _check_remote(remote: RemoteJwks, path: Path) -> Iterator[Finding]:
    try:
        parts = urlsplit(remote.uri)
        is_address = bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address:
        yield (*path, "uri"), "has no host, or no port from 1 to 65535; write https://HOST/PATH"
    for name, value, least_s in (("cacheDuration", remote.cache_duration, 1.0), ("timeout", remote.timeout, 0.001)):
        if not least_s <= value <= _LONGEST_S:
            yield (*path, name), f"Envoy takes no {value} here; write a time from {least_s:g}s to {_LONGEST_S:g}s"
