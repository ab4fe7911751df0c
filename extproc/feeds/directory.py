"""Watches the configuration directory: a good change is applied at once, a broken one is refused and the last state kept."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from extproc.config.errors import ConfigInvalid
from extproc.config.load import load_directory, signature

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from extproc.config.types import ModelServer, Snapshot
    from extproc.core.core import Core
    from extproc.metrics.registry import Metrics

log = logging.getLogger(__name__)

# Polling works on every file system, mounted ConfigMaps and network shares included, and costs some 30 µs.
_POLL_S: Final = 0.1


class DirectoryFeed:
    """Feeds a directory's snapshots to the core."""

    def __init__(
        self,
        directory: Path,
        core: Core,
        metrics: Metrics,
        *,
        settle_s: float,
        apply: Callable[[Snapshot], None],
    ) -> None:
        """``settle_s``: how long a configuration with a new ModelServer, or a server's first engine, must stand before it is applied.

        Envoy is told of them by another process, and would have no route for the server, or nobody behind it, yet.
        ``apply``: puts a snapshot into use; raises ConfigInvalid.
        """
        self._apply = apply
        self._directory = directory
        self._settle_s = settle_s
        self._core = core
        self._metrics = metrics
        self._seen: object = None
        self._version = ""

    def started_with(self, snapshot: Snapshot) -> None:
        """The core was made with ``snapshot``."""
        self._version = snapshot.version
        self._metrics.config_applied()

    async def watch(self) -> None:
        """Until cancelled, follow the directory."""
        while True:
            now_seen = signature(self._directory)
            if now_seen != self._seen:
                await self._reload()
                # what has changed since may not have been read
                self._seen = now_seen if signature(self._directory) == now_seen else None
            await asyncio.sleep(_POLL_S)

    async def _reload(self) -> None:
        try:
            # parsing thousands of endpoints takes long enough to hold up requests
            snapshot = await asyncio.to_thread(load_directory, self._directory)
        except (ConfigInvalid, OSError) as error:
            self._refuse(error)
            return
        if snapshot.version == self._version:
            self._metrics.config_mended()
            return
        if any(self._is_new(server) for server in snapshot.servers):
            before = signature(self._directory)
            await asyncio.sleep(self._settle_s)
            if signature(self._directory) != before:
                return  # and begin again with what is there now
        try:
            self._apply(snapshot)
        except ConfigInvalid as error:
            self._refuse(error)
            return
        self._version = snapshot.version
        self._metrics.config_applied()
        log.info(
            "configuration %s applied: %d routes, %d servers",
            snapshot.version,
            len(snapshot.routes),
            len(snapshot.servers),
        )

    def _is_new(self, server: ModelServer) -> bool:
        pool = self._core.pools.get(server.metadata.name)
        return pool is None or (bool(server.spec.endpoints) and not len(pool.table))

    def _refuse(self, error: Exception) -> None:
        self._metrics.config_refused()
        log.error("configuration refused, the last good one stays:\n%s", error)
