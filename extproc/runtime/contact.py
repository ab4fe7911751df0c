# SPDX-License-Identifier: Apache-2.0
"""Says that no Envoy comes: one that uses our bundle asks every second whether extproc is well"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from extproc.metrics.registry import Metrics

log = logging.getLogger(__name__)

PATIENCE_S: Final = 30.0
_POLL_S: Final = 1.0


class Contact:
    """Whether Envoy is missed: it has not come for a while, or stays away."""

    def __init__(self, *, started_at_s: float) -> None:
        self._started_at_s = started_at_s
        self._is_missed = False

    def look(self, now: float, *, last_stream_at_s: float, last_check_at_s: float) -> bool | None:
        """Whether Envoy is missed, if that has changed. Instants are 0 if there was none.

        A gateway that asks for health is missed when it asks no more. From another one, requests may stay away for
        hours.
        """
        last_at_s = max(last_stream_at_s, last_check_at_s)
        is_silent = now - max(self._started_at_s, last_at_s) >= PATIENCE_S
        is_missed = is_silent and bool(last_check_at_s or not last_at_s)
        if is_missed == self._is_missed:
            return None
        self._is_missed = is_missed
        return is_missed


async def watch_contact(listen: str, metrics: Metrics, clock: Callable[[], float]) -> None:
    """Until cancelled. ``listen``: where Envoy should call."""
    contact = Contact(started_at_s=clock())
    while True:
        await asyncio.sleep(_POLL_S)
        is_missed = contact.look(
            clock(), last_stream_at_s=metrics.last_stream_at_s, last_check_at_s=metrics.last_check_at_s
        )
        if is_missed:
            log.warning(
                "no Envoy has called %s for %g s; see that Envoy runs with the bundle of this directory, that 'extproc'"
                " in its GatewayConfig is this address, and that no firewall is between them",
                listen,
                PATIENCE_S,
            )
        elif is_missed is not None:
            log.info("Envoy has called %s again", listen)
