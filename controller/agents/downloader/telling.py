# SPDX-License-Identifier: Apache-2.0
"""Progress as Prometheus metrics, as a file, and as lines of JSON."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Final

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge

from controller.agents.downloader.entry import write_whole

if TYPE_CHECKING:
    from pathlib import Path

    from controller.agents.downloader.core.progress import Progress

_LOG: Final = logging.getLogger("attache.download")
_PHASES: Final = ("Resolving", "Waiting", "Downloading", "Unpacking", "Ready", "Failed")


class ProgressMetrics:
    """``/metrics`` of one download, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        known = self.registry
        self._phase = Gauge("attache_download_phase", "1 for the current phase", ["phase"], registry=known)
        self._total = Gauge("attache_download_size_bytes", "bytes of all files", registry=known)
        self._done = Gauge(
            "attache_download_done_bytes", "bytes on the disk, those of earlier runs too", registry=known
        )
        self._files_total = Gauge("attache_download_files", "files wanted", registry=known)
        self._files_done = Gauge("attache_download_files_done", "files complete and verified", registry=known)
        self._fetched = Counter("attache_download_fetched_bytes", "bytes that came from the source", registry=known)
        self._retries = Counter("attache_download_retries", "attempts that failed and were repeated", registry=known)
        self._seen = (0, 0)

    def tell(self, progress: Progress) -> None:
        """Take over the newest figures."""
        for phase in _PHASES:
            self._phase.labels(phase).set(phase == progress.phase)
        self._total.set(progress.bytes_total)
        self._done.set(progress.bytes_done)
        self._files_total.set(progress.files_total)
        self._files_done.set(progress.files_done)
        fetched, retries = self._seen
        self._fetched.inc(progress.bytes_fetched - fetched)
        self._retries.inc(progress.retries - retries)
        self._seen = (progress.bytes_fetched, progress.retries)


class ProgressFile:
    """The newest progress as a JSON document, replaced whole. A disk that is full fails the download, not this."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._has_failed = False

    def tell(self, progress: Progress) -> None:
        """Write the file."""
        try:
            write_whole(self._path, msgspec.json.encode(progress) + b"\n")
        except OSError as error:
            if not self._has_failed:
                _LOG.warning("the progress cannot be written to %s: %s", self._path, error.strerror)
            self._has_failed = True


class ProgressLines:
    """A line of JSON on the standard output for each change."""

    def tell(self, progress: Progress) -> None:
        """Write the line."""
        sys.stdout.write(msgspec.json.encode(progress).decode() + "\n")
        sys.stdout.flush()
