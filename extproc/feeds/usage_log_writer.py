# SPDX-License-Identifier: Apache-2.0
"""Writes lines of the usage log that Envoy cannot write, to a file of their own beside Envoy's.

Not to Envoy's: it writes a line in several pieces, and ours would come between them. No request waits for the file.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from extproc.api.usage_log import LEFT_SUFFIX
from extproc.line_writer import LineWriter, make_threadsafe_callback
from extproc.metrics.exposition import CounterFamily

if TYPE_CHECKING:
    from collections.abc import Callable

    from prometheus_client import CollectorRegistry

    from extproc.api.gateway_config import UsageLog
    from extproc.api.usage_log import UsageLine
    from extproc.line_writer import LineResult


class UsageLogWriter:
    """``usage_log``: the one in use, None: there is none. Made inside the event loop."""

    def __init__(self, usage_log: Callable[[], UsageLog | None], registry: CollectorRegistry) -> None:
        self._usage_log = usage_log
        self._counts = CounterFamily(
            "attache_usage_log_lines",
            "Lines of the usage log that extproc has to write itself: written, dropped, failed.",
            ["result"],
            registry,
        )
        self._loop = asyncio.get_running_loop()
        self._file: tuple[str, LineWriter] | None = None
        # of the path that was configured before
        self._closing: asyncio.Future[None] | None = None

    def add(self, line: UsageLine) -> None:
        """Write it soon."""
        usage_log = self._usage_log()
        if usage_log is None:
            self._count("dropped", 1)
            return
        if self._file is None or self._file[0] != usage_log.path:
            self._begin(usage_log.path)
        assert self._file is not None  # noqa: S101 - of _begin
        self._file[1].enqueue(msgspec.json.encode(line) + b"\n")

    async def close(self) -> None:
        """Write what waits."""
        if self._closing is not None:
            await self._closing
        if self._file is not None:
            await asyncio.to_thread(self._file[1].close)

    def _begin(self, path: str) -> None:
        if self._file is not None:
            self._closing = self._loop.run_in_executor(None, self._file[1].close)
        self._file = path, LineWriter(Path(f"{path}{LEFT_SUFFIX}"), make_threadsafe_callback(self._loop, self._count))

    def _count(self, result: LineResult, number: int) -> None:
        self._counts.add_amount(number, result)
