# SPDX-License-Identifier: Apache-2.0
"""gs://: Google Cloud Storage by its JSON API."""

from __future__ import annotations

import asyncio
import base64
import time
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, urlencode

import msgspec

from controller.agents.downloader.core.errors import AccessRefused, Unavailable, UriInvalid
from controller.agents.downloader.core.key import listing_digest
from controller.agents.downloader.core.listing import Checksum, Listing, RemoteFile
from controller.agents.downloader.libraries import library
from controller.agents.downloader.sources.prefixes import path_below
from controller.agents.downloader.transfer import Request

if TYPE_CHECKING:
    from controller.agents.downloader.core.uri import BucketPlace
    from controller.agents.downloader.credentials import Environment
    from controller.agents.downloader.transfer import Transfer

_PUBLIC: Final = "https://storage.googleapis.com"
_SCOPE: Final = "https://www.googleapis.com/auth/devstorage.read_only"
_FIELDS: Final = "nextPageToken,items(name,size,generation,md5Hash,crc32c,contentEncoding)"
_TOKEN_S: Final = 300.0


class _Item(msgspec.Struct, frozen=True, rename="camel"):
    name: str
    size: str
    generation: str
    md5_hash: str = ""
    crc32c: str = ""
    content_encoding: str = ""


class _Page(msgspec.Struct, frozen=True, rename="camel"):
    items: list[_Item] = []
    next_page_token: str = ""


class GoogleSource:
    """Objects pinned to their generations.

    google-auth finds credentials as everywhere: ``GOOGLE_APPLICATION_CREDENTIALS`` names a mounted key, else workload
    identity. ``GOOGLE_ANONYMOUS=true``: none, for public buckets. ``STORAGE_EMULATOR_HOST``: another server, without
    any.
    """

    def __init__(self, place: BucketPlace, transfer: Transfer, environment: Environment) -> None:
        self._place = place
        self._transfer = transfer
        emulator = environment.get("STORAGE_EMULATOR_HOST").rstrip("/")
        self._server = (emulator if "://" in emulator else f"http://{emulator}") if emulator else _PUBLIC
        self._is_anonymous = bool(emulator) or environment.is_on("GOOGLE_ANONYMOUS")
        self._token = environment.get("GOOGLE_OAUTH_ACCESS_TOKEN")
        self._credentials: Any = None
        self._refreshed_at_s = 0.0
        self._packed: set[str] = set()
        library("google_crc32c", "gs")  # before the first byte, not after the last

    async def resolve(self, revision: str) -> Listing:
        """All objects below the prefix; a digest of their generations is the revision."""
        if revision:
            raise UriInvalid("gs:// has no revisions; generations of objects are pinned when they are listed")
        found: list[_Item] = []
        token = ""
        while True:
            query = {"prefix": self._place.prefix, "fields": _FIELDS} | ({"pageToken": token} if token else {})
            url = f"{self._server}/storage/v1/b/{quote(self._place.bucket, safe='')}/o?{urlencode(query)}"
            answer = await self._transfer.document(Request(url, await self._headers()))
            try:
                page = msgspec.json.decode(answer.body, type=_Page)
            except msgspec.DecodeError as error:
                raise Unavailable(f"{self._server} answers with no list", is_temporary=False) from error
            found += page.items
            token = page.next_page_token
            if not token:
                break
        files = [self._file(one) for one in found if path_below(self._place.prefix, one.name)]
        return Listing(listing_digest(sorted((one.path, one.locator) for one in files)), tuple(files))

    async def request(self, file: RemoteFile, start: int, end: int | None) -> Request:
        """The object's generation, as it is stored: the server would unpack gzip, and then has no ranges."""
        packed = {"Accept-Encoding": "gzip"} if file.locator in self._packed else {}
        return Request(file.locator, await self._headers() | packed)

    def _file(self, item: _Item) -> RemoteFile:
        path = f"/storage/v1/b/{quote(self._place.bucket, safe='')}/o/{quote(item.name, safe='')}"
        url = f"{self._server}{path}?{urlencode({'alt': 'media', 'generation': item.generation})}"
        if item.content_encoding == "gzip":
            self._packed.add(url)
        checksum = None
        if item.md5_hash:
            checksum = Checksum("md5", base64.b64decode(item.md5_hash).hex())
        elif item.crc32c:  # composed objects have no MD5
            checksum = Checksum("crc32c", base64.b64decode(item.crc32c).hex())
        return RemoteFile(path_below(self._place.prefix, item.name), int(item.size), url, checksum)

    async def _headers(self) -> dict[str, str]:
        if self._is_anonymous:
            return {}
        token = self._token or await asyncio.to_thread(self._renewed)
        return {"Authorization": f"Bearer {token}"}

    def _renewed(self) -> str:
        auth = library("google.auth", "gs")
        errors = library("google.auth.exceptions", "gs")
        try:
            if self._credentials is None:
                self._credentials, _ = auth.default(scopes=[_SCOPE])
            if not self._credentials.valid or _now_s() - self._refreshed_at_s > _TOKEN_S:
                self._credentials.refresh(library("google.auth.transport.requests", "gs").Request())
                self._refreshed_at_s = _now_s()
        except errors.DefaultCredentialsError as error:
            raise AccessRefused(
                "there are no Google credentials; mount a key and set GOOGLE_APPLICATION_CREDENTIALS"
            ) from error
        except errors.RefreshError as error:
            raise AccessRefused("Google refuses the credentials") from error
        except errors.GoogleAuthError as error:
            raise Unavailable(f"Google gives no token: {type(error).__name__}") from error
        return str(self._credentials.token)


def _now_s() -> float:
    return time.monotonic()  # noqa: TID251 - the edge: how old a token is
