# SPDX-License-Identifier: Apache-2.0
"""Rows as JSON lines, a file a day: for systems that take files. Reports need a database.

Exactly once by position, and not by id: ``position.json`` has the length of each file behind the last batch, and is
replaced by rename. What a crash has left behind that length is cut off at the next start.
"""

from __future__ import annotations

import fcntl
import os
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

import msgspec

from controller.usage.log_follower import LogPosition
from controller.usage.store import StoreError, StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from controller.usage.rows import UsageRow

_DAY_FILE: Final = "requests-%Y-%m-%d.jsonl"


class _State(msgspec.Struct, frozen=True):
    position: LogPosition = LogPosition()
    # of files that may be written to again
    lengths: dict[str, int] = {}


class JsonLinesStore:
    """A Sink. One process writes to a directory."""

    def __init__(self, folder: Path) -> None:
        """Raises StoreError, StoreAway."""
        self._folder = folder
        self._state_file = folder / "position.json"
        self._is_clean = False
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._state = msgspec.json.decode(self._state_file.read_bytes(), type=_State)
        except FileNotFoundError:
            self._state = _State()
        except BlockingIOError:
            raise StoreError(f"another process writes to {folder}; stop it, or name another directory") from None
        except msgspec.DecodeError as error:
            raise StoreError(f"{self._state_file} is broken ({error}); restore it, or name another directory") from None
        except OSError as error:
            raise StoreUnavailable(f"{folder}: {error}") from error

    def read_position(self) -> LogPosition:
        """Behind the last line whose row is kept."""
        return self._state.position

    def write(
        self, rows: Sequence[UsageRow], before: LogPosition, after: LogPosition, until_s: float | None = None
    ) -> Sequence[UsageRow]:
        """As Sink says; nobody reads ``until_s`` here."""
        del until_s
        if before != self._state.position:
            raise StoreError(f"{self._state_file} does not have the position that was read; start again")
        texts: dict[str, list[bytes]] = {}
        for row in rows:
            name = datetime.fromtimestamp(row.at_us / 1_000_000, UTC).strftime(_DAY_FILE)
            texts.setdefault(name, []).append(msgspec.json.encode(row))
        try:
            if not self._is_clean:
                self._cut()
            lengths = dict(self._state.lengths)
            self._is_clean = False
            for name, lines in sorted(texts.items()):
                lengths[name] = self._append(name, b"\n".join(lines) + b"\n")
            state = _State(after, lengths)
            draft = self._state_file.with_suffix(".draft")
            _write(draft, msgspec.json.encode(state))
            draft.rename(self._state_file)
        except OSError as error:
            raise StoreUnavailable(f"{self._folder}: {error}") from error
        self._state = state
        self._is_clean = True
        return rows

    def _cut(self) -> None:
        """Cut off what is behind the last position: it will be written again."""
        for path in self._folder.glob("requests-*.jsonl"):
            length = self._state.lengths.get(path.name, 0)
            if path.stat().st_size > length:
                os.truncate(path, length)

    def _append(self, name: str, text: bytes) -> int:
        with (self._folder / name).open("ab") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
            return file.tell()

    def prune(self, now_s: float, keep_requests_s: float, keep_rollups_s: float) -> float | None:
        """Delete the oldest file, if it is of a whole day that is older; and no more, as Sink says."""
        del keep_rollups_s
        first = datetime.fromtimestamp(now_s - keep_requests_s, UTC).strftime(_DAY_FILE)
        old = sorted(name for name in self._state.lengths if name < first)[:1]
        try:
            for name in old:
                (self._folder / name).unlink(missing_ok=True)
        except OSError as error:
            raise StoreUnavailable(f"{self._folder}: {error}") from error
        # a length of a file that is not there is harmless: the next position leaves it out
        for name in old:
            del self._state.lengths[name]
        return None

    def close(self) -> None:
        """Let another process write."""
        os.close(self._lock)


def _write(path: Path, text: bytes) -> None:
    with path.open("wb") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
