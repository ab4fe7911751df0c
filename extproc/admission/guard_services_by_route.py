# SPDX-License-Identifier: Apache-2.0
"""Which guard each ModelRoute's requests must pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from extproc.api.guard_services import GuardService

if TYPE_CHECKING:
    from extproc.api.config_snapshot import Snapshot

# By which a guard may lengthen a body.
MOST_ADDED_BYTES: Final = 1 << 20
# Of an answer, beside the body.
_OTHER_BYTES: Final = 64 * 1024


class RouteGuardConfig(msgspec.Struct, frozen=True):
    """The guard of one ModelRoute. ``service``: None if the GatewayConfig has none of this name. ``is_open``: requests
    about which it does not answer go on. ``most_bytes``: of a body.
    """

    name: str
    service: GuardService | None
    is_open: bool
    most_bytes: int

    def max_changed_body_bytes(self, given: int) -> int:
        """What it may make of a body of ``given`` bytes."""
        return max(given, min(self.most_bytes, given + MOST_ADDED_BYTES))

    def max_answer_bytes(self, given: int) -> int:
        """What its answer about such a body may have."""
        return self.max_changed_body_bytes(given) + _OTHER_BYTES


def guards_by_route(snapshot: Snapshot) -> dict[str, RouteGuardConfig]:
    """By the key of the ModelRoute; empty where none has one."""
    gateway = snapshot.gateway
    services = {one.name: one for one in gateway.guards}
    return {
        route.metadata.key: RouteGuardConfig(
            name=guard.name,
            service=services.get(guard.name),
            is_open=guard.failure_mode == "Open",
            most_bytes=int(gateway.max_body_size),
        )
        for route in snapshot.routes
        if (guard := route.spec.guard) is not None
    }
