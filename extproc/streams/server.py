# SPDX-License-Identifier: Apache-2.0
"""The services of extproc's gRPC port: external processing, access logs and health.

For probes of a kubelet, health is served on a port of its own, too.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Final, cast

from extproc.core.effects import RequestHeld
from extproc.rpc.server import MOST_MESSAGE_BYTES, RpcFailed, RpcServer, Status
from extproc.streams.access_log import receive_entries
from extproc.streams.direct_responses import OWN_MESSAGES
from extproc.streams.headers import read_origin
from extproc.streams.health import EXTERNAL_PROCESSOR, HealthService
from extproc.streams.message_order import ANSWER_KINDS, IllegalMessage
from extproc.streams.messages import ProcessingRequest, StreamAccessLogsMessage
from extproc.task_supervisor import FailureLog
from extproc.wire_names import BUNDLE_MARK, STORE_KIND, STORE_PATH, STORE_TICKET

if TYPE_CHECKING:
    import socket
    import ssl
    from collections.abc import Awaitable, Callable, Coroutine

    from extproc.core.admission_pipeline import Answer
    from extproc.core.effects import Decision, Pending, RequestRefused
    from extproc.rpc.server import Relay, RpcCall
    from extproc.streams.exchange import Exchange
    from extproc.streams.headers import StreamOrigin
    from extproc.streams.stream_dependencies import StreamContext

log = logging.getLogger(__name__)
ACCESS_LOG: Final = "envoy.service.accesslog.v3.AccessLogService"
# Headers, metadata and attributes beside it.
_MORE_THAN_A_BODY: Final = 1024 * 1024


async def _nothing() -> None:
    """Comes before no message."""


class _Messages:
    """The messages that a gateway sends on one stream; None: it has closed its side."""

    def __init__(self, call: RpcCall) -> None:
        self.call = call
        self._ahead: asyncio.Task[ProcessingRequest | None] | None = None

    async def next(self, relay: Relay | None) -> ProcessingRequest | None:
        """The next message that ``relay`` does not answer."""
        if self._ahead is None:
            return _parsed(await self.call.read(relay))
        ahead, self._ahead = self._ahead, None
        return await ahead

    def ahead(self) -> asyncio.Task[ProcessingRequest | None]:
        """The message that ``next`` will return."""
        if self._ahead is None:
            self._ahead = asyncio.create_task(self._read())
        return self._ahead

    def stop(self) -> None:
        """Read no more."""
        if self._ahead is not None:
            self._ahead.cancel()

    async def _read(self) -> ProcessingRequest | None:
        return _parsed(await self.call.read())


def _parsed(message: bytes | None) -> ProcessingRequest | None:
    return None if message is None else ProcessingRequest.FromString(message)


class GrpcServer:
    """Owns the listening socket and answers streams with the exchanges that ``new_exchange`` makes."""

    def __init__(
        self,
        context: StreamContext,
        *,
        new_exchange: Callable[[StreamContext, Callable[[], bool], Callable[[], StreamOrigin]], Exchange],
        answer_to: Callable[
            [Pending, Callable[[], Awaitable[None]]], Coroutine[None, None, Answer | Decision | RequestRefused]
        ],
        before_each: Callable[[], Awaitable[None]] = _nothing,
    ) -> None:
        """``new_exchange``: takes the stream's context and two functions, whether headers are trusted, and where the
        stream comes from.
        ``answer_to``: awaits a Pending.

        It first awaits its second argument if the request is held: the gateway must be notified. ``before_each``:
        awaited before a message is read.
        """
        self._streams = context
        self._answer_to = answer_to
        self._before_each = before_each
        self._metrics = context.metrics
        self._new_exchange = new_exchange
        self._failures = FailureLog(log)
        self._open = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self.health = HealthService(context.metrics)
        handlers = {
            f"/{EXTERNAL_PROCESSOR}/Process": self._process,
            f"/{ACCESS_LOG}/StreamAccessLogs": self._stream_access_logs,
            STORE_PATH: self._store_answer,
        }
        answers = {path: partial(_answer, message) for path, message in OWN_MESSAGES.items()}
        self._server = RpcServer({**handlers, **answers, **self.health.handlers}, self._most_message_bytes)

    def _most_message_bytes(self) -> int:
        """Our bundle sends a body in one message, with its attributes."""
        return max(MOST_MESSAGE_BYTES, self._streams.core.snapshot.gateway.max_body_size + _MORE_THAN_A_BODY)

    async def start(self, listening: socket.socket, tls: ssl.SSLContext | None = None) -> None:
        """Take the connections of a socket, alive and not yet ready. ``tls``: None: plain text."""
        await self._server.start(listening, tls)
        self.health.set_live()

    async def stop(self, *, drain_s: float, hurry: asyncio.Event) -> None:
        """Take no new streams, and wait up to ``drain_s`` for running requests, or until ``hurry``.

        Access log streams are not waited for: Envoy keeps them open for ever.
        """
        self._server.stop_listening()
        ends = [asyncio.create_task(event.wait()) for event in (self._is_idle, hurry)]
        await asyncio.wait(ends, timeout=drain_s, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()
        await self._server.close()

    async def _process(self, call: RpcCall) -> None:
        exchange = self._new_exchange(
            self._streams.of_stream(call.metadata),
            lambda: self._streams.options.trusts_headers or _is_bundle(call),
            lambda: read_origin(call.metadata),
        )
        self._open += 1
        self._is_idle.clear()
        # not at the end of this function: the status is sent after it, and when all have ended the server stops
        cast("asyncio.Task[None]", asyncio.current_task()).add_done_callback(self._one_less)
        messages = _Messages(call)
        try:
            while (message := await messages.next(exchange.passthrough_relay)) is not None:
                answers = await self._received(exchange, message)
                # bodies are not kept while the request waits, nor while the answer takes its time
                del message
                if exchange.pending is not None:
                    answers = await self._decided(exchange, messages)
                for answer in answers:
                    await call.write(answer)
                answer = b""
                del answers
        except IllegalMessage as error:
            self._failures.record("a gateway sends what it may not", error, is_ours=False)
            if exchange.has_answer:
                raise RpcFailed(Status.FAILED_PRECONDITION, str(error)) from None
            await call.write(exchange.refuse())
        finally:
            messages.stop()
            exchange.on_stream_closed()

    async def _received(self, exchange: Exchange, message: ProcessingRequest) -> list[bytes]:
        """Whatever fails here, requests are refused rather than left to the gateway's failure mode: no request avoids
        its decision by causing a failure of extproc. Answers pass.
        """
        try:
            await self._before_each()
            return exchange.receive(message)
        except IllegalMessage:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, it is counted, logged once and answered
            self._failures.record("a request could not be decided and is refused, or an answer passes unread", error)
            return exchange.fail(message)

    async def _decided(self, exchange: Exchange, messages: _Messages) -> list[bytes]:
        """The same of a request that waits: its answers."""
        answers: list[bytes] = []
        try:
            while (pending := exchange.pending) is not None:
                answers = await self._resumed(exchange, pending, messages)
        except IllegalMessage:
            raise
        except Exception as error:  # noqa: BLE001 - likewise
            self._failures.record("a request that waited could not be decided and is refused", error)
            return [exchange.refuse()]
        return answers

    async def _resumed(self, exchange: Exchange, pending: Pending, messages: _Messages) -> list[bytes]:
        """Answers once ``pending`` is here; none if the gateway has answered a held request by itself, as at a time
        limit of its own.
        """
        waiting = self._answer_to(pending, partial(_ask_to_wait, exchange, messages.call))
        if not isinstance(pending, RequestHeld):
            return exchange.resume(await waiting)
        ended, ahead = asyncio.create_task(waiting), messages.ahead()
        try:
            await asyncio.wait({ended, ahead}, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done() and _is_answer(ahead.result()):
                exchange.on_answered_elsewhere()
                return []
            return exchange.resume(await ended)
        finally:
            if not ended.done():
                ended.cancel()
                await asyncio.wait({ended})

    def _one_less(self, _: object) -> None:
        self._open -= 1
        if not self._open:
            self._is_idle.set()

    async def _stream_access_logs(self, call: RpcCall) -> None:
        while (message := await call.read()) is not None:
            entries = StreamAccessLogsMessage.FromString(message)
            # one odd entry must not cut off the log stream and with it all learning
            receive_entries(entries, self._streams, self._streams.clock(), self._failures)
        await call.write(b"")

    async def _store_answer(self, call: RpcCall) -> None:
        """Envoy sends the answer to a request that the response cache had not found."""
        body, metadata = await call.read(), dict(call.metadata)
        context, is_stream = self._streams, metadata.get(STORE_KIND) == "stream"
        if body is not None:
            ticket = metadata.get(STORE_TICKET, "")
            context.perform(
                context.core.on_cacheable_answer(ticket, "stream" if is_stream else "json", body, context.clock())
            )
        await call.write(b"")


async def _answer(message: bytes, call: RpcCall) -> None:
    """A call that was decided before: Envoy sends it here for its answer."""
    while await call.read() is not None:
        pass
    await call.write(message)


async def _ask_to_wait(exchange: Exchange, call: RpcCall) -> None:
    longer = exchange.wait_extension()
    if longer is not None:
        await call.write(longer)


def _is_bundle(call: RpcCall) -> bool:
    """Whether the stream is our own bundle's: the gateway writes gRPC's metadata, and no client can."""
    return any(name == BUNDLE_MARK for name, _ in call.metadata)


def _is_answer(message: ProcessingRequest | None) -> bool:
    return message is not None and message.WhichOneof("request") in ANSWER_KINDS
