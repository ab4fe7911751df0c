# SPDX-License-Identifier: Apache-2.0
"""A pick with its reasons, in addresses and words: for people, the decision log and tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from extproc.endpoints.health import NO_ANSWER, silent_after_s
from extproc.scheduling.adapter_placement import loaders, place, rows_in

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from extproc.scheduling.picker import Reasons
    from extproc.scheduling.pool import Consideration, Pool


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


class Explanation(msgspec.Struct, frozen=True):
    """Where a request goes, and why. ``addresses``: first choice, then fallbacks. ``adapter``: where its adapter is, or
    would be loaded, if it is one on demand. ``waits``: for an engine, in words, if its ModelServer has none; empty
    else. ``avoided``: endpoints that are avoided, and why. ``silent``: those that do not say how they are, as others
    do, so that only our own counts are known of them. ``failed``: plugins that the pick had to do without, and why.
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


def explain(considered: Consideration, pool: Pool) -> Explanation:
    """The reasons of a pick that was made with ``wants_reasons``."""
    pick, expectation, addresses = considered.pick, considered.expectation, pool.table.addresses
    prefilled_by = pick.rows[0] if pick.prefill_row is None else pick.prefill_row
    return Explanation(
        server=pool.name,
        model=considered.view.request.model,
        input_tokens=round(expectation.input_tokens, 1),
        cached_tokens=round(float(expectation.demand.cached_tokens[prefilled_by]), 1),
        addresses=tuple(addresses[row] for row in pick.rows),
        cost_s=round(pick.cost_s, 6),
        prefill=None if pick.prefill_row is None else addresses[pick.prefill_row],
        stage=pick.stage,
        profiles=tuple(_profile(reasons, addresses) for reasons in pick.reasons),
        failed={one.plugin: str(one) for one in considered.view.failed},
    )


def _profile(reasons: Reasons, addresses: list[str]) -> ProfileExplanation:
    endpoints = []
    for position, row in enumerate(reasons.rows):
        scores = {one.name: round(float(one.values[position]), 6) for one in reasons.scored}
        total = sum(one.weight * float(one.values[position]) for one in reasons.scored)
        endpoints.append(EndpointScores(addresses[row], scores, round(total, 6)))
    endpoints.sort(key=lambda one: -one.total)
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


def avoided_now(pool: Pool, now: float) -> dict[str, str]:
    """Endpoints that are avoided, by address: why, and when they are tried."""
    table, found = pool.table, {}
    for row in table.active_rows:
        reasons = sorted(one.value for one in table.healths[row].reasons)
        if table.failures[row] and not reasons:
            reasons = [NO_ANSWER]
        if reasons:
            pause_s = float(table.retry_at_s[row]) - now
            again = f"not tried for {pause_s:.0f} s more" if pause_s > 0 else "tried by the next request that suits it"
            found[table.addresses[row]] = f"{'; '.join(reasons)}; {again}"
    return found


def silent_now(pool: Pool, now: float) -> tuple[str, ...]:
    """Endpoints without a recent report, if any endpoint of the pool has ever had one."""
    table = pool.table
    heard = {row: table.has_reported(row) for row in table.active_rows}
    if not any(heard.values()):
        return ()
    late = now - silent_after_s(pool.report_interval_s)
    return tuple(table.addresses[row] for row, has in heard.items() if not has or table.reported_at_s[row] < late)


def where_adapter_goes(
    pool: Pool, adapter: str | None, subset: Collection[str] | None, now: float
) -> tuple[str, int | None]:
    """Where an adapter on demand is, or would be loaded, in words; and the row that would load it, None: it is
    there.
    """
    slots, table = pool.slots, pool.table
    if slots is None or adapter is None or adapter not in slots.sources:
        return "", None
    rows = loaders(table, pool.eligible(None, subset), now)
    holders = [table.addresses[row] for row in rows_in(slots.has(adapter) & rows)]
    if holders:
        return f"'{adapter}' is loaded on {', '.join(holders)}", None
    found = place(slots, table, adapter, rows_in(rows), now=now, shortest_stay_s=0.0)
    if found is None:
        return f"'{adapter}' is on no engine, and no engine has room for it now", None
    where = f"'{adapter}' is on no engine; {table.addresses[found.row]} would load it"
    if slots.is_loading(found.row, adapter):
        where = f"'{adapter}' is on no engine; {table.addresses[found.row]} is loading it"
    elif found.evicts is not None:
        where += f" in place of '{found.evicts}'{', once no request uses that' if found.must_wait else ''}"
    return where, found.row


def to_text(one: Explanation) -> str:
    """For a terminal."""
    if one.waits:
        return f"{one.server}: {one.waits}"
    lines = [
        f"{one.server}: {one.addresses[0]}, then {', '.join(one.addresses[1:]) or 'nobody'}",
        f"  prompt of about {one.input_tokens:.0f} tokens, {one.cached_tokens:.0f} of them expected in the cache",
        f"  expected cost {one.cost_s * 1000:.1f} ms",
    ]
    lines += [f"  {address} is avoided: {why}" for address, why in one.avoided.items()]
    lines += [f"  {address} does not say how it is: only our own counts are known of it" for address in one.silent]
    lines += [f"  the plugin '{plugin}' fails, and counts nothing: {why}" for plugin, why in one.failed.items()]
    if one.adapter:
        lines.append(f"  {one.adapter}")
    if one.stage:
        lines.append(f"  {one.stage}{f': {one.prefill}' if one.prefill else ''}")
    for profile in one.profiles:
        lines += ["", *_profile_lines(profile)]
    return "\n".join(lines)


def _profile_lines(profile: ProfileExplanation) -> Iterator[str]:
    yield f"profile {profile.profile}: {profile.candidates} candidates, the highest total first"
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
