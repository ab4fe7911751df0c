# SPDX-License-Identifier: Apache-2.0
"""Between workers on one machine: every worker publishes on a socket file of its own and listens to all others'."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import zmq
import zmq.asyncio

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_HIGH_WATER: Final = 10_000


class LocalBus:
    """``directory``: of the socket files; ``number`` of ``workers``, from 0."""

    def __init__(self, directory: Path, number: int, workers: int) -> None:
        self._context = zmq.asyncio.Context()
        self._own = self._context.socket(zmq.PUB)
        self._own.setsockopt(zmq.SNDHWM, _HIGH_WATER)
        self._own.bind(f"ipc://{directory}/worker-{number}")
        self._others = self._context.socket(zmq.SUB)
        self._others.setsockopt(zmq.RCVHWM, _HIGH_WATER)
        self._others.setsockopt(zmq.SUBSCRIBE, b"")
        self._others.setsockopt(zmq.RECONNECT_IVL, 100)
        for other in range(workers):
            if other != number:
                self._others.connect(f"ipc://{directory}/worker-{other}")

    async def run(self, receive: Callable[[bytes], None]) -> None:
        """Until cancelled."""
        try:
            while True:
                receive(await self._others.recv())
        finally:
            self._context.destroy(linger=0)

    async def send(self, payload: bytes) -> None:
        """Never waits: a worker that does not read loses messages."""
        await self._own.send(payload, zmq.NOBLOCK)
