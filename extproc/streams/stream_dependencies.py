# SPDX-License-Identifier: Apache-2.0
"""The objects that every stream uses."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Protocol

import msgspec

from extproc.core.core import Core
from extproc.core.trace import Trace, TraceParent, parse_trace_parent
from extproc.metrics.request_metrics import Metrics
from extproc.streams.headers import UNKNOWN, read_claims, read_head
from extproc.wire_names import CONFORMANCE_HEADER

if TYPE_CHECKING:
    from extproc.core.effects import Effect, RequestEffect
    from extproc.core.payload_log import PayloadCapture
    from extproc.core.request_record import Arrival, RequestHead
    from extproc.streams.headers import StreamOrigin
    from extproc.streams.messages import ProcessingRequest


class GatewayOptions(msgspec.Struct, frozen=True):
    """Properties of gateways that their messages do not reveal.

    ``buffered_choices`` and ``duplex_choices``: how many endpoints an answer may name, by how bodies are sent. Several
    for gateways that go down a list (our bundle, Istio), one for those that read one address (ORIGINAL_DST). ``pool``:
    the ModelServer for all models that no ModelRoute serves. ``conformance``: tests may choose the endpoint by header.
    ``trusts_headers``: the gateway writes the headers that identify the caller, and removes its clients' own; our
    bundle does, and sets metadata to that effect. ``whole_bodies``: a gateway whose messages do not indicate how it
    sends bodies sends them whole. ``shadows``: copies of requests that another picker has decided are compared with
    what ours would choose. ``emits_scores``: answers have the scores of all endpoints in their metadata, as llm-d's
    can.
    """

    buffered_choices: int = 4
    duplex_choices: int = 1
    pool: str | None = None
    conformance: bool = False
    trusts_headers: bool = False
    whole_bodies: bool = False
    shadows: bool = False
    emits_scores: bool = False


class PerformEffects(Protocol):
    """Performs the core's effects."""

    def __call__(self, effects: list[Effect], own: RequestEffect | None = None, /) -> None:
        """``own``: what the request of the calling stream gets or waits for."""
        ...


class TraceSink(Protocol):
    """Takes the traces of decided requests. Never waits."""

    @property
    def is_enabled(self) -> bool:
        """Whether anybody wants them."""
        ...

    def add(self, trace: Trace, /) -> None:
        """One whose request is decided."""
        ...


class PayloadRecorder(Protocol):
    """Keeps requests and answers that routes log. Never waits."""

    def start_capture(self, arrival: Arrival, ticket: str, /) -> PayloadCapture | None:
        """That of a request; None: it is not logged."""
        ...

    def add(self, capture: PayloadCapture, /) -> None:
        """Its request has ended."""
        ...


class StreamContext(msgspec.Struct, frozen=True):
    """``perform``: performs the core's effects. ``started_s``: Unix time of our start, the age of listed models.
    ``traces``: gets those of sampled requests. ``payloads``: keeps what routes log. ``trace_parent``: the
    gateway's span of one stream, if it is sampled.
    """

    core: Core
    metrics: Metrics
    clock: Callable[[], float]
    perform: PerformEffects
    started_s: int
    options: GatewayOptions = GatewayOptions()
    traces: TraceSink | None = None
    payloads: PayloadRecorder | None = None
    trace_parent: TraceParent | None = None

    def of_stream(self, metadata: Iterable[tuple[str, str]]) -> StreamContext:
        """That of a stream with this metadata: itself, if the stream is not sampled."""
        if self.traces is None or not self.traces.is_enabled or (parent := parse_trace_parent(metadata)) is None:
            return self
        return msgspec.structs.replace(self, trace_parent=parent)

    def start_capture(self, arrival: Arrival, ticket: str) -> PayloadCapture | None:
        """What is kept of a request, if its route logs it."""
        if not self.core.payload_logs or self.payloads is None:
            return None
        return self.payloads.start_capture(arrival, ticket)

    def trace_refusal(self, error: str, began_s: float) -> None:
        """The request of a sampled stream is refused before it came to the core."""
        if self.traces is not None and self.trace_parent is not None:
            trace = Trace(self.trace_parent, began_s)
            trace.on_refusal(error, self.clock())
            self.traces.add(trace)

    def read_head(
        self, message: ProcessingRequest, is_trusted: Callable[[], bool], origin: StreamOrigin = UNKNOWN
    ) -> RequestHead:
        """A request's headers; ``is_trusted`` takes a while, so it is called only where anything depends on it."""
        trusts = self.options.trusts_headers or (self.core.asks_who and is_trusted())
        head = read_head(message.request_headers, is_trusted=trusts, origin=origin)
        if not head.is_trusted or not self.core.claims:
            return head
        return msgspec.structs.replace(head, claims=read_claims(message, self.core.claims))

    def allowed_addresses(self, head: RequestHead, subset: Collection[str] | None) -> Collection[str] | None:
        """The addresses that a request may go to: those of the gateway's ``subset``, or of a conformance test's
        header.
        """
        chosen = head.headers.get(CONFORMANCE_HEADER) if self.options.conformance else None
        if chosen is None:
            return subset
        return [part.strip() for part in chosen.split(",") if part.strip()]
