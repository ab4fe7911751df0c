# SPDX-License-Identifier: Apache-2.0
"""A download from beginning to end: resolve, look in the cache, fetch or follow whoever fetches, unpack, mark, link."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from controller.agents.downloader.core.errors import DownloadError, TimeIsUp, Unavailable
from controller.agents.downloader.core.key import Wanted, asked_revision, content_key, question_key
from controller.agents.downloader.core.listing import chosen, single_archive
from controller.agents.downloader.core.marker import Found, next_step
from controller.agents.downloader.core.retrying import wait_s
from controller.agents.downloader.core.uri import ClaimPlace, FilePlace, HubPlace
from controller.agents.downloader.entry import Cache, Lock, disk_errors
from controller.agents.downloader.filling import Filling, Rules
from controller.agents.downloader.linking import link
from controller.agents.downloader.sources.choose import source_for
from controller.agents.downloader.sources.local import check_local, locate
from controller.agents.downloader.threads import in_thread
from controller.agents.downloader.transfer import Patient, transfers

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from controller.agents.downloader.core.listing import Listing
    from controller.agents.downloader.credentials import Environment
    from controller.agents.downloader.sources.source import Source
    from controller.agents.downloader.tracking import Tracker

_FOLLOW_S: Final = 0.5


class Job(msgspec.Struct, frozen=True):
    """What to do. ``shown_uri``: without credentials. ``timeout_s``: for all of it. ``allow_stale``: if the source does
    not answer, take what the cache has for the same question. ``claims``, ``files``: roots of ``pvc://`` and
    ``file://``.
    ``ca_files``: authorities beside the machine's.
    """

    wanted: Wanted
    shown_uri: str
    cache: Path
    link: Path | None = None
    rules: Rules = Rules()
    patient: Patient = Patient()
    timeout_s: float | None = None
    allow_stale: bool = True
    claims: Path = Path("/mnt/pvc")
    files: Path = Path("/")
    ca_files: tuple[str, ...] = ()


class Ready(msgspec.Struct, frozen=True):
    """``path``: of the weights. ``use``: held as long as nobody may evict them; None if they are not in the cache."""

    path: Path
    use: Lock | None


async def download(job: Job, environment: Environment, tracker: Tracker) -> Ready:
    """Have the weights on this node, and linked; raises a DownloadError."""
    tracker.start()
    try:
        async with asyncio.timeout(job.timeout_s):
            return await _download(job, environment, tracker)
    except TimeoutError as error:
        failed: DownloadError = TimeIsUp(
            f"{job.shown_uri} took longer than {job.timeout_s:.0f} s; the next run goes on"
        )
        tracker.phase("Failed", message=str(failed), reason=failed.reason)
        raise failed from error
    except DownloadError as error:
        tracker.phase("Failed", message=str(error), reason=error.reason)
        raise


async def _download(job: Job, environment: Environment, tracker: Tracker) -> Ready:
    place = job.wanted.place
    if isinstance(place, ClaimPlace | FilePlace):
        path = await in_thread(locate, place, job.claims, job.files)
        await in_thread(check_local, job.wanted, path)
        return _linked(job, tracker, Ready(path, None))
    cache = Cache(job.cache)
    cache.make()
    async with transfers(job.patient, job.rules.sizes.parallel + 1, job.ca_files) as transfer:
        source = source_for(place, transfer, environment)
        # others may use the cache: what somebody got by their credentials is no answer to who has none
        question = question_key(job.wanted, environment.fingerprint())
        try:
            listing = await _resolved(job, source, tracker)
        except Unavailable as error:
            stale = _stale(job, cache, tracker, question, error)
            if stale is None:
                raise
            return _linked(job, tracker, stale)
        key = content_key(job.wanted, listing)
        tracker.resolved(revision=listing.revision, key=key, files=len(listing.files), size=listing.size)
        filling = Filling(cache, source, transfer, tracker, job.rules)
        use = await _completed(cache, key, tracker, lambda: filling.fill(key, listing, job.wanted, job.shown_uri))
        entry = cache.entry(key)
        entry.touch()
        tracker.there(files=len(listing.files), size=listing.size)
        with disk_errors(f"to the cache {cache.root}"):
            cache.remember(question, key)
        return _linked(job, tracker, Ready(entry.content, use))


async def _resolved(job: Job, source: Source, tracker: Tracker) -> Listing:
    """The wanted files at a pinned revision."""
    found = await _asked(job, source, tracker)
    if job.wanted.unpack and not isinstance(job.wanted.place, HubPlace):
        found = single_archive(found)
    return chosen(found, job.wanted.allow, job.wanted.ignore, dict(job.wanted.sha256))


async def _asked(job: Job, source: Source, tracker: Tracker) -> Listing:
    """What the source has, however many attempts that takes."""
    failures = 0
    while True:
        try:
            return await source.resolve(asked_revision(job.wanted))
        except Unavailable as error:
            failures += 1
            pause_s = (
                wait_s(job.rules.patience, failures, error.retry_after_s, random.Random())
                if error.is_temporary
                else None
            )
            if pause_s is None:
                raise
            tracker.retried(error, pause_s)
            await asyncio.sleep(pause_s)


def _stale(job: Job, cache: Cache, tracker: Tracker, question: str, error: Unavailable) -> Ready | None:
    """What the cache has for the same question, if that is allowed and anything is there."""
    key = cache.remembered(question) if job.allow_stale else ""
    if not key:
        return None
    use, entry = cache.use(key), cache.entry(key)
    marker = entry.marker() if use.acquire(shared=True) else None
    if marker is None:
        use.release()
        return None
    entry.touch()
    tracker.resolved(revision=marker.revision, key=key, files=len(marker.files), size=marker.size)
    tracker.there(files=len(marker.files), size=marker.size)
    tracker.retried(error, 0.0)
    return Ready(entry.content, use)


def _linked(job: Job, tracker: Tracker, ready: Ready) -> Ready:
    if job.link is not None:
        link(job.link, ready.path.absolute(), job.cache.absolute())
    tracker.phase("Ready", message=f"{job.shown_uri} is at {job.link or ready.path}")
    return ready


async def _completed(cache: Cache, key: str, tracker: Tracker, fill: Callable[[], Awaitable[None]]) -> Lock:
    """Return once the entry is complete, with a share of its use. Of many processes one fetches, the others follow."""
    use, lock, entry = cache.use(key), cache.lock(key), cache.entry(key)
    is_told = False
    try:
        while True:
            is_ours = use.acquire(shared=True)  # else it is being evicted
            is_ready = is_ours and entry.marker() is not None
            match next_step(Found(is_ready, holds_lock=not is_ready and is_ours and lock.acquire())):
                case "use":
                    return use
                case "fetch":
                    # somebody may have completed it between our look and the lock
                    if entry.marker() is None:
                        await fill()
                case "follow":
                    if not is_told:
                        tracker.phase("Waiting", message="another process of this node downloads it")
                        is_told = True
                    await asyncio.sleep(random.uniform(_FOLLOW_S / 2, _FOLLOW_S))
    except BaseException:
        use.release()
        raise
    finally:
        lock.release()
