"""One request's conversation with a gateway, message by message: no I/O, so that it can be tested in memory.

The gateway says in its first message how it sends bodies. Whole (BUFFERED), as our bundle and some gateways do: headers are
answered at once, the body with the decision, and after that nothing more comes. In pieces (FULL_DUPLEX_STREAMED), as the
endpoint picker protocol of the Gateway API Inference Extension asks: see ``duplex.py``. One server serves both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import msgspec

from extproc.errors import MethodNotAllowed, Refusal, UnknownModel
from extproc.observe import Metrics
from extproc.pipeline import Attachment, Pipeline
from extproc.protocol import MODELS_PATH
from extproc.streams.answer import (
    CONTINUE_HEADERS,
    FULL_DUPLEX,
    decision_answer,
    model_answer,
    models_answer,
    refusal_answer,
)
from extproc.streams.head import read_head, read_subset

if TYPE_CHECKING:
    from collections.abc import Sequence

    from extproc.learning import Outcome
    from extproc.pipeline import Arrival, Decision, Head
    from extproc.request.model import Api
    from extproc.streams.messages import HttpBody, HttpHeaders, ProcessingRequest


class GatewayOptions(msgspec.Struct, frozen=True):
    """What differs between gateways, and cannot be seen in their messages.

    ``buffered_choices`` and ``duplex_choices``: how many endpoints an answer may name, by the way bodies come. Several for gateways
    that go down a list (our bundle; Istio), one for those that read an address (ORIGINAL_DST). ``pool``: the ModelServer to
    which all that no ModelRoute knows goes. ``overrides_mode``: the gateway allows ``mode_override``, so answers can be spared
    the way through here. ``conformance``: tests may choose the endpoint by header.
    """

    buffered_choices: int = 4
    duplex_choices: int = 1
    pool: str | None = None
    overrides_mode: bool = False
    conformance: bool = False


class Peers(Protocol):
    """The other processes, which count our requests as theirs."""

    def sent(self, decision: Decision) -> None:
        """A request was decided here."""
        ...

    def ended(self, ticket: str) -> None:
        """Its stream is over."""
        ...

    def learned(self, outcome: Outcome) -> None:
        """An outcome came here, whoever sent the request."""
        ...


class Desk(msgspec.Struct, frozen=True):
    """What every exchange works with. ``started_s``: Unix time of our start, the age of listed models."""

    pipeline: Pipeline
    metrics: Metrics
    clock: Callable[[], float]
    started_s: int
    options: GatewayOptions = GatewayOptions()
    peers: Peers | None = None

    def decide(
        self, arrival: Arrival, attachment: Attachment, *, began: float, tokens: Sequence[int] | None
    ) -> Decision:
        """A decision, of which everybody is told; raises a Refusal."""
        reasons = self.metrics.wants_reasons()
        decision = self.pipeline.dispatch(arrival, began, tokens=tokens, attachment=attachment, wants_reasons=reasons)
        self.metrics.decided(decision, self.clock() - began)
        if self.peers is not None:
            self.peers.sent(decision)
        return decision

    def finish(self, ticket: str) -> None:
        """The end of a stream is the end of its request."""
        self.pipeline.finish(ticket)
        if self.peers is not None:
            self.peers.ended(ticket)

    def models(self, head: Head) -> bytes | None:
        """The list of models, or one of them, if that is what is asked for; raises a Refusal."""
        if head.path != MODELS_PATH and not head.path.startswith(MODELS_PATH + "/"):
            return None
        if head.method != "GET":
            raise MethodNotAllowed(f"{head.path[:100]} takes GET, not {head.method[:20]}.")
        models = self.pipeline.models
        name = head.path.removeprefix(MODELS_PATH).removeprefix("/")
        model = next((model for model in models if model.name == name), None)
        if name and model is None:
            raise UnknownModel(
                f"The model '{name[:100]}' does not exist; GET {MODELS_PATH} lists those that do.", param="model"
            )
        self.metrics.answered_models()
        return model_answer(model, self.started_s) if model else models_answer(models, self.started_s)


class UnexpectedMessage(Exception):
    """The gateway's processing mode is none that can be served."""


class Conversation(Protocol):
    """One way of talking."""

    @property
    def question(self) -> Arrival | None:
        """A request that would be decided better with its tokens; ``resume`` decides it."""
        ...

    def receive(self, message: ProcessingRequest, kind: str | None) -> list[bytes]:
        """Serialized answers to ``message``; raises UnexpectedMessage or a Refusal."""
        ...

    def resume(self, tokens: Sequence[int] | None) -> list[bytes]:
        """Answers to the message that raised the question; raises a Refusal."""
        ...

    def close(self) -> None:
        """The stream has ended, in whatever way."""
        ...


class Exchange:
    """One stream, in the way that its first message asks for."""

    def __init__(self, desk: Desk, new_duplex: Callable[[Desk], Conversation]) -> None:
        self._desk = desk
        self._new_duplex = new_duplex
        self._opened_at = desk.clock()
        self._conversation: Conversation | None = None
        desk.metrics.stream_opened()

    @property
    def question(self) -> Arrival | None:
        """A request whose tokens are asked for: the shell answers with ``resume``."""
        return self._conversation.question if self._conversation is not None else None

    def receive(self, message: ProcessingRequest) -> list[bytes]:
        """Serialized answers to ``message``; raises UnexpectedMessage."""
        if self._conversation is None:
            is_duplex = message.protocol_config.request_body_mode == FULL_DUPLEX
            self._conversation = self._new_duplex(self._desk) if is_duplex else Buffered(self._desk)
        try:
            return self._conversation.receive(message, message.WhichOneof("request"))
        except Refusal as refusal:
            return self._refuse(refusal)

    def resume(self, tokens: Sequence[int] | None) -> list[bytes]:
        """Go on with the request in question; None: nobody knows its tokens."""
        if self._conversation is None:
            return []
        try:
            return self._conversation.resume(tokens)
        except Refusal as refusal:
            return self._refuse(refusal)

    def close(self) -> None:
        """The stream has ended, in whatever way."""
        if self._conversation is not None:
            self._conversation.close()
        self._desk.metrics.stream_closed(self._desk.clock() - self._opened_at)

    def _refuse(self, refusal: Refusal) -> list[bytes]:
        self._desk.metrics.refused(refusal)
        return [refusal_answer(refusal)]


class Buffered:
    """Headers, then the whole body."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._admitted: tuple[Api, Head] | None = None
        self._attachment = Attachment(desk.options.buffered_choices)
        self._ticket: str | None = None
        self.question: Arrival | None = None

    def receive(self, message: ProcessingRequest, kind: str | None) -> list[bytes]:
        """Headers or a body."""
        if kind == "request_headers":
            return self._receive_headers(message, message.request_headers)
        if kind == "request_body":
            return self._receive_body(message.request_body)
        msg = f"got {kind}; set request_header_mode SEND, request_body_mode BUFFERED, all others SKIP or NONE"
        raise UnexpectedMessage(msg)

    def close(self) -> None:
        """The end of the stream is the end of the request."""
        if self._ticket is not None:
            self._desk.finish(self._ticket)

    def _receive_headers(self, message: ProcessingRequest, headers: HttpHeaders) -> list[bytes]:
        head = read_head(headers)
        models = self._desk.models(head)
        if models is not None:
            return [models]
        if message.HasField("metadata_context"):
            self._attachment = Attachment(self._desk.options.buffered_choices, read_subset(message))
        self._admitted = self._desk.pipeline.admit(head), head
        return [CONTINUE_HEADERS]

    def _receive_body(self, message: HttpBody) -> list[bytes]:
        if self._admitted is None or not message.end_of_stream:
            msg = "got a body without its headers or in parts; set request_header_mode SEND, request_body_mode BUFFERED"
            raise UnexpectedMessage(msg)
        api, head = self._admitted
        desk, now = self._desk, self._desk.clock()
        pool = desk.options.pool
        if pool is None:
            arrival = desk.pipeline.receive(api, head, message.body)
        else:
            arrival = desk.pipeline.receive_for(pool, api, head, message.body)
        if arrival.wants_tokens:
            self.question = arrival
            return []
        return self._dispatch(arrival, now, None)

    def resume(self, tokens: Sequence[int] | None) -> list[bytes]:
        """Decide the request in question."""
        arrival, self.question = self.question, None
        return [] if arrival is None else self._dispatch(arrival, self._desk.clock(), tokens)

    def _dispatch(self, arrival: Arrival, now: float, tokens: Sequence[int] | None) -> list[bytes]:
        decision = self._desk.decide(arrival, self._attachment, began=now, tokens=tokens)
        self._ticket = decision.ticket
        return [decision_answer(decision)]
