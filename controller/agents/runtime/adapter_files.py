# SPDX-License-Identifier: Apache-2.0
"""Files of adapters: downloads, and the links under which the engine finds them.

The downloader runs as a process; its cache is shared by all pods of the node.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from controller.agents.runtime.declared_adapters import (
    AdapterNameInvalid,
    AdapterNotDeclared,
    adapter_link_name,
    allowed_local_path,
    check_name,
    check_uri,
    is_uri,
)
from controller.agents.runtime.model_repository import add_model, remove_model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from controller.agents.runtime.declared_adapters import DeclaredAdapter
    from controller.agents.runtime.settings import AdapterSettings
    from extproc.engines.dialects import Dialect

_DOWNLOADER: Final = (sys.executable, "-m", "attache", "download")
# At the same time; each takes a share of the network, and memory of its own.
_SIDE_BY_SIDE: Final = 2
_KEPT_BYTES: Final = 4096
_END_S: Final = 10.0
log = logging.getLogger(__name__)


class DownloadFailed(Exception):
    """The message is the downloader's last line."""


class Downloader(Protocol):
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
        output = b""
        try:
            if process.stderr is not None:
                while chunk := await process.stderr.read(_KEPT_BYTES):
                    output = (output + chunk)[-_KEPT_BYTES:]
            status = await process.wait()
        finally:
            await _end(process)
        if status:
            lines = output.decode(errors="replace").strip().splitlines()
            raise DownloadFailed(lines[-1] if lines else f"the downloader ended with status {status}")
        if not link.exists():  # noqa: ASYNC240 - one stat of a local file
            raise DownloadFailed(f"the downloader made no {link}")
        log.info("downloaded %s", link.name)


async def _end(process: asyncio.subprocess.Process) -> None:
    """SIGTERM, so that it releases its lock, then SIGKILL."""
    if process.returncode is not None:
        return
    process.terminate()
    try:
        async with asyncio.timeout(_END_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


class AdapterFiles:
    """Of an engine of ``dialect``. One with a repository finds models there by their names, and is given no paths."""

    def __init__(self, settings: AdapterSettings, downloads: Downloader, dialect: Dialect) -> None:
        self._settings = settings
        self._downloads = downloads
        self._dialect = dialect
        self._is_repository = dialect.adapters == "repository"

    def resolve_path(self, name: str, source: str, declared: DeclaredAdapter | None) -> tuple[str, str]:
        """The source, and the path of its files; raises AdapterNameInvalid or AdapterNotDeclared if it is not allowed.

        ``source``: empty for that of ``declared``. Both are empty for a model that is in the repository already.
        """
        source = source or (declared.uri if declared is not None else "")
        check_name(name, is_directory=self._is_repository)
        if self._settings.policy.declared_only and (declared is None or source != declared.uri):
            raise AdapterNotDeclared(
                f"{name} is not declared with this source, and others are not allowed (--declared-only)"
            )
        if not source:
            if self._is_repository:
                return "", ""
            raise AdapterNameInvalid(f"{name} is not declared: lora_path is missing")
        if not is_uri(source):
            return source, allowed_local_path(source, self._settings.policy)
        if declared is None or source != declared.uri:
            check_uri(source, self._settings.policy)
        # the repository holds what is made from them
        links = self._settings.cache / "adapters" if self._is_repository else self._settings.links
        return source, str(links / adapter_link_name(name, source))

    async def download(self, source: str, path: str) -> None:
        """Download the files to ``path``. Raises DownloadFailed or OSError."""
        if is_uri(source):
            link = Path(path)
            link.parent.mkdir(parents=True, exist_ok=True)
            await self._downloads.fetch(source, link)

    def add_to_repository(self, name: str, path: str, declared: DeclaredAdapter | None) -> None:
        """Where the engine has a repository, put a model there. Raises OSError or AdapterNameInvalid."""
        if self._is_repository and path:
            weights_format = "" if declared is None else declared.format
            add_model(self._settings.links, name, Path(path), dialect=self._dialect, weights_format=weights_format)

    def remove_from_repository(self, name: str) -> None:
        """Take an unloaded model out of the repository; the files stay in the cache.

        Links to LoRA adapters stay: they are in a cache that pods share, and another engine may read by them.
        """
        if self._is_repository:
            remove_model(self._settings.links, name)
