# SPDX-License-Identifier: Apache-2.0
"""The hours of objectives, in a file: attainment over a month outlives the process.

The file is replaced once a minute, and once more at the end: a killed process loses a minute. Every worker has a file
of its own, which the worker of the same number continues. A predecessor hands it over to its successor, and leaves what
it counts afterwards, its remainder, in other files, each of which the successor adds once.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final
from uuid import uuid4

import msgspec

from extproc.api.status_page_contents import SloObjectiveCounts
from extproc.feeds.saved_limits import read_state, write_state

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from extproc.metrics.slo_metrics import ObjectiveSeries

log = logging.getLogger(__name__)

_PAUSE_S: Final = 60.0
# While a predecessor owns the file.
_WAIT_S: Final = 1.0
_BROKEN: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class _Saved(msgspec.Struct, frozen=True):
    """``added``: names of remainders that are part of ``objectives``."""

    objectives: list[SloObjectiveCounts]
    added: frozenset[str] = frozenset()


class SavedSloCounts:
    """The hours of ``series`` in ``directory``, which exists. ``number``: of this worker. ``owns``: whether this
    process writes the worker's file.
    """

    def __init__(
        self, series: ObjectiveSeries, directory: Path, *, number: int, owns: Callable[[], bool] = lambda: True
    ) -> None:
        self._series = series
        self._file = directory / f"objectives-{number}.json"
        self._owns = owns
        self._is_loaded = False
        self._has_successor = False
        # remainders that the file has, and that are not deleted yet
        self._added: set[str] = set()
        self._saved_changes = series.changes
        self._has_failed = False
        # files of which it was logged
        self._unreadable: set[Path] = set()

    def load(self) -> None:
        """Go on with what was saved, once no predecessor owns it. A broken file is passed over. One that cannot be
        read now is read later, and not replaced before.
        """
        if self._is_loaded or self._has_successor or not self._owns():
            return
        try:
            saved = _read(self._file)
        except FileNotFoundError:
            saved = _Saved([])
        except OSError as error:
            self._warn(self._file, error)
            return
        except _BROKEN as error:
            self._warn(self._file, error)
            saved = _Saved([])
        self._series.restore(saved.objectives)
        self._added = set(saved.added)
        self._is_loaded = True

    async def run(self) -> None:
        """Save until cancelled."""
        while True:
            await asyncio.sleep(_PAUSE_S if self._is_loaded or self._has_successor else _WAIT_S)
            self.adopt_predecessor_counts()

    def adopt_predecessor_counts(self) -> None:
        """Add what a predecessor has handed over or left, and save."""
        self.load()
        self._add_remainders()
        self.save()

    def save(self) -> None:
        """If anything was counted. A failure is logged once, until it works again."""
        if self._series.changes == self._saved_changes:
            return
        if not self._has_successor:
            if self._is_loaded:
                self._write(self._file)
        elif self._write(self._file.with_suffix(f".{uuid4().hex}.rest")):
            self._series.clear()

    def hand_over(self) -> None:
        """Save for the successor. What is counted from now on is left in other files, which it adds."""
        self.load()
        if self._is_loaded:
            self.save()
            if self._series.changes == self._saved_changes:
                self._series.clear()
            else:
                self._remove_saved()
        self._has_successor = True

    def _remove_saved(self) -> None:
        """The last save has failed: the successor has what the file has, and the remainder is all else."""
        try:
            self._series.subtract_counts(_read(self._file).objectives)
        except FileNotFoundError:
            return
        except (OSError, *_BROKEN) as error:
            # so the successor cannot read it either
            self._warn(self._file, error)

    def _add_remainders(self) -> None:
        # A file is deleted only once its counts are saved. A process may be killed in between, so what is saved names
        # the files that it contains: the next life deletes them without adding them again. No name comes twice.
        if self._is_loaded and not self._has_successor:
            for file in self._file.parent.glob(f"{self._file.stem}.*.rest"):
                if file.name in self._added or self._add(file):
                    file.unlink(missing_ok=True)
            self._added.clear()

    def _add(self, file: Path) -> bool:
        """Whether what the file has is saved. If not, it is not counted either, and the file is read again later."""
        try:
            left = _read(file).objectives
        except (OSError, *_BROKEN) as error:
            self._warn(file, error)
            return False
        self._series.restore(left)
        self._added.add(file.name)
        if self._write(self._file):
            return True
        self._series.subtract_counts(left)
        self._added.remove(file.name)
        return False

    def _warn(self, file: Path, error: Exception) -> None:
        if file not in self._unreadable:
            self._unreadable.add(file)
            log.warning("%s cannot be read, objectives are counted without it: %s", file, error)

    def _write(self, file: Path) -> bool:
        changes = self._series.changes
        try:
            write_state(file, msgspec.json.encode(_Saved(list(self._series.report()), frozenset(self._added))))
        except OSError as error:
            if not self._has_failed:
                log.warning("objectives cannot be saved, a restart will begin with older counts: %s", error)
            self._has_failed = True
            return False
        self._has_failed, self._saved_changes = False, changes
        return True


def _read(file: Path) -> _Saved:
    """Raises OSError, and what is in ``_BROKEN``."""
    return msgspec.json.decode(read_state(file), type=_Saved)
