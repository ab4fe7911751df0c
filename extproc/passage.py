"""What a request is on its way: headers, an arrival, one that is held, a decision, an outcome with its decision."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

import msgspec

from extproc.admission.identity import NOBODY, Caller
from extproc.admission.limits import Grant
from extproc.admission.waiting import Wanted
from extproc.errors import Refusal
from extproc.explain import Explanation
from extproc.learning import Outcome
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
    caller: Caller = NOBODY

    @property
    def wants_tokens(self) -> bool:
        """Whether there is a precise index to ask: picking is more precise with the prompt's tokens."""
        knowledge = self.pool.knowledge
        return knowledge.kv is not None and bool(knowledge.whole_feeds | knowledge.partial_feeds)

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
    wanted: Wanted

    @property
    def ticket(self) -> str:
        """By which ``release`` will name it."""
        return self.wanted.ticket


class Decision(msgspec.Struct, frozen=True):
    """Where a request goes and why. ``body``: what to send instead of the client's, if anything had to change.

    ``wanted``: how it stood in the queue, if its server has one.
    """

    ticket: str
    server: str
    assignment: Assignment
    body: bytes | None
    explanation: Explanation | None = None
    wanted: Wanted | None = None
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
    wanted: Wanted | None = None
    service: float = 0.0
