# SPDX-License-Identifier: Apache-2.0
"""az://: Azure Blob Storage, with an account key, a shared access signature, an identity, or publicly."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from controller.agents.downloader.core.errors import AccessRefused, NotThere, Unavailable, UriInvalid
from controller.agents.downloader.core.key import listing_digest
from controller.agents.downloader.core.listing import Checksum, Listing, RemoteFile
from controller.agents.downloader.libraries import library
from controller.agents.downloader.sources.prefixes import path_below
from controller.agents.downloader.transfer import Request

if TYPE_CHECKING:
    from controller.agents.downloader.core.uri import AzurePlace
    from controller.agents.downloader.credentials import Environment

_SIGNED_FOR: Final = timedelta(hours=1)
_SCOPE: Final = "https://storage.azure.com/.default"
_VERSION: Final = "2021-12-02"


class AzureSource:
    """The library lists blobs and signs URLs; bytes come through our own fetcher.

    ``AZURE_STORAGE_ACCOUNT`` names the account, or ``AZURE_STORAGE_ENDPOINT`` its URL. One of ``AZURE_STORAGE_KEY``,
    ``AZURE_STORAGE_SAS_TOKEN`` and ``AZURE_STORAGE_ANONYMOUS=true``; else an identity, as azure-identity finds it.
    """

    def __init__(self, place: AzurePlace, environment: Environment) -> None:
        self._place = place
        account = environment.get("AZURE_STORAGE_ACCOUNT", "AZURE_STORAGE_ACCOUNT_NAME")
        endpoint = environment.get("AZURE_STORAGE_ENDPOINT")
        if place.account_host:
            account, endpoint = place.account_host.partition(".")[0], f"https://{place.account_host}"
        if not (account or endpoint):
            raise UriInvalid("set AZURE_STORAGE_ACCOUNT, or write az://ACCOUNT.blob.core.windows.net/CONTAINER/PATH")
        self._account = account
        self._endpoint = (endpoint or f"https://{account}.blob.core.windows.net").rstrip("/")
        self._key = environment.get("AZURE_STORAGE_KEY", "AZURE_STORAGE_ACCESS_KEY")
        self._signature = environment.get("AZURE_STORAGE_SAS_TOKEN").removeprefix("?")
        self._blobs = library("azure.storage.blob", "az")
        self._identity: Any = None
        if not (self._key or self._signature or environment.is_on("AZURE_STORAGE_ANONYMOUS")):
            self._identity = library("azure.identity", "az").DefaultAzureCredential()
        if self._key and not account:
            raise UriInvalid("AZURE_STORAGE_KEY needs AZURE_STORAGE_ACCOUNT")

    async def resolve(self, revision: str) -> Listing:
        """All blobs below the prefix; a digest of their ETags is the revision."""
        if revision:
            raise UriInvalid("az:// has no revisions; ETags of blobs are pinned when they are listed")
        files = tuple(await asyncio.to_thread(self._called, self._list))
        return Listing(listing_digest(sorted((one.path, one.size, one.version) for one in files)), files)

    async def request(self, file: RemoteFile, start: int, end: int | None) -> Request:
        """A URL that is signed for an hour, or a header with an identity's token."""
        url = f"{self._endpoint}/{quote(self._place.container)}/{quote(file.locator)}"
        if self._key:
            return Request(f"{url}?{await asyncio.to_thread(self._called, self._signed)}")
        if self._signature:
            return Request(f"{url}?{self._signature}")
        if self._identity is None:
            return Request(url, {"x-ms-version": _VERSION})
        token = await asyncio.to_thread(self._called, lambda: self._identity.get_token(_SCOPE).token)
        return Request(url, {"Authorization": f"Bearer {token}", "x-ms-version": _VERSION})

    def _signed(self) -> str:
        return str(
            self._blobs.generate_container_sas(
                self._account,
                self._place.container,
                account_key=self._key,
                permission=self._blobs.ContainerSasPermissions(read=True),
                expiry=datetime.now(UTC) + _SIGNED_FOR,
            )
        )

    def _list(self) -> list[RemoteFile]:
        credential: Any = self._key or self._signature or self._identity
        if self._key:
            credential = {"account_name": self._account, "account_key": self._key}
        with self._blobs.BlobServiceClient(self._endpoint, credential=credential, retry_total=0) as service:
            container = service.get_container_client(self._place.container)
            found = container.list_blobs(name_starts_with=self._place.prefix or None)
            return [self._file(one) for one in found if path_below(self._place.prefix, one.name)]

    def _file(self, blob: Any) -> RemoteFile:  # noqa: ANN401 - the library's BlobProperties
        md5 = blob.content_settings.content_md5
        checksum = Checksum("md5", bytes(md5).hex()) if md5 else None
        path = path_below(self._place.prefix, blob.name)
        return RemoteFile(path, int(blob.size), blob.name, checksum, version=str(blob.etag or "").strip('"'))

    def _called(self, function: Any) -> Any:  # noqa: ANN401 - what the function has
        """Errors of the libraries as ours."""
        where = f"{self._endpoint}/{self._place.container}"
        errors = library("azure.core.exceptions", "az")
        try:
            return function()
        except errors.ClientAuthenticationError as error:
            raise AccessRefused(f"{where}: the credentials are missing, wrong, or not enough") from error
        except errors.ResourceNotFoundError as error:
            raise NotThere(f"{where}: there is no such container") from error
        except errors.HttpResponseError as error:
            status = error.status_code or 0
            if status in (401, 403):
                raise AccessRefused(f"{where}: {error.error_code or status}") from error
            raise Unavailable(f"{where} answers {status}", is_temporary=status >= 500 or status == 429) from error
        except errors.AzureError as error:
            raise Unavailable(f"{where}: {type(error).__name__}") from error
        except ValueError as error:
            raise UriInvalid("the settings for Azure cannot be used; is AZURE_STORAGE_KEY in base64?") from error
