# SPDX-License-Identifier: Apache-2.0
"""How full the buckets of local limits are, in a file: a process that starts goes on where the last one ended.

The file is replaced by rename, some ten times a second while limits grant, and once more at the end: who kills the
process gains what was granted in the last tenth of a second. Every worker has a file of its own and begins with the
lowest level of all files. The time between is inflow, by the wall clock.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import stat
from typing import TYPE_CHECKING, Final

import msgspec

from extproc.admission.limits import BucketLevel

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from extproc.admission.limits import LocalLimits

log = logging.getLogger(__name__)

_PAUSE_S: Final = 0.1
# Of the process's time, saving takes at most one part in as many.
_MOST_SHARE: Final = 20
# Some 100,000 buckets are remembered, of 200 bytes or so each.
_MOST_BYTES: Final = 256 << 20


class _Saved(msgspec.Struct, frozen=True):
    saved_at_s: float
    levels: list[BucketLevel]


class SavedLevels:
    """The levels of ``limits`` in ``directory``. ``number``: of this worker. ``wall_clock``: seconds since 1970."""

    def __init__(
        self,
        limits: LocalLimits,
        directory: Path,
        *,
        number: int,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        self._limits = limits
        self._directory = directory
        self._file = directory / f"limits-{number}.json"
        self._clock = clock
        self._wall_clock = wall_clock
        self._saved_changes = limits.changes
        self._has_failed = False

    def load(self) -> None:
        """Begin with what was saved. A file that cannot be read is passed over. Raises OSError if there can be no
        directory.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        now, wall_now = self._clock(), self._wall_clock()
        for file in sorted(self._directory.glob("limits-*.json")):
            try:
                saved = msgspec.json.decode(_content(file), type=_Saved)
            except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                log.warning("%s cannot be read, its limits start full: %s", file, error)
                continue
            passed_s = max(0.0, wall_now - saved.saved_at_s)
            self._limits.lower(
                [BucketLevel(one.key, one.limit, one.level + one.limit.rate * passed_s) for one in saved.levels], now
            )
        self._saved_changes = self._limits.changes

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            began_s = self._clock()
            self.save()
            await asyncio.sleep(max(_PAUSE_S, _MOST_SHARE * (self._clock() - began_s)))

    def save(self) -> None:
        """If anything has changed. A failure is logged once, until it works again."""
        if self._limits.changes == self._saved_changes:
            return
        changes = self._limits.changes
        saved = _Saved(self._wall_clock(), self._limits.levels(self._clock()))
        fresh = self._file.with_suffix(".new")
        try:
            # what lies there was left by a process that was killed; a pipe would be waited for
            fresh.unlink(missing_ok=True)
            # names of tenants are nobody else's business
            with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(msgspec.json.encode(saved))
            fresh.replace(self._file)
        except OSError as error:
            if not self._has_failed:
                log.warning("the levels of limits cannot be saved, a restart will find older ones: %s", error)
            self._has_failed = True
            return
        self._has_failed, self._saved_changes = False, changes


def _content(file: Path) -> bytes:
    """Raises OSError."""
    # a pipe would be waited for until somebody writes into it
    with os.fdopen(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as opened:
        if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
            raise OSError(errno.EINVAL, "is not a regular file")
        content = opened.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise OSError(errno.EFBIG, f"has more than {_MOST_BYTES} bytes")
    return content
