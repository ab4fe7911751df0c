# SPDX-License-Identifier: Apache-2.0
"""Make one cache entry complete: room on the disk, the files, what is in archives, and at last the marker."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import msgspec

from controller.agents.downloader.core.errors import ContentRefused, DiskFull, SourceChanged
from controller.agents.downloader.core.listing import is_wanted
from controller.agents.downloader.core.marker import KeptFile, Marker, to_evict
from controller.agents.downloader.core.members import ArchiveLimits
from controller.agents.downloader.core.retrying import Patience
from controller.agents.downloader.entry import disk_errors
from controller.agents.downloader.fetching import Fetch, Sizes
from controller.agents.downloader.threads import in_thread
from controller.agents.downloader.unpacking import Stopped, Unpacker, files_in

if TYPE_CHECKING:
    from controller.agents.downloader.core.key import Wanted
    from controller.agents.downloader.core.listing import Listing
    from controller.agents.downloader.entry import Cache, CacheEntry
    from controller.agents.downloader.sources.source import Source
    from controller.agents.downloader.tracking import Tracker
    from controller.agents.downloader.transfer import Transfer


class Rules(msgspec.Struct, frozen=True):
    """How entries are filled. ``keep_free``: bytes of the disk that are left alone. ``cache_limit``: of all entries
    together; None: nothing is ever evicted.
    """

    sizes: Sizes = Sizes()
    patience: Patience = Patience()
    limits: ArchiveLimits = ArchiveLimits()
    keep_free: int = 0
    cache_limit: int | None = None


class Filling:
    """Fills entries of a cache, each under its lock, which the caller holds."""

    def __init__(self, cache: Cache, source: Source, transfer: Transfer, tracker: Tracker, rules: Rules) -> None:
        self._cache = cache
        self._source = source
        self._transfer = transfer
        self._tracker = tracker
        self._rules = rules

    async def fill(self, key: str, listing: Listing, wanted: Wanted, uri: str) -> None:
        """Complete when it returns. ``uri``: for the marker, without credentials. Raises a DownloadError."""
        entry = self._cache.entry(key)
        with disk_errors(f"to the cache {self._cache.root}"):
            try:
                await self._fill(entry, key, listing, wanted, uri)
            except SourceChanged:
                # this revision can no longer be had
                await in_thread(self._cache.remove, key)
                raise

    async def _fill(self, entry: CacheEntry, key: str, listing: Listing, wanted: Wanted, uri: str) -> None:
        entry.make()
        fetch = Fetch(
            self._source,
            self._transfer,
            entry,
            self._tracker,
            listing=listing,
            sizes=self._rules.sizes,
            patience=self._rules.patience,
            check_room=self._check_room,
        )
        needed = fetch.missing_bytes() + sum(file.size or 0 for file in listing.files if file.archive)
        await in_thread(self._make_room, key, needed)
        await fetch.run()
        if any(file.archive for file in listing.files):
            self._tracker.phase("Unpacking")
            stopped = threading.Event()
            await in_thread(self._unpack, entry, listing, wanted, stopped, on_cancel=stopped.set)
        await in_thread(self._complete, entry, listing, uri)

    def _make_room(self, key: str, needed: int) -> None:
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

    def _check_room(self) -> None:
        """Of what nobody has said how large it is, the disk takes as much as leaves ``keep_free``."""
        free = self._cache.free_bytes()
        if free < self._rules.keep_free:
            raise DiskFull(f"{free} bytes are free in {self._cache.root}, and {self._rules.keep_free} stay free")

    def _evict(self, key: str, needed: int, limit: int) -> None:
        entries = []
        for other in self._cache.entries():
            with contextlib.suppress(OSError):  # somebody else evicts, too
                use = self._cache.use(other)
                is_free = use.acquire()
                use.release()
                entries.append(self._cache.entry(other).describe(is_held=not is_free))
        on_disk = sum(one.size for one in entries) + self._cache.free_bytes() - self._rules.keep_free
        for other in to_evict(entries, limit=min(limit, on_disk), needed=needed, keep=key):
            use, lock = self._cache.use(other), self._cache.lock(other)
            try:
                if use.acquire() and lock.acquire():
                    self._cache.remove(other)
            finally:
                lock.release()
                use.release()

    def _unpack(self, entry: CacheEntry, listing: Listing, wanted: Wanted, stopped: threading.Event) -> None:
        """Write ``content/`` anew: a crash half way leaves what nobody takes for complete."""

        def is_stopped() -> bool:
            self._check_room()
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
            if next(files_in(entry.content), None) is None:
                raise ContentRefused("the archive has no file that is wanted")
        except Stopped:
            return
        except ContentRefused:
            entry.clear()
            raise
        except (OSError, DiskFull):
            shutil.rmtree(entry.content, ignore_errors=True)
            raise

    def _complete(self, entry: CacheEntry, listing: Listing, uri: str) -> None:
        said = {one.path: f"{one.checksum.algorithm}:{one.checksum.value}" for one in listing.files if one.checksum}
        files = []
        for path in files_in(entry.content):
            name = str(path.relative_to(entry.content))
            files.append(KeptFile(name, path.lstat().st_size, said.get(name, "")))
        size = sum(one.size for one in files)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        entry.complete(Marker(uri=uri, revision=listing.revision, size=size, files=tuple(files), completed_at=now))
