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
        self._directory, self._number, self._workers = directory, number, workers
        # while it runs
        self._own: zmq.asyncio.Socket | None = None

    async def run(self, receive: Callable[[bytes], None]) -> None:
        """Until cancelled."""
        context = zmq.asyncio.Context()
        try:
            self._own = context.socket(zmq.PUB)
            self._own.setsockopt(zmq.SNDHWM, _HIGH_WATER)
            self._own.bind(self._address(self._number))
            others = context.socket(zmq.SUB)
            others.setsockopt(zmq.RCVHWM, _HIGH_WATER)
            others.setsockopt(zmq.SUBSCRIBE, b"")
            others.setsockopt(zmq.RECONNECT_IVL, 100)
            for other in range(self._workers):
                if other != self._number:
                    others.connect(self._address(other))
            while True:
                receive(await others.recv())
        finally:
            context.destroy(linger=0)
            self._own = None

    async def send(self, payload: bytes) -> None:
        """Never waits: a worker that does not read loses messages."""
        if self._own is not None:
            await self._own.send(payload, zmq.NOBLOCK)

    def _address(self, number: int) -> str:
        return f"ipc://{self._directory}/worker-{number}"
