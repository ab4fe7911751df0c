# SPDX-License-Identifier: Apache-2.0
"""``--workers N``: N processes, each with an address of its own, behind one Envoy.

Envoy balances over them, and one that ends is started again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
import tempfile
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

log = logging.getLogger(__name__)

_FIRST_PAUSE_S: Final = 0.2
_LONGEST_PAUSE_S: Final = 10.0
# Mistakes of configuration or arguments: starting again would not help.
_USAGE: Final = 2


async def supervise(words: Sequence[str], workers: int) -> int:
    """Run ``python -m extproc`` with ``words`` N times until a signal; their exit status if all gave up."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    with tempfile.TemporaryDirectory(prefix="attache-") as directory:
        children = [_Worker(words, number, workers, directory) for number in range(workers)]

        def forward(number: signal.Signals) -> None:
            stop.set()
            for child in children:
                child.send(number)

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, forward, number)
        results = await asyncio.gather(*(child.run(stop) for child in children))
    return max(results)


class _Worker:
    """One process and its successors."""

    def __init__(self, words: Sequence[str], number: int, workers: int, directory: str) -> None:
        self._command = [sys.executable, "-m", "extproc", *words, "--worker", f"{number}/{workers}:{directory}"]
        self._number = number
        self._process: asyncio.subprocess.Process | None = None

    async def run(self, stop: asyncio.Event) -> int:
        """Until it is told to stop; the last exit status."""
        pause_s = _FIRST_PAUSE_S
        while True:
            began = asyncio.get_running_loop().time()
            self._process = await asyncio.create_subprocess_exec(*self._command)
            status = await self._process.wait()
            if stop.is_set() or status == _USAGE:
                return max(status, 0)
            log.warning("worker %d ended with status %d and is started again", self._number, status)
            if asyncio.get_running_loop().time() - began > _LONGEST_PAUSE_S:
                pause_s = _FIRST_PAUSE_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await stop.wait()
                return 0
            pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)

    def send(self, number: signal.Signals) -> None:
        """A signal, if it runs."""
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)
