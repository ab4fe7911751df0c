"""What a request is on its way: headers, an arrival, one that is held, a decision, an outcome with its decision."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

import msgspec

from extproc.admission.identity import ANONYMOUS_CALLER, Caller
from extproc.admission.limits import Grant
from extproc.admission.queued_request import QueuedRequest
from extproc.core.explanation import Explanation
from extproc.core.feedback import Outcome
from extproc.errors import Refusal
from extproc.request.model import InferenceRequest
from extproc.routing.resolve import Destination
from extproc.scheduling.pool import Assignment, Pool


class Head(msgspec.Struct, frozen=True):
    """A request's headers. Names are lower-case; ``path`` is without its query.

    ``is_trusted``: what they say of the caller was written by a gateway, and not by the client.
    """

    method: str
    path: str
    headers: Mapping[str, str]
    has_body: bool
    is_trusted: bool = False


class Attachment(msgspec.Struct, frozen=True):
    """How the asking gateway is attached: how many endpoints its answers may name, and which of them this request may have."""

    choices: int = 4
    subset: Collection[str] | None = None


BUNDLE: Final = Attachment()


class Arrival(msgspec.Struct, frozen=True):
    """A request that has been parsed and routed."""

    request: InferenceRequest
    destination: Destination
    pool: Pool
    head: Head
    body: bytes
    caller: Caller = ANONYMOUS_CALLER

    @property
    def wants_tokens(self) -> bool:
        """Whether there is a precise index to ask: picking is more precise with the prompt's tokens."""
        caches = self.pool.caches
        return caches.kv_index is not None and bool(caches.whole_feeds | caches.partial_feeds)

    @property
    def priority(self) -> int:
        """By its objective, or else by the rule that routed it."""
        return self.destination.priority if self.caller.priority is None else self.caller.priority


class Terms(msgspec.Struct, frozen=True):
    """With what an arrival asks to go: its tokens if known, its gateway, what its limits have granted."""

    tokens: Sequence[int] | None = None
    attachment: Attachment = BUNDLE
    wants_reasons: bool = False
    grants: tuple[Grant, ...] = ()


class Held(msgspec.Struct, frozen=True):
    """A request that waits for an engine to have room."""

    arrival: Arrival
    terms: Terms
    queued: QueuedRequest

    @property
    def ticket(self) -> str:
        """By which ``release`` will name it."""
        return self.queued.ticket


class Decision(msgspec.Struct, frozen=True):
    """Where a request goes and why. ``body``: what to send instead of the client's, if anything had to change.

    ``wanted``: how it stood in the queue, if its server has one.
    """

    ticket: str
    server: str
    assignment: Assignment
    body: bytes | None
    explanation: Explanation | None = None
    queued: QueuedRequest | None = None
    waited_s: float = 0.0
    grants: tuple[Grant, ...] = ()


class Released(msgspec.Struct, frozen=True):
    """The end of a wait."""

    held: Held
    result: Decision | Refusal


class Settled(msgspec.Struct, frozen=True):
    """An outcome with the decision that led to it. ``service``: what it cost, in weighted tokens, if that is counted."""

    server: str
    assignment: Assignment
    outcome: Outcome
    is_ours: bool = True
    queued: QueuedRequest | None = None
    service: float = 0.0
