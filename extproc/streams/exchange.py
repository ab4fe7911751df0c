# SPDX-License-Identifier: Apache-2.0
"""One request's conversation with a gateway, message by message, without I/O.

Bodies come whole (BUFFERED), as our bundle and some gateways send them: headers are answered at once, the body with the
decision, and nothing more comes. Or in pieces (FULL_DUPLEX_STREAMED), as the endpoint picker protocol of the Gateway
API Inference Extension asks: see ``duplex.py``. Envoy says which in its first message. One server serves both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from extproc.core.effects import Decision, Held, Refused
from extproc.core.states import IllegalEvent
from extproc.core.types import Attachment
from extproc.errors import InternalError, Refusal
from extproc.streams.http_headers import error_form, read_subset
from extproc.streams.origin import UNKNOWN, Origin
from extproc.streams.request import StreamRequest
from extproc.streams.responses import (
    CONTINUE_HEADERS,
    FULL_DUPLEX,
    chosen_decision_answer,
    decision_answer,
    longer_wait_answer,
    refusal_answer,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from extproc.core.effects import Pending
    from extproc.core.entering import Answer
    from extproc.core.types import Arrival, Head
    from extproc.request.model import Api
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
        """Serialized answers to ``message``; raises IllegalEvent or a Refusal."""
        ...

    def decided(self, decision: Decision) -> list[bytes]:
        """Answers to the message that asked for it."""
        ...

    def close(self) -> None:
        """The stream has ended, however it did."""
        ...


class NewDuplex(Protocol):
    """Makes a conversation whose answers come here, too. ``is_whole``: bodies are not in pieces."""

    def __call__(
        self, context: StreamContext, is_trusted: Callable[[], bool], /, *, is_whole: bool = False
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
        context.metrics.stream_opened()

    @property
    def pending(self) -> Pending | None:
        """What the request waits for: the shell gets it and calls ``resume``."""
        request = self._conversation.request if self._conversation is not None else None
        return request.pending if request is not None else None

    def longer_wait(self) -> bytes | None:
        """What to tell the gateway before a request is held: to wait longer than for others. None: it cannot be told.

        Without such requests it waits for us as long as a message may take, so that it learns soon if we hang.
        """
        pending = self.pending
        if not isinstance(pending, Held) or not isinstance(self._conversation, Buffered) or not self._is_trusted():
            return None
        return longer_wait_answer(pending.longest_s + self._context.core.snapshot.gateway.message_timeout)

    def receive(self, message: ProcessingRequest) -> list[bytes]:
        """Serialized answers to ``message``; raises IllegalEvent."""
        conversation = self._conversation
        if conversation is None:
            if self._comes_in_pieces(message):
                conversation = self._new_duplex(self._context, self._is_trusted)
            elif self._context.options.pool is not None and message.protocol_config.response_body_mode:
                # whole both ways
                conversation = self._new_duplex(self._context, self._is_trusted, is_whole=True)
            else:
                conversation = Buffered(self._context, self._is_trusted, self._origin)
            self._conversation = conversation
        try:
            return conversation.receive(message, message.WhichOneof("request") or "nothing")
        except Refusal as refusal:
            self._context.metrics.refused(refusal)
            return [refusal_answer(refusal, error_form(conversation.head))]

    def _comes_in_pieces(self, first: ProcessingRequest) -> bool:
        if first.HasField("protocol_config"):
            return first.protocol_config.request_body_mode == FULL_DUPLEX
        # older Envoys and gateways that are none do not say; those with a pool keep to the endpoint picker protocol
        options = self._context.options
        return options.pool is not None and not options.whole_bodies

    def resume(self, answer: Answer | Decision | Refused) -> list[bytes]:
        """Go on with what was pending."""
        conversation = self._conversation
        request = conversation.request if conversation is not None else None
        if conversation is None or request is None:
            return []
        return answers_to(conversation, request.resume(answer))

    def fail(self) -> bytes:
        """The answer where our own code has failed: the request ends here and does not pass undecided."""
        refusal = InternalError()
        self._context.metrics.refused(refusal)
        head = None if self._conversation is None else self._conversation.head
        return refusal_answer(refusal, error_form(head))

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


# By the messages that have come, the kinds that may come next.
_AWAITS_HEADERS: Final = frozenset({"request_headers"})
_AWAITS_BODY: Final = frozenset({"request_body"})
_AWAITS_NOTHING: Final = frozenset[str]()
_ADVICE: Final = "set request_header_mode SEND, request_body_mode BUFFERED, all others SKIP or NONE"


class Buffered:
    """Headers, then the whole body."""

    def __init__(
        self, context: StreamContext, is_trusted: Callable[[], bool], origin: Callable[[], Origin] = Origin
    ) -> None:
        self._context = context
        self._is_trusted = is_trusted
        self._origin = origin
        self._admitted: tuple[Api, Head] | None = None
        # the ModelServer that an HTTPRoute has chosen, with the request's head
        self._chosen: tuple[str, Head] | None = None
        # of a gateway with a pool
        self._pooled: Head | None = None
        self._decides_headers = False
        self._attachment = self._attached(None)
        self._awaits = _AWAITS_HEADERS
        self.request: StreamRequest | None = None
        self.head: Head | None = None

    def receive(self, message: ProcessingRequest, kind: str) -> list[bytes]:
        """Headers or a body."""
        if kind not in self._awaits:
            raise IllegalEvent(kind, f"awaiting {' or '.join(self._awaits) or 'nothing more'}", "the stream", _ADVICE)
        if kind == "request_headers":
            self._awaits = _AWAITS_NOTHING
            return self._receive_headers(message)
        self._awaits = _AWAITS_NOTHING
        return self._receive_body(message.request_body)

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
            self._awaits = _AWAITS_BODY
            return [CONTINUE_HEADERS]
        pool = self._context.options.pool
        if pool is not None:
            self._pooled = head
            if not head.has_body:
                self._decides_headers = True
                return self._begin(self._context.core.intake.receive_unread(pool, head, b""))
            self._awaits = _AWAITS_BODY
            return [CONTINUE_HEADERS]
        models = self._context.list_models(head)
        if models is not None:
            return [models]
        self._admitted = self._context.core.intake.admit(head), head
        self._awaits = _AWAITS_BODY
        return [CONTINUE_HEADERS]

    def _receive_body(self, message: HttpBody) -> list[bytes]:
        # a body that trailers follow is whole, too, and does not say that it ends the stream
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
