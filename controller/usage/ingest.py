# SPDX-License-Identifier: Apache-2.0
"""From the log to the store, one batch after the other, for as long as the process runs."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Final

import msgspec

from controller.usage.rows import BadLine, parse_usage_line
from controller.usage.store import BadBatch, StoreUnavailable
from extproc.task_supervisor import Backoff

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Sequence

    from controller.usage.log_follower import ExtprocLogReader, LogBatch, LogFollower, LogPosition, LogRotator
    from controller.usage.rows import UsageRow
    from controller.usage.store import UsageSink

log = logging.getLogger(__name__)

# Between looks at a log without news: Envoy writes its buffers every second at the soonest.
_IDLE_S: Final = 0.25
# At the end, for lines of extproc.
_LAST_STEPS: Final = 12
_FIRST_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 30.0
_PRUNE_EVERY_S: Final = 600.0
_SUMMARY_EVERY_S: Final = 10.0
# How often a log without news has it stored that nothing waits.
_MARK_EVERY_S: Final = 60.0
# Envoy may hold a line for a second before it writes it, and those of extproc are read two seconds later; their clocks
# and ours are those of one machine.
_FLUSH_S: Final = 4.0


class IngestCounters:
    """What the metrics show. Written by one thread, read by others: each value by itself is right."""

    def __init__(self) -> None:
        self.lines = self.bad_lines = self.rows = self.duplicates = self.late = self.failures = 0
        self.bytes_behind = 0
        # seconds since 1970: when the last request ended whose line was read, or when nothing waited
        self.kept_until_s: float | None = None
        self.failed_at_s = self.began_s = 0.0
        self.error = "the store is not open yet"

    @property
    def stored_until_s(self) -> float | None:
        """Every request that ended before it is stored; seconds since 1970, None if that is not known yet."""
        return None if self.kept_until_s is None else self.kept_until_s - _FLUSH_S

    def lag_s(self, now_s: float) -> float:
        """Age of the oldest request that is not stored; 0 if there is none."""
        return max(0.0, now_s - (self.kept_until_s or self.began_s)) if self.bytes_behind else 0.0


class Ingest:
    """Moves batches. One thread calls ``step`` or ``run``; others read ``counts``."""

    def __init__(
        self,
        follower: LogFollower,
        open_sink: Callable[[], UsageSink],
        *,
        wall: Callable[[], float],
        keep_requests_s: float,
        keep_rollups_s: float,
        left: ExtprocLogReader | None = None,
        rotation: LogRotator | None = None,
        first_pause_s: float = _FIRST_PAUSE_S,
    ) -> None:
        """``open_sink``: raises StoreAway and OSError, upon which it is called again later, and StoreError. ``wall``:
        seconds since 1970. ``left``: what extproc writes beside the log. ``rotation``: None: another process rotates
        the log, or nobody. ``first_pause_s``: before the second try of what has failed; pauses double.
        """
        self._follower = follower
        self._open_sink = open_sink
        self._sink: UsageSink | None = None
        counts = self.counts = IngestCounters()
        self._wall = wall
        self._keep_requests_s = keep_requests_s
        self._keep_rollups_s = keep_rollups_s
        self._left = left
        self._rotation = rotation
        self._backoff = Backoff(first_pause_s, _LONGEST_PAUSE_S)
        self._pruned_at_s = self._reported_at_s = 0.0
        self._unreported = 0
        self._kept = follower.position
        self._reason = ""
        self._kept_since_s: float | None = None
        counts.began_s = wall()
        self._marked_at_s = 0.0
        self._is_refused = False

    def run(self, stop: threading.Event) -> None:
        """Until ``stop``, then once more what is there; raises StoreError alone."""
        while not stop.wait(self.step()):
            pass
        while not self.step():
            pass
        # extproc may have written a moment ago, and nobody reads it later if the file goes with this machine
        for _ in range(_LAST_STEPS):
            if self._left is None or not self._left.has_unread_lines:
                break
            time.sleep(_IDLE_S)
            self.step()

    def step(self) -> float:
        """Open the store, if it is not; move one batch, if there is one. Returns after how many seconds to call again.

        Raises StoreError.
        """
        now_s = self._wall()
        is_more = False
        try:
            sink = self._open()
            is_more = any([self._move(sink), self._move_left(sink)])
            if not is_more and not 0 <= now_s - self._marked_at_s <= _MARK_EVERY_S:
                self._store(sink, (), self._kept, self.counts.stored_until_s)
            if self._rotation is not None:
                self._rotation.step(self._follower)
                self._report_rotation(self._rotation)
            if not 0 <= now_s - self._pruned_at_s <= _PRUNE_EVERY_S:
                self._kept_since_s = sink.prune(now_s, self._keep_requests_s, self._keep_rollups_s)
                self._pruned_at_s = now_s
        except (StoreUnavailable, BadBatch, OSError) as error:
            return self._failed(error, now_s)
        self._report_bad_lines(now_s)
        if self._backoff.pause_s:
            log.info("rows are kept again; %d bytes of the log wait", self.counts.bytes_behind)
            self._backoff.reset()
        self.counts.error = ""
        return 0.0 if is_more else _IDLE_S

    def close(self) -> None:
        """Close the log and the store."""
        self._follower.close()
        if self._left is not None:
            self._left.close()
        if self._sink is not None:
            self._sink.close()

    def _open(self) -> UsageSink:
        if self._sink is None:
            sink = self._open_sink()
            self._kept = sink.read_position()
            self._follower.rewind(self._kept)
            self._sink = sink
        return self._sink

    def _move(self, sink: UsageSink) -> bool:
        """Whether there was something to move."""
        counts = self.counts
        try:
            batch = self._follower.read()
            if batch is not None:
                self._keep(sink, batch)
        except BaseException:
            self._follower.rewind(self._kept)
            raise
        finally:
            counts.bytes_behind = self._follower.bytes_behind()
        if not counts.bytes_behind:
            counts.kept_until_s = self._wall()
        return batch is not None

    def _move_left(self, sink: UsageSink) -> bool:
        """The same for lines of extproc's, which have no position."""
        batch = None if self._left is None else self._left.read()
        if self._left is None or batch is None:
            return False
        at = (self._kept,) * len(batch.lines)
        self._keep(sink, msgspec.structs.replace(batch, ends=at, after=self._kept), is_left=True)
        self._left.mark_stored(batch)
        return True

    def _keep(self, sink: UsageSink, batch: LogBatch, *, is_left: bool = False) -> None:
        now_s = self._wall()
        oldest_s = now_s - self._keep_requests_s
        if self._kept_since_s is not None:
            oldest_s = min(oldest_s, self._kept_since_s)
        rows: list[tuple[UsageRow, LogPosition]] = []
        bad, late = batch.torn, 0
        reason = "it has no end" if batch.torn else ""
        for line, end in zip(batch.lines, batch.ends, strict=True):
            try:
                row = parse_usage_line(line, now_s)
            except BadLine as error:
                bad, reason = bad + 1, str(error)
                continue
            if row.at_us < oldest_s * 1_000_000:
                # nobody could say whether it was counted before
                late += 1
            else:
                rows.append((row, end))
        counts = self.counts
        until_s = counts.kept_until_s
        if rows and not is_left:
            # Envoy writes lines in the order of the ends of requests
            until_s = min(now_s, max(row.at_us + row.duration_us for row, _ in rows) / 1_000_000)
        if rows or batch.after != self._kept:
            self._write(sink, rows, batch.after, None if until_s is None else until_s - _FLUSH_S)
        counts.kept_until_s = until_s
        counts.lines += len(batch.lines)
        counts.late += late
        self._count_bad(bad, reason)

    def _write(
        self, sink: UsageSink, rows: Sequence[tuple[UsageRow, LogPosition]], after: LogPosition, until_s: float | None
    ) -> None:
        """Keep rows; of rows that the store refuses, those alone are lost."""
        kept = [row for row, _ in rows]
        try:
            new = self._store(sink, kept, after, until_s)
        except BadBatch as error:
            if not rows:
                raise StoreUnavailable(str(error)) from error
            if len(rows) == 1:
                self._store(sink, (), after, until_s)
                self._count_bad(1, f"the store refuses it: {error}")
                return
            half = len(rows) // 2
            self._write(sink, rows[:half], rows[half - 1][1], None)
            self._write(sink, rows[half:], after, until_s)
            return
        self.counts.rows += len(new)
        self.counts.duplicates += len(kept) - len(new)

    def _store(
        self, sink: UsageSink, rows: Sequence[UsageRow], after: LogPosition, until_s: float | None
    ) -> Sequence[UsageRow]:
        new = sink.write(rows, self._kept, after, until_s)
        self._kept = after
        self._marked_at_s = self._wall()
        return new

    def _count_bad(self, bad: int, reason: str) -> None:
        self.counts.bad_lines += bad
        if bad:
            self._unreported += bad
            self._reason = reason

    def _report_bad_lines(self, now_s: float) -> None:
        """One line of our log for many of Envoy's."""
        if self._unreported and now_s - self._reported_at_s > _SUMMARY_EVERY_S:
            log.warning("%d lines cannot be read and are left out; the last one: %s", self._unreported, self._reason)
            self._unreported = 0
            self._reported_at_s = now_s

    def _report_rotation(self, rotation: LogRotator) -> None:
        if rotation.is_refused and not self._is_refused:
            log.warning("Envoy does not open its log again: nobody answers at --envoy-admin; it is asked until it does")
        self._is_refused = rotation.is_refused

    def _failed(self, error: Exception, now_s: float) -> float:
        counts = self.counts
        counts.failures += 1
        counts.failed_at_s = now_s
        text = str(error) or type(error).__name__
        is_new, counts.error = not self._backoff.pause_s or text != counts.error, text
        if is_new:
            log.error("rows cannot be kept: %s; Envoy's log keeps them, and this is tried again", text)
        return self._backoff.record_failure()
