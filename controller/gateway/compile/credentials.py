# SPDX-License-Identifier: Apache-2.0
"""A GatewayConfig's authentication with what its Secrets hold: digests of API keys, and key sets of issuers.

The directory gets digests alone. A Secret that is missing or cannot be read lets nobody in: its keys are unknown, and
tokens of its issuer are refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final

import msgspec

from extproc.api import patterns
from extproc.api.authentication import has_usable_key
from extproc.api.spec import object_key

if TYPE_CHECKING:
    from collections.abc import Iterator

    from extproc.api.authentication import ApiKeySecret, Authentication, JwtIssuer

TENANT: Final = "attache.dev/tenant"
USER: Final = "attache.dev/user"
_NAME: Final = re.compile(patterns.NAME)
_KEY: Final = re.compile(patterns.KEY)
_TEXT: Final = re.compile(patterns.NO_CONTROL)
_SHORTEST_KEY: Final = 8
_LONGEST_KEY: Final = 512
# Stands for no key at all: nobody knows a text of this digest. So a gateway whose Secrets are all missing still asks
# for keys.
_NO_KEY: Final = {"name": "none", "tenant": "none", "keySHA256": "0" * 64}


class SecretContent(msgspec.Struct, frozen=True):
    """What counts of a Secret. ``data``: decoded."""

    data: Mapping[str, bytes]
    annotations: Mapping[str, str] = {}


class Credentials(msgspec.Struct, frozen=True):
    """``authentication``: for the directory, as plain data. ``problems``: what could not be had, for the condition."""

    authentication: Mapping[str, Any]
    problems: tuple[str, ...]


def secrets_of(authentication: Authentication | None, namespace: str) -> frozenset[str]:
    """The Secrets that it points to, as ``namespace/name``."""
    if authentication is None:
        return frozenset()
    names = [one.name for one in authentication.api_key_secrets]
    names += [one.jwks_secret.name for one in authentication.jwt if one.jwks_secret is not None]
    return frozenset(object_key(namespace, name) for name in names)


def resolve(
    given: Mapping[str, Any], decoded: Authentication, namespace: str, secrets: Mapping[str, SecretContent]
) -> Credentials:
    """``given``: the object's own, ``decoded``: the same as a struct. ``secrets``: those that are there, by key."""
    problems: list[str] = []
    found = {name: value for name, value in given.items() if name not in ("apiKeys", "apiKeySecrets", "jwt")}
    if decoded.api_keys or decoded.api_key_secrets:
        keys = [_own_key(one) for one in given.get("apiKeys", ())]
        taken = {one["name"] for one in keys}
        digests = {one["keySHA256"].lower() for one in keys if "keySHA256" in one}
        for ref in decoded.api_key_secrets:
            for key in _keys(ref, secrets.get(object_key(namespace, ref.name)), problems):
                # names and keys tell callers apart: of two alike, the first counts
                if key["name"] in taken or key["keySHA256"] in digests:
                    problems.append(f"Secret {ref.name}: another client has the name or the key of '{key['name']}'")
                    continue
                taken.add(key["name"])
                digests.add(key["keySHA256"])
                keys.append(key)
        return Credentials({**found, "apiKeys": keys or [_NO_KEY]}, tuple(problems))
    issuers = [
        issuer
        for plain, one in zip(given.get("jwt", ()), decoded.jwt, strict=True)
        if (issuer := _issuer(plain, one, namespace, secrets, problems)) is not None
    ]
    if decoded.jwt and not issuers:
        return Credentials({**found, "apiKeys": [_NO_KEY]}, tuple(problems))
    return Credentials({**found, "jwt": issuers} if issuers else found, tuple(problems))


def _own_key(plain: Mapping[str, Any]) -> dict[str, Any]:
    """A key that stands in the object itself goes on as its digest."""
    rest = {name: value for name, value in plain.items() if name != "key"}
    return {**rest, "keySHA256": _digest(plain["key"].encode())} if "key" in plain else rest


def _keys(ref: ApiKeySecret, secret: SecretContent | None, problems: list[str]) -> Iterator[dict[str, Any]]:
    if secret is None:
        problems.append(f"there is no Secret {ref.name}; its keys are refused")
        return
    tenant, user = ref.tenant or secret.annotations.get(TENANT), ref.user or secret.annotations.get(USER)
    if not all(_is_text(one) for one in (tenant, user) if one is not None):
        problems.append(
            f"Secret {ref.name}: its annotations {TENANT} and {USER} must be text of at most 512 characters"
        )
        return
    for name, value in sorted(secret.data.items()):
        key = _key_in(value)
        if not _NAME.match(name) or key is None:
            # the value is never repeated
            problems.append(
                f"Secret {ref.name}: '{name}' is not used; clients' names are lower-case letters, digits, '-' and '.', "
                f"and keys have {_SHORTEST_KEY} to {_LONGEST_KEY} ASCII characters without spaces"
            )
            continue
        made: dict[str, Any] = {"name": name, "tenant": tenant or name, "keySHA256": _digest(key)}
        if user:
            made["user"] = user
        if ref.models is not None:
            made["models"] = list(ref.models)
        yield made


def _issuer(
    plain: Mapping[str, Any],
    one: JwtIssuer,
    namespace: str,
    secrets: Mapping[str, SecretContent],
    problems: list[str],
) -> Mapping[str, Any] | None:
    """None: its key set cannot be had, so none of its tokens is good."""
    ref = one.jwks_secret
    if ref is None:
        return plain
    secret = secrets.get(object_key(namespace, ref.name))
    content = None if secret is None else secret.data.get(ref.key)
    if content is None or not has_usable_key(content):
        what = "there is no" if secret is None else f"'{ref.key}' is no key set in"
        problems.append(f"{what} Secret {ref.name}; tokens of the issuer '{one.name}' are refused")
        return None
    rest = {name: value for name, value in plain.items() if name != "jwksSecret"}
    return {**rest, "jwks": content.decode()}


def _key_in(value: bytes) -> bytes | None:
    """An API key, without the line break at the end of the file that it came from."""
    try:
        text = value.decode().strip()
    except UnicodeDecodeError:
        return None
    if not _SHORTEST_KEY <= len(text) <= _LONGEST_KEY or not _KEY.match(text):
        return None
    return text.encode()


def _is_text(value: str) -> bool:
    return 0 < len(value) <= _LONGEST_KEY and _TEXT.match(value) is not None


def _digest(key: bytes) -> str:
    return sha256(key).hexdigest()
