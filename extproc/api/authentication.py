# SPDX-License-Identifier: Apache-2.0
"""How Envoy identifies callers: API keys, tokens and certificates."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from extproc.api.errors import Finding, Path


from datetime import datetime
from hashlib import sha256
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from extproc.api import patterns
from extproc.api.quantities import Duration
from extproc.api.spec import Name, NonEmpty, Rule, Spec, exactly_one, keyed_by

# Key sets are fetched anew within a day.
_LONGEST_S: Final = 86400.0
_DIGEST: Final = re.compile("[0-9a-fA-F]{64}")
# Of patterns of certificates' names; a brace by itself is one, too.
_HOLE: Final = re.compile(r"\{[^{}]*\}|[{}]")
_NEIGHBOURS: Final = re.compile(r"\}\{")
# By kind of key, the members of RFC 7518 and RFC 8037 that Envoy reads.
_MEMBERS: Final = {"RSA": {"n", "e"}, "EC": {"x", "y"}, "oct": {"k"}, "OKP": {"x"}}


class _KeySet(msgspec.Struct, frozen=True):
    """As RFC 7517 has it."""

    keys: list[dict[str, Any]]


def has_usable_key(text: str | bytes) -> bool:
    """Whether ``text`` is a key set with a key of a kind that Envoy knows. What is in the key, Envoy judges."""
    try:
        keys = msgspec.json.decode(text, type=_KeySet).keys
    except msgspec.DecodeError:
        return False
    return any(_MEMBERS.get(str(key.get("kty")), {"none"}) <= key.keys() for key in keys)


Secret = Annotated[str, msgspec.Meta(min_length=8, max_length=512, pattern=patterns.KEY)]
Claim = Annotated[str, msgspec.Meta(min_length=1, max_length=512, pattern=patterns.CLAIM)]
# A name that clients ask for, or its beginning or end: ``llama``, ``sql-*``, ``*-instruct``, ``*``.
ModelPattern = Annotated[str, msgspec.Meta(min_length=1, max_length=512, pattern=patterns.WILDCARD)]
# Names that clients ask for; None: all of them.
Models = Annotated[tuple[ModelPattern, ...], msgspec.Meta(min_length=1, max_length=10_000)] | None


class ApiKey(Spec, frozen=True):
    """A key that clients send as ``authorization: Bearer KEY`` or ``x-api-key: KEY``, and who that is.

    It has one of ``key``, ``keyFile``, ``keyEnv`` and ``keySHA256``.

    ``name``: for limits by API key and for people. ``key``: the secret. ``key_file``: a file that holds it and that
    the bundle's writer follows. ``key_env``: a variable of the bundle writer's environment that holds it.
    ``key_sha256``: its SHA-256 in hexadecimal. ``expires_at``: from then on it is refused; ``2030-01-31T00:00:00Z``.
    ``tenant``: whose it is. ``user``: of that tenant.
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

    @property
    def digest(self) -> str | None:
        """The SHA-256 of the key in lower case, None if it is to be read first."""
        if self.key is not None:
            return sha256(self.key.encode()).hexdigest()
        return None if self.key_sha256 is None else self.key_sha256.lower()

    def __repr__(self) -> str:
        return f"ApiKey({self.name!r})"


class Tenant(Spec, frozen=True):
    """What one tenant may use. ``name``: as an API key or a token says it. ``models``: by the names that clients ask
    for.
    """

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    models: Models = None


class ApiKeySecret(Spec, frozen=True):
    """API keys in a Secret of a cluster: each key of its data is the name of a client, and its value that client's API
    key. The gateway role follows it, and hands on digests alone.

    ``name``: of a Secret in the GatewayConfig's namespace. ``tenant``: whose the keys are; without it, the Secret's
    annotation ``attache.dev/tenant`` says so, or else each client is a tenant by itself. ``user``: of that tenant;
    without it, the annotation ``attache.dev/user``.
    """

    name: Name
    tenant: NonEmpty | None = None
    user: NonEmpty | None = None
    # What these keys are good for, by the names that clients ask for; without it, what their tenant may use.
    models: Models = None


class SecretKey(Spec, frozen=True):
    """One value of a Secret in the same namespace. ``name``: the Secret's. ``key``: of its data."""

    name: Name
    key: NonEmpty = "jwks"


class RemoteJwks(Spec, frozen=True):
    """A key set that Envoy fetches from its issuer over TLS, and again and again. While the issuer cannot be reached,
    the last set holds.

    ``uri``: where it is; the certificate must be good for its host. ``ca_file``: who signs that certificate, in PEM.
    ``cache_duration``: until the next fetch; keys that the issuer has changed are known after it at the latest.
    ``timeout``: of one fetch.
    """

    uri: Annotated[str, msgspec.Meta(min_length=1, max_length=2048, pattern=patterns.HTTPS_URL)]
    ca_file: NonEmpty = "/etc/ssl/certs/ca-certificates.crt"
    cache_duration: Duration = Duration("5m")
    timeout: Duration = Duration("5s")


class JwtIssuer(Spec, frozen=True):
    """Tokens of one issuer, and which claims say who it is. Its key set is one of ``jwks``, ``jwks_file``,
    ``jwks_secret`` and ``remote_jwks``.

    ``name``: for people. ``issuer``: the claim ``iss``. ``jwks_file``: a file with the keys that sign, which the
    bundle's writer follows. ``jwks``: the same keys, as text. ``jwks_secret``: the same in a Secret of a cluster, which
    the gateway role follows. ``remote_jwks``: Envoy fetches them. ``audiences``: accepted ones. ``tenant_claim`` and
    ``user_claim``: the claims that name them; a token in which one is missing or is no text is refused. No
    ``user_claim``: users are not told apart.
    """

    CEL: ClassVar = (
        exactly_one("jwks", "jwksFile", "jwksSecret", "remoteJwks"),
        Rule("has(self.audiences) != self.anyAudience", "write audiences, or anyAudience: true"),
    )

    name: Name
    issuer: NonEmpty
    jwks_file: NonEmpty | None = None
    jwks: Annotated[str, msgspec.Meta(min_length=1, max_length=1_000_000)] | None = None
    jwks_secret: SecretKey | None = None
    remote_jwks: RemoteJwks | None = None
    audiences: Annotated[tuple[NonEmpty, ...], msgspec.Meta(max_length=32)] = ()
    # Accept tokens that were made out to other services, too.
    any_audience: bool = False
    # Refuse tokens without the claim exp, which would be good for ever.
    require_expiration: bool = True
    tenant_claim: Claim = "tenant"
    user_claim: Claim | None = "sub"

    def __repr__(self) -> str:
        return f"JwtIssuer({self.name!r})"


class CertificateName(Spec, frozen=True):
    """How client certificates name a tenant. ``name``: for people.

    ``field``: ``URI`` and ``DNS`` are alternative names, ``CommonName`` is of the subject. ``pattern``: the whole
    value, in which ``{tenant}`` and ``{user}`` stand for one or more characters that are not ``/`` (URI), ``.`` (DNS),
    or ``@`` and ``/`` (CommonName): ``spiffe://example.com/{tenant}/{user}``. ``tenant``: whose it is, where the
    pattern has no ``{tenant}``.
    """

    name: Name
    field: Literal["URI", "DNS", "CommonName"]
    pattern: NonEmpty
    tenant: NonEmpty | None = None


class Authentication(Spec, frozen=True):
    """By keys, tokens or client certificates; a request that brings none is answered 401.

    ``api_keys``: known keys. ``api_key_secrets``: more of them, in Secrets of a cluster. ``jwt``: issuers of signed
    tokens. ``client_certificates``: whose a client certificate is; the first that fits decides, and one that none fits
    is answered 403.
    """

    CEL: ClassVar = (
        Rule(
            "(has(self.apiKeys) || has(self.apiKeySecrets) ? 1 : 0) + (has(self.jwt) ? 1 : 0) + "
            "(has(self.clientCertificates) ? 1 : 0) == 1",
            "write apiKeys (or apiKeySecrets), jwt or clientCertificates, one of the three",
        ),
    )

    api_keys: Annotated[tuple[ApiKey, ...], msgspec.Meta(max_length=10_000, extra_json_schema=keyed_by("name"))] = ()
    api_key_secrets: Annotated[
        tuple[ApiKeySecret, ...], msgspec.Meta(max_length=256, extra_json_schema=keyed_by("name"))
    ] = ()
    jwt: Annotated[tuple[JwtIssuer, ...], msgspec.Meta(max_length=16, extra_json_schema=keyed_by("name"))] = ()
    client_certificates: Annotated[
        tuple[CertificateName, ...], msgspec.Meta(max_length=16, extra_json_schema=keyed_by("name"))
    ] = ()


def check_authentication(authentication: Authentication) -> Iterator[Finding]:
    """Keys, tokens or certificates, each with a name of its own."""
    path: Path = ("spec", "authentication")
    keys = authentication.api_keys or authentication.api_key_secrets
    if sum(map(bool, (keys, authentication.jwt, authentication.client_certificates))) != 1:
        yield path, "write apiKeys (or apiKeySecrets), jwt or clientCertificates, one of the three"
    for field, names in (
        ("apiKeys", [one.name for one in authentication.api_keys]),
        ("apiKeySecrets", [one.name for one in authentication.api_key_secrets]),
        ("jwt", [one.name for one in authentication.jwt]),
        ("clientCertificates", [one.name for one in authentication.client_certificates]),
    ):
        seen: set[str] = set()
        for index, name in enumerate(names):
            if name in seen:
                yield (*path, field, index, "name"), f"'{name}' is there already; give each a name of its own"
            seen.add(name)
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


def check_tenants(tenants: Sequence[Tenant]) -> Iterator[Finding]:
    """Each is there once."""
    seen: set[str] = set()
    for index, one in enumerate(tenants):
        if one.name in seen:
            yield ("spec", "tenants", index, "name"), f"'{one.name}' is there already; write each tenant once"
        seen.add(one.name)


def _check_certificate_name(named: CertificateName, path: Path) -> Iterator[Finding]:
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
    if issuer.jwks is not None and not has_usable_key(issuer.jwks):
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
