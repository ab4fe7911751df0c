# SPDX-License-Identifier: Apache-2.0
"""A pick with its reasons, in addresses and words: for people, the decision log and tests."""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from extproc.admission.limit_refusals import amount_text
from extproc.api.budgets import budget_title
from extproc.api.quantities import money_text
from extproc.core.request_record import FallbackState
from extproc.endpoints.health import NO_ANSWER, silent_after_s
from extproc.routing.cost_tiers import cost_order
from extproc.scheduling.adapter_placement import place_adapter, rows_of_mask, rows_that_can_load
from extproc.wire_names import ANONYMOUS, REQUEST_ID, TENANT

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from extproc.admission.rate_limits import Charge
    from extproc.core.request_record import Arrival, SloForecast, TierPlacement
    from extproc.core.trace import Trace
    from extproc.scheduling.picker import Reasons
    from extproc.scheduling.pool import Pool, UncommittedPick


_TAKEN: Final[Mapping[str, str]] = MappingProxyType(
    {
        "holds": "taken: the cheapest that holds the objective",
        "waits": "taken: waits here for its turn before it spills",
        "up": "taken: dearer, as its home would miss the objective",
        "down": "taken: cheaper, as its home would miss the objective by more",
        "misses": "taken: would miss the objective, and none that spill allows is better",
    }
)
_FORECAST: Final[Mapping[str, str]] = MappingProxyType(
    {
        "held": "it stays where it was routed to",
        "moved": "another ModelServer of its rule is predicted to hold it",
        "fallback": "it goes to a fallback",
        "refused": "it is refused",
    }
)
# Endpoints of a profile that a request's own explanation has. Each takes 5 µs, for which other requests wait.
MOST_EXPLAINED: Final = 1_000
# Beside an address and a total, in a terminal of 80 columns.
_WIDEST_HEADS: Final = 48


class FilterStep(msgspec.Struct, frozen=True):
    """The endpoints that a filter removed, and how many it left."""

    filter: str
    removed: tuple[str, ...]
    left: int


class EndpointScores(msgspec.Struct, frozen=True):
    """One endpoint's value from each scorer, and the weighted total."""

    address: str
    scores: dict[str, float]
    total: float


class ProfileExplanation(msgspec.Struct, frozen=True):
    """How one profile chose; endpoints from the best down. ``weights`` by scorer; 0: shown but not counted."""

    profile: str
    candidates: int
    filters: tuple[FilterStep, ...]
    weights: dict[str, float]
    endpoints: tuple[EndpointScores, ...]


class BudgetState(msgspec.Struct, frozen=True):
    """One amount of a budget that applies to the request. ``holder``: whose budget it is. ``left``: None where machines
    share it, in Redis. ``reserves``: for this request.
    """

    budget: str
    # by its name in the decision log
    holder: str = msgspec.field(name="level")
    most: str
    left: str | None
    reserves: str
    ends_in_s: int


class TierState(msgspec.Struct, frozen=True):
    """One ModelServer of the request's rule, from the cheapest to the dearest. ``cost``: expected, of this request.
    ``ttft_ms``, ``tpot_ms``: predicted; None if unknown. ``holds``: the objective. ``why``: it is taken, or not.
    """

    server: str
    cost: str
    ttft_ms: float | None
    tpot_ms: float | None
    holds: bool
    why: str


class SloForecastState(msgspec.Struct, frozen=True):
    """A class of objectives that refuses what is predicted to miss them. ``objective``: by which the first token is due
    after ``due_ms``. ``ttft_ms``: predicted where the request was routed to, None if unknown. ``why``: what follows.
    """

    route: str
    name: str
    objective: str
    due_ms: float
    ttft_ms: float | None
    result: str
    why: str


class Explanation(msgspec.Struct, frozen=True):
    """Where a request goes, and why. ``addresses``: first choice, then fallbacks. ``adapter``: where its adapter is, or
    would be loaded, if it is one on demand. ``waits``: for an engine, in words, if its ModelServer has none; empty
    else. ``avoided``: endpoints that are avoided, and why. ``silent``: those without recent reports, while others have
    them, so that only our own counts are used for them. ``failed``: plugins that the pick had to do without, and why.
    ``tenant``, ``user``, ``api_key``: who asks, by verified names; ``request_id``: the gateway's. ``trace_id``: of its
    trace, if it is sampled. Empty if unknown. ``budgets``: those that apply. ``tiers``: of its rule, if it has some.
    ``forecast``: of its TTFT, if its class refuses what would come too late. ``fallbacks``: those of its rule.
    ``split``: why it goes to this target of its rule, in words; empty unless the split is sticky. ``sets``: what its
    rule or target sets in its body, or limits. ``rule``: that holds for it, empty if its route has no other.
    """

    server: str
    model: str
    input_tokens: float
    cached_tokens: float
    addresses: tuple[str, ...]
    cost_s: float
    prefill: str | None
    stage: str
    profiles: tuple[ProfileExplanation, ...]
    adapter: str = ""
    waits: str = ""
    avoided: dict[str, str] = {}
    silent: tuple[str, ...] = ()
    failed: dict[str, str] = {}
    tenant: str = ""
    user: str = ""
    api_key: str = ""
    request_id: str = ""
    budgets: tuple[BudgetState, ...] = ()
    trace_id: str = ""
    tiers: tuple[TierState, ...] = ()
    # what the guard of its route said of it, in words; empty if it has none
    guard: str = ""
    forecast: SloForecastState | None = None
    fallbacks: tuple[FallbackState, ...] = ()
    split: str = ""
    sets: tuple[str, ...] = ()
    rule: str = ""
    # where a copy would go and how often, or why none would; empty if its rule has no mirror
    mirror: str = ""


def explain_pick(
    considered: UncommittedPick,
    arrival: Arrival,
    trace: Trace | None = None,
    placement: TierPlacement | None = None,
    forecast: SloForecast | None = None,
    *,
    guarded: str = "",
    fallbacks: tuple[FallbackState, ...] = (),
    most: int | None = None,
) -> Explanation:
    """The reasons of a pick that was made with ``wants_reasons``. ``trace``: of the request, if it is sampled.
    ``placement``: among the tiers of its rule. ``forecast``: of its TTFT. ``guarded``: what its guard said.
    ``fallbacks``: those of its rule. ``most``: endpoints of a profile that have scores, the best, and the one that
    was chosen; None: all.
    """
    pool, caller = arrival.pool, arrival.caller
    pick, expectation, addresses = considered.pick, considered.expectation, pool.table.addresses
    prefilled_by = pick.rows[0] if pick.prefill_row is None else pick.prefill_row
    chosen = {pick.rows[0], prefilled_by}
    return Explanation(
        server=pool.name,
        model=considered.view.request.model,
        input_tokens=round(expectation.input_tokens, 1),
        cached_tokens=round(float(expectation.demand.cached_tokens[prefilled_by]), 1),
        addresses=tuple(addresses[row] for row in pick.rows),
        cost_s=round(pick.cost_s, 6),
        prefill=None if pick.prefill_row is None else addresses[pick.prefill_row],
        stage=pick.stage,
        profiles=tuple(_profile(reasons, addresses, chosen, most) for reasons in pick.reasons),
        failed={one.plugin: str(one) for one in considered.view.failed},
        tenant=caller.tenant,
        user=caller.user,
        api_key=caller.api_key,
        request_id=arrival.head.headers.get(REQUEST_ID, ""),
        trace_id="" if trace is None else trace.parent.trace_id,
        tiers=tier_states(placement),
        guard=guarded,
        forecast=None if forecast is None else describe_forecast(forecast),
        fallbacks=fallbacks,
        split=sticky_split_of(arrival),
        sets=overridden_fields(arrival),
        rule=arrival.destination.rule.title,
    )


def overridden_fields(arrival: Arrival) -> tuple[str, ...]:
    """See ``Explanation.sets``."""
    overrides = arrival.destination.overrides
    return () if overrides is None else overrides.names


def sticky_split_of(arrival: Arrival) -> str:
    """See ``Explanation.split``."""
    targets = None if arrival.candidates is None else arrival.candidates.targets
    if targets is None or targets.sticky is None:
        return ""
    what, caller = targets.sticky.by.lower(), arrival.caller
    key = targets.sticky.key_of(arrival.head.headers, caller.tenant, caller.user)
    if not key:
        return f"the target of its rule was drawn by weight: the request names no {what}"
    chosen = targets.sticky_destination(targets.sticky, key).server
    if chosen == arrival.destination.server:
        return f"of the targets of its rule, all requests of its {what} go to this one"
    return f"of the targets of its rule, requests of its {what} go to {chosen}, which cannot have this one now"


def describe_forecast(forecast: SloForecast) -> SloForecastState:
    """In words."""
    objectives = forecast.objectives
    return SloForecastState(
        route=objectives.route,
        name=objectives.name,
        objective=forecast.objective,
        due_ms=round(1000 * forecast.due_s, 1),
        ttft_ms=None if forecast.ttft_s is None else round(1000 * forecast.ttft_s, 1),
        result=forecast.result,
        why=_FORECAST[forecast.result],
    )


def _forecast_line(one: SloForecastState) -> str:
    ttft = "unknown" if one.ttft_ms is None else f"{one.ttft_ms:g} ms"
    due = f"{'its caller' if one.objective == 'deadline' else one.objective} allows {one.due_ms:g} ms"
    return f"  the class {one.name} of {one.route}: TTFT {ttft} is predicted, {due}; {one.why}"


def tier_states(placement: TierPlacement | None) -> tuple[TierState, ...]:
    """None of a request whose rule has no tiers."""
    if placement is None:
        return ()
    candidates, choice, found = placement.candidates, placement.choice, list[TierState]()
    order = cost_order(candidates)
    for position in order:
        one, holds = candidates[position], choice.misses[position] <= 1
        if position == choice.taken:
            why = _TAKEN[choice.reason]
            if choice.reason == "waits":
                why = f"{why}, {choice.ask_again_s:.2g} s at most"
        elif order.index(position) > order.index(choice.taken):
            why = "dearer"
        elif holds:
            why = "not allowed by spill"
        else:
            why = "cheaper, and would miss the objective"
        found.append(
            TierState(
                server=one.server,
                cost="unpriced" if one.cost_micros is None else f"{money_text(one.cost_micros)} {one.currency}",
                ttft_ms=None if one.ttft_s is None else round(1000 * one.ttft_s, 1),
                tpot_ms=None if one.tpot_s is None else round(1000 * one.tpot_s, 1),
                holds=holds,
                why=why,
            )
        )
    return tuple(found)


def _fallback_line(one: FallbackState) -> str:
    return f"  the fallback {one.server}{f' at {one.address}' if one.address else ''}: {one.why}"


def _tier_line(one: TierState) -> str:
    ttft, tpot = ("unknown" if ms is None else f"{ms:g} ms" for ms in (one.ttft_ms, one.tpot_ms))
    return f"  tier {one.server}: {one.cost}, TTFT {ttft}, TPOT {tpot}; {one.why}"


def _profile(reasons: Reasons, addresses: list[str], chosen: Collection[int], most: int | None) -> ProfileExplanation:
    totals = np.zeros(len(reasons.rows))
    for one in reasons.scored:
        totals += one.weight * one.values
    best = np.argsort(-totals, kind="stable").tolist()
    beyond = () if most is None else [position for position in best[most:] if reasons.rows[position] in chosen]
    endpoints = [
        EndpointScores(
            addresses[reasons.rows[position]],
            {one.name: round(float(one.values[position]), 6) for one in reasons.scored},
            round(float(totals[position]), 6),
        )
        for position in [*best[:most], *beyond]
    ]
    return ProfileExplanation(
        profile=reasons.profile,
        candidates=len(reasons.candidates),
        filters=tuple(_filters(reasons, addresses)),
        weights={one.name: one.weight for one in reasons.scored},
        endpoints=tuple(endpoints),
    )


def _filters(reasons: Reasons, addresses: list[str]) -> Iterator[FilterStep]:
    before = set(reasons.candidates)
    for name, rows in reasons.after_filters:
        yield FilterStep(name, tuple(addresses[row] for row in sorted(before - set(rows))), len(rows))
        before = set(rows)


def budget_states(charges: Iterable[Charge], level_of: Callable[[Charge], float]) -> Iterator[BudgetState]:
    """``level_of``: what a Local budget has left."""
    for charge in charges:
        if charge.budget is not None:
            yield BudgetState(
                budget=charge.budget.key,
                holder=charge.budget.holder,
                most=amount_text(charge, charge.limit.capacity),
                left=None if charge.is_global else amount_text(charge, max(0.0, level_of(charge))),
                reserves=amount_text(charge, charge.amount),
                ends_in_s=math.ceil(charge.ends_in_s),
            )


def _budget_line(one: BudgetState) -> str:
    left = "is shared with other machines" if one.left is None else f"has {one.left} of {one.most} left"
    name = one.budget.rpartition("/")[2]
    shown = budget_title(name, "the API key itself")
    what = f"budget {one.budget} of the {one.holder}" if shown == name else shown
    return f"  the {what} {left}; this request reserves {one.reserves}"


def avoided_endpoints(pool: Pool, now: float) -> dict[str, str]:
    """Endpoints that are avoided, by address: why, and when they are tried."""
    table = pool.table
    return {table.addresses[row]: why for row in table.active_rows if (why := why_avoided(pool, row, now))}


def why_avoided(pool: Pool, row: int, now: float) -> str:
    """Why the endpoint of ``row`` is avoided, and when it is tried; empty if it is not."""
    table, breaker = pool.table, pool.table.breakers[row]
    if not breaker.trips:
        return ""
    reasons = sorted(one.value for one in table.healths[row].reasons) or [NO_ANSWER]
    pool.update_retry_times(now)
    pause_s = float(table.retry_at_s[row]) - now
    again = f"not tried for {pause_s:.0f} s more" if pause_s > 0 else "tried by the next request that suits it"
    return f"{'; '.join(reasons)}; its breaker is {breaker.state(now).text}, and it is {again}"


def silent_endpoints(pool: Pool, now: float) -> tuple[str, ...]:
    """Endpoints without a recent report, if any endpoint of the pool has ever had one."""
    table = pool.table
    reported = {row: table.has_reported(row) for row in table.active_rows}
    if not any(reported.values()):
        return ()
    late = now - silent_after_s(pool.report_interval_s)
    return tuple(table.addresses[row] for row, has in reported.items() if not has or table.reported_at_s[row] < late)


def adapter_location(
    pool: Pool, adapter: str | None, subset: Collection[str] | None, now: float
) -> tuple[str, int | None]:
    """Where an adapter on demand is, or would be loaded, in words; and the row that would load it, None: it is
    there.
    """
    slots, table = pool.slots, pool.table
    if slots is None or adapter is None or adapter not in slots.sources:
        return "", None
    rows = rows_that_can_load(table, pool.rows_that_may_serve(None, subset), now)
    holders = [table.addresses[row] for row in rows_of_mask(slots.rows_with(adapter) & rows)]
    if holders:
        return f"'{adapter}' is loaded on {', '.join(holders)}", None
    found = place_adapter(slots, table, adapter, rows_of_mask(rows), now=now, shortest_stay_s=0.0)
    if found is None:
        return f"'{adapter}' is on no engine, and no engine has room for it now", None
    where = f"'{adapter}' is on no engine; {table.addresses[found.row]} would load it"
    if slots.is_loading(found.row, adapter):
        where = f"'{adapter}' is on no engine; {table.addresses[found.row]} is loading it"
    elif found.evicts:
        others = " and ".join(f"'{one}'" for one in found.evicts)
        where += f" in place of {others}{', once no request uses that' if found.must_wait else ''}"
    return where, found.row


def why_chosen(one: Explanation) -> str:
    """Why the first address was chosen, in a sentence; empty where no endpoint was scored."""
    chosen = one.addresses[0] if one.addresses else ""
    profile = next((each for each in one.profiles if any(e.address == chosen for e in each.endpoints)), None)
    if profile is None:
        return ""
    scored = {each.address: each for each in profile.endpoints}
    own, others = scored[chosen], [each for each in profile.endpoints if each.address != chosen]
    if not others:
        removing = [step.filter for step in profile.filters if step.removed]
        left = f" that {' and '.join(removing)} left" if removing else ""
        return f"{chosen} is the only endpoint{left}"
    best = others[0]
    equals = [each.address for each in others if each.total == own.total]
    if equals:
        return f"{chosen} was drawn: {_listed(equals)} {'has' if len(equals) == 1 else 'have'} the same total"
    if best.total > own.total:
        return f"{chosen} was drawn although {best.address} has a higher total ({best.total:.4g}, not {own.total:.4g})"
    gains = {name: weight * (own.scores[name] - best.scores[name]) for name, weight in profile.weights.items()}
    decisive = max(gains, key=lambda name: gains[name])
    facts = [name for name, weight in profile.weights.items() if not weight and own.scores[name] != best.scores[name]]
    shown = "; ".join(_compared(name, own, best) for name in facts)
    return f"{chosen} wins over {best.address} by {_compared(decisive, own, best)}{f' ({shown})' if shown else ''}"


def _compared(name: str, own: EndpointScores, other: EndpointScores) -> str:
    return f"{name}: {own.scores[name]:.4g} against {other.scores[name]:.4g}"


def _listed(addresses: list[str]) -> str:
    return addresses[0] if len(addresses) == 1 else f"{', '.join(addresses[:-1])} and {addresses[-1]}"


def to_text(one: Explanation) -> str:
    """For a terminal."""
    guarded = f"  the guard {one.guard}" if one.guard else ""
    if one.waits:
        return "\n".join([f"{one.server}: {one.waits}", *_rule_lines(one), *filter(None, (guarded,))])
    lines = [
        f"{one.server}: {one.addresses[0]}, then {', '.join(one.addresses[1:]) or 'nobody'}",
        *(f"  {sentence}" for sentence in (why_chosen(one),) if sentence),
        f"  {_caller(one)}",
        f"  prompt of about {one.input_tokens:.0f} tokens, {one.cached_tokens:.0f} of them expected in the cache",
        f"  expected cost {one.cost_s * 1000:.1f} ms",
    ]
    lines += [f"  {address} is avoided: {why}" for address, why in one.avoided.items()]
    lines += [f"  {address} does not say how it is: only our own counts are known of it" for address in one.silent]
    lines += [f"  the plugin '{plugin}' fails, and counts nothing: {why}" for plugin, why in one.failed.items()]
    if guarded:
        lines.append(guarded)
    lines += _rule_lines(one)
    lines += map(_budget_line, one.budgets)
    lines += map(_tier_line, one.tiers)
    lines += [] if one.forecast is None else [_forecast_line(one.forecast)]
    lines += map(_fallback_line, one.fallbacks)
    if one.adapter:
        lines.append(f"  {one.adapter}")
    if one.stage:
        lines.append(f"  {one.stage}{f': {one.prefill}' if one.prefill else ''}")
    for profile in one.profiles:
        lines += ["", *_profile_lines(profile)]
    return "\n".join(lines)


def _rule_lines(one: Explanation) -> list[str]:
    lines = [f"  {one.rule} holds"] if one.rule else []
    lines += [f"  {one.split}"] if one.split else []
    lines += [f"  its rule sets {', '.join(one.sets)}"] if one.sets else []
    return [*lines, f"  {one.mirror}"] if one.mirror else lines


def _caller(one: Explanation) -> str:
    if one.tenant == ANONYMOUS:
        return f"for the tenant {ANONYMOUS}; as another one: --header '{TENANT}: NAME'"
    names = (("user", one.user), ("API key", one.api_key))
    return f"for the tenant {one.tenant}" + "".join(f", {what} {name}" for what, name in names if name)


def _profile_lines(profile: ProfileExplanation) -> Iterator[str]:
    noun = "candidate" if profile.candidates == 1 else "candidates, the highest total first"
    yield f"profile {profile.profile}: {profile.candidates} {noun}"
    for step in profile.filters:
        yield f"  {step.filter} left {step.left}" + (f"; out: {', '.join(step.removed)}" if step.removed else "")
    names = list(profile.weights)
    heads = [f"{name} x {profile.weights[name]:g}" if profile.weights[name] else f"({name})" for name in names]
    is_wide = sum(map(len, heads)) + 2 * len(heads) > _WIDEST_HEADS
    yield from _table(profile, [f"[{number}]" for number in range(1, len(heads) + 1)] if is_wide else heads)
    if is_wide:
        for number, name in enumerate(names, start=1):
            weight = profile.weights[name]
            yield f"  [{number}] {name}: {f'counts {weight:g} times' if weight else 'shown, does not count'}"


def _table(profile: ProfileExplanation, heads: list[str]) -> Iterator[str]:
    """From the best endpoint down."""
    rows = [
        [one.address, *(f"{one.scores[name]:.4g}" for name in profile.weights), f"{one.total:.4g}"]
        for one in profile.endpoints
    ]
    heads = ["endpoint", *heads, "total"]
    widths = [max([len(head), *(len(row[index]) for row in rows)]) for index, head in enumerate(heads)]
    for first, *others in [heads, *rows]:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        yield "  " + "  ".join([first.ljust(widths[0]), *cells])
