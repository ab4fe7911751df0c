# SPDX-License-Identifier: Apache-2.0
"""Downloads the files of adapters by running the downloader, which shares its cache with all pods of the node."""

from __future__ import annotations

import asyncio
import logging
import sys
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_DOWNLOADER: Final = (sys.executable, "-m", "attache", "download")
# At the same time; each takes a share of the network, and memory of its own.
_SIDE_BY_SIDE: Final = 2
_KEPT_BYTES: Final = 4096
_END_S: Final = 10.0

log = logging.getLogger(__name__)


class DownloadFailed(Exception):
    """The message is the downloader's last line."""


class Downloads(Protocol):
    """Brings files to this node."""

    async def fetch(self, uri: str, link: Path) -> None:
        """Afterwards ``link`` leads to the files; raises DownloadFailed."""
        ...


class DownloaderProcess:
    """Runs ``attache download`` for each URI; an interpreter that ends gives its memory back."""

    def __init__(self, cache: Path, *, timeout_s: float, command: Sequence[str] = ()) -> None:
        self._cache = cache
        self._timeout_s = timeout_s
        self._command = tuple(command) or _DOWNLOADER
        self._slots = asyncio.Semaphore(_SIDE_BY_SIDE)

    async def fetch(self, uri: str, link: Path) -> None:
        """Raises DownloadFailed; a download that is cut off is resumed by the next one."""
        async with self._slots:
            try:
                async with asyncio.timeout(self._timeout_s):
                    await self._run(uri, link)
            except TimeoutError as error:
                raise DownloadFailed(f"the download took longer than {self._timeout_s:g} s") from error

    async def _run(self, uri: str, link: Path) -> None:
        words = (*self._command, uri, "--cache", str(self._cache), "--link", str(link))
        try:
            process = await asyncio.create_subprocess_exec(
                *words,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
            )
        except OSError as error:
            raise DownloadFailed(f"the downloader cannot be started: {error}") from error
        said = b""
        try:
            if process.stderr is not None:
                while chunk := await process.stderr.read(_KEPT_BYTES):
                    said = (said + chunk)[-_KEPT_BYTES:]
            status = await process.wait()
        finally:
            await _end(process)
        if status:
            lines = said.decode(errors="replace").strip().splitlines()
            raise DownloadFailed(lines[-1] if lines else f"the downloader ended with status {status}")
        if not link.exists():  # noqa: ASYNC240 - one stat of a local file
            raise DownloadFailed(f"the downloader made no {link}")
        log.info("downloaded %s", link.name)


async def _end(process: asyncio.subprocess.Process) -> None:
    """SIGTERM, so that it lets go of its lock, then SIGKILL."""
    if process.returncode is not None:
        return
    process.terminate()
    try:
        async with asyncio.timeout(_END_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
