"""The endpoint picker protocol (Gateway API Inference Extension, proposal 004): bodies come and go in pieces.

Request headers and body are collected; the end of the body brings the decision, which answers the headers, and then the body
goes on in pieces. Answers pass through piece by piece, and what they say of tokens is read on the way. There is no access
log here: the outcome is what was seen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from extproc.core.feedback import Outcome
from extproc.core.types import Attachment
from extproc.errors import BadRequest
from extproc.protocol import CONFORMANCE_HEADER
from extproc.request.openai import INFERENCE_PATHS
from extproc.streams.entry import Entry
from extproc.streams.exchange import Desk, UnexpectedMessage
from extproc.streams.http_headers import read_served, read_status, read_subset
from extproc.streams.responses import (
    CONTINUE_REQUEST_TRAILERS,
    CONTINUE_RESPONSE_HEADERS,
    CONTINUE_RESPONSE_TRAILERS,
    duplex_decision_answer,
    request_body_answers,
    response_body_answers,
)
from extproc.streams.usage import UsageReader

if TYPE_CHECKING:
    from collections.abc import Callable

    from extproc.core.types import Arrival, Decision, Head
    from extproc.streams.messages import HttpBody, ProcessingRequest


class Duplex:
    """One request in pieces: first it comes, then its answer goes."""

    def __init__(self, desk: Desk, is_trusted: Callable[[], bool]) -> None:
        self._desk = desk
        self._is_trusted = is_trusted
        self._head: Head | None = None
        self._subset: list[str] | None = None
        self._pieces: list[bytes] = []
        self._has_trailers = False
        self._arrival: Arrival | None = None
        self._decision: Decision | None = None
        self._began = 0.0
        self._answer = _Answer()
        self._is_settled = False
        self.entry: Entry | None = None

    def receive(self, message: ProcessingRequest, kind: str | None) -> list[bytes]:
        """Any of the six kinds of messages."""
        if message.HasField("metadata_context"):
            self._read_metadata(message)
        match kind:
            case "request_headers":
                self._head = self._desk.read_head(message.request_headers, self._is_trusted)
                return [] if self._head.has_body else self._decide_without_body(self._head)
            case "request_body":
                return self._receive_body(message.request_body)
            case "request_trailers":
                self._has_trailers = True
                return self._decide()
            case "response_headers":
                headers = message.response_headers
                self._answer.began(read_status(headers))
                return self._ended([CONTINUE_RESPONSE_HEADERS], is_end=headers.end_of_stream)
            case "response_body":
                body = message.response_body
                self._answer.came(body.body, self._desk.clock())
                answers = list(response_body_answers(body.body, is_end=body.end_of_stream))
                return self._ended(answers, is_end=body.end_of_stream)
            case "response_trailers":
                return self._ended([CONTINUE_RESPONSE_TRAILERS], is_end=True)
        msg = f"got {kind}; set both body modes FULL_DUPLEX_STREAMED, header and trailer modes SEND"
        raise UnexpectedMessage(msg)

    def close(self) -> None:
        """The end of the stream is the end of the request; an answer that was cut off is one all the same."""
        if self._decision is None:
            return
        self._settle()
        self._desk.finish(self._decision.ticket)

    def _read_metadata(self, message: ProcessingRequest) -> None:
        subset = read_subset(message)
        if subset is not None:
            self._subset = subset
        served = read_served(message)
        if served:
            self._answer.served = served

    def _receive_body(self, body: HttpBody) -> list[bytes]:
        if self._head is None or self._decision is not None:
            msg = "got a body without its headers, or after its end; set request_header_mode SEND"
            raise UnexpectedMessage(msg)
        self._pieces.append(body.body)
        return self._decide() if body.end_of_stream else []

    def _decide_without_body(self, head: Head) -> list[bytes]:
        pool = self._desk.options.pool
        if pool is not None:
            return self._enter(self._desk.pipeline.intake.receive_unread(pool, head, b""))
        models = self._desk.models(head)
        if models is not None:
            return [models]
        self._desk.pipeline.intake.admit(head)
        return []

    def _decide(self) -> list[bytes]:
        if self._head is None:
            msg = "got trailers without headers; set request_header_mode SEND"
            raise UnexpectedMessage(msg)
        body = b"".join(self._pieces)
        return self._enter(self._receive(self._head, body))

    def _receive(self, head: Head, body: bytes) -> Arrival:
        """By our routes; what they do not know goes to the pool that the gateway asks for, if it has one."""
        pipeline, pool = self._desk.pipeline, self._desk.options.pool
        if pool is None:
            return pipeline.intake.receive(pipeline.intake.admit(head), head, body)
        api = INFERENCE_PATHS.get(head.path)
        if api is None:
            return pipeline.intake.receive_unread(pool, head, body)
        try:
            return pipeline.intake.receive_for(pool, api, head, body)
        except BadRequest:
            # engines know more APIs and fields than we do, and say best what is wrong
            return pipeline.intake.receive_unread(pool, head, body)

    def _enter(self, arrival: Arrival) -> list[bytes]:
        self._arrival = arrival
        attachment = Attachment(self._desk.options.duplex_choices, self._allowed(arrival.head))
        self.entry = Entry(self._desk, arrival, attachment, self._desk.clock())
        decision = self.entry.begin()
        return [] if decision is None else self.decided(decision)

    def decided(self, decision: Decision) -> list[bytes]:
        """The answer to the headers, and the body in pieces behind it."""
        arrival = self._arrival
        if arrival is None:
            return []
        # outcomes count from the arrival, as an access log does
        self._began = self._desk.clock() - decision.waited_s
        self._decision = decision
        answers = [duplex_decision_answer(decision, overrides_mode=self._desk.options.overrides_mode)]
        if arrival.head.has_body:
            body = decision.body if decision.body is not None else arrival.body
            answers.extend(request_body_answers(body, is_end=not self._has_trailers))
        if self._has_trailers:
            answers.append(CONTINUE_REQUEST_TRAILERS)
        self._pieces.clear()
        return answers

    def _allowed(self, head: Head) -> list[str] | None:
        chosen = head.headers.get(CONFORMANCE_HEADER) if self._desk.options.conformance else None
        if chosen is None:
            return self._subset
        return [part.strip() for part in chosen.split(",") if part.strip()]

    def _ended(self, answers: list[bytes], *, is_end: bool) -> list[bytes]:
        if is_end and self._decision is not None:
            self._settle()
            self._desk.finish(self._decision.ticket)
        return answers

    def _settle(self) -> None:
        if self._is_settled or self._decision is None:
            return
        self._is_settled = True
        now = self._desk.clock()
        first = self._decision.assignment.endpoint.address
        outcome = self._answer.outcome(self._decision.ticket, first, begun=self._began, now=now)
        settled = self._desk.pipeline.settle(outcome, now)
        if settled is not None:
            self._desk.metrics.settled_here(settled)
        if self._desk.peers is not None:
            self._desk.peers.learned(outcome)


class _Answer:
    """What is seen of an answer on its way."""

    def __init__(self) -> None:
        self.served = ""
        self._status = 0
        self._first_at: float | None = None
        self._usage = UsageReader()

    def began(self, status: int) -> None:
        self._status = status

    def came(self, piece: bytes, now: float) -> None:
        if self._first_at is None and piece:
            self._first_at = now
        self._usage.feed(piece)

    def outcome(self, ticket: str, first: str, *, begun: float, now: float) -> Outcome:
        """A gateway that does not say who served was given one address, which then did if anybody."""
        usage = self._usage.finish()
        return Outcome(
            ticket=ticket,
            status=self._status,
            served=self.served or (first if self._status else ""),
            duration_s=now - begun,
            ttfb_s=None if self._first_at is None else self._first_at - begun,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
        )
