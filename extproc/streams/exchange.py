# SPDX-License-Identifier: Apache-2.0
"""One request's exchange of messages with a gateway, without I/O.

Bodies come whole (BUFFERED), as our bundle and some gateways send them: headers are answered at once, the body with the
decision. Or in pieces (FULL_DUPLEX_STREAMED), as the endpoint picker protocol of the Gateway API Inference Extension
requires: see ``duplex.py``. Envoy's first message indicates which. One server serves both. ``order.py`` has the legal
order of messages.

An answer that an engine or the gateway has made passes in any case: one that begins a stream, one that comes before the
request is decided, and one at which our own code fails.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from extproc.core.effects import Decision, RequestHeld, RequestRefused
from extproc.core.request_record import BUNDLE, GatewayProperties
from extproc.refusals import BadRequest, InternalError, Refusal
from extproc.streams.direct_responses import OWN_CALLS, direct_grpc_response, direct_response
from extproc.streams.headers import (
    UNKNOWN,
    StreamOrigin,
    error_form,
    is_encoded,
    read_endpoint_subset,
    read_header,
    read_status,
)
from extproc.streams.message_order import ANSWER_KINDS, BodyMode, IllegalMessage, MessageOrder
from extproc.streams.processing_responses import (
    CONTINUE_FOREIGN_HEADERS,
    CONTINUE_HEADERS,
    CONTINUE_REQUEST_TRAILERS,
    CONTINUE_RESPONSE_HEADERS,
    SEND_ANSWER,
    decision_answer,
    envoy_routed_decision_answer,
    longer_wait_answer,
    passing_answers,
    refusal_answer,
    trace_metadata,
)
from extproc.streams.request import StreamRequest
from extproc.wire_names import CONTENT_ENCODING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from extproc.core.admission_pipeline import Answer
    from extproc.core.effects import Pending
    from extproc.core.payload_log import PayloadCapture
    from extproc.core.request_record import RequestHead
    from extproc.streams.messages import HttpBody, ProcessingRequest
    from extproc.streams.stream_dependencies import StreamContext

# Statuses before it are interim answers.
_FINAL: Final = 200
_ADVICE: Final = "set request_header_mode SEND, request_body_mode BUFFERED, all others SKIP or NONE"
_SHADOW_ADVICE: Final = "set observability_mode, header modes SEND, both body modes STREAMED"
_DUPLEX_ADVICE: Final = "set both body modes FULL_DUPLEX_STREAMED, header and trailer modes SEND"


class BodyModeExchange(Protocol):
    """The exchange in one mode of bodies."""

    @property
    def request(self) -> StreamRequest | None:
        """The request, once it is whole."""
        ...

    @property
    def head(self) -> RequestHead | None:
        """Its headers, once they have come."""
        ...

    @property
    def relay(self) -> Callable[[bytes], bytes | None] | None:
        """As of Exchange."""
        ...

    def receive(self, message: ProcessingRequest, kind: str) -> list[bytes]:
        """Serialized answers to ``message``, a part of the request; raises a Refusal."""
        ...

    def receive_answer(self, message: ProcessingRequest, kind: str) -> list[bytes]:
        """Serialized answers to ``message``, a part of the answer to the decided request."""
        ...

    def decision_answers(self, decision: Decision) -> list[bytes]:
        """Answers to the message that waited for the decision."""
        ...

    def on_stream_closed(self) -> None:
        """The stream has ended, however it did."""
        ...


class DuplexFactory(Protocol):
    """Makes an exchange that also receives the answer. ``request`` and ``answer``: how their bodies come.
    ``is_copy``: of a request that another picker has decided.
    """

    def __call__(
        self,
        context: StreamContext,
        is_trusted: Callable[[], bool],
        /,
        *,
        request: BodyMode,
        answer: BodyMode,
        is_copy: bool = False,
    ) -> BodyModeExchange:
        """A new one."""
        ...


class Exchange:
    """One stream, in the mode of its first message. ``is_trusted``: whether a gateway wrote the headers that identify
    the caller.
    """

    def __init__(
        self,
        context: StreamContext,
        new_duplex: DuplexFactory,
        *,
        is_trusted: Callable[[], bool],
        origin: Callable[[], StreamOrigin] = StreamOrigin,
    ) -> None:
        """``origin``: where the stream comes from."""
        self._context = context
        self._new_duplex = new_duplex
        self._is_trusted = is_trusted
        self._origin = origin
        self._opened_at_s = context.clock()
        self._conversation: BodyModeExchange | None = None
        self._order: MessageOrder | None = None
        self._answer_mode = BodyMode.NONE
        # the request is answered, by extproc or another filter: the rest of it is dropped, and any answer passes
        self._is_answered = False
        # the gateway sends copies of what goes on without us, and reads no answer
        self._is_copy = False
        context.metrics.on_stream_opened()

    @property
    def pending(self) -> Pending | None:
        """What the request waits for: the shell gets it and calls ``resume``."""
        request = self._conversation.request if self._conversation is not None else None
        return request.pending if request is not None and not self._is_answered else None

    @property
    def passthrough_relay(self) -> Callable[[bytes], bytes | None] | None:
        """Answers messages that change nothing here, as they come: from a serialized message to the answer. None
        instead of an answer: it must be parsed and received. None instead of a function: any message must.
        """
        if self._conversation is None or self._is_answered or self._is_copy:
            return None
        return self._conversation.relay

    def wait_extension(self) -> bytes | None:
        """The message that makes the gateway wait longer, sent before a request is held. None: the gateway takes no
        such message.

        For other requests its time limit is that of one message, so that it soon detects an extproc that hangs.
        """
        pending = self.pending
        if (
            not isinstance(pending, RequestHeld)
            or not isinstance(self._conversation, BufferedExchange)
            or not self._is_trusted()
        ):
            return None
        return longer_wait_answer(pending.longest_s + self._context.core.snapshot.gateway.message_timeout)

    def receive(self, message: ProcessingRequest) -> list[bytes]:
        """Serialized answers to ``message``; raises IllegalMessage."""
        self._is_copy = message.observability_mode
        if self._is_copy and not self._context.options.shadows:
            return []
        answers = self._receive(message)
        return [] if self._is_copy else answers

    def _receive(self, message: ProcessingRequest) -> list[bytes]:
        kind = message.WhichOneof("request") or "nothing"
        if self._order is None or self._conversation is None:
            self._order, self._conversation = self._begin(message)
        self._order.advance(kind, message)
        conversation = self._conversation
        if kind in ANSWER_KINDS:
            return self._receive_answer(conversation, message, kind)
        if self._is_answered:
            return []
        try:
            return conversation.receive(message, kind)
        except Refusal as refusal:
            self._is_answered = True
            self._context.metrics.count_early_refusal(refusal)
            self._context.trace_refusal(refusal.outcome, self._opened_at_s)
            if self._context.metrics.recent.is_open:
                self._context.metrics.recent.on_early_refusal(conversation.head, refusal, self._context.clock())
            return [self._refusal_answer(refusal, conversation.head)]

    def _begin(self, first: ProcessingRequest) -> tuple[MessageOrder, BodyModeExchange]:
        conversation: BodyModeExchange
        request, answer = self._body_modes(first)
        if self._is_copy:
            # copies come in pieces or whole, and nothing waits for us
            request = BodyMode.FULL_DUPLEX_STREAMED if request is BodyMode.STREAMED else request
            conversation = self._new_duplex(
                self._context, self._is_trusted, request=request, answer=answer, is_copy=True
            )
            self._answer_mode = answer
            return MessageOrder(request, answer, _SHADOW_ADVICE), conversation
        has_body = first.HasField("request_headers") and not first.request_headers.end_of_stream
        self._answer_mode = answer
        in_pieces = request is BodyMode.FULL_DUPLEX_STREAMED
        is_duplex = in_pieces or (
            self._context.options.pool is not None and bool(first.protocol_config.response_body_mode)
        )
        if has_body and (request is BodyMode.STREAMED or (is_duplex and request is BodyMode.NONE)):
            raise unsupported_body_mode_error(request)
        if is_duplex:
            conversation = self._new_duplex(self._context, self._is_trusted, request=request, answer=answer)
        else:
            conversation = BufferedExchange(
                self._context, self._is_trusted, self._origin, request=request, answer=answer
            )
        if answer is BodyMode.NONE and self._context.core.payload_logs:
            # extproc may ask for the answer
            answer = BodyMode.STREAMED
        return MessageOrder(request, answer, _DUPLEX_ADVICE if in_pieces else _ADVICE), conversation

    def _body_modes(self, first: ProcessingRequest) -> tuple[BodyMode, BodyMode]:
        """How the bodies of the request and of the answer come."""
        if first.HasField("protocol_config"):
            config = first.protocol_config
            return BodyMode(config.request_body_mode), BodyMode(config.response_body_mode)
        # older Envoys and other gateways do not indicate it; those with a pool use the endpoint picker protocol
        options = self._context.options
        if options.pool is not None and not options.whole_bodies:
            return BodyMode.FULL_DUPLEX_STREAMED, BodyMode.FULL_DUPLEX_STREAMED
        return BodyMode.BUFFERED, BodyMode.STREAMED

    def _receive_answer(self, conversation: BodyModeExchange, message: ProcessingRequest, kind: str) -> list[bytes]:
        request = conversation.request
        if not self._is_answered and (request is None or request.sent is None):
            self.on_answered_elsewhere()
        if self._is_answered:
            return passing_answers(message, kind, self._answer_mode)
        return conversation.receive_answer(message, kind)

    def resume(self, answer: Answer | Decision | RequestRefused) -> list[bytes]:
        """Go on with what was pending."""
        conversation = self._conversation
        request = conversation.request if conversation is not None else None
        if conversation is None or request is None:
            return []
        own = request.resume(answer)
        self._is_answered = isinstance(own, RequestRefused)
        answers = decision_messages(conversation, own)
        return [] if self._is_copy else answers

    def on_answered_elsewhere(self) -> None:
        """The undecided request is answered elsewhere: by a filter before the gateway's ext_proc, or by the gateway at
        a time limit.
        """
        self._is_answered = True
        if self._conversation is not None:
            self._conversation.on_stream_closed()

    def fail(self, message: ProcessingRequest) -> list[bytes]:
        """Answers to ``message`` where our own code has failed: a request ends here and does not pass undecided.

        An answer passes all the same, and so does the rest of it: an engine or the gateway made it, and it may be good.
        """
        self._is_answered = True
        kind = message.WhichOneof("request") or "nothing"
        if kind in ANSWER_KINDS:
            return passing_answers(message, kind, self._answer_mode)
        return [self.refuse()]

    def refuse(self) -> bytes:
        """End a request that cannot be decided."""
        self._is_answered = True
        refusal = InternalError()
        self._context.metrics.count_early_refusal(refusal)
        head = None if self._conversation is None else self._conversation.head
        return self._refusal_answer(refusal, head)

    def _refusal_answer(self, refusal: Refusal, head: RequestHead | None) -> bytes:
        """Of a request that has not arrived in the core."""
        core = self._context.core
        usage = None if head is None or not core.logs_usage else core.builder.usage_of_refused(head, refusal)
        return refusal_answer(refusal, error_form(head), usage)

    @property
    def has_answer(self) -> bool:
        """Whether an answer of an engine or the gateway has begun, which no refusal of extproc may replace."""
        return self._order is not None and self._order.has_answer

    def on_stream_closed(self) -> None:
        """The stream has ended, however it did."""
        if self._conversation is not None:
            self._conversation.on_stream_closed()
        self._context.metrics.on_stream_closed(self._context.clock() - self._opened_at_s)


def decision_messages(conversation: BodyModeExchange, own: Decision | RequestRefused | None) -> list[bytes]:
    """The messages to the gateway about a request; none while something is pending."""
    match own:
        case Decision():
            return conversation.decision_answers(own)
        case RequestRefused():
            answer = refusal_answer(own.refusal, error_form(conversation.head), own.usage)
            request = conversation.request
            return [answer if request is None else answer + trace_metadata(request.trace)]
        case None:
            return []


def missing_body_refusal() -> BadRequest:
    """The refusal of a request whose headers have been answered, when it is too late to choose an engine."""
    return BadRequest("The request has trailers and no body; send a JSON object with at least 'model'.")


def unsupported_body_mode_error(mode: BodyMode) -> IllegalMessage:
    """With this mode, the body does not come, or comes when it is too late to choose an engine."""
    return IllegalMessage("request_headers", f"request_body_mode {mode.name}", "the gateway", _ADVICE)


class BufferedExchange:
    """Headers, then the whole body; or headers alone (NONE), of requests whose path names the model."""

    def __init__(
        self,
        context: StreamContext,
        is_trusted: Callable[[], bool],
        origin: Callable[[], StreamOrigin] = StreamOrigin,
        *,
        request: BodyMode = BodyMode.BUFFERED,
        answer: BodyMode = BodyMode.NONE,
    ) -> None:
        """``request``: how its body comes. ``answer``: how the bodies of answers come, if they come here."""
        self._context = context
        self._has_bodies = request is not BodyMode.NONE
        self._answer = answer
        self._is_trusted = is_trusted
        self._origin = origin
        # that an HTTPRoute has chosen, by the headers
        self._server = ""
        # it is a copy
        self._is_mirrored = False
        self._attachment = BUNDLE
        self._awaits_body = False
        self.request: StreamRequest | None = None
        self.head: RequestHead | None = None
        self.relay: Callable[[bytes], bytes | None] | None = None
        # what is kept of it for the payload log
        self._capture: PayloadCapture | None = None

    def receive(self, message: ProcessingRequest, kind: str) -> list[bytes]:
        """Headers, a body or trailers."""
        if kind == "request_headers":
            return self._receive_headers(message)
        if kind == "request_body":
            return self._receive_body(message.request_body)
        if self._awaits_body:
            raise missing_body_refusal()
        is_decided = self.request is not None and self.request.sent is not None
        return [CONTINUE_REQUEST_TRAILERS] if is_decided else []

    def receive_answer(self, message: ProcessingRequest, kind: str) -> list[bytes]:
        """It passes: the outcome of the request comes with the access log. Only one that is logged comes here whole."""
        capture = self._capture
        if capture is not None and capture.wants_answer:
            if kind == "response_headers":
                headers = message.response_headers
                status = read_status(headers)
                if status >= _FINAL and not capture.status:
                    kind, encoding = (read_header(headers, name) for name in ("content-type", CONTENT_ENCODING))
                    capture.on_answer_headers(status, kind, self._context.clock(), is_encoded=is_encoded(encoding))
                    return [CONTINUE_RESPONSE_HEADERS if headers.end_of_stream else SEND_ANSWER]
            elif kind == "response_body":
                capture.answer.add(message.response_body.body)
        return passing_answers(message, kind, self._answer)

    def decision_answers(self, decision: Decision) -> list[bytes]:
        """The answer to the body, or to the headers where no body comes."""
        on_headers = self.head is not None and not (self.head.has_body and self._has_bodies)
        if self._server:
            answer = envoy_routed_decision_answer(decision, on_headers=on_headers)
        else:
            is_foreign = self._context.options.pool is not None
            answer = decision_answer(decision, on_headers=on_headers, removes_forged=is_foreign)
        return [answer if self.request is None else answer + trace_metadata(self.request.trace)]

    def on_stream_closed(self) -> None:
        """The end of the stream is the end of the request."""
        capture, self._capture = self._capture, None
        if capture is not None and self._context.payloads is not None:
            self._context.payloads.add(capture)
        if self.request is not None:
            self.request.on_stream_closed()

    def _attached(self, subset: Collection[str] | None) -> GatewayProperties:
        # the options are for other gateways: our own bundle marks its streams by metadata
        options = self._context.options
        is_bundle = bool(self._server) or not (options.trusts_headers or options.pool)
        return GatewayProperties(options.buffered_choices, subset, is_bundle=is_bundle)

    def _receive_headers(self, message: ProcessingRequest) -> list[bytes]:
        # read only where anything depends on it, as it takes a while
        origin = self._origin() if self._context.core.asks_origin else UNKNOWN
        head = self.head = self._context.read_head(message, self._is_trusted, origin)
        self._is_mirrored = bool(origin.mirror)
        self._server, is_foreign = origin.server, self._context.options.pool is not None
        has_subset = message.HasField("metadata_context") or self._context.options.conformance
        subset = self._context.allowed_addresses(head, read_endpoint_subset(message)) if has_subset else None
        self._attachment = self._attached(subset)
        if not self._server and not is_foreign:
            answer = direct_response(self._context, head)
            if answer is not None:
                return [answer]
            self._context.core.builder.check_head(head)
        if head.has_body and not self._has_bodies and self._reads_body(head):
            raise unsupported_body_mode_error(BodyMode.NONE)
        if not (head.has_body and self._has_bodies):
            return self._begin(head, b"")
        self._awaits_body = True
        return [CONTINUE_FOREIGN_HEADERS if is_foreign and not self._server else CONTINUE_HEADERS]

    def _reads_body(self, head: RequestHead) -> bool:
        server = self._server or self._context.options.pool or ""
        return self._context.core.builder.reads_body(head, server)

    def _receive_body(self, message: HttpBody) -> list[bytes]:
        # a body that trailers follow is whole, too, and is not marked as the end of the stream
        if self.head is None or not self._awaits_body:
            return []
        self._awaits_body = False
        return self._begin(self.head, message.body)

    def _begin(self, head: RequestHead, body: bytes) -> list[bytes]:
        began_s = self._context.clock()
        if head.path in OWN_CALLS and self._attachment.is_bundle and not self._server:
            answer = direct_grpc_response(self._context, head, body)
            if answer is not None:
                return [answer]
        builder = self._context.core.builder
        build = builder.arrival_builder(server=self._server, pool=self._context.options.pool)
        arrival = builder.build_mirror_copy(head, body) if self._is_mirrored else build(head, body)
        self.request = StreamRequest(self._context)
        own = self.request.submit(arrival, self._attachment, began_s)
        if self._context.core.payload_logs:
            self._capture = self._context.start_capture(arrival, self.request.ticket)
        return decision_messages(self, own)
