# SPDX-License-Identifier: Apache-2.0
"""One request's conversation with a gateway, message by message, without I/O.

Bodies come whole (BUFFERED), as our bundle and some gateways send them: headers are answered at once, the body with the
decision. Or in pieces (FULL_DUPLEX_STREAMED), as the endpoint picker protocol of the Gateway API Inference Extension
asks: see ``duplex.py``. Envoy says which in its first message. One server serves both. What may come when is in
``order.py``.

An answer that somebody has made passes, whatever happens here: one that begins a stream, one that comes before the
request is decided, and one at which our own code fails.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from extproc.core.effects import Decision, Held, Refused
from extproc.core.record import Attachment
from extproc.errors import BadRequest, InternalError, Refusal
from extproc.streams.headers import UNKNOWN, Origin, error_form, read_subset
from extproc.streams.order import ANSWER_KINDS, BodyMode, IllegalMessage, MessageOrder
from extproc.streams.request import StreamRequest
from extproc.streams.responses import (
    CONTINUE_FOREIGN_HEADERS,
    CONTINUE_HEADERS,
    CONTINUE_REQUEST_TRAILERS,
    chosen_decision_answer,
    decision_answer,
    longer_wait_answer,
    passing_answers,
    refusal_answer,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from extproc.core.effects import Pending
    from extproc.core.pipeline import Answer
    from extproc.core.record import Arrival, Head
    from extproc.protocol import Api
    from extproc.streams.context import StreamContext
    from extproc.streams.messages import HttpBody, ProcessingRequest


class Conversation(Protocol):
    """One way of talking."""

    @property
    def request(self) -> StreamRequest | None:
        """The request, once it is whole."""
        ...

    @property
    def head(self) -> Head | None:
        """Its headers, once they have come."""
        ...

    def receive(self, message: ProcessingRequest, kind: str) -> list[bytes]:
        """Serialized answers to ``message``, a part of the request; raises a Refusal."""
        ...

    def receive_answer(self, message: ProcessingRequest, kind: str) -> list[bytes]:
        """Serialized answers to ``message``, a part of the answer to the decided request."""
        ...

    def decided(self, decision: Decision) -> list[bytes]:
        """Answers to the message that asked for it."""
        ...

    def close(self) -> None:
        """The stream has ended, however it did."""
        ...


class NewDuplex(Protocol):
    """Makes a conversation whose answers come here, too. ``request`` and ``answer``: how their bodies come."""

    def __call__(
        self, context: StreamContext, is_trusted: Callable[[], bool], /, *, request: BodyMode, answer: BodyMode
    ) -> Conversation:
        """A new one."""
        ...


class Exchange:
    """One stream, in the mode of its first message. ``is_trusted``: whether a gateway vouches for its headers."""

    def __init__(
        self,
        context: StreamContext,
        new_duplex: NewDuplex,
        *,
        is_trusted: Callable[[], bool],
        origin: Callable[[], Origin] = Origin,
    ) -> None:
        """``origin``: where the stream comes from."""
        self._context = context
        self._new_duplex = new_duplex
        self._is_trusted = is_trusted
        self._origin = origin
        self._opened_at_s = context.clock()
        self._conversation: Conversation | None = None
        self._order: MessageOrder | None = None
        self._answer_mode = BodyMode.NONE
        # the request is answered, by us or by somebody else: what is left of it is dropped, and any answer passes
        self._is_answered = False
        context.metrics.stream_opened()

    @property
    def pending(self) -> Pending | None:
        """What the request waits for: the shell gets it and calls ``resume``."""
        request = self._conversation.request if self._conversation is not None else None
        return request.pending if request is not None and not self._is_answered else None

    def longer_wait(self) -> bytes | None:
        """What to tell the gateway before a request is held: to wait longer than for others. None: it cannot be told.

        Without such requests it waits for us as long as a message may take, so that it learns soon if we hang.
        """
        pending = self.pending
        if not isinstance(pending, Held) or not isinstance(self._conversation, Buffered) or not self._is_trusted():
            return None
        return longer_wait_answer(pending.longest_s + self._context.core.snapshot.gateway.message_timeout)

    def receive(self, message: ProcessingRequest) -> list[bytes]:
        """Serialized answers to ``message``; raises IllegalMessage."""
        if message.observability_mode:
            # a copy of what goes on without us: the gateway reads no answer
            return []
        kind = message.WhichOneof("request") or "nothing"
        if self._order is None or self._conversation is None:
            self._order, self._conversation = self._begin(message)
        self._order.take(kind, message)
        conversation = self._conversation
        if kind in ANSWER_KINDS:
            return self._receive_answer(conversation, message, kind)
        if self._is_answered:
            return []
        try:
            return conversation.receive(message, kind)
        except Refusal as refusal:
            self._is_answered = True
            self._context.metrics.refused(refusal)
            return [refusal_answer(refusal, error_form(conversation.head))]

    def _begin(self, first: ProcessingRequest) -> tuple[MessageOrder, Conversation]:
        request, answer = self._body_modes(first)
        has_body = first.HasField("request_headers") and not first.request_headers.end_of_stream
        if has_body and request in _UNREADABLE:
            raise IllegalMessage("request_headers", f"request_body_mode {request.name}", "the gateway", _ADVICE)
        self._answer_mode = answer
        in_pieces = request is BodyMode.FULL_DUPLEX_STREAMED
        conversation: Conversation
        if in_pieces or (self._context.options.pool is not None and first.protocol_config.response_body_mode):
            conversation = self._new_duplex(self._context, self._is_trusted, request=request, answer=answer)
        else:
            conversation = Buffered(self._context, self._is_trusted, self._origin, answer=answer)
        return MessageOrder(request, answer, _DUPLEX_ADVICE if in_pieces else _ADVICE), conversation

    def _body_modes(self, first: ProcessingRequest) -> tuple[BodyMode, BodyMode]:
        """How the bodies of the request and of the answer come."""
        if first.HasField("protocol_config"):
            config = first.protocol_config
            return BodyMode(config.request_body_mode), BodyMode(config.response_body_mode)
        # older Envoys and gateways that are none do not say; those with a pool keep to the endpoint picker protocol
        options = self._context.options
        if options.pool is not None and not options.whole_bodies:
            return BodyMode.FULL_DUPLEX_STREAMED, BodyMode.FULL_DUPLEX_STREAMED
        return BodyMode.BUFFERED, BodyMode.STREAMED

    def _receive_answer(self, conversation: Conversation, message: ProcessingRequest, kind: str) -> list[bytes]:
        request = conversation.request
        if not self._is_answered and (request is None or request.sent is None):
            self.answered_elsewhere()
        if self._is_answered:
            return passing_answers(message, kind, self._answer_mode)
        return conversation.receive_answer(message, kind)

    def resume(self, answer: Answer | Decision | Refused) -> list[bytes]:
        """Go on with what was pending."""
        conversation = self._conversation
        request = conversation.request if conversation is not None else None
        if conversation is None or request is None:
            return []
        own = request.resume(answer)
        self._is_answered = isinstance(own, Refused)
        return answers_to(conversation, own)

    def answered_elsewhere(self) -> None:
        """Somebody else answers the undecided request: a filter before the gateway's ext_proc, or the gateway at a time
        limit.
        """
        self._is_answered = True
        if self._conversation is not None:
            self._conversation.close()

    def fail(self, message: ProcessingRequest) -> list[bytes]:
        """Answers to ``message`` where our own code has failed: a request ends here and does not pass undecided.

        An answer passes all the same, and so does the rest of it: it is somebody's, and may be good.
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
        self._context.metrics.refused(refusal)
        head = None if self._conversation is None else self._conversation.head
        return refusal_answer(refusal, error_form(head))

    @property
    def has_answer(self) -> bool:
        """Whether somebody's answer has begun, which no refusal of ours may replace."""
        return self._order is not None and self._order.has_answer

    def close(self) -> None:
        """The stream has ended, however it did."""
        if self._conversation is not None:
            self._conversation.close()
        self._context.metrics.stream_closed(self._context.clock() - self._opened_at_s)


def answers_to(conversation: Conversation, own: Decision | Refused | None) -> list[bytes]:
    """What to tell the gateway of a request; nothing while something is pending."""
    match own:
        case Decision():
            return conversation.decided(own)
        case Refused():
            return [refusal_answer(own.refusal, error_form(conversation.head))]
        case None:
            return []


def no_body() -> BadRequest:
    """The refusal of a request whose headers have been answered, when it is too late to choose an engine."""
    return BadRequest("The request has trailers and no body; send a JSON object with at least 'model'.")


# With these, a request's body does not come, or comes when it is too late to choose an engine.
_UNREADABLE: Final = frozenset({BodyMode.NONE, BodyMode.STREAMED})
_ADVICE: Final = "set request_header_mode SEND, request_body_mode BUFFERED, all others SKIP or NONE"
_DUPLEX_ADVICE: Final = "set both body modes FULL_DUPLEX_STREAMED, header and trailer modes SEND"


class Buffered:
    """Headers, then the whole body."""

    def __init__(
        self,
        context: StreamContext,
        is_trusted: Callable[[], bool],
        origin: Callable[[], Origin] = Origin,
        *,
        answer: BodyMode = BodyMode.NONE,
    ) -> None:
        """``answer``: how the bodies of answers come, if they come here."""
        self._context = context
        self._answer = answer
        self._is_trusted = is_trusted
        self._origin = origin
        self._admitted: tuple[Api, Head] | None = None
        # the ModelServer that an HTTPRoute has chosen, with the request's head
        self._chosen: tuple[str, Head] | None = None
        # of a gateway with a pool
        self._pooled: Head | None = None
        self._decides_headers = False
        self._attachment = self._attached(None)
        self._awaits_body = False
        self.request: StreamRequest | None = None
        self.head: Head | None = None

    def receive(self, message: ProcessingRequest, kind: str) -> list[bytes]:
        """Headers, a body or trailers."""
        if kind == "request_headers":
            return self._receive_headers(message)
        if kind == "request_body":
            return self._receive_body(message.request_body)
        if self._awaits_body:
            raise no_body()
        is_decided = self.request is not None and self.request.sent is not None
        return [CONTINUE_REQUEST_TRAILERS] if is_decided else []

    def receive_answer(self, message: ProcessingRequest, kind: str) -> list[bytes]:
        """It passes: the access log says what became of the request."""
        return passing_answers(message, kind, self._answer)

    def decided(self, decision: Decision) -> list[bytes]:
        """The answer to the body, or to the headers of a request without one."""
        if self._chosen is None:
            is_foreign = self._pooled is not None
            return [decision_answer(decision, on_headers=self._decides_headers, removes_forged=is_foreign)]
        return [chosen_decision_answer(decision, on_headers=self._decides_headers)]

    def close(self) -> None:
        """The end of the stream is the end of the request."""
        if self.request is not None:
            self.request.close()

    def _attached(self, subset: Collection[str] | None) -> Attachment:
        # who is told to trust headers is behind another gateway: our own bundle says itself that it writes them
        options = self._context.options
        return Attachment(options.buffered_choices, subset, passes_usage=options.trusts_headers)

    def _receive_headers(self, message: ProcessingRequest) -> list[bytes]:
        # read only where anything depends on it, as it takes a while
        origin = self._origin() if self._context.core.asks_origin else UNKNOWN
        head = self.head = self._context.read_head(message, self._is_trusted, origin)
        if message.HasField("metadata_context") or self._context.options.conformance:
            self._attachment = self._attached(self._context.allowed(head, read_subset(message)))
        if origin.server:
            self._chosen = origin.server, head
            if not head.has_body:
                self._decides_headers = True
                return self._begin(self._context.core.intake.receive_chosen(origin.server, head, b""))
            self._awaits_body = True
            return [CONTINUE_HEADERS]
        pool = self._context.options.pool
        if pool is not None:
            self._pooled = head
            if not head.has_body:
                self._decides_headers = True
                return self._begin(self._context.core.intake.receive_unread(pool, head, b""))
            self._awaits_body = True
            return [CONTINUE_FOREIGN_HEADERS]
        models = self._context.list_models(head)
        if models is not None:
            return [models]
        self._admitted = self._context.core.intake.admit(head), head
        self._awaits_body = True
        return [CONTINUE_HEADERS]

    def _receive_body(self, message: HttpBody) -> list[bytes]:
        # a body that trailers follow is whole, too, and does not say that it ends the stream
        self._awaits_body = False
        began_s = self._context.clock()
        intake = self._context.core.intake
        if self._chosen is not None:
            server, head = self._chosen
            return self._begin(intake.receive_chosen(server, head, message.body), began_s)
        if self._pooled is not None:
            pooled = intake.receive_pooled(self._context.options.pool, self._pooled, message.body)
            return self._begin(pooled, began_s)
        if self._admitted is None:
            return []
        api, head = self._admitted
        return self._begin(intake.receive(api, head, message.body), began_s)

    def _begin(self, arrival: Arrival, began_s: float | None = None) -> list[bytes]:
        self.request = StreamRequest(self._context)
        began_s = self._context.clock() if began_s is None else began_s
        return answers_to(self, self.request.begin(arrival, self._attachment, began_s))
