# SPDX-License-Identifier: Apache-2.0
"""What every remote source offers, and the source of a place."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Protocol

from controller.agents.downloader.core.uri import AzurePlace, BucketPlace, HdfsPlace, HubPlace, OciPlace, WebPlace
from controller.agents.downloader.sources.buckets import AzureSource, GoogleSource, S3Source
from controller.agents.downloader.sources.hub import HubSource
from controller.agents.downloader.sources.registry import RegistrySource
from controller.agents.downloader.sources.web import HdfsSource, WebSource

if TYPE_CHECKING:
    from controller.agents.downloader.core.listing import Listing, RemoteFile
    from controller.agents.downloader.environment import Environment
    from controller.agents.downloader.transfer import Request, Transfer


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


RemotePlace = HubPlace | BucketPlace | AzurePlace | WebPlace | OciPlace | HdfsPlace


def source_for(place: RemotePlace, transfer: Transfer, environment: Environment) -> Source:  # noqa: PLR0911 - one a scheme
    """Raises LibraryMissing, which says what to install, and UriInvalid for settings that cannot be used."""
    match place:
        case HubPlace():
            return HubSource(place, environment)
        case BucketPlace(scheme="s3"):
            return S3Source(place, environment)
        case BucketPlace():
            return GoogleSource(place, transfer, environment)
        case AzurePlace():
            return AzureSource(place, environment)
        case WebPlace():
            return WebSource(place, transfer, environment)
        case OciPlace():
            return RegistrySource(place, transfer, environment, platform.machine())
        case HdfsPlace():
            return HdfsSource(place, transfer, environment)
