# SPDX-License-Identifier: Apache-2.0
"""What every stream works with."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Protocol

import msgspec

from extproc.core.core import Core
from extproc.errors import MethodNotAllowed, UnknownModel
from extproc.metrics.registry import Metrics
from extproc.protocol import CONFORMANCE_HEADER, MODELS_PATH
from extproc.streams.headers import UNKNOWN, error_form, read_claims, read_head
from extproc.streams.responses import model_answer, models_answer

if TYPE_CHECKING:
    from extproc.core.effects import Effect, RequestEffect
    from extproc.core.record import Head
    from extproc.streams.headers import Origin
    from extproc.streams.messages import ProcessingRequest


class GatewayOptions(msgspec.Struct, frozen=True):
    """What differs between gateways, and cannot be seen in their messages.

    ``buffered_choices`` and ``duplex_choices``: how many endpoints an answer may name, by how bodies are sent. Several
    for gateways that go down a list (our bundle, Istio), one for those that read one address (ORIGINAL_DST). ``pool``:
    the ModelServer for all models that no ModelRoute knows. ``overrides_mode``: the gateway allows ``mode_override``,
    so answers need not pass through here. ``conformance``: tests may choose the endpoint by header. ``trusts_headers``:
    the gateway writes the headers that identify the caller, and removes its clients' own; our bundle does, and says so.
    ``whole_bodies``: a gateway whose messages do not say how it sends bodies sends them whole.
    """

    buffered_choices: int = 4
    duplex_choices: int = 1
    pool: str | None = None
    overrides_mode: bool = False
    conformance: bool = False
    trusts_headers: bool = False
    whole_bodies: bool = False


class Perform(Protocol):
    """Carries the core's effects out."""

    def __call__(self, effects: list[Effect], own: RequestEffect | None = None, /) -> None:
        """``own``: what the request of the calling stream gets or waits for."""
        ...


class StreamContext(msgspec.Struct, frozen=True):
    """``perform``: carries the core's effects out. ``started_s``: Unix time of our start, the age of listed models."""

    core: Core
    metrics: Metrics
    clock: Callable[[], float]
    perform: Perform
    started_s: int
    options: GatewayOptions = GatewayOptions()

    def read_head(self, message: ProcessingRequest, is_trusted: Callable[[], bool], origin: Origin = UNKNOWN) -> Head:
        """A request's headers; ``is_trusted`` takes a while, so it is asked only where anything depends on it."""
        trusts = self.options.trusts_headers or (self.core.asks_who and is_trusted())
        head = read_head(message.request_headers, is_trusted=trusts, origin=origin)
        if not head.is_trusted or not self.core.claims:
            return head
        return msgspec.structs.replace(head, claims=read_claims(message, self.core.claims))

    def allowed(self, head: Head, subset: Collection[str] | None) -> Collection[str] | None:
        """The addresses that a request may go to: those of the gateway's ``subset``, or of a conformance test's
        header.
        """
        chosen = head.headers.get(CONFORMANCE_HEADER) if self.options.conformance else None
        if chosen is None:
            return subset
        return [part.strip() for part in chosen.split(",") if part.strip()]

    def list_models(self, head: Head) -> bytes | None:
        """The list of models that the caller may use, or one of them, if the request asks for that; raises a
        Refusal.
        """
        if head.path != MODELS_PATH and not head.path.startswith(MODELS_PATH + "/"):
            return None
        if head.method != "GET":
            raise MethodNotAllowed(f"{head.path[:100]} takes GET, not {head.method[:20]}.")
        name = head.path.removeprefix(MODELS_PATH).removeprefix("/")
        model = self.core.intake.model_for(head, name) if name else None
        if name and model is None:
            raise UnknownModel(
                f"The model '{name[:100]}' does not exist; GET {MODELS_PATH} lists those that do.", param="model"
            )
        self.metrics.answered_models()
        form = error_form(head)
        if model is not None:
            return model_answer(model, self.started_s, form)
        return models_answer(self.core.intake.models_for(head), self.started_s, form)
