"""How Envoy identifies callers."""

from __future__ import annotations

from typing import Annotated

import msgspec

from extproc.config.spec import Name, NonEmpty, Spec


class ApiKey(Spec, frozen=True):
    """A key that clients send as ``authorization: Bearer KEY``, and the tenant and user that it stands for."""

    name: Name
    key: Annotated[str, msgspec.Meta(min_length=8, max_length=512)]
    tenant: NonEmpty
    user: str = ""


class JwtIssuer(Spec, frozen=True):
    """Tokens that ``issuer`` signs with a key of ``jwks_file``, which Envoy reads; claims for tenant and user."""

    name: Name
    issuer: NonEmpty
    jwks_file: NonEmpty
    audiences: tuple[NonEmpty, ...] = ()
    tenant_claim: NonEmpty = "tenant"
    user_claim: NonEmpty = "sub"


class Authentication(Spec, frozen=True):
    """By API keys or by signed tokens; a request without either is answered 401."""

    api_keys: Annotated[tuple[ApiKey, ...], msgspec.Meta(max_length=10_000)] = ()
    jwt: Annotated[tuple[JwtIssuer, ...], msgspec.Meta(max_length=16)] = ()
