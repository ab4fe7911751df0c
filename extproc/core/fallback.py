# SPDX-License-Identifier: Apache-2.0
"""Fallback: other ModelServers for a request that its own cannot serve, or not soon enough.

Envoy makes the attempts of a request, and is told all of them at its decision: engines of its own ModelServer first,
then those of each fallback that is possible for it. All attempts have one body, in which only the model's name can be
another. A request whose ModelServer has no usable endpoint, or that has waited long enough, goes to a fallback at once.

A budget bounds the requests that a fallback has from others. Those that were sent there count, and so do those that
were sent to an engine that has failed since and has answered nothing after they came: Envoy has passed them on.
"""

from __future__ import annotations

from collections import Counter
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from extproc.api.fallback import attempts_name
from extproc.core import breakers
from extproc.core.dispatch import asks_for_usage, changed_body, changes_for, constraints_of, prompt_of
from extproc.core.record import Attempts, FallbackPlan, FallbackState, Reserve, SentRequest
from extproc.errors import Refusal
from extproc.prefix.index import tail_of
from extproc.request.rewrite import span_of_field
from extproc.scheduling.pool import Assignment

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterable, Mapping

    from extproc.core.record import Arrival, Attachment, Record, Run
    from extproc.core.request_builder import RequestBuilder
    from extproc.request.prefill import Changes
    from extproc.request.rewrite import Span
    from extproc.routing.resolve import Destination, Fallbacks
    from extproc.scheduling.pool import Consideration, Pool


_SALT_NAME: Final = b'"cache_salt":'
# Why a request goes to a fallback at once.
_TAKEN: Final[Mapping[str, str]] = MappingProxyType(
    {
        "no_endpoint": "is taken: the ModelServer before it has no usable endpoint",
        "late": "is taken: the ModelServer before it is predicted to be late",
        "queue": "is taken: the request has waited long enough for the ModelServer before it",
    }
)


class FallbackBudgets:
    """By ModelServer: requests in flight that came, or may come, from another one."""

    def __init__(self) -> None:
        # sent there
        self._sent: Counter[str] = Counter()
        # sent elsewhere, with this one as a fallback: by ticket
        self._listed: dict[str, dict[str, Run]] = {}

    def begin(self, ticket: str, run: Run) -> None:
        """The request is sent to an engine."""
        if run.sent.is_fallback:
            self._sent[run.pool.name] += 1
        for server in run.reserves:
            self._listed.setdefault(server, {})[ticket] = run

    def end(self, ticket: str, run: Run) -> None:
        """Its stream is closed."""
        if run.sent.is_fallback:
            self._sent[run.pool.name] -= 1
        for server in run.reserves:
            self._listed.get(server, {}).pop(ticket, None)

    def has_headroom(self, pool: Pool, fallbacks: Fallbacks) -> bool:
        """Whether the ModelServer may have one more request of the rule that has these ``fallbacks``."""
        passed_on = sum(map(_was_passed_on, self._listed.get(pool.name, {}).values()))
        in_flight = float(pool.table.in_flight[pool.table.is_active].sum())
        return self._sent[pool.name] + passed_on < fallbacks.budget(in_flight)


def _was_passed_on(run: Run) -> bool:
    table, endpoint = run.pool.table, run.assignment.endpoint
    if not table.has_failures or not table.is_current(endpoint) or not table.failures[endpoint.row]:
        return False
    return run.sent_at_s > table.healths[endpoint.row].served_at_s


class FallbackPlanner:
    """Which fallbacks are possible for a request. ``builder``: of the configuration in use."""

    def __init__(self, budgets: FallbackBudgets, *, rng: random.Random) -> None:
        self.builder: RequestBuilder
        self.budgets = budgets
        self._rng = rng

    def begin(self, ticket: str, run: Run) -> None:
        """The request is sent to an engine."""
        self.budgets.begin(ticket, run)

    def instead(
        self,
        arrival: Arrival,
        attachment: Attachment,
        now: float,
        *,
        waited_s: float | None = None,
        is_drawn: bool = True,
        in_time: Callable[[Arrival], bool] | None = None,
    ) -> Arrival | None:
        """The request at the first fallback that can have it; None: there is none.

        ``waited_s``: it has waited so long for its ModelServer. ``in_time``: it would be late there, and is in time at
        those that are true. With neither it moves only if its ModelServer has no usable endpoint, or a breaker that
        does not let it through. ``is_drawn``: the breaker does, beside the probe.
        """
        fallbacks, pool = arrival.destination.fallbacks, arrival.pool
        if fallbacks is None or not attachment.is_bundle:
            return None
        is_waiting = pool.spec.activation is not None and not pool.readiness.can_serve
        is_for_failure = waited_s is None and in_time is None
        if is_for_failure and (is_waiting or (pool.is_ready(now) and (is_drawn or breakers.may_probe(pool, now)))):
            return None
        for one in fallbacks.chain:
            if waited_s is not None and (one.after_queue_s is None or waited_s < one.after_queue_s):
                continue
            try:
                other = self.builder.at(arrival, one)
            except Refusal:
                continue
            is_let_in = breakers.may_probe(other.pool, now) or breakers.is_drawn(other.pool, now, self._rng)
            if is_let_in and not self._why_not(pool, other, fallbacks, now) and (in_time is None or in_time(other)):
                return other
        return None

    def plan(
        self,
        record: Record,
        considered: Consideration,
        now: float,
        *,
        base: Changes | None = None,
        body: bytes | None = None,
    ) -> FallbackPlan | None:
        """All attempts of a request that is about to be sent; None if its rule has no fallbacks. ``base``, ``body``:
        for its own ModelServer, made if not given.
        """
        arrival = record.arrived
        fallbacks = arrival.destination.fallbacks
        if fallbacks is None or not record.attachment.is_bundle:
            return None
        if base is None:
            base = changes_for(arrival, with_usage=asks_for_usage(arrival, record.attachment))
            body = changed_body(arrival, base)
        own, retries = arrival.pool, arrival.pool.spec.traffic_policy.retry.attempts
        addresses = [own.table.addresses[row] for row in considered.pick.rows[: 1 + retries]]
        servers, reserves, states = [own.name] * len(addresses), dict[str, Reserve](), list[FallbackState]()
        why = _why_alone(arrival, considered)
        if record.fell_back_for:
            states.append(FallbackState(own.name, addresses[0], _TAKEN[record.fell_back_for]))
        span = None
        for one in fallbacks.chain:
            found = why or self._reserve(record, one, fallbacks, base, now)
            if isinstance(found, Reserve) and found.model != arrival.destination.model:
                span = span or span_of_field(arrival.body if body is None else body, "model")
                if span is None:
                    found = "the model's name has no place in its body"
            if isinstance(found, str):
                states.append(FallbackState(one.server, "", found))
                continue
            to = found.assignment.addresses
            addresses += to
            servers += [one.server] * len(to)
            reserves[one.server] = found
            states.append(FallbackState(one.server, to[0], "is tried next"))
        degraded = [one.server for one in fallbacks.chain if one.is_degraded and one.server in reserves]
        if arrival.destination.is_degraded:
            degraded.append(own.name)
        attempts = Attempts(
            servers=tuple(servers),
            addresses=tuple(addresses),
            degraded=tuple(degraded),
            splice=_place(span),
            salt=_place(_salt_in(body, [own, *(one.pool for one in reserves.values())])),
            policy=attempts_name(own.spec.traffic_policy, fallbacks.fallback, fallbacks.retry),
        )
        return FallbackPlan(None if considered.pick.prefill_row is not None else attempts, reserves, tuple(states))

    def _reserve(
        self, record: Record, to: Destination, fallbacks: Fallbacks, base: Changes, now: float
    ) -> Reserve | str:
        """What is known of the request at a fallback, or why that is not possible."""
        arrival, attachment = record.arrived, record.attachment
        try:
            other = self.builder.at(arrival, to)
            why = self._why_not(arrival.pool, other, fallbacks, now) or _why_differing(base, other, attachment)
            if why:
                return why
            found = other.pool.consider(
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
        return "" if self.budgets.has_headroom(other.pool, fallbacks) else "its budget is used up"


def _why_alone(arrival: Arrival, considered: Consideration) -> str:
    """Why the request can go to no fallback at all; empty: it can."""
    if arrival.adapter is not None:
        return "the request is for an adapter"
    if considered.pick.prefill_row is not None:
        return "its prompt is computed by another engine"
    return "its API is not known" if arrival.request.api is None else ""


def _why_differing(base: Changes, arrival: Arrival, attachment: Attachment) -> str:
    """Which fields an engine must read otherwise than as ``base`` has them, beside the model's name; empty: none."""
    other = changes_for(arrival, with_usage=asks_for_usage(arrival, attachment))
    fields, others = base.fields, other.fields
    # a provider gets no salt, whatever the body has
    names = (fields.keys() | others.keys()) - {"model", *(("cache_salt",) if arrival.pool.spec.provider else ())}
    found = {name for name in names if fields.get(name) != others.get(name) or (name in fields) != (name in others)}
    found |= set(base.without) ^ set(other.without)
    return f"its body would have another {', '.join(sorted(found))} there" if found else ""


def _place(span: Span | None) -> str:
    return "" if span is None else f"{span[0]},{span[1] - span[0]}"


def _salt_in(body: bytes | None, pools: Iterable[Pool]) -> Span | None:
    """Where the whole field stands in a body that was made here; None if there is none, or no provider among
    ``pools``.
    """
    if body is None or not any(one.spec.provider for one in pools):
        return None
    value = span_of_field(body, "cache_salt")
    if value is None:
        return None
    start, end = value[0] - len(_SALT_NAME), value[1]
    return (start - 1, end) if body[start - 1 : start] == b"," else (start, end + (body[end : end + 1] == b","))


def _reserve_at(arrival: Arrival, considered: Consideration, record: Record) -> Reserve:
    pool, request, expectation, pick = arrival.pool, arrival.request, considered.expectation, considered.pick
    row = pick.rows[0]
    rows = pick.rows[: 1 + pool.spec.traffic_policy.retry.attempts]
    assignment = Assignment(
        pool.table.ref(row),
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
        tail=tail_of(request.prompt, expectation.covered_bytes),
        prompt_bytes=len(request.prompt) if request.is_text else 0,
        is_streamed=request.is_streamed,
        tenant=arrival.tenant,
        answers=request.answers,
        expects_usage=request.asks_for_usage or asks_for_usage(arrival, record.attachment),
        waited_s=record.held_s,
        is_fallback=True,
    )
    price = pool.price_at(record.wall_s)
    return Reserve(
        pool, assignment, sent, arrival.destination.model, price, is_degraded=arrival.destination.is_degraded
    )
