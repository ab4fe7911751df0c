# SPDX-License-Identifier: Apache-2.0
"""Effects that the shell performs for the core: each verb returns a list of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Literal, TypeVar

import msgspec

from extproc.admission.flow_queues import QueuedRequest
from extproc.admission.guard_services_by_route import RouteGuardConfig
from extproc.admission.rate_limits import NO_USAGE, Charge, Grant, RequestUsage
from extproc.admission.slo_classes import ObjectiveClass
from extproc.api.usage_log import UsageContext, UsageLine
from extproc.core.explanation import Explanation
from extproc.core.guard_decisions import VERDICTS
from extproc.core.peer_events import PeerEvent
from extproc.core.request_record import (
    NO_WAITS,
    AdapterLoadResult,
    Arrival,
    Outcome,
    PlannedAttempts,
    PrefillLegResult,
    SloForecast,
)
from extproc.core.request_states import RequestState
from extproc.core.slo_verdicts import AnswerLatencies, SloVerdict
from extproc.endpoints.breaker import Breaker
from extproc.endpoints.health import EngineFailure
from extproc.refusals import Refusal
from extproc.scheduling.pool import Assignment
from extproc.translate.directive import TranslationDirective

_Result = TypeVar("_Result")


class RequestHistory(msgspec.Struct, frozen=True):
    """What a request went through until its decision, for metrics and logs. ``explanation``: of its pick, None unless
    it was asked for. ``queued``: its entry in its server's queue, None without flow control. ``waits``: by state, the
    seconds that it waited. ``was_held``: its stream waits for the decision. ``tier``: why it goes to its tier, empty if
    its rule has none. ``fell_back_for``: why it goes to a fallback at once. ``leg``: the prefill that extproc has
    requested, None without. ``whole``: why its prompt could not be prefilled by another engine, empty if it could, or
    if no leg is extproc's. ``size_bytes``: of the client's body, 0 if it is not read.
    """

    explanation: Explanation | None = None
    queued: QueuedRequest | None = None
    waits: Mapping[RequestState, float] = NO_WAITS
    was_held: bool = False
    tier: str = ""
    fell_back_for: str = ""
    leg: PrefillLegResult | None = None
    whole: str = ""
    size_bytes: int = 0

    @property
    def held_s(self) -> float:
        """All of its waits, and its prefill."""
        return sum(self.waits.values())

    @property
    def waited_s(self) -> float:
        """All of its waits, until its engines were picked."""
        return sum(waited_s for state, waited_s in self.waits.items() if state is not RequestState.PREFILLING)


class Decision(msgspec.Struct, frozen=True):
    """Answer: the request of ``tenant`` goes to these endpoints.

    ``body``: what to send instead of the client's body, None to send that. ``attempts``: all that Envoy may make, None
    if its rule has no fallbacks. ``adds_usage``: extproc requested usage that the client did not ask for, so it must be
    removed from the answer. ``checks_refusal``: if the first endpoint refuses it, Envoy tries the next one. ``policy``:
    the server's time limit and retries, as ``TrafficPolicy.route_settings_text`` writes them. ``usage``: for the usage
    log, None without one. ``is_leased``: what that engine keeps is for the first endpoint alone: Envoy tries no other
    of its ModelServer. ``request_id``: that both engines must have in place of the client's, empty for that. ``path``:
    in place of the client's, empty for that. ``response_model``: in answers, as JSON text; empty: they stay as they
    come. ``translation``: of the request for its engines, without headers; None: they get it as it is. ``mirror``: the
    directive for a copy, empty: Envoy makes none. ``cache_bytes``: the longest answer that the response cache keeps; 0:
    it keeps none.
    """

    ticket: str
    server: str
    tenant: str
    assignment: Assignment
    body: bytes | None
    history: RequestHistory = RequestHistory()
    grants: tuple[Grant, ...] = ()
    attempts: PlannedAttempts | None = None
    adds_usage: bool = False
    checks_refusal: bool = False
    policy: str = ""
    usage: UsageContext | None = None
    is_leased: bool = False
    request_id: str = ""
    path: str = ""
    response_model: str = ""
    translation: TranslationDirective | None = None
    mirror: str = ""
    cache_bytes: int = 0

    @property
    def prefill_address(self) -> str:
        """The address of the engine that computes the prompt, if it is another one; else empty."""
        leg = self.history.leg
        if leg is not None:
            return leg.address if leg.outcome in {"prefilled", "beside"} else ""
        return self.sidecar_prefill_address

    @property
    def sidecar_prefill_address(self) -> str:
        """The address of the engine that a sidecar is to ask for the prefill; empty: none."""
        prefill = self.assignment.prefill
        return "" if prefill is None or self.history.leg is not None else prefill.address


class RequestRefused(msgspec.Struct, frozen=True):
    """Answer: the request is refused. ``was_held``: it has waited. ``usage``: for the usage log, None without one."""

    ticket: str
    refusal: Refusal
    arrival: Arrival
    queued: QueuedRequest | None = None
    was_held: bool = False
    usage: UsageContext | None = None


class AskLimits(msgspec.Struct, frozen=True):
    """Ask the shared store for a grant, then ``resume`` with a Grant, a Refusal, StoreAway if it does not answer, or
    None if there is no store.
    """

    state: ClassVar = RequestState.ASKING_LIMITS
    ticket: str
    charges: Sequence[Charge]


class AskGuard(msgspec.Struct, frozen=True):
    """Ask the guard of the request's route, then ``resume`` with a GuardReply or GuardFailed."""

    state: ClassVar = RequestState.ASKING_GUARD
    ticket: str
    arrival: Arrival
    guard: RouteGuardConfig


class GuardAnswered(msgspec.Struct, frozen=True):
    """A guard has answered, or has not. ``result``: an answer (allowed, refused, changed), or why there is none.
    ``took_s``: of its call. ``goes_on``: the request does. ``detail``: for the log, of a failure or a refusal.
    """

    name: str
    result: str
    took_s: float
    goes_on: bool
    detail: str = ""
    ticket: str = ""

    @property
    def has_verdict(self) -> bool:
        """Whether it answered as it should."""
        return self.result in VERDICTS


class CacheLookupResult(msgspec.Struct, frozen=True):
    """A request of a route with a response cache was looked up, or was not. ``why``: of a bypass."""

    route: str
    result: Literal["hit", "miss", "bypass"]
    why: str = ""


class CacheStoreAttempted(msgspec.Struct, frozen=True):
    """The answer to a request that the response cache had not found has come. ``route``: empty if unknown.
    ``outdated``: the engines have changed meanwhile.
    """

    route: str
    result: Literal["stored", "not_whole", "outdated", "unknown"]


class AskPromptTokens(msgspec.Struct, frozen=True):
    """Ask for the prompt's tokens, then ``resume`` with them, or with None."""

    state: ClassVar = RequestState.ASKING_TOKENS
    ticket: str
    arrival: Arrival


class RequestHeld(msgspec.Struct, frozen=True):
    """The request waits in ``state``, and then maybe for more; a Decision or Refused with its ticket comes after
    ``longest_s`` at most.
    """

    ticket: str
    state: RequestState
    longest_s: float


class EngineNeeded(msgspec.Struct, frozen=True):
    """A request has begun to wait for an engine of ``server``, the first to do so: one must be started."""

    server: str


class EngineStarted(msgspec.Struct, frozen=True):
    """``server`` has an engine again. ``after_s``: since the first request began to wait for it."""

    server: str
    after_s: float


class LoadAdapter(msgspec.Struct, frozen=True):
    """Have the engine at ``address`` load an adapter, then ``on_work_result`` with a LoadResult.

    ``source``: where its weights are. ``unload``: the adapters that are unloaded first. ``timeout_s``: for all of
    it.
    """

    server: str
    address: str
    adapter: str
    source: str
    unload: tuple[str, ...]
    timeout_s: float


class Prefill(msgspec.Struct, frozen=True):
    """Have the engine at ``address`` compute a request's prompt for another, then ``on_work_result`` with its result.

    ``headers``: of the request, for both engines. ``timeout_s``: for all of it. ``query_port``: where the
    engine's id is asked for first; 0: it need not be known. ``is_beside``: the other engine has the request meanwhile.
    """

    ticket: str
    server: str
    address: str
    path: str
    body: bytes
    headers: Mapping[str, str]
    timeout_s: float
    query_port: int = 0
    is_beside: bool = False


class CancelPrefill(msgspec.Struct, frozen=True):
    """The client of a request that prefills went away: end the call. No result is needed, but of one beside its
    request, which has ``after_s`` to end by itself. The request is over: abort it no more.
    """

    ticket: str
    after_s: float = 0.0


class AbortDecode(msgspec.Struct, frozen=True):
    """A prefill beside its request has failed: have the engine at ``address`` end that with an error, until its
    CancelPrefill. ``bodies``: of the calls.
    """

    ticket: str
    server: str
    address: str
    bodies: tuple[bytes, ...]


class PrefillEnded(msgspec.Struct, frozen=True):
    """A prefill has ended, well or not. ``goes_on``: its request does, which is not so after a refusal. ``is_beside``:
    the decode engine has had the request all the time.
    """

    ticket: str
    server: str
    leg: PrefillLegResult
    goes_on: bool
    is_beside: bool = False


class LogUsage(msgspec.Struct, frozen=True):
    """Write a line of the usage log that Envoy cannot write: the client of its request left before Envoy was told of
    the engine that worked for it.
    """

    line: UsageLine


class AdapterLoadEnded(msgspec.Struct, frozen=True):
    """A load has ended, well or not."""

    result: AdapterLoadResult


class ClientLeft(msgspec.Struct, frozen=True):
    """The client of a held request went away."""

    ticket: str
    server: str
    queued: QueuedRequest


class SettleGrant(msgspec.Struct, frozen=True):
    """Settle a grant in the shared store. ``used=None`` refunds all: the request was never dispatched."""

    grant: Grant
    used: RequestUsage | None


class SoftBudgetPassed(msgspec.Struct, frozen=True):
    """A caller has used more of a budget than its soft share: once in each window. ``level``: what is left."""

    charge: Charge
    level: float


class ChargeSharedStore(msgspec.Struct, frozen=True):
    """The shared store is to be charged ``amount`` that was used without it; negative: a correction of an earlier
    charge.
    """

    charge: Charge
    amount: float


class Broadcast(msgspec.Struct, frozen=True):
    """Send this event to the other processes."""

    event: PeerEvent


class OutcomeJoined(msgspec.Struct, frozen=True):
    """An outcome was joined with the decision that led to it.

    ``is_ours``: this process decided the request of ``tenant``. ``used``: its tokens, as limits count them.
    ``service``: its cost in weighted tokens. ``priority``: of its queue's band, 0 without a queue. ``currency``: of
    what was used, empty if the ModelServer had no price. ``model``: as its engine was asked, empty if the configuration
    does not have that name. ``waited_s``: how long extproc held it. ``times``: of its answer, None if it got none.
    ``leg``: the end of the prefill beside it, if that has ended. ``prefilled_by``: the engine that computed its prompt
    on a leg of its own, empty if none did. ``is_streamed``: the client asked for a stream. ``fell_back_from``: the
    ModelServer that it was sent to, if Envoy has gone on to a fallback; ``server``, ``assignment`` and ``model`` are of
    that.
    """

    server: str
    assignment: Assignment
    outcome: Outcome
    is_ours: bool = True
    tenant: str = ""
    used: RequestUsage = NO_USAGE
    service: float = 0.0
    priority: int = 0
    currency: str = ""
    model: str = ""
    waited_s: float = 0.0
    times: AnswerLatencies | None = None
    objectives: ObjectiveClass | None = None
    leg: PrefillLegResult | None = None
    prefilled_by: str = ""
    is_streamed: bool = False
    fell_back_from: str = ""


class RequestSloJudged(msgspec.Struct, frozen=True):
    """A request of this process is over. ``verdicts``: one for each objective of its class that it is held to."""

    objectives: ObjectiveClass
    verdicts: tuple[SloVerdict, ...]


class SloMissPredicted(msgspec.Struct, frozen=True):
    """A request was predicted to miss an objective of its class where it was routed to, so it went elsewhere or was
    refused.
    """

    forecast: SloForecast


class HealthChanged(msgspec.Struct, frozen=True):
    """An endpoint became a suspect, fails in another way, or is trusted again (``failure`` None)."""

    server: str
    address: str
    failure: EngineFailure | None


class BreakerChanged(msgspec.Struct, frozen=True):
    """A breaker has opened, has opened again, or has closed. ``address``: of the endpoint; empty: it is that of the
    ModelServer.
    """

    server: str
    address: str
    before: Breaker
    after: Breaker


class EngineModelsListed(msgspec.Struct, frozen=True):
    """An engine has listed its models, of which ``listed`` are no adapters.

    It is the first of ``server`` that lacks ``model``; or, where ``model`` is empty, the last that lacked its
    ModelServer's model, and lists it now.
    """

    server: str
    address: str
    model: str
    listed: frozenset[str]


class Fault(msgspec.Struct, frozen=True):
    """An error that does not end the request or the process; to be logged. ``what``: the step that failed.

    ``plugin``: of another package, by its name in the picker's file of ``server``; empty if the code is ours.
    """

    what: str
    error: BaseException
    server: str = ""
    plugin: str = ""


class WakeAt(msgspec.Struct, frozen=True):
    """Call ``tick`` at this time, or soon if it has passed: held requests may go then."""

    at_s: float


# What a request may have to wait for after ``arrive`` or ``resume``; held ones end with a Decision or Refused.
Pending = AskLimits | AskGuard | AskPromptTokens | RequestHeld
# The effect on the request itself of each of its steps: its answer, or what it waits for.
RequestEffect = Decision | RequestRefused | Pending
# What is done outside of the core for requests that wait or waited; ``on_result`` gets a WorkResult, if there is one.
Work = LoadAdapter | Prefill | CancelPrefill | AbortDecode | LogUsage
Effect = (
    Decision
    | RequestRefused
    | AskLimits
    | AskGuard
    | GuardAnswered
    | CacheLookupResult
    | CacheStoreAttempted
    | AskPromptTokens
    | EngineNeeded
    | EngineStarted
    | Work
    | AdapterLoadEnded
    | PrefillEnded
    | RequestHeld
    | ClientLeft
    | SettleGrant
    | ChargeSharedStore
    | SoftBudgetPassed
    | Broadcast
    | OutcomeJoined
    | RequestSloJudged
    | SloMissPredicted
    | HealthChanged
    | BreakerChanged
    | EngineModelsListed
    | Fault
    | WakeAt
)


def run_or_report_fault(out: list[Effect], what: str, step: Callable[[], _Result]) -> _Result | None:
    """The result of ``step``; None, with a Fault in ``out``, if it fails, and the request goes on without."""
    try:
        return step()
    except Exception as error:  # noqa: BLE001 - plugins of packages may raise anything
        out.append(Fault(what, error))
        return None
