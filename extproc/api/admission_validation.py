# SPDX-License-Identifier: Apache-2.0
"""Checks of limits, queues and authentication beyond their shape."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from extproc.api.key_sets import has_usable_key

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from extproc.api.admission import FlowControl, RateLimit
    from extproc.api.authentication import (
        ApiKey,
        Authentication,
        CertificateName,
        JwtIssuer,
        RemoteJwks,
        Tenant,
    )
    from extproc.api.errors import Finding, Path

# Key sets are fetched anew within a day.
_LONGEST_S: Final = 86400.0
_DIGEST: Final = re.compile("[0-9a-fA-F]{64}")
# Of patterns of certificates' names; a brace by itself is one, too.
_HOLE: Final = re.compile(r"\{[^{}]*\}|[{}]")
_NEIGHBOURS: Final = re.compile(r"\}\{")


def check_limits(limits: Sequence[RateLimit]) -> Iterator[Finding]:
    """Each limits something; the field 'header' goes with ``per: Header``."""
    for index, limit in enumerate(limits):
        path: Path = ("spec", "rateLimits", index)
        if not any((limit.requests, limit.input_tokens, limit.output_tokens, limit.total_tokens)):
            yield path, "limits nothing; write requests, inputTokens, outputTokens or totalTokens"
        if (limit.per == "Header") != (limit.header is not None):
            yield path, "per: Header and the field 'header' go together; write both or neither"
        if limit.scope == "Local" and limit.without_redis == "Refuse":
            yield (*path, "withoutRedis"), "has no effect on a Local limit; write scope: Global, or leave it out"


def check_flow_control(control: FlowControl) -> Iterator[Finding]:
    """Bands differ in name and priority, and the limits let requests through."""
    path: Path = ("spec", "flowControl")
    if control.saturation.limits().max_wait_s == 0:
        yield (*path, "saturation", "maxWait"), "nothing could ever go; write a longer time, or null"
    names: set[str] = set()
    priorities: set[int] = set()
    for index, band in enumerate(control.bands):
        if band.name in names or band.priority in priorities:
            yield (*path, "bands", index), "another band has this name or priority; give each its own"
        names.add(band.name)
        priorities.add(band.priority)


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
