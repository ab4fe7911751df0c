# SPDX-License-Identifier: Apache-2.0
"""Whose prompts share a prefix cache: cache salts by tenant, user or header.

A cached prefix makes the first token come sooner, so whoever shares a cache can find out what others have asked.
Engines keep prompts with different salts apart. A salt is keyed, so that nobody who knows a tenant's name can make it.
"""

from __future__ import annotations

import hmac
from hashlib import sha256
from typing import TYPE_CHECKING

import msgspec

from extproc.api.snapshot import cache_isolation_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from extproc.admission.identity import Caller
    from extproc.api.model_server import ModelServerSpec
    from extproc.api.snapshot import Snapshot
    from extproc.request.model import InferenceRequest


class CacheIsolation:
    """Salts by one configuration. All replicas of extproc make the same ones."""

    def __init__(self, snapshot: Snapshot) -> None:
        gateway = snapshot.gateway
        self._snapshot = snapshot
        self._secret = None if gateway.cache_secret is None else gateway.cache_secret.encode()
        self._keys: dict[str, bytes] = {}
        # a new key cools the caches of its own tenant alone
        for key in () if gateway.authentication is None else gateway.authentication.api_keys:
            known = msgspec.json.encode([key.name, key.digest])
            self._keys[key.tenant] = sha256(self._keys.get(key.tenant, b"") + known).digest()
        self.asks_who = any(self.mode_of(server.spec) in {"Tenant", "User"} for server in snapshot.servers)

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
