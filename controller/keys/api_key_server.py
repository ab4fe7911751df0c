# SPDX-License-Identifier: Apache-2.0
"""The admin API of virtual keys: the operations of ``attache keys`` over HTTP, for whoever has the token."""

from __future__ import annotations

import asyncio
import hmac
import logging
from typing import TYPE_CHECKING, Any, Final

import msgspec
from aiohttp import web

from controller.keys.api_key_changes import KeyRefused, find_key, key_for_display, parse_key_request, parse_key_update
from extproc.api.quantities import Duration
from extproc.api.untrusted_files import read_token

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from controller.keys.api_key_store import GeneratedKey, KeyAdmin
    from extproc.api.key_store import VirtualKey

log = logging.getLogger(__name__)
PATH: Final = "/v1/keys"
_MOST_BYTES: Final = 1024 * 1024
_ACTOR: Final = "api"
_PRIVATE: Final = {"cache-control": "no-store"}


class KeysApi:
    """One change at a time, in a thread: the file is locked, written and synced."""

    def __init__(self, admin: KeyAdmin, token_file: Path) -> None:
        """``token_file`` is read for each request, so that a replaced one holds at once."""
        self._admin = admin
        self._token_file = token_file
        self._lock = asyncio.Lock()

    def app(self) -> web.Application:
        """The server's application."""
        made = web.Application(client_max_size=_MOST_BYTES, middlewares=[self._guard])
        made.router.add_get(PATH, self._list)
        made.router.add_post(PATH, self._create)
        made.router.add_get(f"{PATH}/{{key}}", self._show)
        made.router.add_patch(f"{PATH}/{{key}}", self._update)
        made.router.add_delete(f"{PATH}/{{key}}", self._delete)
        made.router.add_post(f"{PATH}/{{key}}/rotate", self._rotate)
        made.router.add_post(f"{PATH}/{{key}}/revoke", self._revoke)
        return made

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        try:
            token = await asyncio.to_thread(read_token, self._token_file)
        except (OSError, ValueError) as error:
            log.error("the token of the admin API cannot be read: %s", error)
            return _error(503, "the token of this API cannot be read; its log says why")
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(errors="surrogateescape"), token):
            return _error(401, "write the header authorization: Bearer TOKEN")
        try:
            return await handler(request)
        except KeyRefused as error:
            return _error(error.status, str(error))
        except web.HTTPException as error:
            return _error(error.status, error.reason)
        except OSError as error:
            log.error("the keys cannot be read or written: %s", error)
            return _error(503, f"the keys cannot be read or written: {error.strerror}")

    async def _list(self, _: web.Request) -> web.Response:
        store = await asyncio.to_thread(self._admin.place.read)
        return _json({"keys": [key_for_display(one, self._admin.now) for one in store.keys]})

    async def _show(self, request: web.Request) -> web.Response:
        store = await asyncio.to_thread(self._admin.place.read)
        return _json(key_for_display(find_key(store, request.match_info["key"]), self._admin.now))

    async def _create(self, request: web.Request) -> web.Response:
        asked = parse_key_request(await _body(request))
        return await self._made(await self._do(self._admin.create, asked, _actor(request)), 201)

    async def _rotate(self, request: web.Request) -> web.Response:
        body = await _body(request) if request.can_read_body else {}
        if not isinstance(body, dict) or set(body) - {"overlap"}:
            raise KeyRefused('write {"overlap": DURATION}, or nothing')
        overlap_s = parse_duration(str(body.get("overlap", "0s")))
        which = request.match_info["key"]
        async with self._lock:
            made = await asyncio.to_thread(self._admin.rotate, which, _actor(request), overlap_s=overlap_s)
        return await self._made(made, 200)

    async def _update(self, request: web.Request) -> web.Response:
        asked = parse_key_update(await _body(request))
        return await self._shown(await self._do(self._admin.update, request.match_info["key"], asked, _actor(request)))

    async def _revoke(self, request: web.Request) -> web.Response:
        return await self._shown(await self._do(self._admin.revoke, request.match_info["key"], _actor(request)))

    async def _delete(self, request: web.Request) -> web.Response:
        return await self._shown(await self._do(self._admin.delete, request.match_info["key"], _actor(request)))

    async def _do(self, change: Callable[..., Any], *arguments: object) -> Any:  # noqa: ANN401 - what the change returns
        async with self._lock:
            return await asyncio.to_thread(change, *arguments)

    async def _made(self, made: GeneratedKey, status: int) -> web.Response:
        return await self._shown(made.record, status, key=made.key)

    async def _shown(self, record: VirtualKey, status: int = 200, **more: str) -> web.Response:
        warning = await self._do(self._admin.place.why_unused)
        return _json(
            {**key_for_display(record, self._admin.now), **more, **({"warning": warning} if warning else {})}, status
        )


def parse_duration(text: str) -> Duration:
    """Raises KeyRefused."""
    try:
        return Duration(text)
    except ValueError as error:
        raise KeyRefused(str(error)) from None


async def _body(request: web.Request) -> object:
    try:
        return msgspec.json.decode(await request.read())
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        raise KeyRefused("the body is no JSON") from None


def _actor(request: web.Request) -> str:
    return f"{_ACTOR} {request.remote}"


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(value), status=status, content_type="application/json", headers=_PRIVATE
    )


def _error(status: int, message: str) -> web.Response:
    return _json({"error": {"message": message, "code": status}}, status)
