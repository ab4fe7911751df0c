# SPDX-License-Identifier: Apache-2.0
"""http:// and https://: one file, or an archive that is unpacked."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

import msgspec

from controller.agents.downloader.core.errors import UriInvalid
from controller.agents.downloader.core.key import listing_digest
from controller.agents.downloader.core.listing import Listing, RemoteFile
from controller.agents.downloader.transfer import Request, etag_in

if TYPE_CHECKING:
    from controller.agents.downloader.core.uri import WebPlace
    from controller.agents.downloader.credentials import Environment
    from controller.agents.downloader.transfer import Document, Transfer


class WebSource:
    """Headers with credentials come from ``ATTACHE_HTTP_HEADERS``, a JSON object, and go to the URL's own host
    alone.
    """

    def __init__(self, place: WebPlace, transfer: Transfer, environment: Environment) -> None:
        self._place = place
        self._transfer = transfer
        given = environment.get("ATTACHE_HTTP_HEADERS")
        try:
            headers = msgspec.json.decode(given, type=dict[str, str]) if given else {}
        except msgspec.DecodeError as error:
            raise UriInvalid("ATTACHE_HTTP_HEADERS is no JSON object of texts") from error
        self._request = Request(place.url, headers)

    async def resolve(self, revision: str) -> Listing:
        """Size, ETag and date of the file are its revision."""
        if revision:
            raise UriInvalid("http(s):// has no revisions")
        answer = await self._transfer.head(self._request)
        name = unquote(urlsplit(self._place.url).path).rpartition("/")[2] or "model"
        size, ranges = _size_of(answer)
        version = etag_in(answer.headers)
        file = RemoteFile(name, size, self._place.canonical(), version=version, ranges=ranges)
        pinned = listing_digest([version, size, answer.headers.get("last-modified", "")])
        return Listing(pinned, (file,))

    async def request(self, file: RemoteFile, start: int, end: int | None) -> Request:
        """The URL itself."""
        return self._request


def _size_of(answer: Document) -> tuple[int | None, bool]:
    """The file's size, if the server says it, and whether parts can be asked for."""
    total = answer.headers.get("content-range", "").rpartition("/")[2]
    if answer.status in (206, 416):  # 416: nothing has a first byte
        return (int(total), total != "0") if total.isdecimal() else (None, False)
    length = answer.headers.get("content-length", "")
    is_encoded = answer.headers.get("content-encoding", "identity") != "identity"
    return (int(length) if length.isdecimal() and not is_encoded else None), False
