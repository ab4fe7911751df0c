# SPDX-License-Identifier: Apache-2.0
"""The endpoint of a session: in its token, or, for sessions with an id, in the table of bindings."""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections import OrderedDict
from typing import Final

import msgspec

# A client can make as many sessions as it likes; each takes some 300 bytes.
_MOST_SESSIONS: Final = 100_000
_TENANT_BYTES: Final = 8
_SESSION_BYTES: Final = 16


class SessionNote(msgspec.Struct, frozen=True, array_like=True):
    """A session's record of a pick: either ``header`` or ``key`` is set.

    ``header``: of the answer, which names ``address`` in a token. ``key``: of the session, which is bound to
    ``address`` and forgotten if it is not used for ``ttl_s``.
    """

    address: str
    header: str = ""
    key: str = ""
    ttl_s: float = 0.0

    def token(self, *, first: str = "", served: str = "") -> str:
        """The header's value. ``served`` has answered in place of the ``first`` choice, if both are known."""
        return session_token(served if served and self.address == first else self.address)


def session_token(address: str) -> str:
    """The session token of the endpoint at ``address``: opaque to clients, and no secret."""
    return base64.b64encode(address.encode()).decode()


def address_of_token(token: str) -> str | None:
    """The address that a token names; its origin is not verified. None if it is no token."""
    try:
        return base64.b64decode(token, validate=True).decode() or None
    except (binascii.Error, UnicodeDecodeError, ValueError):
        return None


class SessionBindings:
    """The endpoints of sessions by their keys; the one that its tenant used longest ago is dropped first.

    Where there are too many, the tenant with more than its share loses them, so that one tenant's many ids cost others
    no session.
    """

    def __init__(self, most: int = _MOST_SESSIONS) -> None:
        self._most = most
        # by tenant, the address and when it is forgotten
        self._tenants: OrderedDict[str, OrderedDict[str, tuple[str, float]]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def address_of(self, key: str, now: float) -> str | None:
        """The address that the session is bound to; None if it is not, or not any more."""
        bound = self._tenants.get(_tenant_in(key))
        if bound is None or key not in bound:
            return None
        address, expires_at_s = bound[key]
        return address if now < expires_at_s else None

    def bind(self, key: str, address: str, now: float, ttl_s: float) -> None:
        """The session is served there now."""
        tenant = _tenant_in(key)
        own = self._tenants.setdefault(tenant, OrderedDict())
        self._count += key not in own
        own[key] = address, now + ttl_s
        own.move_to_end(key)
        self._tenants.move_to_end(tenant)
        for name in (next(iter(self._tenants)), tenant):
            self._forget_expired(name, now)
        while self._count > self._most:
            self._forget_oldest(tenant if len(own) * len(self._tenants) > self._most else self._largest())

    def _forget_expired(self, tenant: str, now: float) -> None:
        while (bound := self._tenants.get(tenant)) and next(iter(bound.values()))[1] <= now:
            self._forget_oldest(tenant)

    def _largest(self) -> str:
        return max(self._tenants, key=lambda name: len(self._tenants[name]))

    def _forget_oldest(self, tenant: str) -> None:
        bound = self._tenants[tenant]
        bound.popitem(last=False)
        self._count -= 1
        if not bound:
            del self._tenants[tenant]


class TenantSessions(msgspec.Struct, frozen=True):
    """The sessions of one tenant: two tenants that use the same id have two sessions."""

    bindings: SessionBindings
    tenant: str = ""

    def session_key(self, profile: str, session: str) -> str:
        """Of the session called ``session``. ``profile``: the profile whose endpoint is kept, empty for the primary
        one.
        """
        # of one size, however long the client's id is; other processes read the tenant from the beginning
        return _digest(self.tenant, _TENANT_BYTES) + _digest(f"{profile}\0{session}", _SESSION_BYTES)


def _tenant_in(key: str) -> str:
    return key[: 2 * _TENANT_BYTES]


def _digest(text: str, size_bytes: int) -> str:
    return hashlib.blake2b(text.encode(errors="replace"), digest_size=size_bytes).hexdigest()
