# SPDX-License-Identifier: Apache-2.0
"""How a download can fail, as types; each has the exit status of the command."""

from __future__ import annotations

from typing import ClassVar


class DownloadError(Exception):
    """Any failure. The message has the correction and no credentials."""

    exit_status: ClassVar[int] = 1
    reason: ClassVar[str] = "Failed"


class UriInvalid(DownloadError):
    """The URI or an option cannot be used as it is written."""

    exit_status = 2
    reason = "InvalidURI"


class LibraryMissing(DownloadError):
    """The scheme needs a library that is not installed."""

    exit_status = 2
    reason = "LibraryMissing"


class SourceNotFound(DownloadError):
    """The source has no such model, revision, bucket or file, or the patterns leave nothing of it."""

    exit_status = 3
    reason = "NotFound"


class AccessRefused(DownloadError):
    """The source requires credentials, or other ones."""

    exit_status = 4
    reason = "AccessRefused"


class SourceUnavailable(DownloadError):
    """The source did not answer, stalled, or failed, more often than it may. Later it may work.

    ``retry_after_s``: the delay that the source requested. ``is_temporary``: worth another attempt at once.
    """

    exit_status = 5
    reason = "SourceUnavailable"

    def __init__(self, message: str, *, retry_after_s: float | None = None, is_temporary: bool = True) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.is_temporary = is_temporary


class SourceChanged(DownloadError):
    """A file differs from the listed one: it was replaced meanwhile. The next run takes the new one."""

    exit_status = 5
    reason = "SourceChanged"


class ChecksumMismatch(DownloadError):
    """A file's bytes do not match the source's checksum. The file was removed."""

    exit_status = 6
    reason = "ChecksumMismatch"


class ContentRefused(DownloadError):
    """An archive or a file's name would write outside of its directory, or is larger than allowed."""

    exit_status = 6
    reason = "ContentRefused"


class DiskFull(DownloadError):
    """The cache's file system has too little room."""

    exit_status = 7
    reason = "DiskFull"


class DownloadTimeout(DownloadError):
    """The download as a whole took longer than it may. Fetched ranges are kept, and the next run resumes from them."""

    exit_status = 8
    reason = "TimedOut"


class CacheUnusable(DownloadError):
    """The cache's directory cannot be written or locked, or the link cannot be made."""

    exit_status = 9
    reason = "CacheUnusable"
