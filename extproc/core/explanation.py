# SPDX-License-Identifier: Apache-2.0
"""A pick with its reasons, in addresses and words: for people, the decision log and tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from extproc.scheduling.adapter_placement import loaders, place, rows_in

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from extproc.scheduling.picker import Reasons
    from extproc.scheduling.pool import Consideration, Pool


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
    else.
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
    if one.adapter:
        lines.append(f"  {one.adapter}")
    if one.stage:
        lines.append(f"  {one.stage}{f': {one.prefill}' if one.prefill else ''}")
    for profile in one.profiles:
        lines += ["", *_profile_lines(profile)]
    return "\n".join(lines)


def _profile_lines(profile: ProfileExplanation) -> Iterator[str]:
    yield f"profile {profile.profile}: {profile.candidates} candidates"
    for step in profile.filters:
        yield f"  {step.filter} left {step.left}" + (f"; out: {', '.join(step.removed)}" if step.removed else "")
    names = list(profile.weights)
    width = max([len(one.address) for one in profile.endpoints], default=8)
    heads = [f"{name} x {profile.weights[name]:g}" if profile.weights[name] else f"({name})" for name in names]
    yield "  " + "  ".join(["endpoint".ljust(width), *heads, "total"])
    for one in profile.endpoints:
        cells = [f"{one.scores[name]:.4g}".rjust(len(head)) for name, head in zip(names, heads, strict=True)]
        yield "  " + "  ".join([one.address.ljust(width), *cells, f"{one.total:.4g}".rjust(5)])
