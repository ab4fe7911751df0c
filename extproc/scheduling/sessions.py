# SPDX-License-Identifier: Apache-2.0
"""Which endpoint a session stays on: its token, and what is kept of sessions that have an id."""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections import OrderedDict
from typing import Final

import msgspec

# A client can make as many sessions as it likes; each takes some 300 bytes.
_MOST_SESSIONS: Final = 100_000


class SessionNote(msgspec.Struct, frozen=True):
    """What a session is to keep of a pick: either ``header`` or ``key`` is set.

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


def address_in(token: str) -> str | None:
    """The address that a token names, whoever made it; None if it is no token."""
    try:
        return base64.b64decode(token, validate=True).decode() or None
    except (binascii.Error, UnicodeDecodeError, ValueError):
        return None


class SessionBindings:
    """The endpoints of sessions by their keys; the one that was used longest ago is dropped first."""

    def __init__(self) -> None:
        # the address, and when it is forgotten
        self._bound: OrderedDict[str, tuple[str, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._bound)

    def address_of(self, key: str, now: float) -> str | None:
        """The address that the session is bound to; None if it is not, or not any more."""
        address, expires_at_s = self._bound.get(key, ("", 0.0))
        return address if now < expires_at_s else None

    def bind(self, key: str, address: str, now: float, ttl_s: float) -> None:
        """The session is served there now."""
        bound = self._bound
        bound[key] = address, now + ttl_s
        bound.move_to_end(key)
        while len(bound) > _MOST_SESSIONS or next(iter(bound.values()))[1] <= now:
            bound.popitem(last=False)


class TenantSessions(msgspec.Struct, frozen=True):
    """The sessions of one tenant: two tenants that use the same id have two sessions."""

    bindings: SessionBindings
    tenant: str = ""

    def key(self, profile: str, session: str) -> str:
        """Of the session called ``session``. ``profile``: whose endpoint is kept, empty for the primary one."""
        # of one size, however long the client's id is
        text = f"{profile}\0{self.tenant}\0{session}"
        return hashlib.blake2b(text.encode(errors="replace"), digest_size=16).hexdigest()
