# SPDX-License-Identifier: Apache-2.0
"""How Envoy identifies callers."""

from __future__ import annotations

from typing import Annotated

import msgspec

from extproc.config.spec import Name, NonEmpty, Spec


class ApiKey(Spec, frozen=True):
    """A key that clients send as ``authorization: Bearer KEY``, and who that is.

    ``name``: for limits by API key and for people. ``key``: the secret. ``tenant``: whose it is. ``user``: of that
    tenant.
    """

    name: Name
    key: Annotated[str, msgspec.Meta(min_length=8, max_length=512)]
    tenant: NonEmpty
    user: str = ""


class JwtIssuer(Spec, frozen=True):
    """Tokens of one issuer, and which claims say who it is.

    ``name``: for people. ``issuer``: the claim ``iss``. ``jwks_file``: a file that Envoy reads, with the keys that
    sign. ``audiences``: accepted ones; any if there are none. ``tenant_claim`` and ``user_claim``: the claims that
    name them.
    """

    name: Name
    issuer: NonEmpty
    jwks_file: NonEmpty
    audiences: tuple[NonEmpty, ...] = ()
    tenant_claim: NonEmpty = "tenant"
    user_claim: NonEmpty = "sub"


class Authentication(Spec, frozen=True):
    """By keys or by tokens; a request that brings neither is answered 401.

    ``api_keys``: known keys. ``jwt``: issuers of signed tokens.
    """

    api_keys: Annotated[tuple[ApiKey, ...], msgspec.Meta(max_length=10_000)] = ()
    jwt: Annotated[tuple[JwtIssuer, ...], msgspec.Meta(max_length=16)] = ()
