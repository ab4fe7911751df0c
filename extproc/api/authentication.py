# SPDX-License-Identifier: Apache-2.0
"""How Envoy identifies callers."""

from __future__ import annotations

from datetime import datetime
from hashlib import sha256
from typing import Annotated, ClassVar, Literal

import msgspec

from extproc.api import patterns
from extproc.api.cel import Rule, exactly_one
from extproc.api.quantities import Duration
from extproc.api.spec import Name, NonEmpty, Spec, keyed_by

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
