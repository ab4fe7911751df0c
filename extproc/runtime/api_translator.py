# SPDX-License-Identifier: Apache-2.0
"""The translator, a process beside Envoy: requests into the API of their engines, and answers into the client's.

Envoy sends it each request that extproc has decided so, at one socket, with a directive in a header. It sends the
translated request to another socket, where Envoy listens again: Envoy finds the engine, tries again and writes keys as
for all others. A client that leaves ends the request of the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Final, Literal, TypeVar

import aiohttp
import msgspec
from aiohttp import web

from extproc.api.addresses import join_host_port
from extproc.hop_by_hop_headers import HOP_BY_HOP
from extproc.http_relay import is_rewritable_header, relay_session
from extproc.listen_sockets import listen
from extproc.page_server import PageLimits, PageServer
from extproc.refusals import (
    InternalError,
    NoEndpoint,
    OutOfTime,
    Refusal,
    UntranslatableAnswer,
    anthropic_status,
    to_anthropic_body,
    to_openai_body,
)
from extproc.runtime.api_translator_metrics import TranslatorMetrics, serving_metrics
from extproc.sd_notify import ALIVE, READY, notify, watchdog_s
from extproc.translate.directive import TranslationDirective, decode_directive
from extproc.translate.translation import find_translation
from extproc.wire_names import (
    CUT_MARK,
    DROPPED_FIELDS,
    ENGINE_ANSWERED,
    ENGINE_ATTEMPTS,
    ENGINE_HOST,
    LIMIT_MARK,
    NOT_FOR_ENGINES,
    OUT_OF_TIME,
    RETRY_AFTER,
    TRANSLATE,
    TRANSLATED_SOCKET,
    TRANSLATOR_SOCKET,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping
    from concurrent.futures import Executor
    from pathlib import Path

    from multidict import CIMultiDictProxy

    from extproc.translate.translation import StreamTranslator, TranslatedRequest, Translation

_T = TypeVar("_T")
# Envoy bounds bodies and headers before they come here.
_MOST_BODY_BYTES: Final = 2**31
_LIMITS: Final = PageLimits(connections=100_000, header_bytes=256 * 1024)
# A whole answer; of streams, ``extproc.translate`` bounds what is kept.
_MOST_ANSWER_BYTES: Final = 64 * 1024 * 1024
# As JSON they may take seconds, and memory of many times their size.
_LONG_BYTES: Final = 256 * 1024
# Of a connection, or written anew.
_OWN_HEADERS: Final = HOP_BY_HOP | {"content-length", "content-type", *NOT_FOR_ENGINES}
# Of the client's, none of these is for anybody behind.
_OWN_PREFIXES: Final = ("x-attache-", "x-envoy-", "x-gateway-")
# Of an engine's answer; the last three are from Envoy, for Envoy.
_PASSED: Final = (RETRY_AFTER, "x-should-retry", ENGINE_HOST, ENGINE_ATTEMPTS, ENGINE_ANSWERED)
_JSON: Final = "application/json"
_EVENTS: Final = "text/event-stream"
_CUT: Final = "The engine's answer ended before it was whole."
# Envoy counts time from the last reading of its clock, so by ours it may be early by the work of one turn of its loop.
_EARLY_S: Final = 0.05


class LlmApiTranslationProxy:
    """``http``: connects to Envoy's second listener. ``long``: a thread for long bodies."""

    def __init__(self, http: aiohttp.ClientSession, long: Executor, metrics: TranslatorMetrics) -> None:
        self._http = http
        self._long = long
        self._metrics = metrics

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """The client's answer to one request."""
        try:
            directive = decode_directive(request.headers.get(TRANSLATE, ""))
        except msgspec.MsgspecError:
            return _refused(InternalError(), "chat")
        between = find_translation(directive.client, directive.engine)
        if between is None:
            return _refused(InternalError(), directive.client)
        ended = "left"
        with self._metrics.in_flight.track_inprogress():
            try:
                answer, ended = await self._answer(request, directive, between)
            finally:
                self._metrics.on_request_ended(directive, ended)
        return answer

    async def _answer(
        self, request: web.Request, directive: TranslationDirective, between: Translation
    ) -> tuple[web.StreamResponse, str]:
        """The answer, and how it has ended."""
        try:
            path = between.engine_path(request.path_qs)
            asked = await self._in_turn(
                partial(between.translate_request, strict=directive.is_strict), await request.read()
            )
            headers = _request_headers(request.headers, directive, between)
            is_late = partial(_is_late, directive.limit_s, asyncio.get_running_loop().time())
            async with self._http.post(path, data=asked.body, headers=headers, allow_redirects=False) as found:
                return await self._translated(request, found, directive, between, asked, is_late)
        except Refusal as refusal:
            return _refused(refusal, directive.client), "refused"
        except aiohttp.ClientConnectionError:
            no_engine = NoEndpoint("The gateway is not ready for this request; try again soon.")
            return _refused(no_engine, directive.client), "no_engine"
        except aiohttp.ClientResponseError:
            no_http = UntranslatableAnswer("The engine's answer is not HTTP.")
            return _refused(no_http, directive.client), "untranslatable"

    async def _translated(
        self,
        request: web.Request,
        found: aiohttp.ClientResponse,
        directive: TranslationDirective,
        between: Translation,
        asked: TranslatedRequest,
        is_late: Callable[[], bool],
    ) -> tuple[web.StreamResponse, str]:
        """``is_late``: whether the time limit of Envoy's second listener is over, which then is what cut an answer."""
        headers = {name: found.headers[name] for name in _PASSED if name in found.headers}
        headers.update(directive.answer_headers)
        if asked.dropped:
            headers[DROPPED_FIELDS] = ", ".join(asked.dropped)
        if found.status == 200 and asked.stream and found.content_type == _EVENTS:
            answer = web.StreamResponse(headers={**headers, "content-type": _EVENTS, "cache-control": "no-cache"})
            await answer.prepare(request)
            stream = between.open_stream(include_usage=asked.include_usage)
            cut = await self._relay(request, found, answer, stream, is_late)
            return answer, cut or ("answered" if stream.error is None else "untranslatable")
        try:
            whole = await _whole(found, is_late)
        except OutOfTime as refusal:
            return _refused(refusal, directive.client, {**headers, ENGINE_ANSWERED: OUT_OF_TIME}), "timeout"
        except Refusal as refusal:
            return _refused(refusal, directive.client, headers), "untranslatable"
        try:
            body = await self._in_turn(partial(between.translate_answer, found.status), whole)
        except Refusal as refusal:
            return _refused(refusal, directive.client, headers), "untranslatable"
        return web.Response(status=found.status, body=body, headers={**headers, "content-type": _JSON}), "answered"

    async def _relay(
        self,
        request: web.Request,
        found: aiohttp.ClientResponse,
        answer: web.StreamResponse,
        stream: StreamTranslator,
        is_late: Callable[[], bool],
    ) -> Literal["", "cut", "timeout"]:
        """Events as they come; returns how the answer was cut, empty if it was not. Then the client's is cut, too: it
        has no end that looks whole.
        """
        cut: Literal["", "cut", "timeout"] = ""
        try:
            async for piece in found.content.iter_any():
                out = await self._in_turn(stream.feed, piece, held_bytes=stream.held_bytes)
                if out:
                    await answer.write(out)
                if stream.error is not None:
                    # an engine that goes on would keep both busy for nothing
                    break
        except aiohttp.ClientPayloadError:
            cut = "timeout" if is_late() else "cut"
        out = stream.finish(OutOfTime() if cut == "timeout" else None)
        if cut:
            out += LIMIT_MARK if cut == "timeout" else CUT_MARK
        if out:
            await answer.write(out)
        if cut and request.transport is not None:
            request.transport.close()
        return cut

    async def _in_turn(self, work: Callable[[bytes], _T], body: bytes, *, held_bytes: int = 0) -> _T:
        """``work`` of ``body``; long ones one at a time, beside the streams of others. ``held_bytes``: that came
        before it.
        """
        if held_bytes + len(body) < _LONG_BYTES:
            return work(body)
        return await asyncio.get_running_loop().run_in_executor(self._long, work, body)


def _request_headers(
    given: CIMultiDictProxy[str], directive: TranslationDirective, between: Translation
) -> list[tuple[str, str]]:
    changed = {**dict(between.headers()), **directive.headers}
    kept = [
        (name, value)
        for name, value in given.items()
        if (lower := name.lower()) not in _OWN_HEADERS
        and lower not in changed
        and not lower.startswith(_OWN_PREFIXES)
        and is_rewritable_header(value)
    ]
    return [*kept, *((name, value) for name, value in changed.items() if value is not None), ("content-type", _JSON)]


def _is_late(limit_s: float | None, asked_at_s: float) -> bool:
    return limit_s is not None and asyncio.get_running_loop().time() - asked_at_s >= limit_s - _EARLY_S


async def _whole(found: aiohttp.ClientResponse, is_late: Callable[[], bool]) -> bytes:
    pieces, size = list[bytes](), 0
    try:
        async for piece in found.content.iter_any():
            pieces.append(piece)
            size += len(piece)
            if size > _MOST_ANSWER_BYTES:
                raise UntranslatableAnswer("The engine's answer has more than 64 MiB.")
    except aiohttp.ClientPayloadError:
        raise OutOfTime if is_late() else UntranslatableAnswer(_CUT) from None
    return b"".join(pieces)


def _refused(refusal: Refusal, client: str, headers: Mapping[str, str] | None = None) -> web.Response:
    """In the form of the client's API."""
    is_anthropic = client == "messages"
    made = web.Response(
        status=anthropic_status(refusal) if is_anthropic else refusal.status,
        body=to_anthropic_body(refusal) if is_anthropic else to_openai_body(refusal),
        headers={**(headers or {}), "content-type": _JSON},
    )
    if refusal.retry_after_s is not None:
        made.headers[RETRY_AFTER] = str(refusal.retry_after_s)
    return made


@contextlib.asynccontextmanager
async def running_translator(
    folder: Path, *, end_s: float, metrics: TranslatorMetrics | None = None
) -> AsyncIterator[None]:
    """Serve at the socket in ``folder``. ``end_s``: for requests that run at the end. Raises ListenFailed."""
    metrics = metrics or TranslatorMetrics()
    connector = aiohttp.UnixConnector(str(folder / TRANSLATED_SOCKET), limit=0)
    long = ThreadPoolExecutor(1, "long-bodies")
    async with relay_session(connector, _LIMITS, base_url="http://engines") as http:
        app = web.Application(client_max_size=_MOST_BODY_BYTES)
        app.router.add_post("/{path:.*}", LlmApiTranslationProxy(http, long, metrics).handle)
        runner = PageServer(app, end_s=end_s, limits=_LIMITS, cancels=True)
        await runner.setup()
        try:
            path = folder / TRANSLATOR_SOCKET
            # at no moment anybody else can connect
            before = os.umask(0o177)
            try:
                made = listen(f"unix:{path}")
            finally:
                os.umask(before)
            await runner.listen(made)
            yield
        finally:
            await runner.cleanup()
            long.shutdown(wait=False, cancel_futures=True)


async def serve(folder: Path, *, end_s: float, page: tuple[str, int] | None = None) -> None:
    """Until SIGTERM or SIGINT; raises ListenFailed. ``page``: where metrics are shown."""
    metrics = TranslatorMetrics()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    within_s = watchdog_s(os.environ)
    async with contextlib.AsyncExitStack() as exits:
        if page is not None:
            await exits.enter_async_context(serving_metrics(metrics, listen(join_host_port(*page)), page[0]))
        await exits.enter_async_context(running_translator(folder, end_s=end_s, metrics=metrics))
        notify(READY if within_s is None else b"\n".join((ALIVE, READY)), os.environ)
        while not stop.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), None if within_s is None else within_s / 3)
            if within_s is not None:
                notify(ALIVE, os.environ)
