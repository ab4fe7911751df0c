# SPDX-License-Identifier: Apache-2.0
"""Writes that say something and change nothing: one that fails is tried again later, and holds up no decision."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from controller.kube.errors import Backoff, ClusterError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from random import Random

log = logging.getLogger(__name__)

_FIRST_S: Final = 0.5
_LONGEST_S: Final = 60.0


class Unwritten:
    """Of each binding: until when it is not tried, because the API server has refused it. ``what``: is written."""

    def __init__(self, what: str, rng: Random) -> None:
        self._what = what
        self._rng = rng
        self._waits: dict[str, tuple[Backoff, float]] = {}

    async def tried(self, key: str, write: Callable[[], Awaitable[object]]) -> bool:
        """Whether it is written. After a failure it is not tried before the back-off, or the server's Retry-After,
        ends.
        """
        now_s = asyncio.get_running_loop().time()
        backoff, until_s = self._waits.get(key, (None, 0.0))
        if now_s < until_s:
            return False
        try:
            await write()
        except ClusterError as error:
            backoff = backoff or Backoff(_FIRST_S, _LONGEST_S, self._rng)
            wait_s = backoff.failed(error)
            self._waits[key] = backoff, now_s + wait_s
            log.warning("%s: %s could not be written: %s; trying again in %.1f s", key, self._what, error, wait_s)
            return False
        self._waits.pop(key, None)
        return True

    def forget(self, key: str) -> None:
        """The binding is gone."""
        self._waits.pop(key, None)
