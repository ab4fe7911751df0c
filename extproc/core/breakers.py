# SPDX-License-Identifier: Apache-2.0
"""The breakers of ModelServers and their endpoints: who is let in, what other processes know, what operators reset."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from extproc.core.effects import BreakerChanged, HealthChanged
from extproc.core.peer_events import BreakerSnapshot
from extproc.endpoints.breaker import BreakerState
from extproc.endpoints.breaker_ranks import set_breaker
from extproc.endpoints.health import EndpointHealth
from extproc.refusals import ServerFailing

if TYPE_CHECKING:
    import random
    from collections.abc import Iterable, Mapping

    from extproc.core.effects import Effect
    from extproc.endpoints.breaker import Breaker
    from extproc.scheduling.pool import Pool

# Of breakers on the wire, those of all ModelServers together.
_MOST_KNOWN: Final = 10_000


def draw_breaker_pass(pool: Pool, now: float, rng: random.Random) -> bool:
    """Whether a request may go to the ModelServer, by the share that its breaker lets through."""
    breaker = pool.breaker
    return not breaker.generation or rng.random() < breaker.passing_share(now)


def may_probe(pool: Pool, now: float) -> bool:
    """Whether the next request that goes to the ModelServer is a probe of its breaker."""
    return bool(pool.breaker.trips) and pool.next_probe_at_s(now) <= now


def check_server_breaker(pool: Pool, now: float, *, is_drawn: bool) -> None:
    """Raises ServerFailing if the ModelServer's breaker, which is not closed, does not let the request through.
    ``draw_breaker_pass``: it may go beside the probe.
    """
    breaker = pool.breaker
    if not len(pool.table):
        return
    state, again_s = breaker.state(now), pool.next_probe_at_s(now)
    if state is BreakerState.OPEN or (not is_drawn and again_s > now):
        raise ServerFailing(
            "The engines of this model answer with errors, so requests are not sent there for now; try again later.",
            retry_after_s=max(1, math.ceil(again_s - now)),
        )


def breakers_for_peers(pools: Iterable[Pool], now: float) -> list[BreakerSnapshot]:
    """For the other processes."""
    found = [
        BreakerSnapshot(pool.name, address, breaker.with_clock_shift(-now))
        for pool in pools
        for address, breaker in breakers_of(pool)
        if breaker.generation
    ]
    return found[:_MOST_KNOWN]


def breakers_of(pool: Pool) -> Iterable[tuple[str, Breaker]]:
    """By address; that of the ModelServer itself has an empty one. Those that have never opened may be left out."""
    table = pool.table
    yield "", pool.breaker
    if table.has_tripped:
        for row in table.active_rows:
            yield table.addresses[row], table.breakers[row]


def server_breaker_problems(pools: Iterable[Pool], now: float) -> dict[str, str]:
    """By ModelServer, what its breaker does, for its status; those whose breakers are closed are left out."""
    return {
        pool.name: f"its breaker is {pool.breaker.state(now).text}, as most of its requests have failed"
        for pool in pools
        if pool.breaker.trips
    }


def merge_breakers(pools: Mapping[str, Pool], known: Iterable[BreakerSnapshot], now: float, out: list[Effect]) -> None:
    """What another process knows of breakers."""
    for one in known:
        pool = pools.get(one.server)
        row = None if pool is None or not one.address else pool.table.row_of(one.address)
        if pool is None or (one.address and row is None):
            continue
        before = pool.breaker if row is None else pool.table.breakers[row]
        after = before.merged(one.breaker.with_clock_shift(now), now)
        if after is not before:
            change_breaker(pool, row, after, out, is_news=bool(before.trips) != bool(after.trips))


def reset_breakers(pool: Pool, address: str, now: float, out: list[Effect]) -> None:
    """Close the breaker of an endpoint; with an empty ``address`` those of the ModelServer and all its endpoints."""
    rows: list[int | None] = [pool.table.row_of(address)] if address else [None, *pool.table.active_rows]
    for row in rows:
        if address and row is None:
            continue
        before = pool.breaker if row is None else pool.table.breakers[row]
        if before.trips or now < before.not_before_s:
            change_breaker(pool, row, before.reset(now), out, is_news=bool(before.trips))


def change_breaker(pool: Pool, row: int | None, after: Breaker, out: list[Effect], *, is_news: bool) -> None:
    """An endpoint's breaker is in another generation; ``row`` None: that of the ModelServer, whose next failure is
    judged by what comes after. Where an endpoint's closes, it is no suspect any more. ``is_news``: it is reported.
    """
    before, address = (pool.breaker, "") if row is None else (pool.table.breakers[row], pool.table.addresses[row])
    if row is None:
        pool.breaker, pool.health = after, EndpointHealth()
    else:
        set_breaker(pool.table, row, after)
    if is_news:
        out.append(BreakerChanged(pool.name, address, before, after))
    if row is not None and not after.trips and pool.table.healths[row].is_suspect:
        pool.table.healths[row].reasons.clear()
        out.append(HealthChanged(pool.name, address, None))
