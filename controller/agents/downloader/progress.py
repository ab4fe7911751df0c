# SPDX-License-Identifier: Apache-2.0
"""The progress of this process's download, and the listeners that get each change of it."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Final, Literal, Protocol

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

Phase = Literal["Resolving", "Waiting", "Downloading", "Unpacking", "Ready", "Failed"]


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

    def sentence(self) -> str:
        """For people, in a pod's condition and in the log."""
        if self.phase in ("Failed", "Ready", "Waiting", "Resolving") and self.message:
            return self.message
        share = f" ({100 * self.bytes_done // self.bytes_total}%)" if self.bytes_total else ""
        size = f"{self.bytes_done / 1e6:.0f} of {self.bytes_total / 1e6:.0f} MB{share}"
        return f"{self.phase} {self.uri}: {self.files_done} of {self.files_total} files, {size}"


_LOG: Final = logging.getLogger("attache.download")
_EVERY_S: Final = 1.0


class Listener(Protocol):
    """Gets the progress: at each change of the phase, and about once a second while bytes come."""

    def update(self, progress: Progress) -> None:
        """Must not wait and must not fail."""
        ...


class Tracker:
    """Counts, and passes changes to ``listeners``."""

    def __init__(self, uri: str, listeners: Sequence[Listener] = ()) -> None:
        self.now = Progress("Resolving", uri)
        self._listeners = listeners
        self._notified_at_s = float("-inf")

    def start(self) -> None:
        """Tell everybody that the download begins."""
        self._notify()

    def phase(self, phase: Phase, *, message: str = "", reason: str = "") -> None:
        """Go on to another phase."""
        self.now = msgspec.structs.replace(self.now, phase=phase, message=message, reason=reason)
        _LOG.info("%s", self.now.sentence())
        self._notify()

    def resolved(self, *, revision: str, key: str, files: int, size: int) -> None:
        """The source has answered what is to be fetched."""
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
        if time.monotonic() - self._notified_at_s >= _EVERY_S:  # noqa: TID251 - the edge
            self._notify()

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
        self._notify()

    def _notify(self) -> None:
        self._notified_at_s = time.monotonic()  # noqa: TID251 - the edge
        for listener in self._listeners:
            listener.update(self.now)
