# SPDX-License-Identifier: Apache-2.0
"""The progress of a download: as metrics, as a file, as lines of JSON, and as a condition of our pod (WeightsReady).

A condition that cannot be written does not end the download.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, Literal, Protocol

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge

from controller.agents.downloader.cache import write_atomically
from controller.kube.api_resources import PODS
from controller.kube.errors import ClusterError, Forbidden, NotFound

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from controller.kube.api_resources import Object
    from controller.kube.client import Client

_LOG: Final = logging.getLogger("attache.download")

Phase = Literal["Resolving", "Waiting", "Downloading", "Unpacking", "Ready", "Failed"]
_EVERY_S: Final = 1.0
_PHASES: Final = ("Resolving", "Waiting", "Downloading", "Unpacking", "Ready", "Failed")
CONDITION: Final = "attache.dev/WeightsReady"
_CONDITION_EVERY_S: Final = 10.0
_LAST_S: Final = 5.0


class Progress(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """``bytes_done`` counts what was there before, too. ``bytes_fetched``: by this process, repeats included.

    ``reason`` and ``message``: of a failure, or of an attempt that is repeated.
    """

    phase: Phase
    uri: str
    revision: str = ""
    key: str = ""
    files_total: int = 0
    files_done: int = 0
    bytes_total: int = 0
    bytes_done: int = 0
    bytes_fetched: int = 0
    retries: int = 0
    reason: str = ""
    message: str = ""

    def status_text(self) -> str:
        """For people, in a pod's condition and in the log."""
        if self.phase in ("Failed", "Ready", "Waiting", "Resolving") and self.message:
            return self.message
        share = f" ({100 * self.bytes_done // self.bytes_total}%)" if self.bytes_total else ""
        size = f"{self.bytes_done / 1e6:.0f} of {self.bytes_total / 1e6:.0f} MB{share}"
        return f"{self.phase} {self.uri}: {self.files_done} of {self.files_total} files, {size}"


class ProgressListener(Protocol):
    """Gets the progress: at each change of the phase, and about once a second during transfers."""

    def update(self, progress: Progress) -> None:
        """Must not wait and must not fail."""
        ...


class ProgressTracker:
    """Counts, and passes changes to ``listeners``."""

    def __init__(self, uri: str, listeners: Sequence[ProgressListener] = ()) -> None:
        self.now = Progress("Resolving", uri)
        self._listeners = listeners
        self._notified_at_s = float("-inf")

    def notify_download_start(self) -> None:
        """Notify all listeners that the download begins."""
        self._notify()

    def set_phase(self, phase: Phase, *, message: str = "", reason: str = "") -> None:
        """Go on to another phase."""
        self.now = msgspec.structs.replace(self.now, phase=phase, message=message, reason=reason)
        _LOG.info("%s", self.now.status_text())
        self._notify()

    def on_resolved(self, *, revision: str, key: str, files: int, size: int) -> None:
        """The source has answered what is to be fetched."""
        self.now = msgspec.structs.replace(self.now, revision=revision, key=key, files_total=files, bytes_total=size)

    def set_present_on_disk(self, *, files: int, size: int) -> None:
        """So much is on the disk."""
        self.now = msgspec.structs.replace(self.now, files_done=files, bytes_done=size)

    def add_fetched(self, count: int) -> None:
        """Count bytes that were fetched from the source and written."""
        now = self.now
        self.now = msgspec.structs.replace(
            now, bytes_done=now.bytes_done + count, bytes_fetched=now.bytes_fetched + count
        )
        if time.monotonic() - self._notified_at_s >= _EVERY_S:  # noqa: TID251 - the edge
            self._notify()

    def subtract_lost(self, count: int) -> None:
        """Bytes that were counted have to be fetched once more."""
        self.now = msgspec.structs.replace(self.now, bytes_done=self.now.bytes_done - count)

    def file_done(self) -> None:
        """A file is complete and verified."""
        self.now = msgspec.structs.replace(self.now, files_done=self.now.files_done + 1)

    def count_retry(self, error: Exception, wait_s: float) -> None:
        """An attempt failed and is repeated."""
        _LOG.warning("%s; trying again in %.1f s", error, wait_s)
        self.now = msgspec.structs.replace(self.now, retries=self.now.retries + 1, message=str(error))
        self._notify()

    def _notify(self) -> None:
        self._notified_at_s = time.monotonic()  # noqa: TID251 - the edge
        for listener in self._listeners:
            listener.update(self.now)


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

    def update(self, progress: Progress) -> None:
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

    def update(self, progress: Progress) -> None:
        """Write the file."""
        try:
            write_atomically(self._path, msgspec.json.encode(progress) + b"\n")
        except OSError as error:
            if not self._has_failed:
                _LOG.warning("the progress cannot be written to %s: %s", self._path, error.strerror)
            self._has_failed = True


class ProgressLines:
    """A line of JSON on the standard output for each change."""

    def update(self, progress: Progress) -> None:
        """Write the line."""
        sys.stdout.write(msgspec.json.encode(progress).decode() + "\n")
        sys.stdout.flush()


def download_condition(progress: Progress, since: str) -> Object:
    """The condition in the pod's status. ``since``: RFC 3339, when it last changed between True and False."""
    return {
        "type": CONDITION,
        "status": "True" if progress.phase == "Ready" else "False",
        "reason": progress.reason or progress.phase,
        "message": progress.status_text()[:1000],
        "lastTransitionTime": since,
    }


class PodConditionWriter:
    """Keeps the newest progress; ``run`` writes it periodically, and once more at the end."""

    def __init__(self, client: Client, namespace: str, name: str) -> None:
        self._client = client
        self._namespace = namespace
        self._name = name
        self._newest: Progress | None = None
        self._written: Progress | None = None
        self._since = ("", "")
        self._changed = asyncio.Event()

    def update(self, progress: Progress) -> None:
        """Something to write."""
        is_other = self._newest is None or self._newest.phase != progress.phase
        self._newest = progress
        if is_other:
            self._changed.set()

    @contextlib.asynccontextmanager
    async def writing_in_background(self) -> AsyncIterator[None]:
        """Writes while inside, and the last state when left, however that is."""
        writing = asyncio.create_task(self._write_on())
        try:
            yield
        finally:
            writing.cancel()
            await asyncio.wait({writing})
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LAST_S):
                    await self._write()

    async def _write_on(self) -> None:
        while await self._write():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CONDITION_EVERY_S):
                    await self._changed.wait()

    async def _write(self) -> bool:
        """False: it is no use to try again."""
        self._changed.clear()
        progress = self._newest
        if progress is None or progress == self._written:
            return True
        condition = download_condition(progress, "")
        if condition["status"] != self._since[0]:
            self._since = (condition["status"], datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"))
        pod = {
            "apiVersion": PODS.api_version,
            "kind": PODS.kind,
            "metadata": {"namespace": self._namespace, "name": self._name},
            "status": {"conditions": [download_condition(progress, self._since[1])]},
        }
        try:
            await self._client.apply(PODS, pod, subresource="status", force=True)
        except (Forbidden, NotFound) as error:
            _LOG.warning("the pod's condition is not written: %s", error)
            return False
        except ClusterError as error:
            _LOG.info("the pod's condition was not written: %s", error)
            return True
        self._written = progress
        return True
