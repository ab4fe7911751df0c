"""The way of a request, as plain function calls: it arrives, it is over, its outcome is known.

No clock, no event loop and no network in here: the same pipeline runs under Envoy, in tests and in virtual time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import msgspec

from extproc.endpoints.ledger import release
from extproc.errors import BadRequest, MethodNotAllowed, UnknownPath
from extproc.learning import Outcome, Sent, learn
from extproc.prefix.hashing import hash_blocks
from extproc.protocol import MODELS_PATH
from extproc.request.openai import INFERENCE_PATHS, parse, with_changes
from extproc.routing.resolve import RoutingTable
from extproc.scheduling.pool import Assignment, Pool, Prompt, default_picker

if TYPE_CHECKING:
    import random

    from extproc.config.types import Snapshot
    from extproc.request.model import Api, InferenceRequest
    from extproc.routing.resolve import Destination, ListedModel
    from extproc.scheduling.pool import MakePicker

# Access log entries that never come must not pile up: beyond this many, the oldest are given up.
_MAX_UNSETTLED: Final = 65_536


class Head(msgspec.Struct, frozen=True):
    """A request's headers. Names are lower-case; ``path`` is without its query."""

    method: str
    path: str
    headers: Mapping[str, str]
    has_body: bool


class Decision(msgspec.Struct, frozen=True):
    """Where a request goes and why. ``body``: what to send instead of the client's, if anything had to change."""

    ticket: str
    server: str
    assignment: Assignment
    body: bytes | None


class Settled(msgspec.Struct, frozen=True):
    """An outcome with the decision that led to it."""

    server: str
    assignment: Assignment
    outcome: Outcome


class Pipeline:
    """Decides with what it knows; every verb takes the time in seconds and returns what is to be done."""

    def __init__(
        self,
        snapshot: Snapshot,
        *,
        rng: random.Random,
        ticket_prefix: str,
        make_picker: MakePicker = default_picker,
    ) -> None:
        self._make_picker = make_picker
        self.pools: dict[str, Pool] = {}
        self._rng = rng
        self._ticket_prefix = ticket_prefix
        self._tickets = 0
        self._sent: dict[str, Sent] = {}
        self._unsettled: OrderedDict[str, Sent] = OrderedDict()
        self._routing = RoutingTable(snapshot)
        self.apply(snapshot)

    @property
    def models(self) -> list[ListedModel]:
        """The names that clients can ask for."""
        return self._routing.models

    def apply(self, snapshot: Snapshot) -> None:
        """Switch to another configuration at once; what is known of servers that stay is kept."""
        self._routing = RoutingTable(snapshot)
        pools: dict[str, Pool] = {}
        for server in snapshot.servers:
            name = server.metadata.name
            known = self.pools.get(name)
            if known is not None:
                known.update(server.spec)
            pools[name] = known or Pool(name, server.spec, self._make_picker)
        self.pools = pools

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

    def arrive(self, api: Api, head: Head, body: bytes, now: float) -> Decision:
        """Parse, resolve, pick, and count the request as sent; raises a Refusal."""
        request = parse(api, body)
        destination = self._routing.resolve(request.model, head.headers, head.path, self._rng)
        pool = self.pools[destination.server]
        chain = hash_blocks(request.prompt, destination.model)
        prompt = Prompt(chain, len(request.prompt), destination.model, head.headers)
        assignment = pool.assign(prompt, now=now, rng=self._rng)
        ticket = self._next_ticket()
        self._sent[ticket] = Sent(
            pool=pool,
            assignment=assignment,
            chain=chain,
            prompt_bytes=len(request.prompt),
            is_streamed=request.is_streamed,
            sent_at_s=now,
        )
        return Decision(ticket, destination.server, assignment, _changed_body(request, destination, pool, body))

    def finish(self, ticket: str) -> None:
        """The request's stream has ended: its endpoint is free of it."""
        sent = self._sent.pop(ticket, None)
        if sent is None:
            return
        release(sent.pool.table, sent.assignment.place)
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
        return Settled(sent.pool.name, sent.assignment, outcome)

    def _next_ticket(self) -> str:
        self._tickets += 1
        return f"{self._ticket_prefix}-{self._tickets:x}"


def _changed_body(request: InferenceRequest, destination: Destination, pool: Pool, body: bytes) -> bytes | None:
    """The body under the engines' model name and with usage asked for; None if the client's own will do."""
    changes: dict[str, object] = {}
    if destination.model != request.model:
        changes["model"] = destination.model
    if request.leaves_usage_out and pool.spec.stream_usage == "Always":
        changes["stream_options"] = {**request.stream_options, "include_usage": True}
    return with_changes(body, changes) if changes else None
