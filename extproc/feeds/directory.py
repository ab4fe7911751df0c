"""Watches the configuration directory: a good change is applied at once, a broken one is refused and the last state kept."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from extproc.config.load import load_directory
from extproc.config.mistakes import ConfigInvalid

if TYPE_CHECKING:
    import os
    from pathlib import Path

    from extproc.config.types import Snapshot
    from extproc.observe import Metrics
    from extproc.pipeline import Pipeline

log = logging.getLogger(__name__)

# Polling works on every file system, mounted ConfigMaps and network shares included, and costs some 30 µs.
_POLL_S: Final = 0.1


class DirectoryFeed:
    """Feeds a directory's snapshots to the pipeline."""

    def __init__(self, directory: Path, pipeline: Pipeline, metrics: Metrics) -> None:
        self._directory = directory
        self._pipeline = pipeline
        self._metrics = metrics
        self._seen: object = None
        self._version = ""

    def started_with(self, snapshot: Snapshot) -> None:
        """The pipeline was made with ``snapshot``."""
        self._version = snapshot.version
        self._metrics.config_applied()

    async def watch(self) -> None:
        """Until cancelled, follow the directory."""
        while True:
            signature = _signature(self._directory)
            if signature != self._seen:
                self._seen = signature
                await self._reload()
            await asyncio.sleep(_POLL_S)

    async def _reload(self) -> None:
        try:
            # parsing thousands of endpoints takes long enough to hold up requests
            snapshot = await asyncio.to_thread(load_directory, self._directory)
        except (ConfigInvalid, OSError) as error:
            self._metrics.config_refused()
            log.error("configuration refused, the last good one stays:\n%s", error)
            return
        if snapshot.version == self._version:
            self._metrics.config_mended()
            return
        self._pipeline.apply(snapshot)
        self._version = snapshot.version
        self._metrics.config_applied()
        log.info(
            "configuration %s applied: %d routes, %d servers",
            snapshot.version,
            len(snapshot.routes),
            len(snapshot.servers),
        )


def _signature(directory: Path) -> object:
    """Changes when a file comes, goes, or is written or replaced."""
    try:
        return sorted(
            (entry.name, stat.st_ino, stat.st_mtime_ns, stat.st_size)
            for entry in directory.iterdir()
            if entry.suffix in {".yaml", ".yml"} and (stat := _stat(entry)) is not None
        )
    except OSError as error:
        return str(error)


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:  # replaced between listing and asking
        return None
