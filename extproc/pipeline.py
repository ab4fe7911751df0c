"""The way of a request, as plain function calls: it arrives, it is over, its outcome is known.

No clock, no event loop and no network in here: the same pipeline runs under Envoy, in tests and in virtual time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from extproc.endpoints.ledger import release
from extproc.errors import BadRequest, MethodNotAllowed, NoEndpoint, UnknownPath
from extproc.explain import Explanation, explain
from extproc.learning import Outcome, Sent, learn
from extproc.prefix.turns import tail_of
from extproc.protocol import MODELS_PATH
from extproc.request.model import Api, InferenceRequest
from extproc.request.openai import INFERENCE_PATHS, parse, with_changes
from extproc.routing.resolve import Destination, RoutingTable
from extproc.scheduling.knowledge import Prompt
from extproc.scheduling.pickers import make_picker
from extproc.scheduling.pool import Assignment, Pool, Terms

if TYPE_CHECKING:
    import random

    from extproc.config.types import Snapshot
    from extproc.routing.resolve import ListedModel
    from extproc.scheduling.pickers import MakePicker
    from extproc.scheduling.sending import Sending

# Access log entries that never come must not pile up: beyond this many, the oldest are given up.
_MAX_UNSETTLED: Final = 65_536


class Head(msgspec.Struct, frozen=True):
    """A request's headers. Names are lower-case; ``path`` is without its query."""

    method: str
    path: str
    headers: Mapping[str, str]
    has_body: bool


class Attachment(msgspec.Struct, frozen=True):
    """How the asking gateway is attached: how many endpoints its answers may name, and which of them this request may have."""

    choices: int = 4
    subset: Collection[str] | None = None


BUNDLE: Final = Attachment()


class Arrival(msgspec.Struct, frozen=True):
    """A request that has been parsed and routed. ``wants_tokens``: picking is more precise with the prompt's tokens."""

    request: InferenceRequest
    destination: Destination
    pool: Pool
    head: Head
    body: bytes

    @property
    def wants_tokens(self) -> bool:
        """Whether there is a precise index to ask."""
        knowledge = self.pool.knowledge
        return knowledge.kv is not None and bool(knowledge.whole_feeds | knowledge.partial_feeds)


class Decision(msgspec.Struct, frozen=True):
    """Where a request goes and why. ``body``: what to send instead of the client's, if anything had to change."""

    ticket: str
    server: str
    assignment: Assignment
    body: bytes | None
    explanation: Explanation | None = None


class Settled(msgspec.Struct, frozen=True):
    """An outcome with the decision that led to it."""

    server: str
    assignment: Assignment
    outcome: Outcome
    is_ours: bool = True


class Pipeline:
    """Decides with what it knows; every verb takes the time in seconds and returns what is to be done."""

    def __init__(
        self,
        snapshot: Snapshot,
        *,
        rng: random.Random,
        ticket_prefix: str,
        make_picker: MakePicker = make_picker,
    ) -> None:
        self._make_picker = make_picker
        self.pools: dict[str, Pool] = {}
        self._rng = rng
        self._ticket_prefix = ticket_prefix
        self._tickets = 0
        self._sent: dict[str, Sent] = {}
        self._unsettled: OrderedDict[str, Sent] = OrderedDict()
        self._snapshot = snapshot
        self._routing = RoutingTable(snapshot)
        self.apply(snapshot)

    @property
    def models(self) -> list[ListedModel]:
        """The names that clients can ask for."""
        return self._routing.models

    @property
    def snapshot(self) -> Snapshot:
        """The configuration in use."""
        return self._snapshot

    def apply(self, snapshot: Snapshot) -> None:
        """Switch to another configuration at once; what is known of servers that stay is kept.

        Raises ConfigInvalid, with nothing changed, if a picker's file is wrong.
        """
        files = snapshot.picker_files
        pickers = {one.metadata.name: self._make_picker(one.spec, files) for one in snapshot.servers}
        self._routing = RoutingTable(snapshot)
        pools: dict[str, Pool] = {}
        for server in snapshot.servers:
            name = server.metadata.name
            known = self.pools.get(name)
            if known is not None:
                known.update(server.spec, pickers[name])
            pools[name] = known or Pool(name, server.spec, pickers[name])
            pools[name].adapters = self._routing.adapters_of(name)
        self.pools = pools
        self._snapshot = snapshot

    def admit(self, head: Head) -> Api:
        """Refuse what can be refused before the body is here."""
        api = INFERENCE_PATHS.get(head.path)
        if api is None:
            known = ", ".join(INFERENCE_PATHS)
            raise UnknownPath(
                f"Nothing is served under {head.method} {head.path[:100]}; there are {known}, {MODELS_PATH}."
            )
        if head.method != "POST":
            raise MethodNotAllowed(f"{head.path} takes POST, not {head.method[:20]}.")
        if not head.has_body:
            raise BadRequest("The request has no body; send a JSON object with at least 'model'.")
        return api

    def receive(self, api: Api, head: Head, body: bytes) -> Arrival:
        """Parse and route; raises a Refusal."""
        request = parse(api, body)
        destination = self._routing.resolve(request.model, head.headers, head.path, self._rng)
        return Arrival(request, destination, self.pools[destination.server], head, body)

    def receive_unread(self, server: str, head: Head, body: bytes) -> Arrival:
        """A request that is none of the APIs', for a gateway that has only one pool: nothing of it is known."""
        request = InferenceRequest(Api.UNKNOWN, "", b"", is_streamed=False, stream_options={}, max_output_tokens=None)
        return Arrival(request, Destination(server, ""), self._pool(server), head, body)

    def receive_for(self, server: str, api: Api, head: Head, body: bytes) -> Arrival:
        """Parse, and route to ``server`` unless a ModelRoute knows the model; raises a Refusal."""
        request = parse(api, body)
        if self._routing.knows(request.model):
            return self.receive(api, head, body)
        return Arrival(request, Destination(server, request.model), self._pool(server), head, body)

    def dispatch(
        self,
        arrival: Arrival,
        now: float,
        *,
        tokens: Sequence[int] | None = None,
        attachment: Attachment = BUNDLE,
        wants_reasons: bool = False,
    ) -> Decision:
        """Pick, and count the request as sent; raises a Refusal."""
        request, pool = arrival.request, arrival.pool
        terms = Terms(arrival.head.headers, attachment.choices, attachment.subset, wants_reasons)
        considered = pool.consider(_prompt(arrival, tokens), terms, now=now, rng=self._rng)
        explanation = explain(considered, pool) if wants_reasons else None
        assignment, chain = pool.commit(considered, now), considered.expectation.chain
        ticket = self._next_ticket()
        covered = pool.knowledge.index.covered_bytes(len(chain))
        self._sent[ticket] = Sent(
            pool=pool,
            assignment=assignment,
            chain=chain,
            tail=tail_of(request.prompt, covered),
            prompt_bytes=len(request.prompt),
            is_streamed=request.is_streamed,
            sent_at_s=now,
        )
        return Decision(ticket, arrival.destination.server, assignment, _changed_body(arrival), explanation)

    def arrive(self, api: Api, head: Head, body: bytes, now: float) -> Decision:
        """Receive and dispatch in one; raises a Refusal."""
        return self.dispatch(self.receive(api, head, body), now)

    def explain(
        self, arrival: Arrival, now: float, *, tokens: Sequence[int] | None = None, attachment: Attachment = BUNDLE
    ) -> Explanation:
        """What would be decided, with every reason, and nothing changed; raises a Refusal."""
        terms = Terms(arrival.head.headers, attachment.choices, attachment.subset, wants_reasons=True)
        pool = arrival.pool
        return explain(pool.consider(_prompt(arrival, tokens), terms, now=now, rng=self._rng), pool)

    def sent(self, ticket: str) -> Sent | None:
        """A request that runs."""
        return self._sent.get(ticket)

    def repeat(self, event: Sending, now: float) -> bool:
        """Count a request that another process has sent; whether it could be."""
        pool = self.pools.get(event.server)
        if pool is None or event.ticket in self._sent:
            return False
        assignment = pool.repeat(event, now)
        if assignment is None:
            return False
        self._sent[event.ticket] = Sent(
            pool=pool,
            assignment=assignment,
            chain=event.chain,
            tail=event.tail,
            prompt_bytes=event.prompt_bytes,
            is_streamed=event.is_streamed,
            sent_at_s=now,
            is_ours=False,
        )
        return True

    def finish(self, ticket: str) -> None:
        """The request's stream has ended: its endpoint is free of it."""
        sent = self._sent.pop(ticket, None)
        if sent is None:
            return
        release(sent.pool.table, sent.assignment.place)
        if sent.assignment.prefill is not None:
            release(sent.pool.table, sent.assignment.prefill)
        if not sent.is_settled:
            self._unsettled[ticket] = sent
            if len(self._unsettled) > _MAX_UNSETTLED:
                self._unsettled.popitem(last=False)

    def settle(self, outcome: Outcome, now: float) -> Settled | None:
        """Learn from what happened; None if the ticket is unknown (another process gave it, or it is settled)."""
        sent = self._sent.get(outcome.ticket) or self._unsettled.pop(outcome.ticket, None)
        if sent is None or sent.is_settled:
            return None
        sent.is_settled = True
        learn(sent, outcome, now)
        return Settled(sent.pool.name, sent.assignment, outcome, sent.is_ours)

    def _pool(self, server: str) -> Pool:
        pool = self.pools.get(server)
        if pool is None:
            raise NoEndpoint(
                f"The ModelServer '{server}' is not configured any more; add it, or start with another --pool."
            )
        return pool

    def _next_ticket(self) -> str:
        self._tickets += 1
        return f"{self._ticket_prefix}-{self._tickets:x}"


def _prompt(arrival: Arrival, tokens: Sequence[int] | None) -> Prompt:
    request, spec, model = arrival.request, arrival.pool.spec, arrival.destination.model
    header = spec.cache_scope_header
    return Prompt(
        text=request.prompt,
        model=model,
        adapter=model if model not in {spec.model, ""} else None,
        scope="" if header is None else arrival.head.headers.get(header.lower(), ""),
        salt=request.cache_salt,
        tokens=tokens,
    )


def _changed_body(arrival: Arrival) -> bytes | None:
    """The body under the engines' model name and with usage asked for; None if the client's own will do."""
    request = arrival.request
    changes: dict[str, object] = {}
    if arrival.destination.model != request.model:
        changes["model"] = arrival.destination.model
    if request.leaves_usage_out and arrival.pool.spec.stream_usage == "Always":
        changes["stream_options"] = {**request.stream_options, "include_usage": True}
    return with_changes(arrival.body, changes) if changes else None
