# SPDX-License-Identifier: Apache-2.0
"""What a request is: its headers, the parsed and routed request, its outcome."""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Final

import msgspec

from extproc.admission.identity import ANONYMOUS_CALLER, Caller
from extproc.request.model import InferenceRequest
from extproc.routing.resolve import Destination
from extproc.scheduling.pool import Pool

_NO_CLAIMS: Final[Mapping[str, Collection[str]]] = MappingProxyType({})


class Head(msgspec.Struct, frozen=True):
    """A request's headers. Names are lower-case; ``path`` is without its query.

    ``is_trusted``: what the headers say about the caller was written by a gateway, not by the client. ``listener``: the
    name of the listener that was asked, ``http_route``: ``namespace/name`` of the HTTPRoute that took the request;
    empty where the gateway does not say. ``claims``: those of the caller's verified token that policies name, with
    their values.
    """

    method: str
    path: str
    headers: Mapping[str, str]
    has_body: bool
    is_trusted: bool = False
    listener: str = ""
    http_route: str = ""
    claims: Mapping[str, Collection[str]] = _NO_CLAIMS


class Attachment(msgspec.Struct, frozen=True):
    """How the asking gateway is attached.

    ``choices``: the number of endpoints that an answer may name. ``subset``: the addresses that this request may go to,
    None for all. ``passes_usage``: clients get a chunk with usage that they did not ask for; our own bundle keeps it.
    """

    choices: int = 4
    subset: Collection[str] | None = None
    passes_usage: bool = False


BUNDLE: Final = Attachment()


class Arrival(msgspec.Struct, frozen=True):
    """A request that has been parsed and routed.

    ``cache_salt``: what its engine gets; prompts share a cache under the same. ``is_routed``: its ModelServer was
    chosen here, by a ModelRoute; another one of the same rule may take it.
    """

    request: InferenceRequest
    destination: Destination
    pool: Pool
    head: Head
    body: bytes
    caller: Caller = ANONYMOUS_CALLER
    cache_salt: str | None = None
    is_routed: bool = False

    @property
    def wants_tokens(self) -> bool:
        """Whether its pick would be more precise with the prompt's tokens: there is a precise index to ask."""
        caches = self.pool.caches
        return (
            caches.kv_index is not None
            and bool(caches.whole_feeds | caches.partial_feeds)
            and bool(self.request.prompt)
        )

    @property
    def priority(self) -> int:
        """Of its objective, or else of the rule that routed it."""
        return self.destination.priority if self.caller.priority is None else self.caller.priority

    @property
    def adapter(self) -> str | None:
        """The LoRA adapter that was asked for, if it was one."""
        model = self.destination.model
        return model if model and model != self.pool.spec.model else None

    @property
    def tenant(self) -> str:
        """The name under which it is counted."""
        return self.caller.flow or self.caller.tenant


class LoadProblem(enum.Enum):
    """Why an engine did not load an adapter.

    BUSY: all of its slots are in use. BROKEN: it cannot use these weights, or finds none. UNREACHABLE: it, or its
    agent, did not answer in time, or has nothing to load adapters with.
    """

    BUSY = "busy"
    BROKEN = "broken"
    UNREACHABLE = "unreachable"


class LoadResult(msgspec.Struct, frozen=True):
    """What became of a load that the core asked for.

    ``problem``: None if the engine has the adapter now. ``message``: what it said, for the log. ``was_there``: it had
    it before. ``unloaded``: all that it has no more, the one that was to make room included.
    """

    server: str
    address: str
    adapter: str
    problem: LoadProblem | None = None
    message: str = ""
    was_there: bool = False
    unloaded: tuple[str, ...] = ()
    duration_s: float = 0.0


class Outcome(msgspec.Struct, frozen=True):
    """What became of a request, from one access log entry or from an answer that passed through here.

    What was not seen is None. ``status``: 0 if the client left before there was one. ``served``: the address of the
    engine that answered. ``has_left``: the client hung up. ``was_cut``: the engine did. ``has_timed_out``: a time limit
    of the gateway ended it. ``answer_bytes``: of the body that the client got. Durations count from the request's
    arrival, time in the queue included.
    """

    ticket: str
    status: int
    served: str
    duration_s: float
    ttfb_s: float | None
    prompt_tokens: int | None
    completion_tokens: int | None
    cached_tokens: int | None
    has_left: bool = False
    was_cut: bool = False
    answer_bytes: int | None = None
    has_timed_out: bool = False
