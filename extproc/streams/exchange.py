"""One request's conversation with Envoy, message by message: no I/O, so that it can be tested in memory.

Headers are answered at once (or refused), the whole body with the decision. After that Envoy sends nothing more; the end
of the stream is the end of the request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from extproc.errors import MethodNotAllowed, Refusal, UnknownModel
from extproc.pipeline import Head
from extproc.protocol import MODELS_PATH
from extproc.streams.answer import CONTINUE_HEADERS, decision_answer, model_answer, models_answer, refusal_answer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from extproc.observe import Metrics
    from extproc.pipeline import Pipeline
    from extproc.request.model import Api
    from extproc.streams.messages import HeaderValue, HttpBody, HttpHeaders, ProcessingRequest


class UnexpectedMessage(Exception):
    """Envoy's processing mode is not the one that the bundle sets."""


class Exchange:
    """State of one stream: the parsed headers, then the ticket."""

    def __init__(self, pipeline: Pipeline, metrics: Metrics, clock: Callable[[], float], *, started_s: int) -> None:
        self._pipeline = pipeline
        self._metrics = metrics
        self._clock = clock
        self._started_s = started_s
        self._opened_at = clock()
        self._admitted: tuple[Api, Head] | None = None
        self._ticket: str | None = None
        metrics.stream_opened()

    def receive(self, message: ProcessingRequest) -> bytes:
        """The serialized answer to ``message``; raises UnexpectedMessage."""
        kind = message.WhichOneof("request")
        try:
            if kind == "request_headers":
                return self._receive_headers(message.request_headers)
            if kind == "request_body":
                return self._receive_body(message.request_body)
        except Refusal as refusal:
            self._metrics.refused(refusal)
            return refusal_answer(refusal)
        msg = f"got {kind}; set request_header_mode SEND, request_body_mode BUFFERED, all others SKIP or NONE"
        raise UnexpectedMessage(msg)

    def close(self) -> None:
        """The stream has ended, in whatever way."""
        if self._ticket is not None:
            self._pipeline.finish(self._ticket)
        self._metrics.stream_closed(self._clock() - self._opened_at)

    def _receive_headers(self, message: HttpHeaders) -> bytes:
        head = _read_head(message)
        if head.path == MODELS_PATH or head.path.startswith(MODELS_PATH + "/"):
            return self._answer_models(head)
        self._admitted = self._pipeline.admit(head), head
        return CONTINUE_HEADERS

    def _receive_body(self, message: HttpBody) -> bytes:
        if self._admitted is None or not message.end_of_stream:
            msg = "got a body without its headers or in parts; set request_header_mode SEND, request_body_mode BUFFERED"
            raise UnexpectedMessage(msg)
        api, head = self._admitted
        now = self._clock()
        decision = self._pipeline.arrive(api, head, message.body, now)
        self._ticket = decision.ticket
        self._metrics.decided(decision, self._clock() - now)
        return decision_answer(decision)

    def _answer_models(self, head: Head) -> bytes:
        if head.method != "GET":
            raise MethodNotAllowed(f"{head.path[:100]} takes GET, not {head.method[:20]}.")
        models = self._pipeline.models
        name = head.path.removeprefix(MODELS_PATH).removeprefix("/")
        model = next((model for model in models if model.name == name), None)
        if name and model is None:
            raise UnknownModel(
                f"The model '{name[:100]}' does not exist; GET {MODELS_PATH} lists those that do.", param="model"
            )
        self._metrics.answered_models()
        return model_answer(model, self._started_s) if model else models_answer(models, self._started_s)


def _read_head(message: HttpHeaders) -> Head:
    method = path = ""
    for header in message.headers.headers:
        if header.key == ":path":
            path, _, _ = _value(header).partition("?")
        elif header.key == ":method":
            method = _value(header)
    return Head(method=method, path=path, headers=_Headers(message), has_body=not message.end_of_stream)


class _Headers(Mapping[str, str]):
    """Decoded when a route has a condition on one: most have none, and decoding all costs as much as parsing the body."""

    def __init__(self, message: HttpHeaders) -> None:
        self._message = message
        self._decoded: dict[str, str] | None = None

    def __getitem__(self, name: str) -> str:
        return self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def _all(self) -> dict[str, str]:
        if self._decoded is None:
            self._decoded = {header.key: _value(header) for header in self._message.headers.headers}
        return self._decoded


def _value(header: HeaderValue) -> str:
    # Header values are bytes to Envoy; those that conditions are written for are ASCII.
    return header.raw_value.decode("latin-1") if header.raw_value else header.value
