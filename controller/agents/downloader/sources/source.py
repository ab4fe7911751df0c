# SPDX-License-Identifier: Apache-2.0
"""What every remote source offers: the files of a model at a pinned revision, and how to ask for one of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from controller.agents.downloader.core.listing import Listing, RemoteFile
    from controller.agents.downloader.transfer import Request


class Source(Protocol):
    """A remote place. All of them serve files over HTTP, so that one fetcher does ranges, time-outs and memory."""

    async def resolve(self, revision: str) -> Listing:
        """The files now, or at ``revision`` if it is not empty.

        Raises NotThere, AccessRefused, Unavailable, LibraryMissing or UriInvalid.
        """
        ...

    async def request(self, file: RemoteFile, start: int, end: int | None) -> Request:
        """How to ask for the file from ``start`` up to ``end``, asked before every attempt: signatures expire.

        Most ignore the range, because a header of the fetcher says it.
        """
        ...
