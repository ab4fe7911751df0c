# SPDX-License-Identifier: Apache-2.0
"""Levels of the buckets of local limits, and derived prices, in a file: a process that starts continues with them.

The file is replaced by rename, some ten times a second while limits grant, and once more at the end: a killed process
loses the grants of the last tenth of a second. Every worker has a file of its own and begins with the lowest level of
all files. The time between is inflow, by the wall clock.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import msgspec

from extproc.admission.token_buckets import BucketLevel
from extproc.api.untrusted_files import open_regular_file
from extproc.endpoints.prices import DerivedPrice

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from extproc.admission.local_limits import LocalLimits
    from extproc.scheduling.pool import Pool

log = logging.getLogger(__name__)

_PAUSE_S: Final = 0.1
# Of the process's time, saving takes at most one part in as many.
_MOST_SHARE: Final = 20
# Some 100,000 buckets are saved, of 200 bytes or so each.
_MOST_BYTES: Final = 256 << 20


class _Saved(msgspec.Struct, frozen=True):
    """``prices``: by ModelServer. Until an engine has answered there is no other, and money budgets would be free."""

    saved_at_s: float
    levels: list[BucketLevel]
    prices: Mapping[str, DerivedPrice] = MappingProxyType({})


class SavedLimits:
    """The levels of ``limits`` in ``directory``, and the prices of ``pools``. ``number``: of this worker.
    ``wall_clock``: seconds since 1970. ``owns``: whether this process writes the worker's file.
    """

    def __init__(
        self,
        limits: LocalLimits,
        directory: Path,
        *,
        pools: Callable[[], Mapping[str, Pool]] = dict,
        number: int,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        owns: Callable[[], bool] = lambda: True,
    ) -> None:
        self._limits = limits
        self._pools = pools
        self._directory = directory
        self._file = directory / f"limits-{number}.json"
        self._clock = clock
        self._wall_clock = wall_clock
        self._owns = owns
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
                saved = msgspec.json.decode(read_state(file), type=_Saved)
            except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                log.warning("%s cannot be read, its limits start full: %s", file, error)
                continue
            for name, price in saved.prices.items():
                if (pool := self._pools().get(name)) is not None:
                    pool.prices.saved = price
            passed_s = max(0.0, wall_now - saved.saved_at_s)
            self._limits.cap_levels(
                [
                    BucketLevel(one.key, one.limit, one.level + one.limit.rate * passed_s)
                    for one in saved.levels
                    # a budget's window that has ended is of no use
                    if not 0 < one.limit.ends_at_s <= wall_now
                ],
                now,
            )
        self._saved_changes = self._limits.changes

    async def run(self) -> None:
        """Save levels until cancelled."""
        while True:
            began_s = self._clock()
            self.save()
            await asyncio.sleep(max(_PAUSE_S, _MOST_SHARE * (self._clock() - began_s)))

    def hand_over(self) -> None:
        """Save for the successor, which knows what is spent from then on."""
        self.save()

    def save(self) -> None:
        """If anything has changed. A failure is logged once, until it works again."""
        if self._limits.changes == self._saved_changes or not self._owns():
            return
        changes = self._limits.changes
        prices = {name: last for name, pool in self._pools().items() if (last := pool.prices.last_derived) is not None}
        saved = _Saved(self._wall_clock(), self._limits.levels(self._clock()), prices)
        try:
            write_state(self._file, msgspec.json.encode(saved))
        except OSError as error:
            if not self._has_failed:
                log.warning("the levels of limits cannot be saved, a restart will find older ones: %s", error)
            self._has_failed = True
            return
        self._has_failed, self._saved_changes = False, changes


def write_state(file: Path, content: bytes) -> None:
    """Raises OSError, with the file as it was, and nothing left of what was written."""
    fresh = file.with_suffix(".new")
    # the file was left by a process that was killed; opening a pipe would block
    fresh.unlink(missing_ok=True)
    # names of tenants are private
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as opened:
            opened.write(content)
        fresh.replace(file)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise


def read_state(file: Path) -> bytes:
    """Raises OSError."""
    with open_regular_file(file) as opened:
        content = opened.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise OSError(errno.EFBIG, f"has more than {_MOST_BYTES} bytes")
    return content
