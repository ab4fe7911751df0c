# SPDX-License-Identifier: Apache-2.0
"""How Envoy identifies callers."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

import msgspec

from extproc.config import patterns
from extproc.config.spec import Name, NonEmpty, Spec

Secret = Annotated[str, msgspec.Meta(min_length=8, max_length=512, pattern=patterns.KEY)]
Claim = Annotated[str, msgspec.Meta(min_length=1, max_length=512, pattern=patterns.CLAIM)]


class ApiKey(Spec, frozen=True):
    """A key that clients send as ``authorization: Bearer KEY``, and who that is. It has ``key`` or ``key_file``.

    ``name``: for limits by API key and for people. ``key``: the secret. ``key_file``: a file that holds it and that
    the bundle's writer follows. ``expires_at``: from then on it is refused; ``2030-01-31T00:00:00Z``. ``tenant``:
    whose it is. ``user``: of that tenant.
    """

    name: Name
    tenant: NonEmpty
    key: Secret | None = None
    key_file: NonEmpty | None = None
    expires_at: Annotated[datetime, msgspec.Meta(tz=True)] | None = None
    user: Annotated[str, msgspec.Meta(max_length=512, pattern=patterns.NO_CONTROL)] = ""

    def __repr__(self) -> str:
        return f"ApiKey({self.name!r})"


class JwtIssuer(Spec, frozen=True):
    """Tokens of one issuer, and which claims say who it is. It has ``jwks`` or ``jwks_file``.

    ``name``: for people. ``issuer``: the claim ``iss``. ``jwks_file``: a file with the keys that sign, which the
    bundle's writer follows. ``jwks``: the same keys, as text. ``audiences``: accepted ones. ``tenant_claim`` and
    ``user_claim``: the claims that name them; a token in which one is missing or is no text is refused. No
    ``user_claim``: users are not told apart.
    """

    name: Name
    issuer: NonEmpty
    jwks_file: NonEmpty | None = None
    jwks: Annotated[str, msgspec.Meta(min_length=1, max_length=1_000_000)] | None = None
    audiences: tuple[NonEmpty, ...] = ()
    # Accept tokens that were made out to other services, too.
    any_audience: bool = False
    # Refuse tokens without the claim exp, which would be good for ever.
    require_expiration: bool = True
    tenant_claim: Claim = "tenant"
    user_claim: Claim | None = "sub"

    def __repr__(self) -> str:
        return f"JwtIssuer({self.name!r})"


class Authentication(Spec, frozen=True):
    """By keys or by tokens; a request that brings neither is answered 401.

    ``api_keys``: known keys. ``jwt``: issuers of signed tokens.
    """

    api_keys: Annotated[tuple[ApiKey, ...], msgspec.Meta(max_length=10_000)] = ()
    jwt: Annotated[tuple[JwtIssuer, ...], msgspec.Meta(max_length=16)] = ()
