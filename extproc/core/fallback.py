# SPDX-License-Identifier: Apache-2.0
"""Fallback: other ModelServers for a request that its own cannot serve, or not soon enough.

Envoy makes the attempts of a request, and is told all of them at its decision: engines of its own ModelServer first,
then those of each fallback that is possible for it. All attempts have one body, in which only the model's name, the
limits of the answer and what a prefill/decode pair has of its own can be others. A request whose ModelServer has no
usable endpoint or does not take its prompt, or that has waited long enough, goes to a fallback at once.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import msgspec

from extproc.api.fallback import REFUSALS, attempts_route_name
from extproc.core import breakers
from extproc.core.dispatch import (
    adds_usage_request,
    body_changes,
    changed_body,
    constraints_of,
    fallback_token_limits,
    prompt_of,
)
from extproc.core.request_record import FallbackExpectation, FallbackPlan, FallbackState, PlannedAttempts, SentRequest
from extproc.refusals import Refusal
from extproc.request.json_rewrite import raw_top_level_fields, span_of, spans_of_fields
from extproc.request.prefill_protocols import truncates_prompt
from extproc.scheduling.pool import Assignment

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from extproc.core.fallback_budget import FallbackBudgets
    from extproc.core.request_builder import RequestBuilder
    from extproc.core.request_record import Arrival, DispatchedRequest, FallbackReason, GatewayProperties, RequestRecord
    from extproc.request.json_rewrite import Span
    from extproc.request.prefill_protocols import BodyChanges
    from extproc.routing.routing_table import Destination, Fallbacks
    from extproc.scheduling.pool import Pool, UncommittedPick


_CONTEXT: Final = "context-window"
# Texts have up to so many times the bytes in a token that are usual for their ModelServer.
_CERTAIN: Final = 2.0
# What Envoy's filter puts back into a body travels beside it.
_LONGEST_TEXT: Final = 4096
_UNCHANGEABLE: Final = "what its body has for its prefill engine cannot be taken out again"
# Reasons that are looked for when the limits of a request have granted it, in this order.
AT_ONCE: Final[tuple[FallbackReason, ...]] = ("context_window", "no_endpoint")
# Why a request goes to a fallback at once.
_TAKEN: Final[Mapping[FallbackReason, str]] = MappingProxyType(
    {
        "no_endpoint": "is taken: the ModelServer before it has no usable endpoint",
        "context_window": "is taken: the prompt is longer than the ModelServer before it takes",
        "late": "is taken: the ModelServer before it is predicted to be late",
        "prefill": "is taken: no engine of the ModelServer before it has computed the prompt for another",
        "queue": "is taken: the request has waited long enough for the ModelServer before it",
    }
)


class FallbackPlanner:
    """Which fallbacks are possible for a request."""

    def __init__(self, budgets: FallbackBudgets, *, rng: random.Random) -> None:
        """``apply_config`` comes before anything else."""
        self._builder: RequestBuilder
        self._budgets = budgets
        self._rng = rng

    def apply_config(self, builder: RequestBuilder) -> None:
        """Follow the configuration."""
        self._builder = builder
        self._budgets.retain_only(builder.pools)

    def on_dispatch(self, ticket: str, run: DispatchedRequest) -> None:
        """The request is sent to an engine."""
        self._budgets.on_dispatch(ticket, run)

    def on_prefilled(self, ticket: str, run: DispatchedRequest) -> None:
        """The request is sent to its decode engine, and what follows is planned."""
        self._budgets.on_planned(ticket, run)

    def choose_fallback(
        self,
        record: RequestRecord,
        why: FallbackReason,
        now: float,
        *,
        is_drawn: bool = True,
        suits: Callable[[Arrival], bool] | None = None,
    ) -> Arrival | None:
        """The request at the first fallback that can have it; None: it stays where it is, or there is none.

        ``why``: it goes for this alone. ``is_drawn``: the breaker of its ModelServer lets it through beside the probe.
        ``suits``: those that are true can have it.
        """
        arrival = record.arrival_before_dispatch
        fallbacks, pool, waited_s = arrival.destination.fallbacks, arrival.pool, now - record.arrived_at_s
        if fallbacks is None or not record.attachment.is_bundle or arrival.adapter is not None:
            return None
        if why == "no_endpoint":
            is_waiting = pool.spec.activation is not None and not pool.readiness.can_serve
            if is_waiting or (pool.is_ready(now) and (is_drawn or breakers.may_probe(pool, now))):
                return None
        if why == "context_window" and not (any(map(_takes_long, fallbacks.chain)) and _is_too_long(arrival)):
            return None
        for one in self._in_order(fallbacks.chain, now):
            if not self._is_for(one, why, waited_s, now):
                continue
            try:
                other = self._builder.move_to_fallback(arrival, one)
            except Refusal:
                continue
            is_let_in = breakers.may_probe(other.pool, now) or breakers.draw_breaker_pass(other.pool, now, self._rng)
            if is_let_in and not self._why_not(pool, other, fallbacks, now) and (suits is None or suits(other)):
                return other
        return None

    def plan_attempts(
        self,
        record: RequestRecord,
        addresses: Sequence[str],
        now: float,
        *,
        base: BodyChanges | None = None,
        body: bytes | None = None,
        is_paired: bool = False,
        has_sidecar: bool = False,
    ) -> FallbackPlan | None:
        """All attempts of a request that is about to be sent; None if its rule has no fallbacks.

        ``addresses``: of its own ModelServer, the first choice first. ``base``, ``body``: for it, made if not given.
        ``is_paired``: ``body`` is for the decode engine of a pair. ``has_sidecar``: that one's sidecar has the prompt
        computed.
        """
        arrival = record.arrival_before_dispatch
        fallbacks = arrival.destination.fallbacks
        if fallbacks is None or not record.attachment.is_bundle:
            return None
        if base is None:
            base = body_changes(arrival, record.attachment)
            body = changed_body(arrival, base)
        own, given = arrival.pool, arrival.body if body is None else body
        tried = list(addresses[: 1 + own.spec.traffic_policy.retry.attempts])
        servers, reserves, states = [own.name] * len(tried), dict[str, FallbackExpectation](), list[FallbackState]()
        if record.fell_back_for:
            states.append(FallbackState(own.name, tried[0], _TAKEN[record.fell_back_for]))
        edits = edits_to_unpair(given, changed_body(arrival, base) or arrival.body) if is_paired else ""
        why = _why_alone(arrival, has_sidecar=has_sidecar) or ("" if edits is not None else _UNCHANGEABLE)
        edited = _EditedBody(arrival, given, edits or "")
        for one in self._in_order(fallbacks.chain, now):
            found = why or self._reserve(record, one, fallbacks, base, now)
            if isinstance(found, FallbackExpectation) and not edited.may_go_to(found):
                found = "the model's name has no place in its body"
            if isinstance(found, str):
                states.append(FallbackState(one.server, "", found))
                continue
            to = found.assignment.addresses
            tried += to
            servers += [one.server] * len(to)
            reserves[one.server] = edited.going_to(one.server, found)
            shorter = f", for answers of at most {one.as_fallback.max_output_tokens} tokens" if found.limits else ""
            states.append(FallbackState(one.server, to[0], f"is tried next{shorter}"))
        degraded = [one.server for one in fallbacks.chain if one.as_fallback.is_degraded and one.server in reserves]
        if arrival.destination.as_fallback.is_degraded:
            degraded.append(own.name)
        attempts = PlannedAttempts(
            servers=tuple(servers),
            addresses=tuple(tried),
            degraded=tuple(degraded),
            splice=edited.splice,
            salt=_salt_in(body, [own, *(one.pool for one in reserves.values())]),
            policy=attempts_route_name(own.spec.traffic_policy, fallbacks.fallback, fallbacks.retry),
            refusals=_takers(fallbacks, reserves),
            shorter=tuple(edited.shorter),
            edits=tuple(edited.edits.items()),
        )
        is_alone = has_sidecar or arrival.engine_api is not None
        return FallbackPlan(None if is_alone else attempts, reserves, tuple(states))

    def _is_for(self, fallback: Destination, why: FallbackReason, waited_s: float, now: float) -> bool:
        """Whether requests go there for this reason."""
        match why:
            case "queue":
                after_s = fallback.as_fallback.after_queue_s
                return after_s is not None and waited_s >= after_s and not self._is_full(fallback, now)
            case "late":
                return not self._is_full(fallback, now)
            case "context_window":
                return _takes_long(fallback)
            case _:
                return True

    def _is_full(self, fallback: Destination, now: float) -> bool:
        pool = self._builder.pools.get(fallback.server)
        return pool is not None and pool.is_provider_full(now)

    def _in_order(self, chain: Sequence[Destination], now: float) -> Sequence[Destination]:
        """``chain``, with providers that report that they are full behind the others."""
        return sorted(chain, key=lambda one: self._is_full(one, now))

    def _reserve(
        self, record: RequestRecord, to: Destination, fallbacks: Fallbacks, base: BodyChanges, now: float
    ) -> FallbackExpectation | str:
        """What is known of the request at a fallback, or why that is not possible."""
        arrival, attachment = record.arrival_before_dispatch, record.attachment
        try:
            other = self._builder.move_to_fallback(arrival, to)
            why = self._why_not(arrival.pool, other, fallbacks, now) or _why_differing(base, other, attachment)
            if why:
                return why
            if other.engine_api is not None:
                # all attempts have one body
                return "it has other APIs, and an attempt after another is not translated"
            found = other.pool.pick_endpoints(
                prompt_of(other, None), constraints_of(other, attachment), now=now, rng=self._rng
            )
        except Refusal as refusal:
            return refusal.message
        if found.pick.prefill_row is not None:
            return "its prompt would be computed by another engine there"
        return _reserve_at(other, found, record)

    def _why_not(self, own: Pool, other: Arrival, fallbacks: Fallbacks, now: float) -> str:
        """Why the ModelServer gets no request of the rule now; empty: it may get one."""
        if other.pool is own:
            return "it is the same ModelServer"
        if other.pool.spec.protocol != own.spec.protocol:
            return "it speaks another protocol"
        if not other.pool.is_ready(now):
            return "it has no usable endpoint"
        if _is_too_long(other):
            return "the prompt is longer than it takes"
        if self._budgets.has_headroom(other.pool, fallbacks, other.tenant, now):
            return ""
        return "its budget is used up, or this tenant's part of it"


class _EditedBody:
    """What fallbacks read otherwise in the body that its own ModelServer gets.

    ``shorter``, ``edits``: see PlannedAttempts. An answer that is limited at its own is so at those behind it, too.
    ``common``: the edits of all fallbacks.
    """

    def __init__(self, arrival: Arrival, body: bytes, common: str) -> None:
        self._own, self._body, self._common = arrival, body, common
        self._is_short = bool(fallback_token_limits(arrival))
        self._spans: dict[str, Span] = {}
        self.splice = ""
        self.shorter = [arrival.pool.name] if self._is_short else []
        self.edits = dict[str, str]()

    def may_go_to(self, there: FallbackExpectation) -> bool:
        """Whether what must differ there has a place in the body."""
        if there.model == self._own.destination.model and not there.limits:
            return True
        if self._own.request.is_unread:
            return False
        api = self._own.request.api
        limits = () if api is None else api.spec.limits
        self._spans = self._spans or spans_of_fields(self._body, ("model", *limits))
        return "model" in self._spans

    def going_to(self, server: str, there: FallbackExpectation) -> FallbackExpectation:
        """``there``, with its answers marked if they are limited."""
        if there.model != self._own.destination.model:
            self.splice = _place(self._spans["model"])
        edits = self._common + "".join(self._clamp(name, most) for name, most in there.limits.items())
        if edits:
            self.edits[server] = edits
        if not self._is_short and not there.limits:
            return there
        self.shorter.append(server)
        return msgspec.structs.replace(there, is_degraded=True)

    def _clamp(self, name: str, most: int) -> str:
        span = self._spans.get(name)
        value = b"" if span is None else self._body[slice(*span)]
        return "" if value.isdigit() and int(value) <= most else _edit(self._body, name, span, str(most))


def edits_to_unpair(paired: bytes, plain: bytes) -> str | None:
    """The edits that make of ``paired``, as the decode engine of a pair gets a request, what any other engine gets,
    ``plain``. None: Envoy's filter cannot make them.
    """
    fields, wanted, edits = raw_top_level_fields(paired), raw_top_level_fields(plain), list[str]()
    for name in {**fields, **wanted}:
        value, text = fields.get(name), wanted.get(name)
        if value == text:
            continue
        span = None if value is None else span_of(paired, value, value)
        if text is None and span is not None:
            first, end = _member(paired, name, span)
            edits.append(f"{first},{end - first},;")
            continue
        found = "" if text is None else _text_of(text)
        if not found:
            return None
        edits.append(_edit(paired, name, span, found))
    return "".join(edits)


def _text_of(value: msgspec.Raw) -> str:
    """JSON as it can stand in an edit, which ends with a semicolon; empty: it cannot."""
    data = bytes(value)
    try:
        return data.decode().replace(";", "\\u003b") if len(data) <= _LONGEST_TEXT else ""
    except UnicodeDecodeError:
        return ""


def _edit(body: bytes, name: str, span: Span | None, text: str) -> str:
    """As Envoy's filter reads it: the value of a field, at ``span`` of the body if it has one, is ``text``."""
    if span is None:
        # before the first member: there is one, the model
        return f'{body.index(b"{") + 1},0,"{name}":{text},;'
    return f"{_place(span)},{text};"


def _member(body: bytes, name: str, value: Span) -> Span:
    """Where a whole field with one of its commas stands, in a body that was made here."""
    start, end = value[0] - len(name) - len('"":'), value[1]
    if body[start - 1 : start] == b",":
        return start - 1, end
    return start, end + (body[end : end + 1] == b",")


def _takes_long(fallback: Destination) -> bool:
    """Whether it takes prompts that are too long for the ModelServers before it."""
    return _CONTEXT in fallback.as_fallback.takes


def _is_too_long(arrival: Arrival) -> bool:
    """Whether no engine of its ModelServer takes the prompt, by what they list. An estimate must be far beyond that."""
    most, request = arrival.pool.max_prompt_tokens(), arrival.request
    if not most or request.prompts.count != 1 or request.is_unread:
        return False
    tokens = float(request.prompts.token_ids)
    if not tokens:
        tokens = request.text_bytes / arrival.pool.caches.bytes_per_token / _CERTAIN
    return tokens > most and not truncates_prompt(arrival.body, request.contents)


def _takers(fallbacks: Fallbacks, reserves: Collection[str]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """By class of refusals, the ModelServers among ``reserves`` that take what others have refused for it."""
    found = list[tuple[str, tuple[str, ...]]]()
    for kind in REFUSALS:
        takes = tuple(
            [one.server for one in fallbacks.chain if one.server in reserves and kind in one.as_fallback.takes]
        )
        if takes:
            found.append((kind, takes))
    return tuple(found)


def _why_alone(arrival: Arrival, *, has_sidecar: bool) -> str:
    """Why the request can go to no fallback at all; empty: it can."""
    if arrival.engine_api is not None:
        return "the request is translated for its own ModelServer"
    if arrival.adapter is not None:
        return "the request is for an adapter"
    if has_sidecar:
        return "a sidecar has its prompt computed by another engine"
    return "its API is not known" if arrival.request.api is None else ""


def _why_differing(base: BodyChanges, arrival: Arrival, attachment: GatewayProperties) -> str:
    """Which fields an engine must read otherwise than as ``base`` has them, beside the model's name; empty: none."""
    other = body_changes(arrival, attachment)
    fields, others = base.fields, other.fields
    limits = () if arrival.request.api is None else arrival.request.api.spec.limits
    # a provider gets no salt, whatever the body has
    salts = ("cache_salt",) if arrival.pool.spec.provider else ()
    names = (fields.keys() | others.keys()) - {"model", *limits, *salts}
    found = {name for name in names if fields.get(name) != others.get(name) or (name in fields) != (name in others)}
    found |= set(base.without) ^ set(other.without)
    return f"its body would have another {', '.join(sorted(found))} there" if found else ""


def _place(span: Span) -> str:
    """As Envoy's filter reads it: first byte and length."""
    return f"{span[0]},{span[1] - span[0]}"


def _salt_in(body: bytes | None, pools: Iterable[Pool]) -> str:
    """Where the whole field stands in a body that was made here; empty if there is none, or no provider among
    ``pools``.
    """
    if body is None or not any(one.spec.provider for one in pools):
        return ""
    value = spans_of_fields(body, ("cache_salt",)).get("cache_salt")
    if value is None:
        return ""
    return _place(_member(body, "cache_salt", value))


def _reserve_at(arrival: Arrival, considered: UncommittedPick, record: RequestRecord) -> FallbackExpectation:
    pool, request, expectation, pick = arrival.pool, arrival.request, considered.expectation, considered.pick
    row = pick.rows[0]
    rows = pick.rows[: 1 + pool.spec.traffic_policy.retry.attempts]
    assignment = Assignment(
        pool.table.endpoint_ref(row),
        tuple([pool.table.addresses[one] for one in rows]),
        input_tokens=expectation.input_tokens,
        cached_tokens=float(expectation.demand.cached_tokens[row]),
        indexed_tokens=0.0,
        last_used_at_s=None,
        tokens_ahead=0.0,
        cost_s=pick.cost_s,
    )
    sent = SentRequest(
        chain=expectation.chain,
        tail=expectation.tail,
        prompt_bytes=len(request.prompt) if request.tokens_scale_with_bytes else 0,
        is_streamed=request.is_streamed,
        tenant=arrival.tenant,
        answers=request.answers,
        expects_usage=request.reports_usage_unchanged or adds_usage_request(arrival, record.attachment),
        waited_s=record.held_s,
        is_fallback=True,
    )
    price = pool.price_at(record.wall_s)
    return FallbackExpectation(
        pool,
        assignment,
        sent,
        arrival.destination.model,
        price,
        is_degraded=arrival.destination.as_fallback.is_degraded,
        limits=fallback_token_limits(arrival),
    )
