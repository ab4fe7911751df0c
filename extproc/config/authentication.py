"""How Envoy tells who asks."""

from __future__ import annotations

from typing import Annotated

import msgspec

from extproc.config.spec import Name, NonEmpty, Spec


class ApiKey(Spec, frozen=True):
    """A key that clients send as ``authorization: Bearer KEY``, and who that is."""

    name: Name
    key: Annotated[str, msgspec.Meta(min_length=8, max_length=512)]
    tenant: NonEmpty
    user: str = ""


class JwtIssuer(Spec, frozen=True):
    """Tokens that ``issuer`` signs with the keys of ``jwks_file`` (a path that Envoy reads), and which claims say who it is."""

    name: Name
    issuer: NonEmpty
    jwks_file: NonEmpty
    audiences: tuple[NonEmpty, ...] = ()
    tenant_claim: NonEmpty = "tenant"
    user_claim: NonEmpty = "sub"


class Authentication(Spec, frozen=True):
    """By keys or by tokens; a request that brings neither is answered 401."""

    api_keys: Annotated[tuple[ApiKey, ...], msgspec.Meta(max_length=10_000)] = ()
    jwt: Annotated[tuple[JwtIssuer, ...], msgspec.Meta(max_length=16)] = ()
