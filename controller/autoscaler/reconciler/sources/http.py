# SPDX-License-Identifier: Apache-2.0
"""GETs of metrics: bounded in time and size, without redirects, cookies or proxies."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING

import aiohttp

if TYPE_CHECKING:
    import ssl
    from collections.abc import Mapping

    from yarl import URL


class Failed(Exception):
    """There is no page; the message says why, without anything of what the server said."""


async def page_of(
    http: aiohttp.ClientSession,
    url: URL | str,
    *,
    most_bytes: int,
    timeout_s: float,
    query: Mapping[str, str] | None = None,
    headers: Mapping[str, str] | None = None,
    tls: ssl.SSLContext | None = None,
    also: tuple[int, ...] = (),
) -> bytes:
    """The body. ``also``: statuses whose body is wanted, beside 200. Raises Failed."""
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with http.get(
            url, params=query, headers=headers, ssl=tls or True, timeout=timeout, allow_redirects=False
        ) as answer:
            if answer.status != HTTPStatus.OK and answer.status not in also:
                raise Failed(f"the server answers {answer.status}")
            body = bytearray()
            async for chunk in answer.content.iter_any():
                body += chunk
                if len(body) > most_bytes:
                    raise Failed(f"the answer is longer than {most_bytes} bytes")
            return bytes(body)
    except TimeoutError:
        raise Failed(f"no answer within {timeout_s:g} s") from None
    except aiohttp.ClientConnectorCertificateError as error:
        raise Failed(f"the server's certificate is not trusted: {error.certificate_error}") from None
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise Failed(f"the server cannot be asked: {error}") from None
