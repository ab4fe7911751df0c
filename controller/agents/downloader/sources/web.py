# SPDX-License-Identifier: Apache-2.0
"""http:// and https://: one file, or an archive that is unpacked. hdfs://: WebHDFS.

A name node of HDFS redirects each OPEN to a data node, which sends the range from ``offset``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final
from urllib.parse import quote, unquote, urlencode, urlsplit

import msgspec

from controller.agents.downloader.core.errors import ContentRefused, SourceUnavailable, UriInvalid
from controller.agents.downloader.core.fetch_plan import FileListing, RemoteFile, listing_digest
from controller.agents.downloader.transfer import HttpRequest, etag_in

if TYPE_CHECKING:
    from controller.agents.downloader.core.uri import HdfsLocation, WebLocation
    from controller.agents.downloader.environment import EnvironmentReader
    from controller.agents.downloader.transfer import SmallResponse, TransferClient

_MOST_FILES: Final = 100_000


class WebSource:
    """Headers with credentials come from ``ATTACHE_HTTP_HEADERS``, a JSON object, and go to the URL's own host
    alone.
    """

    def __init__(self, place: WebLocation, transfer: TransferClient, environment: EnvironmentReader) -> None:
        self._place = place
        self._transfer = transfer
        given = environment.get("ATTACHE_HTTP_HEADERS")
        try:
            headers = msgspec.json.decode(given, type=dict[str, str]) if given else {}
        except msgspec.DecodeError as error:
            raise UriInvalid("ATTACHE_HTTP_HEADERS is no JSON object of texts") from error
        self._request = HttpRequest(place.url, headers)

    async def list_files(self, revision: str) -> FileListing:
        """Size, ETag and date of the file are its revision."""
        if revision:
            raise UriInvalid("http(s):// has no revisions")
        answer = await self._transfer.head(self._request)
        name = unquote(urlsplit(self._place.url).path).rpartition("/")[2] or "model"
        size, ranges = _size_of(answer)
        version = etag_in(answer.headers)
        file = RemoteFile(name, size, self._place.canonical(), version=version, ranges=ranges)
        pinned = listing_digest([version, size, answer.headers.get("last-modified", "")])
        return FileListing(pinned, (file,))

    async def build_request(self, file: RemoteFile, start: int, end: int | None) -> HttpRequest:
        """The URL itself."""
        return self._request


def _size_of(answer: SmallResponse) -> tuple[int | None, bool]:
    """The file's size, if the server sends it, and whether it supports ranges."""
    total = answer.headers.get("content-range", "").rpartition("/")[2]
    if answer.status in (206, 416):  # 416: nothing has a first byte
        return (int(total), total != "0") if total.isdecimal() else (None, False)
    length = answer.headers.get("content-length", "")
    is_encoded = answer.headers.get("content-encoding", "identity") != "identity"
    return (int(length) if length.isdecimal() and not is_encoded else None), False


class _Status(msgspec.Struct, frozen=True, rename="camel"):
    path_suffix: str
    type: str
    length: int = 0
    modification_time: int = 0


class _Statuses(msgspec.Struct, frozen=True):
    file_status: list[_Status] = msgspec.field(name="FileStatus")


class _DirectoryListing(msgspec.Struct, frozen=True):
    statuses: _Statuses = msgspec.field(name="FileStatuses")


class HdfsSource:
    """``HADOOP_USER_NAME`` or ``WEBHDFS_TOKEN`` (a delegation token) identify us; Kerberos is not supported.

    ``WEBHDFS_SCHEME=https`` for a cluster with TLS. HDFS' checksums depend on its blocks: only sizes are compared.
    """

    def __init__(self, place: HdfsLocation, transfer: TransferClient, environment: EnvironmentReader) -> None:
        self._place = place
        self._transfer = transfer
        scheme = environment.get("WEBHDFS_SCHEME") or "http"
        if scheme not in ("http", "https"):
            raise UriInvalid("WEBHDFS_SCHEME is http or https")
        self._base = f"{scheme}://{place.authority}/webhdfs/v1"
        token, user = environment.get("WEBHDFS_TOKEN"), environment.get("HADOOP_USER_NAME")
        self._who = {"delegation": token} if token else {"user.name": user} if user else {}

    async def list_files(self, revision: str) -> FileListing:
        """The file, or all files below the directory, with their times of change."""
        if revision:
            raise UriInvalid("hdfs:// has no revisions")
        files: list[RemoteFile] = []
        times: list[tuple[str, int, int]] = []
        folders = [""]
        while folders:
            folder = folders.pop()
            for one in await self._list(folder):
                if not one.path_suffix:  # the path is a file
                    name = self._place.path.rpartition("/")[2]
                    locator = self._place.path
                else:
                    name = f"{folder}/{one.path_suffix}".lstrip("/")
                    locator = f"{self._place.path.rstrip('/')}/{name}"
                if one.type == "DIRECTORY":
                    folders.append(name)
                elif one.type == "FILE":
                    files.append(RemoteFile(name, one.length, locator))
                    times.append((name, one.length, one.modification_time))
                if len(files) + len(folders) > _MOST_FILES:
                    raise ContentRefused(f"hdfs://{self._place.authority}{self._place.path} has too many files")
        return FileListing(listing_digest(sorted(times)), tuple(files))

    async def build_request(self, file: RemoteFile, start: int, end: int | None) -> HttpRequest:
        """The range is in the query, not in a header."""
        length = {} if end is None else {"length": str(end - start)}
        return HttpRequest(self._url(file.locator, op="OPEN", offset=str(start), **length), has_range=True)

    async def _list(self, folder: str) -> list[_Status]:
        path = f"{self._place.path.rstrip('/')}/{folder}".rstrip("/") or "/"
        answer = await self._transfer.fetch_small(HttpRequest(self._url(path, op="LISTSTATUS")))
        try:
            return msgspec.json.decode(answer.body, type=_DirectoryListing).statuses.file_status
        except msgspec.DecodeError as error:
            raise SourceUnavailable(
                f"{self._place.authority} answers LISTSTATUS with something else", is_temporary=False
            ) from error

    def _url(self, path: str, **query: str) -> str:
        return f"{self._base}{quote(path)}?{urlencode({**query, **self._who})}"
