# SPDX-License-Identifier: Apache-2.0
"""A download from beginning to end: resolve, check the cache, fetch or wait for another fetch, unpack, mark, link."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from controller.agents.downloader.archives import ArchiveLimits, Unpacker, UnpackingStopped, walk_files
from controller.agents.downloader.cache import (
    CachedFile,
    CompletionMarker,
    EntryLockState,
    FileLock,
    WeightCache,
    choose_evictions,
    next_cache_step,
    translate_disk_errors,
)
from controller.agents.downloader.core.errors import (
    ContentRefused,
    DiskFull,
    DownloadError,
    DownloadTimeout,
    SourceChanged,
    SourceUnavailable,
)
from controller.agents.downloader.core.fetch_plan import (
    FileSelection,
    RetryPolicy,
    cache_entry_key,
    cached_listing_key,
    choose_files,
    is_wanted,
    mark_single_archive,
    requested_revision,
    retry_delay_s,
)
from controller.agents.downloader.core.uri import FileLocation, HubLocation, PvcLocation
from controller.agents.downloader.fetch import EntryFetch, FetchSettings
from controller.agents.downloader.local_files import check_local_files, link_to_cache, resolve_local_path, run_in_thread
from controller.agents.downloader.sources.source import source_for
from controller.agents.downloader.transfer import Timeouts, open_transfer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from controller.agents.downloader.cache import CacheEntry
    from controller.agents.downloader.core.fetch_plan import FileListing
    from controller.agents.downloader.environment import EnvironmentReader
    from controller.agents.downloader.progress import ProgressTracker
    from controller.agents.downloader.sources.source import RemoteSource
    from controller.agents.downloader.transfer import TransferClient

_FOLLOW_S: Final = 0.5


class CacheFillSettings(msgspec.Struct, frozen=True):
    """How entries are filled. ``keep_free``: bytes of the disk that are left alone. ``cache_limit``: of all entries
    together; None: nothing is ever evicted.
    """

    sizes: FetchSettings = FetchSettings()
    retry: RetryPolicy = RetryPolicy()
    limits: ArchiveLimits = ArchiveLimits()
    keep_free: int = 0
    cache_limit: int | None = None


class CacheFiller:
    """Completes entries of a cache, each under its lock, which the caller holds: room, files, archives, marker."""

    def __init__(
        self,
        cache: WeightCache,
        source: RemoteSource,
        transfer: TransferClient,
        tracker: ProgressTracker,
        rules: CacheFillSettings,
    ) -> None:
        self._cache = cache
        self._source = source
        self._transfer = transfer
        self._tracker = tracker
        self._rules = rules

    async def fill(self, key: str, listing: FileListing, wanted: FileSelection, uri: str) -> None:
        """Complete when it returns. ``uri``: for the marker, without credentials. Raises a DownloadError."""
        entry = self._cache.entry(key)
        with translate_disk_errors(f"to the cache {self._cache.root}"):
            try:
                await self._fill(entry, key, listing, wanted, uri)
            except SourceChanged:
                # this revision can no longer be had
                await run_in_thread(self._cache.remove, key)
                raise

    async def _fill(self, entry: CacheEntry, key: str, listing: FileListing, wanted: FileSelection, uri: str) -> None:
        entry.create_directories()
        fetch = EntryFetch(
            self._source,
            self._transfer,
            entry,
            self._tracker,
            listing=listing,
            sizes=self._rules.sizes,
            retry=self._rules.retry,
            check_space=self._check_space,
        )
        needed = fetch.missing_bytes() + sum(file.size or 0 for file in listing.files if file.archive)
        await run_in_thread(self._free_space, key, needed)
        await fetch.run()
        if any(file.archive for file in listing.files):
            self._tracker.set_phase("Unpacking")
            stopped = threading.Event()
            await run_in_thread(self._unpack, entry, listing, wanted, stopped, on_cancel=stopped.set)
        await run_in_thread(self._complete, entry, listing, uri)

    def _free_space(self, key: str, needed: int) -> None:
        """Evict what the limit or the disk has no room for, if that is allowed; raises DiskFull if it is not enough."""
        limit, keep_free = self._rules.cache_limit, self._rules.keep_free
        if limit is not None:
            if needed > limit:
                raise DiskFull(f"{needed} bytes are needed, and the cache may have {limit}")
            self._evict(key, needed, limit)
        free = self._cache.free_bytes()
        if free < needed + keep_free:
            kept = f", of which {keep_free} stay free" if keep_free else ""
            raise DiskFull(f"{needed} bytes are needed in {self._cache.root}, and {free} are free{kept}")

    def _check_space(self) -> None:
        """Raise DiskFull if the disk lacks space; a file of unknown size may fill it down to ``keep_free``."""
        free = self._cache.free_bytes()
        if free < self._rules.keep_free:
            raise DiskFull(f"{free} bytes are free in {self._cache.root}, and {self._rules.keep_free} stay free")

    def _evict(self, key: str, needed: int, limit: int) -> None:
        entries = []
        for other in self._cache.entry_keys():
            with contextlib.suppress(OSError):  # another process evicts, too
                use = self._cache.use_lock(other)
                is_free = use.acquire()
                use.release()
                entries.append(self._cache.entry(other).eviction_candidate(is_held=not is_free))
        on_disk = sum(one.size for one in entries) + self._cache.free_bytes() - self._rules.keep_free
        for other in choose_evictions(entries, limit=min(limit, on_disk), needed=needed, keep=key):
            use, lock = self._cache.use_lock(other), self._cache.fill_lock(other)
            try:
                if use.acquire() and lock.acquire():
                    self._cache.remove(other)
            finally:
                lock.release()
                use.release()

    def _unpack(self, entry: CacheEntry, listing: FileListing, wanted: FileSelection, stopped: threading.Event) -> None:
        """Write ``content/`` again: a crash half way leaves no marker, so it does not count as complete."""

        def is_stopped() -> bool:
            self._check_space()
            return stopped.is_set()

        shutil.rmtree(entry.content)
        entry.content.mkdir()
        unpacker = Unpacker(
            entry.content,
            self._rules.limits,
            is_stopped,
            wants=lambda path: is_wanted(path, wanted.allow, wanted.ignore),
        )
        is_image = len(listing.files) > 1
        try:
            for file in listing.files:
                source = entry.incoming / file.path
                if file.archive:
                    unpacker.unpack(source, file.archive, only=file.only, is_layer=is_image or bool(file.only))
                else:
                    target = entry.content / file.path
                    target.parent.mkdir(parents=True, exist_ok=True)
                    os.link(source, target)
            if next(walk_files(entry.content), None) is None:
                raise ContentRefused("the archive has no file that is wanted")
        except UnpackingStopped:
            return
        except ContentRefused:
            entry.clear()
            raise
        except (OSError, DiskFull):
            shutil.rmtree(entry.content, ignore_errors=True)
            raise

    def _complete(self, entry: CacheEntry, listing: FileListing, uri: str) -> None:
        checksums = {
            one.path: f"{one.checksum.algorithm}:{one.checksum.value}" for one in listing.files if one.checksum
        }
        files = []
        for path in walk_files(entry.content):
            name = str(path.relative_to(entry.content))
            files.append(CachedFile(name, path.lstat().st_size, checksums.get(name, "")))
        size = sum(one.size for one in files)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        entry.mark_complete(
            CompletionMarker(uri=uri, revision=listing.revision, size=size, files=tuple(files), completed_at=now)
        )


class DownloadJob(msgspec.Struct, frozen=True):
    """One download. ``shown_uri``: without credentials. ``timeout_s``: of the whole download. ``allow_stale``: if the
    source does not answer, use the cached entry of the same selection. ``claims``, ``files``: roots of ``pvc://`` and
    ``file://``. ``ca_files``: authorities in addition to the machine's.
    """

    wanted: FileSelection
    shown_uri: str
    cache: Path
    link: Path | None = None
    rules: CacheFillSettings = CacheFillSettings()
    timeouts: Timeouts = Timeouts()
    timeout_s: float | None = None
    allow_stale: bool = True
    claims: Path = Path("/mnt/pvc")
    files: Path = Path("/")
    ca_files: tuple[str, ...] = ()


class ReadyWeights(msgspec.Struct, frozen=True):
    """``path``: of the weights. ``use``: a lock that keeps them from eviction; None if they are not in the cache."""

    path: Path
    use: FileLock | None


async def download(job: DownloadJob, environment: EnvironmentReader, tracker: ProgressTracker) -> ReadyWeights:
    """Have the weights on this node, and linked; raises a DownloadError."""
    tracker.notify_download_start()
    try:
        async with asyncio.timeout(job.timeout_s):
            return await _download(job, environment, tracker)
    except TimeoutError as error:
        failed: DownloadError = DownloadTimeout(
            f"{job.shown_uri} took longer than {job.timeout_s:.0f} s; the next run goes on"
        )
        tracker.set_phase("Failed", message=str(failed), reason=failed.reason)
        raise failed from error
    except DownloadError as error:
        tracker.set_phase("Failed", message=str(error), reason=error.reason)
        raise


async def _download(job: DownloadJob, environment: EnvironmentReader, tracker: ProgressTracker) -> ReadyWeights:
    place = job.wanted.place
    if isinstance(place, PvcLocation | FileLocation):
        path = await run_in_thread(resolve_local_path, place, job.claims, job.files)
        await run_in_thread(check_local_files, job.wanted, path)
        return _linked(job, tracker, ReadyWeights(path, None))
    cache = WeightCache(job.cache)
    cache.create_directories()
    async with open_transfer(job.timeouts, job.rules.sizes.parallel + 1, job.ca_files) as transfer:
        source = source_for(place, transfer, environment)
        # the cache is shared: an answer got with credentials is none for a caller without them
        question = cached_listing_key(job.wanted, environment.source_settings_digest())
        try:
            listing = await _resolved(job, source, tracker)
        except SourceUnavailable as error:
            stale = _stale(job, cache, tracker, question, error)
            if stale is None:
                raise
            return _linked(job, tracker, stale)
        key = cache_entry_key(job.wanted, listing)
        tracker.on_resolved(revision=listing.revision, key=key, files=len(listing.files), size=listing.total_size)
        filler = CacheFiller(cache, source, transfer, tracker, job.rules)
        use = await _completed(cache, key, tracker, lambda: filler.fill(key, listing, job.wanted, job.shown_uri))
        entry = cache.entry(key)
        entry.touch()
        tracker.set_present_on_disk(files=len(listing.files), size=listing.total_size)
        with translate_disk_errors(f"to the cache {cache.root}"):
            cache.store_listing_key(question, key)
        return _linked(job, tracker, ReadyWeights(entry.content, use))


async def _resolved(job: DownloadJob, source: RemoteSource, tracker: ProgressTracker) -> FileListing:
    """The wanted files at a pinned revision."""
    found = await _asked(job, source, tracker)
    if job.wanted.unpack and not isinstance(job.wanted.place, HubLocation):
        found = mark_single_archive(found)
    return choose_files(found, job.wanted.allow, job.wanted.ignore, dict(job.wanted.sha256))


async def _asked(job: DownloadJob, source: RemoteSource, tracker: ProgressTracker) -> FileListing:
    """What the source has, however many attempts that takes."""
    failures = 0
    while True:
        try:
            return await source.list_files(requested_revision(job.wanted))
        except SourceUnavailable as error:
            failures += 1
            pause_s = (
                retry_delay_s(job.rules.retry, failures, error.retry_after_s, random.Random())
                if error.is_temporary
                else None
            )
            if pause_s is None:
                raise
            tracker.count_retry(error, pause_s)
            await asyncio.sleep(pause_s)


def _stale(
    job: DownloadJob, cache: WeightCache, tracker: ProgressTracker, question: str, error: SourceUnavailable
) -> ReadyWeights | None:
    """The cached entry of the same selection, if that is allowed and one exists."""
    key = cache.stored_listing_key(question) if job.allow_stale else ""
    if not key:
        return None
    use, entry = cache.use_lock(key), cache.entry(key)
    marker = entry.read_completion_marker() if use.acquire(shared=True) else None
    if marker is None:
        use.release()
        return None
    entry.touch()
    tracker.on_resolved(revision=marker.revision, key=key, files=len(marker.files), size=marker.size)
    tracker.set_present_on_disk(files=len(marker.files), size=marker.size)
    tracker.count_retry(error, 0.0)
    return ReadyWeights(entry.content, use)


def _linked(job: DownloadJob, tracker: ProgressTracker, ready: ReadyWeights) -> ReadyWeights:
    if job.link is not None:
        link_to_cache(job.link, ready.path.absolute(), job.cache.absolute())
    tracker.set_phase("Ready", message=f"{job.shown_uri} is at {job.link or ready.path}")
    return ready


async def _completed(
    cache: WeightCache, key: str, tracker: ProgressTracker, fill: Callable[[], Awaitable[None]]
) -> FileLock:
    """Return once the entry is complete, with a share of its use. Of many processes one fetches, the others follow."""
    use, lock, entry = cache.use_lock(key), cache.fill_lock(key), cache.entry(key)
    is_told = False
    try:
        while True:
            is_ours = use.acquire(shared=True)  # else it is being evicted
            is_ready = is_ours and entry.read_completion_marker() is not None
            match next_cache_step(EntryLockState(is_ready, holds_lock=not is_ready and is_ours and lock.acquire())):
                case "use":
                    return use
                case "fetch":
                    # another process may have completed it between our check and the lock
                    if entry.read_completion_marker() is None:
                        await fill()
                case "follow":
                    if not is_told:
                        tracker.set_phase("Waiting", message="another process of this node downloads it")
                        is_told = True
                    await asyncio.sleep(random.uniform(_FOLLOW_S / 2, _FOLLOW_S))
    except BaseException:
        use.release()
        raise
    finally:
        lock.release()
