# SPDX-License-Identifier: Apache-2.0
"""A split by a key: all requests with one key go to one target of a rule, and the keys are divided by weight.

    u      = hash(route, target, key)     in (0, 1), drawn anew for each target
    chosen = the target with the smallest  -ln(u) / weight

Each target is chosen for its weight's share of the keys, as the smallest of exponential variables is. To raise one
weight moves keys to that target alone, to lower it moves keys away from it alone, and a target that leaves gives up no
keys but its own (weighted rendezvous hashing: Thaler and Ravishankar, 1998; Schindelhauer and Schomaker, 2005). No
state is kept, so every process and machine chooses the same.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import msgspec
import xxhash

from extproc.api.model_route import Sticky
from extproc.api.picker_flow_control import SESSION_HEADERS
from extproc.wire_names import ANONYMOUS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# As the session plugins read it by default, and then as those read it that follow agents.
_SESSIONS: Final = ("x-session-id", *SESSION_HEADERS)
# A float holds 53 bits, so u is exact, and neither 0 nor 1.
_DROPPED_BITS: Final = 12
_PARTS: Final = 2.0**52


class StickySplit(msgspec.Struct, frozen=True):
    """Of a rule. ``by``: what the key is. ``salt``: its route, so that the splits of two routes are independent."""

    by: Sticky
    salt: str

    def key_of(self, headers: Mapping[str, str], tenant: str, user: str) -> bytes:
        """The request's key; empty if it has none. ``tenant`` and ``user``: verified. Two tenants that use the same
        session or user have two keys.
        """
        if self.by == "Tenant":
            return b"" if tenant == ANONYMOUS else _joined(tenant)
        if self.by == "User":
            return _joined(tenant, user) if user else b""
        session = next((value for name in _SESSIONS if (value := headers.get(name, "").strip())), "")
        return _joined(tenant, session) if session else b""

    def choose(self, names: Sequence[str], weights: Sequence[int], key: bytes) -> int:
        """The position of the target. ``weights``: positive."""
        salted = xxhash.xxh3_64(_joined(self.salt) + key)

        def rank(position: int) -> float:
            own = salted.copy()
            own.update(names[position].encode())
            return -math.log(((own.intdigest() >> _DROPPED_BITS) + 0.5) / _PARTS) / weights[position]

        return min(range(len(names)), key=rank)


def _joined(*texts: str) -> bytes:
    """No other texts are joined to the same bytes. Names may hold what is no character, as clients send bytes."""
    parts = [text.encode("utf-8", "surrogatepass") for text in texts]
    return b"".join(b"%d:%b" % (len(part), part) for part in parts)
