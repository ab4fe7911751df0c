# SPDX-License-Identifier: Apache-2.0
"""Downloads in tests: in this process, or as the command in another one."""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from controller.agents.downloader.core.fetch_plan import FileSelection, RetryPolicy
from controller.agents.downloader.core.uri import parse_uri, redact_uri
from controller.agents.downloader.download import CacheFillSettings, DownloadJob, download
from controller.agents.downloader.environment import EnvironmentReader
from controller.agents.downloader.fetch import FetchSettings
from controller.agents.downloader.progress import ProgressTracker
from controller.agents.downloader.transfer import Timeouts

if TYPE_CHECKING:
    from collections.abc import Mapping

    from controller.agents.downloader.archives import ArchiveLimits
    from controller.agents.downloader.progress import Progress

ROOT = Path(__file__).parents[4]
MIB = 1024**2
QUICK = RetryPolicy(attempts=3, first_s=0.01, longest_s=0.02)


class Told:
    """Remembers progress."""

    def __init__(self) -> None:
        self.all: list[Progress] = []

    def update(self, progress: Progress) -> None:
        """One more."""
        self.all.append(progress)

    @property
    def phases(self) -> list[str]:
        """In their order, each once in a row."""
        found = [one.phase for one in self.all]
        return [one for index, one in enumerate(found) if index == 0 or found[index - 1] != one]


def job(
    uri: str,
    cache: Path,
    *,
    limits: ArchiveLimits | None = None,
    wanted: Mapping[str, Any] | None = None,
    **more: Any,  # noqa: ANN401 - fields of Job
) -> DownloadJob:
    """A job with small parts and little retry. ``wanted``: fields of Wanted."""
    rules = CacheFillSettings(
        sizes=FetchSettings(parallel=3, part=256 * 1024, block=64 * 1024, record=128 * 1024), retry=QUICK
    )
    if limits is not None:
        rules = CacheFillSettings(rules.sizes, rules.retry, limits)
    given = {"rules": rules, "timeouts": Timeouts(connect_s=2, stall_s=5)} | more
    return DownloadJob(FileSelection(parse_uri(uri), **(wanted or {})), redact_uri(uri), cache, **given)


async def fetched(
    uri: str,
    cache: Path,
    environment: Mapping[str, str] | None = None,
    *,
    told: Told | None = None,
    **more: Any,  # noqa: ANN401 - fields of Job
) -> Path:
    """Where the weights are after a download in this process; raises what the download raises."""
    one = job(uri, cache, **more)
    done = await download(
        one, EnvironmentReader(environment or {}), ProgressTracker(one.shown_uri, [told] if told else [])
    )
    if done.use is not None:
        done.use.release()
    return done.path


async def command(*words: str, **environment: str) -> asyncio.subprocess.Process:
    """``attache download`` in a process of its own, in an environment of nothing but what it needs."""
    given = {"PATH": "/usr/bin:/bin", "HOME": "/nowhere", "PYTHONPATH": str(ROOT), **environment}
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "attache",
        "download",
        *words,
        env=given,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


def below(directory: Path, pattern: str = "*") -> list[Path]:
    """All paths below a directory that fit."""
    return sorted(directory.rglob(pattern))


def random_bytes(size: int, seed: int = 1) -> bytes:
    """The same every time."""
    return random.Random(seed).randbytes(size)
