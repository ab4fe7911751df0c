# SPDX-License-Identifier: Apache-2.0
"""The progress of this process's download, and those who are told of it."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from controller.agents.downloader.core.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Sequence

    from controller.agents.downloader.core.progress import Phase

_LOG: Final = logging.getLogger("attache.download")
_EVERY_S: Final = 1.0


class Listener(Protocol):
    """Is told of progress: at each change of the phase, and about once a second while bytes come."""

    def tell(self, progress: Progress) -> None:
        """Must not wait and must not fail."""
        ...


class Tracker:
    """Collects what happens and tells ``listeners``."""

    def __init__(self, uri: str, listeners: Sequence[Listener] = ()) -> None:
        self.now = Progress("Resolving", uri)
        self._listeners = listeners
        self._told_at_s = float("-inf")

    def start(self) -> None:
        """Tell everybody that the download begins."""
        self._tell()

    def phase(self, phase: Phase, *, message: str = "", reason: str = "") -> None:
        """Go on to another phase."""
        self.now = msgspec.structs.replace(self.now, phase=phase, message=message, reason=reason)
        _LOG.info("%s", self.now.sentence())
        self._tell()

    def resolved(self, *, revision: str, key: str, files: int, size: int) -> None:
        """What is to be fetched is known."""
        self.now = msgspec.structs.replace(self.now, revision=revision, key=key, files_total=files, bytes_total=size)

    def there(self, *, files: int, size: int) -> None:
        """So much is on the disk."""
        self.now = msgspec.structs.replace(self.now, files_done=files, bytes_done=size)

    def fetched(self, count: int) -> None:
        """Bytes came from the source and were written."""
        now = self.now
        self.now = msgspec.structs.replace(
            now, bytes_done=now.bytes_done + count, bytes_fetched=now.bytes_fetched + count
        )
        if time.monotonic() - self._told_at_s >= _EVERY_S:  # noqa: TID251 - the edge
            self._tell()

    def lost(self, count: int) -> None:
        """Bytes that were counted have to be fetched once more."""
        self.now = msgspec.structs.replace(self.now, bytes_done=self.now.bytes_done - count)

    def file_done(self) -> None:
        """A file is complete and verified."""
        self.now = msgspec.structs.replace(self.now, files_done=self.now.files_done + 1)

    def retried(self, error: Exception, wait_s: float) -> None:
        """An attempt failed and is repeated."""
        _LOG.warning("%s; trying again in %.1f s", error, wait_s)
        self.now = msgspec.structs.replace(self.now, retries=self.now.retries + 1, message=str(error))
        self._tell()

    def _tell(self) -> None:
        self._told_at_s = time.monotonic()  # noqa: TID251 - the edge
        for listener in self._listeners:
            listener.tell(self.now)
