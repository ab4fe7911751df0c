# SPDX-License-Identifier: Apache-2.0
"""What every remote source offers, and the source of a place."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Protocol

from controller.agents.downloader.core.uri import (
    AzureLocation,
    BucketLocation,
    HdfsLocation,
    HubLocation,
    OciLocation,
    WebLocation,
)
from controller.agents.downloader.sources.buckets import AzureSource, GoogleSource, S3Source
from controller.agents.downloader.sources.hub import HubSource
from controller.agents.downloader.sources.oci_registry import RegistrySource
from controller.agents.downloader.sources.web import HdfsSource, WebSource

if TYPE_CHECKING:
    from controller.agents.downloader.core.fetch_plan import FileListing, RemoteFile
    from controller.agents.downloader.environment import EnvironmentReader
    from controller.agents.downloader.transfer import HttpRequest, TransferClient

RemotePlace = HubLocation | BucketLocation | AzureLocation | WebLocation | OciLocation | HdfsLocation


class RemoteSource(Protocol):
    """A remote place. All of them serve files over HTTP, so that one fetcher does ranges, time-outs and memory."""

    async def list_files(self, revision: str) -> FileListing:
        """The files now, or at ``revision`` if it is not empty.

        Raises NotThere, AccessRefused, Unavailable, LibraryMissing or UriInvalid.
        """
        ...

    async def build_request(self, file: RemoteFile, start: int, end: int | None) -> HttpRequest:
        """The request for the file from ``start`` up to ``end``, made before every attempt, as signatures expire.

        Most ignore the range, because the fetcher sends it in a header.
        """
        ...


def source_for(place: RemotePlace, transfer: TransferClient, environment: EnvironmentReader) -> RemoteSource:  # noqa: PLR0911 - one a scheme
    """Raises LibraryMissing with the package to install, and UriInvalid for settings that cannot be used."""
    match place:
        case HubLocation():
            return HubSource(place, environment)
        case BucketLocation(scheme="s3"):
            return S3Source(place, environment)
        case BucketLocation():
            return GoogleSource(place, transfer, environment)
        case AzureLocation():
            return AzureSource(place, environment)
        case WebLocation():
            return WebSource(place, transfer, environment)
        case OciLocation():
            return RegistrySource(place, transfer, environment, platform.machine())
        case HdfsLocation():
            return HdfsSource(place, transfer, environment)
