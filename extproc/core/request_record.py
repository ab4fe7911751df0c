# SPDX-License-Identifier: Apache-2.0
"""A request as data: its headers, the parsed and routed arrival, its record in the core's table, its outcome."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Final, Literal

import msgspec

from extproc.admission.fair_queue import FlowControlGate
from extproc.admission.flow_queues import QueuedRequest
from extproc.admission.guard_services_by_route import RouteGuardConfig
from extproc.admission.identity import ANONYMOUS_CALLER, Caller
from extproc.admission.rate_limits import NO_USAGE, Charge, Grant, RequestUsage
from extproc.admission.slo_classes import ObjectiveClass
from extproc.admission.token_estimates import InputEstimate
from extproc.api.charged_tokens import AnswerOutcome, ExpectedTokens, used_tokens
from extproc.api.pricing import Price, cost_micros
from extproc.api.usage_log import UsageCounts
from extproc.core.demand_counters import ModelMeter
from extproc.core.request_states import HELD, SUCCESSORS, IllegalEvent, RequestEvent, RequestState
from extproc.core.trace import Trace
from extproc.engines.engine_responses import AdapterLoadProblem
from extproc.prefix.approximate_index import BlockPin, PromptTail
from extproc.request.inference_request import InferenceRequest
from extproc.routing.cost_tiers import TierCandidate, TierChoice, TierPolicy
from extproc.routing.routing_table import Destination, RoutingTable, RuleTargets
from extproc.scheduling.pool import Assignment, Pool
from extproc.wire_names import Api

_NO_CLAIMS: Final[Mapping[str, Collection[str]]] = MappingProxyType({})
NO_WAITS: Final[Mapping[RequestState, float]] = MappingProxyType({})
NO_RESERVES: Final[Mapping[str, FallbackExpectation]] = MappingProxyType({})
OURS: Final = ""
# refused: by the engine, for a fault of the request. unreadable: too long, or of another form. not_asked: too
# many at once, here. expired: it came too late to be used. left: the request was over first. beside: asked at the same
# time as the decode engine, and it has not ended.
PrefillOutcome = Literal[
    "prefilled",
    "beside",
    "refused",
    "error",
    "unreachable",
    "timeout",
    "unreadable",
    "no_parameters",
    "not_asked",
    "expired",
    "left",
]
# Why a request goes to a fallback at once: its ModelServer has no usable endpoint, its prompt is too long there, it
# is predicted to be late, or it has waited long enough.
FallbackReason = Literal["no_endpoint", "context_window", "late", "queue", "prefill"]
_NOTHING: Final = ExpectedTokens()


class RequestHead(msgspec.Struct, frozen=True):
    """A request's headers. Names are lower-case; ``path`` is without its query.

    ``is_trusted``: the headers that identify the caller were written by a gateway, not by the client. ``listener``: the
    name of the listener that received the request, ``http_route``: ``namespace/name`` of the HTTPRoute that matched it;
    empty where the gateway does not report them. ``claims``: those of the caller's verified token that policies name,
    with their values.
    """

    method: str
    path: str
    headers: Mapping[str, str]
    has_body: bool
    is_trusted: bool = False
    listener: str = ""
    http_route: str = ""
    claims: Mapping[str, Collection[str]] = _NO_CLAIMS


class GatewayProperties(msgspec.Struct, frozen=True):
    """The properties of the gateway that sent the request.

    ``choices``: the number of endpoints that an answer may name. ``subset``: the addresses that this request may go to,
    None for all. ``is_bundle``: it has our own bundle, which keeps a chunk with usage from clients that did not ask for
    it, and tries what one endpoint refuses at the next one where extproc asks for that.
    """

    choices: int = 4
    subset: Collection[str] | None = None
    is_bundle: bool = True


BUNDLE: Final = GatewayProperties()


class AllowedTargets(msgspec.Struct, frozen=True):
    """Where a request may go: the targets of its rule that its caller may use, by the configuration of ``routing``."""

    routing: RoutingTable
    targets: RuleTargets


class Arrival(msgspec.Struct, frozen=True):
    """A request that has been parsed and routed.

    ``cache_salt``: what its engine gets; prompts share a cache under the same. ``candidates``: None unless its
    ModelServer was chosen here, by a ModelRoute. ``engine_api``: that to which it is translated; None: its engines take
    it as it is.
    """

    request: InferenceRequest
    destination: Destination
    pool: Pool
    head: RequestHead
    body: bytes
    caller: Caller = ANONYMOUS_CALLER
    cache_salt: str | None = None
    candidates: AllowedTargets | None = None
    # the body is not the client's: a guard has changed it, or the rule has
    is_changed: bool = False
    # of the fields that its rule or target has set: the client's own values, None for those that it left out
    replaced: Mapping[str, msgspec.Raw | None] = {}
    engine_api: Api | None = None

    @property
    def wants_tokens(self) -> bool:
        """Whether its pick would be more precise with the prompt's tokens: there is a precise index."""
        caches = self.pool.caches
        return (
            caches.kv_index is not None
            and bool(caches.whole_feeds | caches.partial_feeds)
            and bool(self.request.prompt)
        )

    @property
    def priority(self) -> int:
        """Of its objective, or else of the rule that routed it."""
        return self.destination.rule.priority if self.caller.priority is None else self.caller.priority

    @property
    def adapter(self) -> str | None:
        """The LoRA adapter that was asked for, if it was one."""
        model = self.destination.model
        return model if model and model != self.pool.spec.model else None

    @property
    def tenant(self) -> str:
        """The name under which it is counted."""
        return self.caller.flow or self.caller.tenant


class TierPlacement(msgspec.Struct, frozen=True):
    """Why a request goes to its tier."""

    policy: TierPolicy
    candidates: tuple[TierCandidate, ...]
    choice: TierChoice


class SloForecast(msgspec.Struct, frozen=True):
    """Whether a request is predicted to hold what its class is promised, where the class refuses what is not.

    ``due_s``: its first token is due so long after it came, by ``objective``. ``ttft_s``: predicted at the ModelServer
    that it was routed to, the time since it came included; None if unknown. ``idle_ttft_s``: the same without other
    requests there. ``result``: it stays, goes to another ModelServer of its rule or to a fallback, or is refused.
    """

    objectives: ObjectiveClass
    objective: Literal["ttft", "e2e", "deadline"]
    due_s: float
    ttft_s: float | None
    idle_ttft_s: float | None
    result: Literal["held", "moved", "fallback", "refused"]


class AdapterLoadResult(msgspec.Struct, frozen=True):
    """The result of a load that the core requested.

    ``problem``: None if the engine has the adapter now. ``message``: the engine's, for the log. ``was_there``: the
    engine had it before. ``unloaded``: all adapters that the engine no longer has, the one that was to make room
    included.
    """

    server: str
    address: str
    adapter: str
    problem: AdapterLoadProblem | None = None
    message: str = ""
    was_there: bool = False
    unloaded: tuple[str, ...] = ()
    duration_s: float = 0.0


class PrefillResult(msgspec.Struct, frozen=True):
    """What became of a Prefill. ``failure``: why there is no answer; else it has ``status`` and ``body``. ``left``: its
    request was over before, of one beside that.
    ``answered_at_s``: when the engine began to answer. ``detail``: for the log. ``engine_id``: if it was asked
    for.
    """

    ticket: str
    failure: Literal["", "unreachable", "timeout", "unreadable", "not_asked", "left"] = ""
    status: int = 0
    body: bytes = b""
    answered_at_s: float = 0.0
    detail: str = ""
    engine_id: str = ""


# Of what is done outside of the core for requests that wait.
WorkResult = AdapterLoadResult | PrefillResult


class PrefillLegResult(msgspec.Struct, frozen=True):
    """What became of a prefill leg at the engine at ``address``. ``outcome``: "prefilled", or why the decode engine
    gets nothing of it. ``detail``: for the log. ``tries``: engines that were asked for it, this one included.
    """

    address: str
    outcome: PrefillOutcome
    took_s: float
    detail: str = ""
    tries: int = 1


class Outcome(msgspec.Struct, frozen=True):
    """The outcome of a request, from one access log entry or from an answer that passed through extproc.

    Fields without an observation are None. ``status``: 0 if the client left before there was one. ``served``: the
    address of the engine that answered. ``has_left``: the client hung up. ``was_cut``: the engine did.
    ``has_timed_out``: a time limit of the gateway ended it. ``is_own_limit``: the client has set that limit for its
    call. ``answer_bytes``: of the body that the client got.
    ``created_tokens``: of the prompt, those that a cache was asked to keep. ``reasoning_tokens``: of the output.
    ``events``: of a stream, those with content. ``is_cut``: the answer did not come to its end, whoever ended it.
    ``first_content_s``: until the first event of a stream that had content. ``is_encoded``: the answer was compressed,
    and its usage is not known. ``served_by``: the ModelServer of the last attempt, of ``attempts``; empty if unknown.
    ``engine_s``: from the request's last byte to the answer's first, at the engine: no client can make it longer by
    sending slowly. ``retry_after_s``: for so long the engine asks to be left alone, if it does. ``pauses``: likewise
    providers of attempts before the last; None: they do not say for how long. ``refused``: by address of an attempt,
    the class for which the prompt was refused there, and may not be at another ModelServer. ``errors``: the addresses
    of attempts of a request with fallbacks that have answered 500. ``is_of_gateway``: the request was to be translated,
    and nothing came back of an engine, or the translator has ended in the middle of the stream.
    Durations count from the request's arrival, time in the queue included.
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
    is_own_limit: bool = False
    created_tokens: int | None = None
    reasoning_tokens: int | None = None
    events: int | None = None
    is_cut: bool = False
    first_content_s: float | None = None
    is_encoded: bool = False
    served_by: str = ""
    attempts: int = 0
    engine_s: float | None = None
    retry_after_s: float | None = None
    refused: Mapping[str, str] = {}
    errors: frozenset[str] = frozenset()
    pauses: Mapping[str, float | None] = {}
    is_of_gateway: bool = False


class SentRequest(msgspec.Struct, frozen=True, array_like=True):
    """A dispatched request as every process counts it.

    ``chain``: the whole blocks of its prompt, ``tail``: what they do not cover. ``prompt_bytes``: 0 if the number of
    tokens in its prompts does not follow from them. ``tenant``: under which it counts. ``answers``: number of requested
    answers, over all its prompts. ``expects_usage``: a whole answer reports usage. ``waited_s``: before it was sent.
    ``checks_refusal``: whether Envoy tries the next endpoint if the first refuses it; None: nothing can try it.
    ``is_fallback``: it was another ModelServer's. ``next_servers``: the ModelServers that Envoy tries next.
    """

    chain: list[int]
    tail: PromptTail
    prompt_bytes: int
    is_streamed: bool
    tenant: str = ""
    answers: int = 1
    expects_usage: bool = False
    waited_s: float = 0.0
    checks_refusal: bool | None = None
    is_fallback: bool = False
    next_servers: tuple[str, ...] = ()


class FallbackExpectation(msgspec.Struct, frozen=True):
    """A request at a fallback that it was not sent to: what is expected there, without any load. ``model``: as its
    engine is asked. ``price``: as ``DispatchedRequest`` has it. ``limits``: fields of its body, by which its answer is
    shorter than the client asks for.
    """

    pool: Pool
    assignment: Assignment
    sent: SentRequest
    model: str
    price: Price | None = None
    is_degraded: bool = False
    limits: Mapping[str, int] = {}


class PlannedAttempts(msgspec.Struct, frozen=True):
    """All attempts that Envoy may make. ``servers``, ``addresses``: one of each for each attempt. ``degraded``: the
    ModelServers whose answers are marked. ``splice``: where the model's name stands in the body, empty if all have the
    same. ``salt``: where its cache salt stands, which providers do not get; empty if it has none, or no provider is
    asked. ``policy``: of Envoy's route. ``refusals``: by class, the ModelServers that take what others refuse for it.
    ``shorter``: ModelServers that write shorter answers than the client asks for. ``edits``: by ModelServer, what else
    it reads otherwise in the body.
    """

    servers: tuple[str, ...]
    addresses: tuple[str, ...]
    degraded: tuple[str, ...] = ()
    splice: str = ""
    salt: str = ""
    policy: str = ""
    refusals: tuple[tuple[str, tuple[str, ...]], ...] = ()
    shorter: tuple[str, ...] = ()
    edits: tuple[tuple[str, str], ...] = ()


class FallbackState(msgspec.Struct, frozen=True):
    """One fallback of the request's rule. ``address``: the endpoint that is tried there; empty: none. ``why``: it is
    taken, tried next, or not possible.
    """

    server: str
    address: str
    why: str


class FallbackPlan(msgspec.Struct, frozen=True):
    """``attempts``: None if it is translated, or a sidecar has its prompt computed. ``reserves``: by ModelServer.
    ``states``: of each fallback of the rule, in words.
    """

    attempts: PlannedAttempts | None
    reserves: Mapping[str, FallbackExpectation]
    states: tuple[FallbackState, ...]


class DispatchedRequest(msgspec.Struct):
    """A dispatched request: what its outcome is compared with.

    ``pins``: the blocks that it holds in the prefix index, by row. ``reserved``: the tokens that were expected of it,
    and ``limited``: those that its limits reserved, None if it has none. ``most_output``: the requested maximum of
    tokens, over all answers. ``has_stored_prompt``: an engine has stored the beginning of its ``prompts`` prompts.
    ``gate``, ``charged``: whose flow paid how much service for it. ``is_on_time``: its silence was not counted as a
    failure of its endpoint. ``input_estimate``: its tenant's, if its limits reserved by it. ``is_for_model``: it asks
    for its ModelServer's model, not for an adapter or another name. ``api``: None if it is of no known one. ``price``:
    of its ModelServer when it arrived, None if it had none. ``expected``: what it pays where its answer does not report
    it. ``objectives``: those of its class, None if it has none. ``model``: as its engine was asked. ``prefilled_by``:
    the address of the engine that has computed its prompt on a leg of its own, empty if the one that answers does.
    ``is_part``: it is such a leg, or an attempt after others: its duration is not that of a whole answer. ``has_leg``:
    its engine gets it after such a leg. ``leg``: the end of one beside it. ``is_aborted``: that failed, so its engine
    answers an error without a fault. ``unjudged``: that leg, as a request of its own, and its outcome, while it is not
    known whether the decode engine has failed first. ``attempts``: None without fallbacks. ``reserves``: of those that
    may serve it, by ModelServer.
    """

    pool: Pool
    assignment: Assignment
    pins: Mapping[int, BlockPin]
    sent: SentRequest
    sent_at_s: float
    reserved: RequestUsage = NO_USAGE
    limited: RequestUsage | None = None
    most_output: float = math.inf
    prompts: int = 1
    has_stored_prompt: bool = False
    gate: FlowControlGate | None = None
    charged: float = 0.0
    is_on_time: bool = True
    input_estimate: InputEstimate | None = None
    is_for_model: bool = False
    api: Api | None = None
    price: Price | None = None
    expected: ExpectedTokens = _NOTHING
    objectives: ObjectiveClass | None = None
    model: str = ""
    prefilled_by: str = ""
    has_leg: bool = False
    is_part: bool = False
    leg: PrefillLegResult | None = None
    is_aborted: bool = False
    unjudged: tuple[DispatchedRequest, Outcome] | None = None
    attempts: PlannedAttempts | None = None
    reserves: Mapping[str, FallbackExpectation] = NO_RESERVES

    def as_served_by_fallback(self, reserve: FallbackExpectation) -> DispatchedRequest:
        """The request as its fallback has served it, after other attempts; it never counted there."""
        return msgspec.structs.replace(
            self,
            pool=reserve.pool,
            assignment=reserve.assignment,
            pins={},
            sent=reserve.sent,
            model=reserve.model,
            price=reserve.price,
            is_part=True,
            attempts=None,
            reserves=NO_RESERVES,
        )

    def used_tokens(self, outcome: Outcome) -> RequestUsage:
        """The tokens that a request used, and what they cost; none if no engine answered it."""
        found = used_tokens(self.expected, answer_usage_of(outcome))
        if found is None:
            return NO_USAGE
        counts = found.counts
        cost = 0 if self.price is None else cost_micros(self.price, counts)
        return RequestUsage(float(counts.input), float(counts.output), cost_micros=float(cost))


def answer_usage_of(outcome: Outcome) -> AnswerOutcome:
    """As a line of the usage log has it."""
    is_cut = outcome.is_cut or outcome.has_left or outcome.was_cut or outcome.has_timed_out or outcome.status == 0
    return AnswerOutcome(
        status=outcome.status,
        has_engine=bool(outcome.served) or 200 <= outcome.status < 300,
        is_cut=is_cut,
        has_timed_out=outcome.has_timed_out,
        counts=UsageCounts(
            prompt_tokens=outcome.prompt_tokens,
            completion_tokens=outcome.completion_tokens,
            cached_tokens=outcome.cached_tokens,
            created_tokens=outcome.created_tokens,
            reasoning_tokens=outcome.reasoning_tokens,
            events=outcome.events,
        ),
        # Envoy writes whole ones, of a duration in nanoseconds
        duration_ms=int(max(0.0, outcome.duration_s) * 1e3 + 1e-6),
        first_byte_us=None if outcome.ttfb_s is None else round(outcome.ttfb_s * 1e6),
        bytes=outcome.answer_bytes,
    )


class AnswerToStore(msgspec.Struct, frozen=True):
    """The response cache keeps the answer, if it has at most so many bytes and this model of this server gives it."""

    server: str
    model: str
    most_bytes: int


class RequestRecord(msgspec.Struct):
    """One request. ``origin``: the process that decides it, OURS for this one.

    ===================  =======================================================================
    field                meaning
    ===================  =======================================================================
    ``arrival``          the request until it is sent to an engine, then None
    ``run``              what it has at its engine, from then on
    ``queued``           how it stands, or stood, in its server's queue
    ``charges``          of the limits that all machines share
    ``limited``          the tokens that its limits reserve, None without limits
    ``guard``            the one that is asked, or was
    ``guarded``          what it said, for people
    ``since_s``          since when it is in its state
    ``waits``            by state, the seconds that it has waited before
    ``engine_by_s``      until when it may wait for an engine
    ``answer_by_s``      until when its gateway waits, once the request is held
    ``wall_s``           when it arrived, seconds since 1970
    ``meter``            where it counts as demand, None if another process decides it
    ``is_work_counted``  whether its prefill work counts there, too
    ``trace``            where its steps are noted, None if it is not sampled
    ``has_moved``        to another ModelServer while its tokens were requested, which are of another model
    ``placement``        the choice of its tier, None if its rule has no tiers
    ``forecast``         whether it can hold its objectives, None if that is not asked
    ``due_by_s``         until when it may wait in a queue, for its first token to come in time
    ``fell_back_for``    why it goes to a fallback at once, empty if it does not
    ``is_drawn``         it may go to a ModelServer that is half-open, beside the probe
    ``to_store``         whether the response cache keeps its answer, None if it does not
    ``event``            what happens to it now, or happened last
    ``successors``       the states that this event may lead to
    ===================  =======================================================================
    """

    ticket: str
    state: RequestState = RequestState.ABSENT
    origin: str = OURS
    arrival: Arrival | None = None
    attachment: GatewayProperties = BUNDLE
    wants_reasons: bool = False
    charges: Sequence[Charge] = ()
    limited: RequestUsage | None = None
    guard: RouteGuardConfig | None = None
    guarded: str = ""
    tokens: Sequence[int] | None = None
    grants: tuple[Grant, ...] = ()
    queued: QueuedRequest | None = None
    run: DispatchedRequest | None = None
    since_s: float = 0.0
    waits: Mapping[RequestState, float] = NO_WAITS
    meter: ModelMeter | None = None
    arrived_at_s: float = 0.0
    wall_s: float = 0.0
    is_work_counted: bool = False
    trace: Trace | None = None
    has_moved: bool = False
    engine_by_s: float = math.inf
    answer_by_s: float = math.inf
    placement: TierPlacement | None = None
    forecast: SloForecast | None = None
    due_by_s: float = math.inf
    fell_back_for: FallbackReason | Literal[""] = ""
    is_drawn: bool = True
    to_store: AnswerToStore | None = None
    event: RequestEvent = RequestEvent.ARRIVED
    successors: frozenset[RequestState] = frozenset()

    def begin_transition(self, event: RequestEvent) -> bool:
        """``event`` begins. Returns whether it changes anything; raises IllegalEvent, with nothing changed."""
        after = SUCCESSORS[self.state][event]
        if after is None:
            raise IllegalEvent(event.name, self.state.name, f"request {self.ticket}")
        if not after:
            return False
        self.event, self.successors = event, after
        return True

    def set_state(self, state: RequestState, now: float) -> None:
        """The only place where a state is set: a successor that the table has for the event that happens.

        A wait that ends is added to ``waits``.
        """
        if state not in self.successors:
            raise IllegalEvent(f"{self.event.name} to {state.name}", self.state.name, f"request {self.ticket}")
        if self.state in HELD:
            self.waits = {**self.waits, self.state: self.waits.get(self.state, 0.0) + now - self.since_s}
        self.state, self.since_s = state, now

    @property
    def held_s(self) -> float:
        """All that it has waited before its state."""
        return sum(self.waits.values()) if self.waits else 0.0

    @property
    def is_stream_waiting(self) -> bool:
        """Whether its stream waits for a Decision or Refused already."""
        return self.event is not RequestEvent.ARRIVED and self.event is not RequestEvent.ANSWERED

    @property
    def arrival_before_dispatch(self) -> Arrival:
        """Its arrival, before dispatch; raises ValueError afterwards."""
        if self.arrival is None:
            raise ValueError(f"request {self.ticket} was sent to an engine already")
        return self.arrival

    @property
    def is_decided_here(self) -> bool:
        """Whether this process decides it."""
        return self.origin == OURS
