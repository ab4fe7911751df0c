# SPDX-License-Identifier: Apache-2.0
"""Ranges of files over HTTP: redirects, time-outs, and what each answer means.

All remote schemes use this module.
"""

from __future__ import annotations

import contextlib
import ssl
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Final
from urllib.parse import urljoin, urlsplit

import aiohttp
import msgspec
from yarl import URL

from controller.agents.downloader.core.errors import AccessRefused, SourceChanged, SourceNotFound, SourceUnavailable
from controller.agents.downloader.core.fetch_plan import SlowTransferDetector
from controller.agents.downloader.core.uri import redact_uri

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Sequence

_REDIRECTS: Final = (301, 302, 303, 307, 308)
_CHUNK: Final = 256 * 1024
_LARGEST_DOCUMENT: Final = 64 * 1024**2
_AGENT: Final = "attache-download"


class Timeouts(msgspec.Struct, frozen=True):
    """How long one attempt waits. ``least_rate``: bytes a second over ``stall_s``, below which a server counts as
    stalled.
    """

    connect_s: float = 10.0
    stall_s: float = 30.0
    least_rate: float = 1024.0
    redirects: int = 5


class HttpRequest(msgspec.Struct, frozen=True):
    """URL and headers; both may hold credentials, so it is never printed.

    ``has_range``: the URL itself has the range, and the answer is a plain 200.
    """

    url: str
    headers: Mapping[str, str] = {}
    has_range: bool = False

    def __repr__(self) -> str:
        return f"Request({redact_uri(self.url)!r})"


class SmallResponse(msgspec.Struct, frozen=True):
    """A small answer, whole. ``headers``: names in lower case. ``status``: only set apart from 200 where it was
    allowed.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes


class RequestedRange(msgspec.Struct, frozen=True):
    """A range of a file. ``size``: of the whole file. ``version``: the ETag that an answer has, if it has one."""

    start: int
    end: int | None
    size: int | None = None
    version: str = ""
    ranged: bool = True


class TransferClient:
    """Sends requests and retries none: the caller has the journal of what is still missing."""

    def __init__(self, http: aiohttp.ClientSession, timeouts: Timeouts, tls: ssl.SSLContext) -> None:
        self._http = http
        self._timeouts = timeouts
        self._tls = tls

    async def fetch_small(
        self, request: HttpRequest, *, method: str = "GET", body: bytes | None = None, allow: Sequence[int] = ()
    ) -> SmallResponse:
        """A small answer; raises the ``failure`` of its status, unless ``allow`` has it."""
        async with self._answer(request, method=method, body=body, allow=allow) as answer:
            content = bytearray()
            async with contextlib.aclosing(self._chunks(answer)) as chunks:
                async for chunk in chunks:
                    content += chunk
                    if len(content) > _LARGEST_DOCUMENT:
                        raise SourceUnavailable(f"{redact_uri(request.url)} answers with too much", is_temporary=False)
            headers = {name.lower(): value for name, value in answer.headers.items()}
            return SmallResponse(answer.status, headers, bytes(content))

    async def head(self, request: HttpRequest) -> SmallResponse:
        """Status and headers of a file without its bytes: of its first byte, because not every server answers HEAD."""
        ranged = msgspec.structs.replace(request, headers={**request.headers, "Range": "bytes=0-0"})
        async with self._answer(ranged, allow=(416,)) as answer:
            headers = {name.lower(): value for name, value in answer.headers.items()}
            answer.close()  # a server without ranges would send all of it
            return SmallResponse(answer.status, headers, b"")

    @contextlib.asynccontextmanager
    async def open(self, request: HttpRequest, wanted: RequestedRange) -> AsyncIterator[AsyncGenerator[bytes]]:
        """The range's bytes in chunks of at most 256 KiB.

        Raises SourceChanged if the answer is of another version or size, and Unavailable if it is of another range.
        """
        headers = dict(request.headers)
        if wanted.ranged and wanted.end is not None and wanted.end > wanted.start and not request.has_range:
            headers["Range"] = f"bytes={wanted.start}-{wanted.end - 1}"
        async with self._answer(msgspec.structs.replace(request, headers=headers)) as answer:
            _check(answer, wanted, redact_uri(request.url), has_range=request.has_range)
            async with contextlib.aclosing(self._chunks(answer)) as chunks:
                yield chunks

    async def _chunks(self, answer: aiohttp.ClientResponse) -> AsyncGenerator[bytes]:
        timeouts = self._timeouts
        pace = SlowTransferDetector(timeouts.stall_s, int(timeouts.least_rate * timeouts.stall_s), _now_s())
        async for chunk in answer.content.iter_chunked(_CHUNK):
            yield chunk
            if pace.add_bytes_and_check(len(chunk), _now_s()):
                raise SourceUnavailable(
                    f"{redact_uri(str(answer.url))} sends less than {timeouts.least_rate:.0f} bytes a second"
                )

    @contextlib.asynccontextmanager
    async def _answer(
        self, request: HttpRequest, *, method: str = "GET", body: bytes | None = None, allow: Sequence[int] = ()
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        timeouts = self._timeouts
        # pool: a connection that waits for another's end is not a server that stalls
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=timeouts.connect_s, sock_read=timeouts.stall_s)
        url = request.url
        headers = {"User-Agent": _AGENT, "Accept-Encoding": "identity", **request.headers}
        try:
            for _ in range(timeouts.redirects + 1):
                async with self._http.request(
                    method,
                    _encoded(url),
                    headers=headers,
                    data=body,
                    ssl=self._tls,
                    timeout=timeout,
                    allow_redirects=False,
                ) as answer:
                    if answer.status not in _REDIRECTS or "location" not in answer.headers:
                        if answer.status >= 300 and answer.status not in allow:
                            raise error_for_status(answer.status, redact_uri(url), answer.headers.get("retry-after"))
                        yield answer
                        return
                    target = urljoin(url, answer.headers["location"])
                    headers = _redirected(url, target, headers)
                    url = target
        except (TimeoutError, aiohttp.ClientError, ConnectionError) as error:
            raise SourceUnavailable(f"{redact_uri(url)}: {_reason(error)}") from error
        raise SourceUnavailable(
            f"{redact_uri(request.url)} redirects more than {timeouts.redirects} times", is_temporary=False
        )


def error_for_status(status: int, where: str, retry_after: str | None = None) -> Exception:
    """What an answer that is no success means for the download."""
    match status:
        case 401 | 403 | 407:
            return AccessRefused(f"{where} answers {status}: the credentials are missing, wrong, or not enough")
        case 404 | 410:
            return SourceNotFound(f"{where} answers {status}: there is no such thing, or none for these credentials")
        case 412 | 416:
            return SourceChanged(f"{where} answers {status}: the file is no longer the one that was listed")
        case 408 | 425 | 429 | 500 | 502 | 503 | 504:
            return SourceUnavailable(f"{where} answers {status}", retry_after_s=_seconds(retry_after))
        case _:
            return SourceUnavailable(f"{where} answers {status}", is_temporary=status >= 500)


@contextlib.asynccontextmanager
async def open_transfer(
    timeouts: Timeouts, connections: int, ca_files: Sequence[str] = ()
) -> AsyncIterator[TransferClient]:
    """A Transfer with a session of its own. ``ca_files``: authorities beside the machine's; raises OSError for a bad
    one.
    """
    tls = ssl.create_default_context()
    for file in ca_files:
        tls.load_verify_locations(cafile=file)
    connector = aiohttp.TCPConnector(limit=connections)
    async with aiohttp.ClientSession(
        connector=connector,
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        trust_env=True,  # HTTPS_PROXY and NO_PROXY: clusters often reach the outside only so
        read_bufsize=_CHUNK,
    ) as http:
        yield TransferClient(http, timeouts, tls)


def etag_in(headers: Mapping[str, str]) -> str:
    """The ETag without quotes and mark of weakness; empty if there is none."""
    return headers.get("etag", "").strip().removeprefix("W/").strip('"')


def _check(answer: aiohttp.ClientResponse, wanted: RequestedRange, where: str, *, has_range: bool) -> None:
    version = etag_in({"etag": answer.headers.get("etag", "")})
    if wanted.version and version and version != wanted.version:
        raise SourceChanged(f"{where} was replaced during the download")
    if answer.status == 206:
        given = answer.headers.get("content-range", "").removeprefix("bytes").strip()
        span, _, total = given.partition("/")
        if total.isdecimal() and wanted.size is not None and int(total) != wanted.size:
            raise SourceChanged(f"{where} has {total} bytes now, not {wanted.size}")
        if not wanted.ranged or span != f"{wanted.start}-{(wanted.end or 0) - 1}":
            raise SourceUnavailable(f"{where} answers with another range than was asked for: {given!r}")
        return
    if has_range:
        return  # its length is counted
    if wanted.start:
        raise SourceUnavailable(f"{where} ignores that a range was asked for", is_temporary=False)
    length = answer.content_length
    if length is not None and wanted.size is not None and length != wanted.size:
        raise SourceChanged(f"{where} has {length} bytes now, not {wanted.size}")


def _redirected(url: str, target: str, headers: Mapping[str, str]) -> dict[str, str]:
    """Headers for a redirect's target: another host gets no credentials. Raises Unavailable for one that is not
    safe.
    """
    before, after = urlsplit(url), urlsplit(target)
    if after.scheme not in ("http", "https"):
        raise SourceUnavailable(f"{redact_uri(url)} redirects to {after.scheme}:", is_temporary=False)
    if before.scheme == "https" and after.scheme == "http":
        raise SourceUnavailable(f"{redact_uri(url)} redirects from TLS to plain HTTP", is_temporary=False)
    if (before.scheme, before.netloc) == (after.scheme, after.netloc):
        return dict(headers)
    return {
        name: value for name, value in headers.items() if name.lower() in ("range", "user-agent", "accept-encoding")
    }


def _encoded(url: str) -> URL:
    """The URL unchanged: a signed URL must not be encoded again."""
    return URL(url, encoded=True)


def _reason(error: Exception) -> str:
    """A timeout has no text of its own, and aiohttp's errors may repeat a URL with its query."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ClientOSError):
        return f"{type(error).__name__}: {error.strerror or error}".partition("?")[0]
    return type(error).__name__


def _seconds(header: str | None) -> float | None:
    if not header:
        return None
    if header.strip().isdecimal():
        return float(header)
    try:
        return max(0.0, parsedate_to_datetime(header).timestamp() - time.time())  # noqa: TID251 - a date of the wall clock
    except ValueError:
        return None


def _now_s() -> float:
    return time.monotonic()  # noqa: TID251 - the edge: how long a server has been sending
