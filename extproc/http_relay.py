# SPDX-License-Identifier: Apache-2.0
"""What relays have in common: processes that take requests of HTTP and send them to another server on their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import aiohttp

if TYPE_CHECKING:
    from extproc.page_server import PageLimits


def is_rewritable_header(value: str) -> bool:
    """Whether a header was read without loss: bytes that are no UTF-8 cannot be written again."""
    return value.isascii() or not any("\ud800" <= one <= "\udfff" for one in value)


def relay_session(
    connector: aiohttp.BaseConnector, limits: PageLimits, *, base_url: str | None = None, connect_s: float | None = None
) -> aiohttp.ClientSession:
    """A session that adds nothing to a message and changes nothing in it. An answer takes as long as it takes.

    ``limits``: of the server that clients call. ``connect_s``: to connect.
    """
    return aiohttp.ClientSession(
        base_url,
        connector=connector,
        # one for all clients would send the cookies of one with the requests of others
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_s),
        auto_decompress=False,
        skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
        max_line_size=limits.header_bytes,
        max_field_size=limits.header_bytes,
    )
