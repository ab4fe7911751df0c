# SPDX-License-Identifier: Apache-2.0
"""Pages of pods, which anybody may run: bounded in time and size, and no reason to fail."""

from __future__ import annotations

import contextlib
from http import HTTPStatus
from typing import TYPE_CHECKING, TypeVar

import aiohttp

from extproc.http_body import read_at_most

if TYPE_CHECKING:
    import msgspec

_Page = TypeVar("_Page")


async def read_page(
    http: aiohttp.ClientSession, url: str, decoder: msgspec.json.Decoder[_Page], *, timeout_s: float, most_bytes: int
) -> _Page | None:
    """None if there is no answer, or one that is no such page."""
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    # the decoder's error is a ValueError
    with contextlib.suppress(TimeoutError, aiohttp.ClientError, ValueError, RecursionError):
        async with http.get(url, timeout=timeout, allow_redirects=False) as answer:
            if answer.status == HTTPStatus.OK:
                body = await read_at_most(answer.content, most_bytes)
                return None if body is None else decoder.decode(body)
    return None
