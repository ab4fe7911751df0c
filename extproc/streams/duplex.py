# SPDX-License-Identifier: Apache-2.0
"""The endpoint picker protocol (GIE proposal 004): bodies come and go in pieces.

GIE is the Gateway API Inference Extension. Request headers and body are collected. The end of the body brings the
decision, which answers the headers; then the body is sent on in pieces. Answers pass through piece by piece, and their
token counts are read. There is no access log here: the outcome is taken from the stream.

Gateways that buffer both ways (Envoy AI Gateway, where the pool's annotation asks for it) send the same messages with
whole bodies, and wait for the answer to each before they send the next.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from extproc.core.dispatch import plugin_faults
from extproc.core.request_record import GatewayProperties, Outcome
from extproc.core.shadow_picks import compare_picks, other_picker_choice
from extproc.streams.body_relay import ResponseBodyRelay
from extproc.streams.direct_responses import direct_response
from extproc.streams.exchange import decision_messages, missing_body_refusal
from extproc.streams.headers import (
    is_encoded,
    read_endpoint_subset,
    read_header,
    read_other_picker_endpoints,
    read_retry_after,
    read_served_endpoint,
    read_status,
)
from extproc.streams.message_order import BodyMode
from extproc.streams.processing_responses import (
    CONTINUE_FOREIGN_HEADERS,
    CONTINUE_REQUEST_TRAILERS,
    decision_answer,
    duplex_decision_answer,
    passing_answers,
    request_body_answers,
    response_headers_answer,
    scores_metadata,
)
from extproc.streams.request import StreamRequest
from extproc.streams.usage_reader import UsageReader, usage_reports_metadata
from extproc.wire_names import CONTENT_ENCODING, RETRY_AFTER

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from extproc.core.effects import Decision
    from extproc.core.request_record import RequestHead
    from extproc.scheduling.framework import UsageReporter
    from extproc.scheduling.picker import PluginFailed
    from extproc.streams.messages import ProcessingRequest
    from extproc.streams.stream_dependencies import StreamContext
    from extproc.streams.usage_reader import ReportedUsage

_GATEWAY_TIMEOUT: Final = 504


class DuplexExchange:
    """One request in pieces or whole, then its answer, however that comes."""

    def __init__(
        self,
        context: StreamContext,
        is_trusted: Callable[[], bool],
        *,
        request: BodyMode,
        answer: BodyMode,
        is_copy: bool = False,
    ) -> None:
        """``request`` and ``answer``: how their bodies come. ``is_copy``: another picker has decided the request."""
        self._is_copy = is_copy
        # by another picker, as metadata say it
        self._chosen = ""
        self._context = context
        self._is_whole = request is not BodyMode.FULL_DUPLEX_STREAMED
        self._answer_mode = answer
        self._is_trusted = is_trusted
        self.head: RequestHead | None = None
        self._subset: list[str] | None = None
        self._pieces: list[bytes] = []
        # of a request that waits for its decision; None: it had none, or it has gone on
        self._body: bytes | None = None
        self._has_trailers = False
        self._began_s = 0.0
        self._answer = _ObservedAnswer()
        self._is_settled = False
        # their metadata goes to the gateway when the answer ends
        self._reporters: Sequence[UsageReporter] = ()
        self._server = ""
        self.request: StreamRequest | None = None
        self.relay: ResponseBodyRelay | None = None

    def receive(self, message: ProcessingRequest, kind: str) -> list[bytes]:
        """Headers, a body or trailers."""
        if message.HasField("metadata_context"):
            self._read_metadata(message)
        if kind == "request_headers":
            return self._receive_headers(message)
        if kind == "request_trailers":
            return self._receive_trailers()
        self._pieces.append(message.request_body.body)
        # a whole body before trailers is not marked as the end of the stream
        return self._decide() if self._is_whole or message.request_body.end_of_stream else []

    def receive_answer(self, message: ProcessingRequest, kind: str) -> list[bytes]:
        """The answer passes, with headers for the client and metadata for the gateway."""
        if message.HasField("metadata_context"):
            self._read_metadata(message)
        if kind == "response_headers":
            headers = message.response_headers
            encoding, retry_after = (read_header(headers, name) for name in (CONTENT_ENCODING, RETRY_AFTER))
            self._answer.began(read_status(headers), encoding, retry_after)
            return self._ended([response_headers_answer(self._tokens())], is_end=headers.end_of_stream)
        passed = passing_answers(message, kind, self._answer_mode)
        if kind == "response_trailers":
            return self._ended(passed, is_end=True)
        body = message.response_body
        self._answer.came(body.body, self._context.clock())
        if body.end_of_stream:
            self.relay = None
        elif self.relay is None and self._answer.has_begun and self._answer_mode is BodyMode.FULL_DUPLEX_STREAMED:
            self.relay = ResponseBodyRelay(self._answer.take)
        return self._ended(passed, is_end=body.end_of_stream)

    def decision_answers(self, decision: Decision) -> list[bytes]:
        """The answer to the headers, and the body in pieces behind it."""
        # outcomes count from the arrival, as an access log does
        self._began_s = self._context.clock() - decision.history.held_s
        if self._is_whole:
            has_body, self._body = self._body is not None, None
            answer = decision_answer(decision, on_headers=not has_body, removes_forged=True)
            return [answer + scores_metadata(decision) if self._context.options.emits_scores else answer]
        answers = [duplex_decision_answer(decision, scores=self._context.options.emits_scores)]
        if self._body is not None:
            body = decision.body if decision.body is not None else self._body
            answers.extend(request_body_answers(body, is_end=not self._has_trailers))
        if self._has_trailers:
            answers.append(CONTINUE_REQUEST_TRAILERS)
        self._body = None
        return answers

    def on_stream_closed(self) -> None:
        """The end of the stream is the end of the request; an answer that was cut off is one all the same."""
        if self.request is not None:
            try:
                self._settle()
            finally:
                self.request.on_stream_closed()

    def _read_metadata(self, message: ProcessingRequest) -> None:
        subset = read_endpoint_subset(message)
        if subset is not None:
            self._subset = subset
        served = read_served_endpoint(message)
        if served:
            self._answer.served = served
        if self._is_copy:
            self._chosen = read_other_picker_endpoints(message) or self._chosen

    def _tokens(self) -> dict[str, str]:
        """Headers that bind the client's session to its endpoint."""
        sent = None if self.request is None else self.request.sent
        if sent is None or not sent.sessions:
            return {}
        # an address that is not in our list was chosen by the gateway alone
        served = self._answer.served if self._answer.served in sent.addresses else ""
        first = sent.endpoint.address
        return {note.header: note.token(first=first, served=served) for note in sent.sessions if note.header}

    def _receive_headers(self, message: ProcessingRequest) -> list[bytes]:
        head = self.head = self._context.read_head(message, self._is_trusted)
        if not head.has_body:
            return self._decide_without_body(head)
        return [CONTINUE_FOREIGN_HEADERS] if self._is_whole else []

    def _receive_trailers(self) -> list[bytes]:
        if not self._is_whole:
            self._has_trailers = True
            return self._decide()
        if self.request is None:
            raise missing_body_refusal()
        return [CONTINUE_REQUEST_TRAILERS] if self.request.sent is not None else []

    def _decide_without_body(self, head: RequestHead) -> list[bytes]:
        answer = direct_response(self._context, head) if self._context.options.pool is None else None
        return self._enter(head, b"") if answer is None else [answer]

    def _decide(self) -> list[bytes]:
        if self.head is None:
            return []
        body = b"".join(self._pieces)
        # Envoy takes no body in the answer to a request that has none, not even an empty one
        self._body = body if self._pieces else None
        self._pieces.clear()
        return self._enter(self.head, body)

    def _enter(self, head: RequestHead, body: bytes) -> list[bytes]:
        options = self._context.options
        arrival = self._context.core.builder.arrival_builder(pool=options.pool)(head, body)
        subset = self._context.allowed_addresses(head, self._subset)
        choices = options.buffered_choices if self._is_whole else options.duplex_choices
        attachment = GatewayProperties(choices, subset, is_bundle=False)
        if self._is_copy:
            core, theirs = self._context.core, other_picker_choice(head, self._chosen)
            found, went_to = compare_picks(core, arrival, attachment, theirs, self._context.clock())
            self._context.metrics.count_shadow_pick(found)
            if not went_to:
                return []
            attachment = GatewayProperties(choices, went_to, is_bundle=False)
        self.request = StreamRequest(self._context)
        self._reporters, self._server = arrival.pool.reporters, arrival.pool.name
        return decision_messages(self, self.request.submit(arrival, attachment, self._context.clock()))

    def _ended(self, answers: list[bytes], *, is_end: bool) -> list[bytes]:
        if is_end and self.request is not None and self.request.sent is not None:
            self._answer.is_whole = True
            if self._reporters:
                answers[-1] += usage_reports_metadata(self._reporters, self._answer.usage(), self._plugin_failed)
            self.on_stream_closed()
        return answers

    def _plugin_failed(self, failed: PluginFailed) -> None:
        self._context.perform(plugin_faults(self._server, [failed]))

    def _settle(self) -> None:
        request = self.request
        if self._is_settled or request is None or request.sent is None:
            return
        if self.head is not None and not self.head.path:
            # a gateway that leaves out the path copies headers and sends no answer: there is no outcome
            return
        self._is_settled = True
        now, first = self._context.clock(), request.sent.endpoint.address
        outcome = self._answer.outcome(request.ticket, first, began_s=self._began_s, now=now)
        self._context.perform(self._context.core.on_outcome(outcome, now))


class _ObservedAnswer:
    """Observes an answer as it passes."""

    def __init__(self) -> None:
        self.served = ""
        self._status = 0
        self._is_encoded = False
        self._retry_after_s: float | None = None
        self._first_at_s: float | None = None
        self._usage = UsageReader()
        # any piece but the first
        self.take = self._usage.feed
        # as the gateway reports; otherwise either the engine or the client may have left
        self.is_whole = False

    def began(self, status: int, encoding: str, retry_after: str) -> None:
        self._status, self._is_encoded = status, is_encoded(encoding)
        self._retry_after_s = read_retry_after(retry_after)

    def came(self, piece: bytes, now: float) -> None:
        if self._first_at_s is None and piece:
            self._first_at_s = now
        self.take(piece)

    @property
    def has_begun(self) -> bool:
        """Whether a piece has come that is not empty."""
        return self._first_at_s is not None

    def usage(self) -> ReportedUsage:
        """The usage that it has reported so far."""
        return self._usage.finish()

    def outcome(self, ticket: str, first: str, *, began_s: float, now: float) -> Outcome:
        """Where the gateway does not report who served: assume that the single address in the answer did."""
        usage = self.usage()
        ttfb_s = None if self._first_at_s is None else self._first_at_s - began_s
        return Outcome(
            ticket=ticket,
            status=self._status,
            served=self.served or (first if self._status else ""),
            duration_s=now - began_s,
            ttfb_s=ttfb_s,
            # events are not read as they pass
            first_content_s=ttfb_s,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
            has_left=not self.is_whole,
            # this status comes from the gateway at a time limit of its own, not from engines
            has_timed_out=self._status == _GATEWAY_TIMEOUT,
            is_encoded=self._is_encoded,
            retry_after_s=self._retry_after_s,
        )
