# SPDX-License-Identifier: Apache-2.0
"""The hours of objectives, in a file: attainment over a month outlives the process.

The file is replaced once a minute, and once more at the end: a killed process loses a minute. Every worker has a file
of its own, which the worker of the same number continues.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

import msgspec

from extproc.api.status_pages import ObjectiveCounts
from extproc.feeds.saved_levels import read_state, replace_state

if TYPE_CHECKING:
    from pathlib import Path

    from extproc.metrics.objectives import ObjectiveSeries

log = logging.getLogger(__name__)

_PAUSE_S: Final = 60.0


class SavedObjectives:
    """The hours of ``series`` in ``directory``, which exists. ``number``: of this worker."""

    def __init__(self, series: ObjectiveSeries, directory: Path, *, number: int) -> None:
        self._series = series
        self._file = directory / f"objectives-{number}.json"
        self._saved_changes = series.changes
        self._has_failed = False

    def load(self) -> None:
        """Go on with what was saved. A file that cannot be read is passed over."""
        try:
            self._series.restore(msgspec.json.decode(read_state(self._file), type=list[ObjectiveCounts]))
        except FileNotFoundError:
            return
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            log.warning("%s cannot be read, objectives are counted from now on: %s", self._file, error)

    async def run(self) -> None:
        """Save until cancelled."""
        while True:
            await asyncio.sleep(_PAUSE_S)
            self.save()

    def save(self) -> None:
        """If anything was counted. A failure is logged once, until it works again."""
        changes = self._series.changes
        if changes == self._saved_changes:
            return
        try:
            replace_state(self._file, msgspec.json.encode(list(self._series.report())))
        except OSError as error:
            if not self._has_failed:
                log.warning("objectives cannot be saved, a restart will begin with older counts: %s", error)
            self._has_failed = True
            return
        self._has_failed, self._saved_changes = False, changes
