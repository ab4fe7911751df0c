# SPDX-License-Identifier: Apache-2.0
"""A reverse proxy before the engine, on the engine's usual port, that joins requests for tensors into one call.

What is not joined passes byte for byte, as it comes. What is joined is held whole until it is answered. If the engine
fails or refuses a joined call, each of its requests is sent once by itself, as its client sent it. So no request costs
another one its answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Final

import aiohttp
import msgspec
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from controller.agents.runtime.batching.queue import BatchQueue
from controller.agents.runtime.batching.tensor_merge import (
    ResponseUnsplittable,
    is_joinable_path,
    merge_requests,
    parse_batch_part,
    split_response,
)
from extproc.hop_by_hop_headers import HOP_BY_HOP
from extproc.http_relay import is_rewritable_header, relay_session
from extproc.page_server import PageLimits, PageServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from multidict import CIMultiDictProxy

    from controller.agents.runtime.batching.tensor_merge import BatchableRequest
    from controller.agents.runtime.metrics import BatchCounters
    from controller.agents.runtime.settings import BatcherSettings

# Of a request that may be joined: reading its numbers takes the loop some milliseconds.
_MOST_BODY_BYTES: Final = 256 * 1024
# Of a joined answer, which is not split if it is longer, and of all that clients have not read.
_MOST_ANSWER_BYTES: Final = 4 * 1024 * 1024
_MOST_ANSWERS_BYTES: Final = 32 * 1024 * 1024
_BODY_S: Final = 10.0
_CONNECT_S: Final = 5.0
# At the end of the agent, which is after the drain.
_END_S: Final = 5.0
# Of two messages about a joined call that failed.
_LOG_S: Final = 60.0
_LIMITS: Final = PageLimits(connections=4096, header_bytes=64 * 1024)
_BINARY_LENGTH: Final = "Inference-Header-Content-Length"
# They differ from request to request, and engines compute the same with any. Requests that differ in other headers are
# not joined.
_WITHOUT_MEANING: Final = HOP_BY_HOP | frozenset(
    {
        *("host", "content-length", "accept-encoding", "user-agent", "date", "via", "forwarded", "referer"),
        *("x-request-id", "x-real-ip", "traceparent", "tracestate", "baggage", "b3"),
    }
)
_PREFIXES_WITHOUT_MEANING: Final = ("x-forwarded-", "x-envoy-", "x-b3-", "x-attache-", "x-gateway-")
# Of an answer to all, none may be for one.
_OF_ONE_CLIENT: Final = frozenset({"set-cookie", "content-encoding", _BINARY_LENGTH.lower()})
_Headers = tuple[tuple[str, str], ...]

log = logging.getLogger(__name__)


class _SharedAnswer(msgspec.Struct, frozen=True):
    """A client's share of the answer to a joined call."""

    status: int
    headers: _Headers
    body: bytes


class _HeldRequest:
    """A request that may be joined. ``answer``: None for one that is to be sent by itself."""

    def __init__(self, part: BatchableRequest, headers: _Headers, at_s: float) -> None:
        self.part = part
        self.key = (part.form, headers)
        self.headers = headers
        self.at_s = at_s
        self.answer: asyncio.Future[_SharedAnswer | None] = asyncio.get_running_loop().create_future()
        self.batch: _Batch | None = None


class _Batch:
    """A joined call. ``clients``: those that have not got their answer yet. ``size``: of the answer, in bytes."""

    def __init__(self, requests: list[_HeldRequest]) -> None:
        self.requests = requests
        self.clients = len(requests)
        self.size = 0
        self.call: asyncio.Task[None] | None = None


class Batcher:
    """Answers all requests to the engine: what may be joined is held in a queue, all else is passed on.

    ``http``: a session for the engine alone.
    """

    def __init__(
        self,
        settings: BatcherSettings,
        http: aiohttp.ClientSession,
        counters: BatchCounters,
        clock: Callable[[], float],
    ) -> None:
        self.queue = BatchQueue[_HeldRequest](settings.limits)
        self._settings = settings
        self._http = http
        self._counters = counters
        self._clock = clock
        self._calls: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._logged_at_s = -_LOG_S
        # Requests that are not answered yet, and the bytes of shared answers.
        self.in_flight = 0
        self._answers_bytes = 0

    async def aclose(self) -> None:
        """Cancel the calls of batches."""
        if self._timer is not None:
            self._timer.cancel()
        for one in self._calls:
            one.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)

    async def handle_request(self, request: web.Request) -> web.StreamResponse:
        """The client's answer."""
        self.in_flight += 1
        try:
            return await self._answer(request)
        finally:
            self.in_flight -= 1

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if not request.raw_path.startswith("/"):
            return _error(400, "write a path that begins with /")
        size = request.content_length
        if size is None or not _may_be_joined(request, size):
            self._counters.requests["passed"] += 1
            return await self._pass(request, request.content if request.body_exists else None)
        if not self.queue.try_reserve(size):
            self._counters.requests["refused"] += 1
            return _error(503, "too many requests wait for the engine")
        try:
            return await self._answer_held(request)
        finally:
            self.queue.release_reserved(size)

    async def _answer_held(self, request: web.Request) -> web.StreamResponse:
        try:
            async with asyncio.timeout(_BODY_S):
                body = await request.read()
        except TimeoutError:
            answer = _error(408, "the body took too long")
            answer.force_close()
            return answer
        part = parse_batch_part(request.raw_path, body)
        if part is None or part.rows > self._settings.limits.max_rows:
            self._counters.requests["passed"] += 1
            return await self._pass(request, body)
        shared = await self._join(request, _HeldRequest(part, _meaningful(request.headers), self._clock()))
        if shared is not None:
            return shared
        self._counters.requests["alone"] += 1
        self.queue.on_call_started()
        try:
            return await self._pass(request, body)
        finally:
            self._send(self.queue.on_call_ended())

    async def _join(self, request: web.Request, held: _HeldRequest) -> web.StreamResponse | None:
        """Wait for others; None if the request is to be sent by itself."""
        self._send(self.queue.add(held.key, held, held.part.rows, self._clock()))
        try:
            shared = await held.answer
            if shared is None:
                return None
            self._counters.requests["joined"] += 1
            answer = web.Response(status=shared.status, headers=CIMultiDict(shared.headers), body=shared.body)
            await answer.prepare(request)
            await answer.write_eof()
            return answer
        finally:
            self._release(held)

    def _release(self, held: _HeldRequest) -> None:
        """Its client has its answer, or has left."""
        self.queue.remove(held.key, held, held.part.rows)
        batch = held.batch
        if batch is None:
            return
        batch.clients -= 1
        if not batch.clients:
            self._answers_bytes -= batch.size
            if batch.call is not None:
                batch.call.cancel()

    def _send(self, batches: list[list[_HeldRequest]]) -> None:
        """Send batches to the engine, and wait for the next one that is due."""
        for requests in batches:
            now_s = self._clock()
            self._counters.on_batch(sum(one.part.rows for one in requests), [now_s - one.at_s for one in requests])
            batch = _Batch(requests)
            for one in requests:
                one.batch = batch
            batch.call = asyncio.create_task(self._call(batch))
            self._calls.add(batch.call)
            batch.call.add_done_callback(self._on_call_end)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.queue.next_due_at_s is not None:
            self._timer = asyncio.get_running_loop().call_at(self.queue.next_due_at_s, self._on_due)

    def _on_due(self) -> None:
        self._timer = None
        self._send(self.queue.pop_due_batches(self._clock()))

    def _on_call_end(self, call: asyncio.Task[None]) -> None:
        self._calls.discard(call)
        if not call.cancelled() and call.exception() is not None:
            log.error("a joined call has failed", exc_info=call.exception())
        self._send(self.queue.on_call_ended())

    async def _call(self, batch: _Batch) -> None:
        """Answer all of a batch; without an answer for all, each is sent by itself."""
        answers: list[_SharedAnswer | None] = [None for _ in batch.requests]
        try:
            if len(answers) > 1:
                async with asyncio.timeout(self._settings.timeout_s):
                    answers = [*await self._ask(batch)]
        except TimeoutError:
            self._counters.failed_batches += 1
            why = _error_body(f"the engine has not answered in {self._settings.timeout_s:g} s")
            answers = [_SharedAnswer(504, (("Content-Type", "application/json"),), why) for _ in answers]
        except (ResponseUnsplittable, aiohttp.ClientError) as error:
            self._on_unusable(len(answers), error)
        finally:
            for one, answer in zip(batch.requests, answers, strict=True):
                if not one.answer.done():
                    one.answer.set_result(answer)

    async def _ask(self, batch: _Batch) -> list[_SharedAnswer]:
        first, parts = batch.requests[0], [one.part for one in batch.requests]
        headers = [*first.headers, ("Accept-Encoding", "identity")]
        url = URL(f"{self._settings.engine}{first.part.form.path}", encoded=True)
        async with self._http.post(url, data=merge_requests(parts), headers=headers, allow_redirects=False) as found:
            if found.status != 200:
                raise ResponseUnsplittable(f"its status is {found.status}")
            if own := _OF_ONE_CLIENT & {name.lower() for name in found.headers}:
                raise ResponseUnsplittable(f"it has the header {', '.join(own)}")
            body = bytearray()
            async for piece in found.content.iter_any():
                body += piece
                batch.size += len(piece)
                self._answers_bytes += len(piece)
                if batch.size > _MOST_ANSWER_BYTES or self._answers_bytes > _MOST_ANSWERS_BYTES:
                    raise ResponseUnsplittable(f"it has more than {len(body)} bytes")
            kept = tuple((name, value) for name, value in _passed(found.headers) if name.lower() != "content-length")
            return [_SharedAnswer(found.status, kept, one) for one in split_response(bytes(body), parts)]

    def _on_unusable(self, count: int, error: Exception) -> None:
        """Count it, and log it now and then."""
        self._counters.failed_batches += 1
        if self._clock() - self._logged_at_s >= _LOG_S:
            self._logged_at_s = self._clock()
            log.warning(
                "the answer to %d joined requests cannot be used, so each is sent by itself: %s",
                count,
                str(error) or type(error).__name__,
            )

    async def _pass(self, request: web.Request, body: bytes | aiohttp.StreamReader | None) -> web.StreamResponse:
        url = URL(f"{self._settings.engine}{request.raw_path}", encoded=True)
        answer: web.StreamResponse | None = None
        try:
            async with self._http.request(
                request.method, url, data=body, headers=_passed(request.headers), allow_redirects=False
            ) as found:
                answer = web.StreamResponse(
                    status=found.status, reason=found.reason, headers=CIMultiDict(_passed(found.headers))
                )
                await answer.prepare(request)
                async for piece in found.content.iter_any():
                    await answer.write(piece)
                await answer.write_eof()
                return answer
        except (aiohttp.ClientError, TimeoutError) as error:
            if answer is None:
                return _error(502, f"the engine does not answer: {type(error).__name__}: {error}")
            # an answer that was cut must not look whole
            if request.transport is not None:
                request.transport.close()
            return answer


def _may_be_joined(request: web.Request, size: int) -> bool:
    headers = request.headers
    return (
        request.method == "POST"
        and size <= _MOST_BODY_BYTES
        and is_joinable_path(request.raw_path)
        and request.content_type == "application/json"
        and not any(one in headers for one in ("Content-Encoding", "Transfer-Encoding", _BINARY_LENGTH))
    )


def _meaningful(headers: CIMultiDictProxy[str]) -> _Headers:
    """Those that a joined call has, because all of its requests have them."""
    found = ((name.lower(), value) for name, value in _passed(headers))
    return tuple(
        sorted(
            (name, value)
            for name, value in found
            if name not in _WITHOUT_MEANING and not name.startswith(_PREFIXES_WITHOUT_MEANING)
        )
    )


def _passed(headers: CIMultiDictProxy[str]) -> list[tuple[str, str]]:
    """Of a message, for the other side."""
    named = {one.strip().lower() for value in headers.getall("Connection", ()) for one in value.split(",")}
    return [
        (name, value)
        for name, value in headers.items()
        if name.lower() not in HOP_BY_HOP and name.lower() not in named and is_rewritable_header(value)
    ]


def _error(status: int, message: str) -> web.Response:
    return web.Response(status=status, body=_error_body(message), content_type="application/json")


def _error_body(message: str) -> bytes:
    """As V1 and V2 have it."""
    return msgspec.json.encode({"error": message})


@contextlib.asynccontextmanager
async def serve_batcher(
    settings: BatcherSettings, counters: BatchCounters, clock: Callable[[], float]
) -> AsyncIterator[Batcher]:
    """Listens inside the context; raises OSError if the port is taken."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True, ssl=False)
    async with relay_session(connector, _LIMITS, connect_s=_CONNECT_S) as http:
        batcher = Batcher(settings, http, counters, clock)
        app = web.Application(client_max_size=_MOST_BODY_BYTES)
        app.router.add_route("*", "/{path:.*}", batcher.handle_request)
        runner = PageServer(app, end_s=_END_S, limits=_LIMITS, cancels=True, relays=True)
        await runner.setup()
        try:
            await runner.listen((settings.host, settings.port))
            yield batcher
        finally:
            await runner.cleanup()
            await batcher.aclose()
