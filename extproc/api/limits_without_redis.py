# SPDX-License-Identifier: Apache-2.0
"""What becomes of limits that machines are to share where there is no Redis to share them by"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from extproc.api.snapshot import Snapshot


def limits_without_redis(snapshot: Snapshot) -> list[str]:
    """A warning for every Global limit: without Redis, machines cannot share it."""
    return [
        f"ModelRoute {route.metadata.key}: rateLimits[{index}] is Global, and there is no --redis: "
        + ("all its requests get 503" if limit.without_redis == "Refuse" else "every machine grants it by itself")
        for route in snapshot.routes
        for index, limit in enumerate(route.spec.rate_limits)
        if limit.scope == "Global"
    ]
