"""One request's conversation with a gateway, message by message: no I/O, so that it can be tested in memory.

The gateway says in its first message how it sends bodies. Whole (BUFFERED), as our bundle and some gateways do: headers are
answered at once, the body with the decision, and after that nothing more comes. In pieces (FULL_DUPLEX_STREAMED), as the
endpoint picker protocol of the Gateway API Inference Extension asks: see ``duplex.py``. One server serves both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import msgspec

from extproc.core.pipeline import Pipeline
from extproc.core.types import Attachment, Decision, Held
from extproc.errors import MethodNotAllowed, Refusal, UnknownModel
from extproc.metrics.registry import Metrics
from extproc.protocol import MODELS_PATH
from extproc.streams.entry import Answer, Entry, Pending
from extproc.streams.http_headers import read_head, read_subset
from extproc.streams.responses import (
    CONTINUE_HEADERS,
    FULL_DUPLEX,
    decision_answer,
    model_answer,
    models_answer,
    refusal_answer,
)

if TYPE_CHECKING:
    from extproc.core.feedback import Outcome
    from extproc.core.types import Arrival, Head, Released, Terms
    from extproc.request.model import Api
    from extproc.streams.messages import HttpBody, HttpHeaders, ProcessingRequest


class GatewayOptions(msgspec.Struct, frozen=True):
    """What differs between gateways, and cannot be seen in their messages.

    ``buffered_choices`` and ``duplex_choices``: how many endpoints an answer may name, by the way bodies come. Several for gateways
    that go down a list (our bundle; Istio), one for those that read an address (ORIGINAL_DST). ``pool``: the ModelServer to
    which all that no ModelRoute knows goes. ``overrides_mode``: the gateway allows ``mode_override``, so answers can be spared
    the way through here. ``conformance``: tests may choose the endpoint by header. ``trusts_headers``: the gateway itself writes
    the headers that say who asks, and removes what its clients put there; our bundle does, and says so.
    """

    buffered_choices: int = 4
    duplex_choices: int = 1
    pool: str | None = None
    overrides_mode: bool = False
    conformance: bool = False
    trusts_headers: bool = False


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
    """What every exchange works with. ``started_s``: Unix time of our start, the age of listed models.

    ``changed`` is called when something may let a held request go.
    """

    pipeline: Pipeline
    metrics: Metrics
    clock: Callable[[], float]
    started_s: int
    options: GatewayOptions = GatewayOptions()
    peers: Peers | None = None
    changed: Callable[[], None] = lambda: None

    def enter(self, arrival: Arrival, terms: Terms, *, began: float) -> Decision | Held:
        """A decision, of which everybody is told, or the request held; raises a Refusal."""
        found = self.pipeline.enter(arrival, began, terms)
        if isinstance(found, Held):
            self.changed()
        else:
            self.decided(found, self.clock() - began)
        return found

    def released(self, one: Released) -> None:
        """A wait has ended."""
        if isinstance(one.result, Decision):
            self.decided(one.result, None)
        self.metrics.admission.released(one)

    def decided(self, decision: Decision, seconds: float | None) -> None:
        """Tell everybody; ``seconds``: that it took, None if it had to wait."""
        self.metrics.decided(decision, seconds)
        if self.peers is not None:
            self.peers.sent(decision)

    def read_head(self, headers: HttpHeaders, is_trusted: Callable[[], bool]) -> Head:
        """A request's headers; whether they are to be trusted is asked where it matters, for it takes a while to see."""
        return read_head(headers, is_trusted=self.pipeline.asks_who and is_trusted())

    def leave(self, held: Held) -> None:
        """The client of a held request has gone."""
        self.pipeline.leave(held, self.clock())
        self.metrics.admission.left(held)
        if self.peers is not None:
            self.peers.ended(held.ticket)
        self.changed()

    def finish(self, ticket: str) -> None:
        """The end of a stream is the end of its request."""
        self.pipeline.finish(ticket, self.clock())
        if self.peers is not None:
            self.peers.ended(ticket)
        self.changed()

    def models(self, head: Head) -> bytes | None:
        """The list of models, or one of them, if that is what is asked for; raises a Refusal."""
        if head.path != MODELS_PATH and not head.path.startswith(MODELS_PATH + "/"):
            return None
        if head.method != "GET":
            raise MethodNotAllowed(f"{head.path[:100]} takes GET, not {head.method[:20]}.")
        models = self.pipeline.intake.models
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
    def entry(self) -> Entry | None:
        """The request on its way to a decision; while something is pending, ``resume`` goes on."""
        ...

    def receive(self, message: ProcessingRequest, kind: str | None) -> list[bytes]:
        """Serialized answers to ``message``; raises UnexpectedMessage or a Refusal."""
        ...

    def decided(self, decision: Decision) -> list[bytes]:
        """Answers to the message that asked for it."""
        ...

    def close(self) -> None:
        """The stream has ended, in whatever way."""
        ...


class Exchange:
    """One stream, in the way that its first message asks for. ``is_trusted``: a gateway vouches for its headers."""

    def __init__(
        self,
        desk: Desk,
        new_duplex: Callable[[Desk, Callable[[], bool]], Conversation],
        *,
        is_trusted: Callable[[], bool],
    ) -> None:
        self._desk = desk
        self._new_duplex = new_duplex
        self._is_trusted = is_trusted
        self._opened_at = desk.clock()
        self._conversation: Conversation | None = None
        desk.metrics.stream_opened()

    @property
    def pending(self) -> Pending | None:
        """What the request must wait for: the shell answers with ``resume``."""
        entry = self._conversation.entry if self._conversation is not None else None
        return entry.pending if entry is not None else None

    def receive(self, message: ProcessingRequest) -> list[bytes]:
        """Serialized answers to ``message``; raises UnexpectedMessage."""
        conversation = self._conversation
        if conversation is None:
            is_duplex = message.protocol_config.request_body_mode == FULL_DUPLEX
            new = self._new_duplex if is_duplex else Buffered
            conversation = self._conversation = new(self._desk, self._is_trusted)
        try:
            return conversation.receive(message, message.WhichOneof("request"))
        except Refusal as refusal:
            return self._refuse(refusal)

    def resume(self, answer: Answer) -> list[bytes]:
        """Go on with what was pending."""
        conversation = self._conversation
        entry = conversation.entry if conversation is not None else None
        if conversation is None or entry is None:
            return []
        try:
            decision = entry.resume(answer)
        except Refusal as refusal:
            return self._refuse(refusal)
        return [] if decision is None else conversation.decided(decision)

    def close(self) -> None:
        """The stream has ended, in whatever way."""
        if self._conversation is not None:
            if self._conversation.entry is not None:
                self._conversation.entry.close()
            self._conversation.close()
        self._desk.metrics.stream_closed(self._desk.clock() - self._opened_at)

    def _refuse(self, refusal: Refusal) -> list[bytes]:
        entry = self._conversation.entry if self._conversation is not None else None
        self._desk.metrics.refused(refusal, None if entry is None else entry.arrival)
        return [refusal_answer(refusal)]


class Buffered:
    """Headers, then the whole body."""

    def __init__(self, desk: Desk, is_trusted: Callable[[], bool]) -> None:
        self._desk = desk
        self._is_trusted = is_trusted
        self._admitted: tuple[Api, Head] | None = None
        self._attachment = Attachment(desk.options.buffered_choices)
        self._ticket: str | None = None
        self.entry: Entry | None = None

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
        head = self._desk.read_head(headers, self._is_trusted)
        models = self._desk.models(head)
        if models is not None:
            return [models]
        if message.HasField("metadata_context"):
            self._attachment = Attachment(self._desk.options.buffered_choices, read_subset(message))
        self._admitted = self._desk.pipeline.intake.admit(head), head
        return [CONTINUE_HEADERS]

    def _receive_body(self, message: HttpBody) -> list[bytes]:
        if self._admitted is None or not message.end_of_stream:
            msg = "got a body without its headers or in parts; set request_header_mode SEND, request_body_mode BUFFERED"
            raise UnexpectedMessage(msg)
        api, head = self._admitted
        desk, now = self._desk, self._desk.clock()
        pool = desk.options.pool
        if pool is None:
            arrival = desk.pipeline.intake.receive(api, head, message.body)
        else:
            arrival = desk.pipeline.intake.receive_for(pool, api, head, message.body)
        self.entry = Entry(desk, arrival, self._attachment, now)
        decision = self.entry.begin()
        return [] if decision is None else self.decided(decision)

    def decided(self, decision: Decision) -> list[bytes]:
        """The answer to the body."""
        self._ticket = decision.ticket
        return [decision_answer(decision)]
