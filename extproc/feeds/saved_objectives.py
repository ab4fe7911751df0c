# SPDX-License-Identifier: Apache-2.0
"""The hours of objectives, in a file: attainment over a month outlives the process.

The file is replaced once a minute, and once more at the end: a killed process loses a minute. Every worker has a file
of its own, which the worker of the same number continues. A predecessor hands it over to its successor, and leaves what
it counts afterwards in another file.
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import TYPE_CHECKING, Final

import msgspec

from extproc.api.status_pages import ObjectiveCounts
from extproc.feeds.saved_levels import read_state, replace_state

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from extproc.metrics.objectives import ObjectiveSeries

log = logging.getLogger(__name__)

_PAUSE_S: Final = 60.0
# While a predecessor owns the file.
_WAIT_S: Final = 1.0


class SavedObjectives:
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
        self._saved_changes = series.changes
        self._has_failed = False

    def load(self) -> None:
        """Go on with what was saved, once no predecessor owns it. A file that cannot be read is passed over."""
        if self._is_loaded or not self._owns():
            return
        self._is_loaded = True
        self._add(self._file)

    async def run(self) -> None:
        """Save until cancelled."""
        while True:
            await asyncio.sleep(_PAUSE_S if self._is_loaded else _WAIT_S)
            self.update()

    def update(self) -> None:
        """Add what a predecessor has handed over or left, and save."""
        self.load()
        self._add_remainders()
        self.save()

    def save(self) -> None:
        """If anything was counted. A failure is logged once, until it works again."""
        changes = self._series.changes
        if changes != self._saved_changes and self._is_loaded and self._write():
            self._saved_changes = changes

    def hand_over(self) -> None:
        """Save for the successor. What is counted from now on is in another file, which it adds once it is there."""
        self.load()
        if self._is_loaded:
            self.save()
            self._series.clear()
        self._file, self._is_loaded = self._file.with_suffix(f".{os.getpid()}.rest"), True

    def _add_remainders(self) -> None:
        if self._is_loaded:
            for file in self._file.parent.glob(f"{self._file.stem}.*.rest"):
                self._add(file)
                file.unlink(missing_ok=True)
                self._write()

    def _add(self, file: Path) -> None:
        try:
            self._series.restore(msgspec.json.decode(read_state(file), type=list[ObjectiveCounts]))
        except FileNotFoundError:
            return
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            log.warning("%s cannot be read, objectives are counted from now on: %s", file, error)

    def _write(self) -> bool:
        try:
            replace_state(self._file, msgspec.json.encode(list(self._series.report())))
        except OSError as error:
            if not self._has_failed:
                log.warning("objectives cannot be saved, a restart will begin with older counts: %s", error)
            self._has_failed = True
            return False
        self._has_failed = False
        return True
