# SPDX-License-Identifier: Apache-2.0
"""The source of a place."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING

from controller.agents.downloader.core.uri import AzurePlace, BucketPlace, HdfsPlace, HubPlace, OciPlace, WebPlace
from controller.agents.downloader.sources.azure import AzureSource
from controller.agents.downloader.sources.gcs import GoogleSource
from controller.agents.downloader.sources.hdfs import HdfsSource
from controller.agents.downloader.sources.hub import HubSource
from controller.agents.downloader.sources.registry import RegistrySource
from controller.agents.downloader.sources.s3 import S3Source
from controller.agents.downloader.sources.web import WebSource

if TYPE_CHECKING:
    from controller.agents.downloader.credentials import Environment
    from controller.agents.downloader.sources.source import Source
    from controller.agents.downloader.transfer import Transfer

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
