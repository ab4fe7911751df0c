# SPDX-License-Identifier: Apache-2.0
"""The caller's identity: tenant, user, priority and latency targets, read from headers, and its prefix cache's salt.

A cached prefix makes the first token come sooner, so a client that shares a cache can find out the prompts of others.
Engines keep prompts with different salts apart. A salt is keyed, so that a client cannot compute it from a tenant's
name.
"""

from __future__ import annotations

import hmac
from collections.abc import Collection, Mapping
from hashlib import sha256
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import msgspec

from extproc.api.config_snapshot import cache_isolation_of
from extproc.api.spec import namespace_of, object_key
from extproc.wire_names import (
    ANONYMOUS,
    CLIENT,
    DEADLINE_MS,
    FAIRNESS_IDS,
    OBJECTIVES,
    SLO_TPOT_MS,
    SLO_TTFT_MS,
    TENANT,
    USER,
    truncate_name,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from extproc.api.config_snapshot import Snapshot
    from extproc.api.model_server import ModelServerSpec
    from extproc.request.inference_request import InferenceRequest

_MAX_TARGET_MS: Final = 86_400_000.0
# Headers by which a caller is known.
_OF_CALLERS: Final = frozenset(
    {CLIENT, TENANT, USER, DEADLINE_MS, *OBJECTIVES, *FAIRNESS_IDS, *SLO_TTFT_MS, *SLO_TPOT_MS}
)
_NO_CLAIMS: Final[Mapping[str, Collection[str]]] = MappingProxyType({})


def read_name(headers: Mapping[str, str], header: str) -> str:
    """The value of a header, shortened to a bounded length; empty if it is missing."""
    return truncate_name(headers.get(header.lower(), ""))


def read_verified_name(headers: Mapping[str, str], header: str) -> str:
    """A name that Envoy has written, as configuration spells it: Envoy writes UTF-8, and headers are read as
    Latin-1.
    """
    value = headers.get(header, "")
    if not value.isascii():
        try:
            value = value.encode("latin-1").decode()
        except UnicodeError:
            # a gateway that is trusted wrote something else; it stays as it was read
            return truncate_name(value)
    return truncate_name(value)


class CallerMatcher(msgspec.Struct, frozen=True):
    """The callers that a rule or a limit of the configuration names, truncated as callers' names are; None: any."""

    tenants: frozenset[str] | None
    users: frozenset[str] | None
    api_keys: frozenset[str] | None

    def matches(self, tenant: str, user: str, api_key: str) -> bool:
        """Whether the caller with these truncated names is one of them."""
        return (
            (self.tenants is None or tenant in self.tenants)
            and (self.users is None or user in self.users)
            and (self.api_keys is None or api_key in self.api_keys)
        )


def caller_matcher(tenants: Collection[str], users: Collection[str], api_keys: Collection[str]) -> CallerMatcher:
    """Names of a configuration; an empty collection names any caller."""
    kept = (frozenset(map(truncate_name, names)) if names else None for names in (tenants, users, api_keys))
    return CallerMatcher(*kept)


class CallerIdentity(msgspec.Struct, frozen=True):
    """The authenticated caller, as Envoy has verified it. ``api_key``: the name from Envoy, which this configuration
    may not have. ``claims``: of the token, those that policies name.
    """

    tenant: str
    user: str = ""
    api_key: str = ""
    claims: Mapping[str, Collection[str]] = {}


class Caller(msgspec.Struct, frozen=True):
    """The caller of a request.

    ``api_key``: its name; ``key_id``: its id, or the beginning of its digest; empty if unknown.
    ``flow``: the fairness ID, empty if the tenant is the flow. ``priority``: of the request's objective, None if it
    names none. ``ttft_target_s``, ``tpot_target_s``: latency objectives in seconds, None if not set. ``deadline_in_s``:
    when the first token is due, in seconds from arrival, None if not set.
    """

    tenant: str = ANONYMOUS
    user: str = ""
    api_key: str = ""
    flow: str = ""
    priority: int | None = None
    ttft_target_s: float | None = None
    tpot_target_s: float | None = None
    deadline_in_s: float | None = None
    key_id: str = ""


ANONYMOUS_CALLER: Final = Caller()
ANONYMOUS_SUBJECT: Final = CallerIdentity(ANONYMOUS)


class IdentityResolver:
    """Resolves callers with the API keys and objectives of the configuration."""

    def __init__(self, snapshot: Snapshot) -> None:
        authentication = snapshot.gateway.authentication
        keys = () if authentication is None else authentication.api_keys
        self._keys = {one.name: one for one in keys}
        # digests are computed once
        self._key_ids = {one.name: one.usage_id for one in keys}
        self._objectives = {one.metadata.key: one.spec.priority for one in snapshot.objectives}

    def resolve_subject(
        self, headers: Mapping[str, str], claims: Mapping[str, Collection[str]] = _NO_CLAIMS
    ) -> CallerIdentity:
        """The authenticated caller, for authorisation. ``headers`` and ``claims``: of a request from a trusted
        gateway.
        """
        name = headers.get(CLIENT, "")
        key = self._keys.get(name)
        if key is not None:
            return CallerIdentity(truncate_name(key.tenant), truncate_name(key.user), name, claims)
        tenant = read_verified_name(headers, TENANT) or ANONYMOUS
        return CallerIdentity(tenant, read_verified_name(headers, USER), name, claims)

    def resolve_caller(self, headers: Mapping[str, str], *, server: str) -> Caller:
        """The caller by a request's headers, which a gateway wrote that is trusted.

        ``server``: the ModelServer, in whose namespace the request's InferenceObjective is looked up.
        """
        # a look-up in the headers of a stream takes as long as ten in a dict, and few of these are there
        headers = {name: headers[name] for name in headers if name in _OF_CALLERS}
        key = self._keys.get(headers.get(CLIENT, ""))
        objective = _first(headers, OBJECTIVES)
        tenant = key.tenant if key is not None else read_verified_name(headers, TENANT) or ANONYMOUS
        return Caller(
            tenant=tenant,
            user=key.user if key is not None else read_verified_name(headers, USER),
            api_key="" if key is None else key.name,
            # an unknown objective counts as priority 0, as in llm-d
            priority=self._objectives.get(object_key(namespace_of(server), objective), 0) if objective else None,
            ttft_target_s=_seconds(_first(headers, SLO_TTFT_MS)),
            tpot_target_s=_seconds(_first(headers, SLO_TPOT_MS)),
            deadline_in_s=_seconds(headers.get(DEADLINE_MS, "")),
            key_id="" if key is None else self._key_ids[key.name],
            flow=truncate_name(_first(headers, FAIRNESS_IDS)),
        )


def _first(headers: Mapping[str, str], names: Sequence[str]) -> str:
    return next((headers[name] for name in names if name in headers), "")


def _seconds(text: str) -> float | None:
    if not text:
        return None
    try:
        milliseconds = float(text)
    except ValueError:
        return None
    return milliseconds / 1000 if 0 < milliseconds <= _MAX_TARGET_MS else None


class CacheIsolation:
    """Salts by one configuration. All replicas of extproc make the same ones."""

    def __init__(self, snapshot: Snapshot) -> None:
        gateway = snapshot.gateway
        self._snapshot = snapshot
        self._secret = None if gateway.cache_secret is None else gateway.cache_secret.encode()
        self._keys: dict[str, bytes] = {}
        # a new key cools the caches of its own tenant alone
        for key in () if gateway.authentication is None else gateway.authentication.api_keys:
            if key.id is not None:
                # they come and go: their store has a secret of its own
                continue
            known = msgspec.json.encode([key.name, key.digest])
            self._keys[key.tenant] = sha256(self._keys.get(key.tenant, b"") + known).digest()
        modes = {self.mode_of(server.spec) for server in snapshot.servers}
        self.asks_who = not modes.isdisjoint({"Tenant", "User"})
        # whether the gateway writes any salt
        self.is_on = bool(modes - {"Shared"})

    def mode_of(self, spec: ModelServerSpec) -> str:
        """``Tenant``, ``User``, ``Shared`` or ``Header:NAME``."""
        return cache_isolation_of(spec, self._snapshot)

    def salt(
        self, request: InferenceRequest, spec: ModelServerSpec, caller: Caller, headers: Mapping[str, str]
    ) -> str | None:
        """The salt to send, None for none. A client's own, where it may set one, divides its part further."""
        own = request.cache_salt if "cache_salt" in spec.allowed_fields else None
        mode = self.mode_of(spec)
        # engines cache nothing that is worth a salt for the other APIs, and may refuse it there
        if mode == "Shared" or request.api is None or not request.api.spec.takes_salt:
            return own
        if mode == "Tenant":
            scope = ["tenant", caller.tenant]
        elif mode == "User":
            scope = ["user", caller.tenant, caller.user]
        else:
            scope = ["header", headers.get(mode.removeprefix("Header:").lower(), "")]
        key = self._secret or self._keys.get(caller.tenant, b"attache")
        return hmac.digest(key, msgspec.json.encode([*scope, own]), "sha256").hex()
