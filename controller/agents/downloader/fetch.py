# SPDX-License-Identifier: Apache-2.0
"""Fetch what is missing of a listing into a cache entry: parts side by side, each file verified when it is whole."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import threading
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from controller.agents.downloader.core.errors import ChecksumMismatch, SourceChanged, SourceUnavailable
from controller.agents.downloader.core.fetch_plan import (
    ByteRange,
    FilePart,
    RetryPolicy,
    journal_discard_line,
    journal_header,
    journal_line,
    listing_digest,
    plan_file_parts,
    read_journal,
    retry_delay_s,
)
from controller.agents.downloader.local_files import file_digest, run_in_thread
from controller.agents.downloader.transfer import RequestedRange

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable
    from pathlib import Path

    from controller.agents.downloader.cache import CacheEntry
    from controller.agents.downloader.core.fetch_plan import FileListing, RemoteFile
    from controller.agents.downloader.progress import ProgressTracker
    from controller.agents.downloader.sources.source import RemoteSource
    from controller.agents.downloader.transfer import TransferClient

_MIB: Final = 1024**2


class FetchSettings(msgspec.Struct, frozen=True):
    """``parallel``: requests at once. ``part``: bytes of a request. ``block``: bytes held by one before they are
    written.

    ``record``: after so many bytes they are synced and noted, so a crash costs at most that many, times ``parallel``.
    """

    parallel: int = 4
    part: int = 64 * _MIB
    block: int = _MIB
    record: int = 8 * _MIB


class _Position:
    """How far a part is: ``at``: written up to; ``noted``: on the disk and in the journal up to."""

    def __init__(self, start: int) -> None:
        self.at = start
        self.noted = start


class _Target(NamedTuple):
    """Where bytes go."""

    part: FilePart
    name: str
    position: _Position


class EntryFetch:
    """One run over one entry, whose lock the caller holds. ``check_space``: raises DiskFull; called during the download
    of a file of unknown size, which may be endless.
    """

    def __init__(
        self,
        source: RemoteSource,
        transfer: TransferClient,
        entry: CacheEntry,
        tracker: ProgressTracker,
        *,
        listing: FileListing,
        sizes: FetchSettings,
        retry: RetryPolicy,
        check_space: Callable[[], None] = lambda: None,
    ) -> None:
        self._source = source
        self._check_space = check_space
        self._transfer = transfer
        self._entry = entry
        self._tracker = tracker
        self._listing = listing
        self._unpacks = any(file.archive for file in listing.files)
        self._sizes = sizes
        self._retry = retry
        self._chance = random.Random()
        self._stopped = threading.Event()
        self._left: dict[int, int] = {}

    async def run(self) -> None:
        """Complete when it returns: each file in ``content/``, or all in ``incoming/`` if there is an archive.

        Raises a DownloadError or OSError. What was written is kept, but for a file with a wrong checksum.
        """
        parts = await asyncio.to_thread(self._plan)
        self._tracker.set_phase("Downloading")
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(self._sizes.parallel, len(parts))):
                    group.create_task(self._work(parts))
        except* Exception as failures:  # noqa: BLE001 - one of them is raised
            raise first_exception(failures) from None
        finally:
            self._stopped.set()

    def missing_bytes(self) -> int:
        """Bytes still to be written, of files of known size."""
        there = self._there()
        return sum(
            (file.size or 0) - sum(span.end - span.start for span in there.get(index, ()))
            for index, file in enumerate(self._listing.files)
            if not self._is_done(file)
        )

    def _plan(self) -> deque[FilePart]:
        there = self._there()
        head = _head(self._listing)
        if not self._entry.journal.exists() or not self._entry.journal.read_text().startswith(head):
            self._entry.clear()
            there = {}
            self._entry.journal.write_text(head)
        parts: deque[FilePart] = deque()
        done = size = 0
        for index, file in enumerate(self._listing.files):
            if self._is_done(file):
                done += 1
                size += file.size or 0
                continue
            spans = there.get(index, []) if file.ranges and (self._entry.incoming / file.path).exists() else []
            size += sum(span.end - span.start for span in spans)
            wanted = list(plan_file_parts(index, file, spans, self._sizes.part)) or [
                FilePart(index, file.size or 0, file.size)
            ]
            self._left[index] = len(wanted)
            parts.extend(wanted)
        self._tracker.set_present_on_disk(files=done, size=size)
        return parts

    def _there(self) -> dict[int, list[ByteRange]]:
        try:
            text = self._entry.journal.read_text()
        except FileNotFoundError:
            return {}
        return read_journal(text, _head(self._listing)) or {}

    def _is_done(self, file: RemoteFile) -> bool:
        """A file is moved to ``content/`` once it is verified. Beside archives it waits for them in ``incoming/``."""
        return not self._unpacks and (self._entry.content / file.path).exists()

    async def _work(self, parts: deque[FilePart]) -> None:
        while parts:
            part = parts.popleft()
            file = self._listing.files[part.file]
            path = self._entry.incoming / file.path
            path.parent.mkdir(parents=True, exist_ok=True)
            await self._part(part, file, path)
            self._left[part.file] -= 1
            if not self._left[part.file]:
                await self._finish(part.file, file, path)

    async def _part(self, part: FilePart, file: RemoteFile, path: Path) -> None:
        """All bytes of a part, however many attempts that takes as long as they bring something."""
        failures = 0
        position = _Position(part.start)
        while position.at != part.end or not part.end:
            before = position.at
            try:
                await self._attempt(part, position, file, path)
                return
            except SourceUnavailable as error:
                failures = 1 if position.at > before else failures + 1
                if not file.ranges or part.end is None:
                    self._tracker.subtract_lost(position.at - part.start)
                    position = _Position(part.start)
                pause_s = (
                    retry_delay_s(self._retry, failures, error.retry_after_s, self._chance)
                    if error.is_temporary
                    else None
                )
                if pause_s is None:
                    raise
                self._tracker.count_retry(error, pause_s)
                await asyncio.sleep(pause_s)

    async def _attempt(self, part: FilePart, position: _Position, file: RemoteFile, path: Path) -> None:
        """One request from ``position`` to the end of the part."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            if part.end == 0:  # an empty file
                return
            request = await self._source.build_request(file, position.at, part.end)
            wanted = RequestedRange(position.at, part.end, file.size, file.version, file.ranges)
            async with self._transfer.open(request, wanted) as chunks:
                await self._write(descriptor, _Target(part, file.path, position), chunks)
        finally:
            # bytes received before a failure count, too; a full disk is reported by the write
            if file.ranges and position.at > position.noted:
                with contextlib.suppress(OSError):
                    self._note(descriptor, part.file, position)
            os.close(descriptor)

    async def _write(self, descriptor: int, target: _Target, chunks: AsyncGenerator[bytes]) -> None:
        part, position = target.part, target.position
        async with contextlib.aclosing(_blocks(chunks, self._sizes.block)) as blocks:
            async for block in blocks:
                if part.end is not None and position.at + len(block) > part.end:
                    raise SourceChanged(f"{target.name} is longer than it was said to be")
                if part.end is None:
                    self._check_space()
                await run_in_thread(_write_at, descriptor, block, position.at)
                position.at += len(block)
                self._tracker.add_fetched(len(block))
                if position.at - position.noted >= self._sizes.record and part.end is not None:
                    await run_in_thread(self._note, descriptor, part.file, position)
        if part.end is not None and position.at < part.end:
            raise SourceUnavailable(f"{target.name} was cut short: {part.end - position.at} bytes are missing")

    def _note(self, descriptor: int, index: int, position: _Position) -> None:
        """Write the bytes to the disk first, then the journal line that records them."""
        span = ByteRange(position.noted, position.at)
        os.fdatasync(descriptor)
        with self._entry.journal.open("a") as journal:
            journal.write(journal_line(index, span))
        position.noted = span.end

    async def _finish(self, index: int, file: RemoteFile, path: Path) -> None:
        try:
            await run_in_thread(self._verify, file, path, on_cancel=self._stopped.set)
        except ChecksumMismatch:
            with self._entry.journal.open("a") as journal:
                journal.write(journal_discard_line(index))
            raise
        self._tracker.file_done()

    def _verify(self, file: RemoteFile, path: Path) -> None:
        """Compare the file with the source's checksum, and move it to where engines read it. A wrong one is removed."""
        size = path.stat().st_size
        if file.size is not None and size != file.size:
            path.unlink()
            raise ChecksumMismatch(f"{file.path} has {size} bytes instead of {file.size}; it was removed")
        if file.checksum is not None:
            found = file_digest(path, file.checksum, self._stopped.is_set)
            if found is None:
                return
            if found.lower() != file.checksum.value.lower():
                path.unlink()
                wanted = f"{file.checksum.algorithm} {file.checksum.value}"
                raise ChecksumMismatch(f"{file.path} should have {wanted}, and has {found}; it was removed")
        if not self._unpacks:
            target = self._entry.content / file.path
            target.parent.mkdir(parents=True, exist_ok=True)
            with path.open("rb") as done:
                os.fsync(done.fileno())
            path.replace(target)


def first_exception(failures: BaseExceptionGroup[Exception]) -> Exception:
    """One error for the user: the first; others are mostly its consequence."""
    first: BaseException = failures
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    return first if isinstance(first, Exception) else RuntimeError(str(first))


async def _blocks(chunks: AsyncGenerator[bytes], size: int) -> AsyncGenerator[bytes]:
    """Chunks gathered to about ``size`` bytes, to reduce calls of threads."""
    gathered = bytearray()
    async for chunk in chunks:
        gathered += chunk
        if len(gathered) >= size:
            yield bytes(gathered)
            gathered.clear()
    if gathered:
        yield bytes(gathered)


def _write_at(descriptor: int, block: bytes, at: int) -> None:
    view = memoryview(block)
    while view:
        count = os.pwrite(descriptor, view, at)
        view, at = view[count:], at + count


def _head(listing: FileListing) -> str:
    return journal_header(listing, listing_digest([(one.path, one.size, one.version) for one in listing.files]))
