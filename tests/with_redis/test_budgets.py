# SPDX-License-Identifier: Apache-2.0
"""Budgets of several machines, in Redis: exact, never refilled before their window ends, and gone a day after it."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import TYPE_CHECKING

import pytest

from extproc.admission.local_limits import LocalLimits
from extproc.admission.rate_limits import Charge, ChargedBudget, Grant, RequestUsage, StoreUnavailable
from extproc.admission.token_buckets import BucketLevel, Limit
from extproc.core.effects import ChargeSharedStore
from extproc.core.limit_accounting import LimitAccounting
from extproc.feeds.redis_limits import RedisLimits
from extproc.metrics.request_metrics import Metrics
from extproc.refusals import BudgetSpent
from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from extproc.core.effects import Effect
    from extproc.refusals import Refusal
    from tests.redis_server import Redis

CLOCK = time.monotonic  # noqa: TID251 - an edge
NOW = time.time()  # noqa: TID251 - Redis' own, when keys expire
PART = ChargedBudget("default/chat/b", "b", "b", "tenant", "month", "tokens")


def charge(amount: float, *, most: float = 100.0, key: str = "$budget/k", ends_in_s: float = 3600.0) -> Charge:
    limit = Limit(0.0, most, NOW + ends_in_s)
    return Charge(key, limit, "output_tokens", amount, is_global=True, budget=PART, ends_in_s=ends_in_s)


@pytest.fixture
async def limits(redis: Redis) -> AsyncIterator[list[RedisLimits]]:
    """Four machines' clients, with their settlements running."""
    metrics = Metrics(list, CLOCK, CLOCK)
    clients = [RedisLimits(redis.url, "test", metrics, CLOCK, process=str(number)) for number in range(4)]
    tasks = [asyncio.create_task(one.run()) for one in clients]
    yield clients
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def ask(limits: RedisLimits, one: Charge) -> Grant | Refusal:
    """As soon as Redis answers, which on a busy machine may be later than its clients wait."""
    async with asyncio.timeout(120):
        while isinstance(found := await limits.reserve([one]), StoreUnavailable):  # noqa: ASYNC110 - Redis comes back by itself
            await asyncio.sleep(0.05)
    return found


async def level(limits: RedisLimits, one: Charge) -> float:
    """What is left, asked with nothing reserved."""
    found = await ask(limits, Charge(one.key, one.limit, one.resource, 0.0, is_global=True, budget=PART))
    if isinstance(found, Grant):
        return found.levels[0]
    # in debt, or spent to nothing
    return 0.0


async def test_machines_at_once_are_granted_the_budget_and_no_more(limits: list[RedisLimits]) -> None:
    found = await asyncio.gather(*(ask(limits[number % 4], charge(5.0)) for number in range(200)))
    granted = sum(isinstance(one, Grant) for one in found)
    assert granted <= 20

    async def is_exact() -> bool:
        # what Redis granted later than its client waited is given back
        return await level(limits[0], charge(0.0)) == 100.0 - 5.0 * granted

    await eventually(is_exact)
    refused = next(one for one in found if not isinstance(one, Grant))
    assert isinstance(refused, BudgetSpent)
    assert refused.error_type == "insufficient_quota"


async def test_what_was_not_used_comes_back_and_time_gives_nothing(limits: list[RedisLimits]) -> None:
    grant = await ask(limits[0], charge(80.0))
    assert isinstance(grant, Grant)
    limits[0].settle(grant, RequestUsage(0.0, 30.0))

    async def is_settled() -> bool:
        return await level(limits[1], charge(0.0)) == 70.0

    await eventually(is_settled)
    # a budget's bucket has rate 0, so a second look is as good as a later one
    assert await level(limits[2], charge(0.0)) == 70.0


async def test_a_window_is_a_key_that_stays_a_day_longer(limits: list[RedisLimits]) -> None:
    await ask(limits[0], charge(100.0, key="$budget/first"))
    assert isinstance(await ask(limits[0], charge(100.0, key="$budget/second", ends_in_s=7200.0)), Grant)
    client = limits[0]._redis
    expires = await client.expiretime("test:limit:$budget/first")
    assert expires == pytest.approx(NOW + 3600.0 + 86_400.0, abs=2.0)


async def test_a_settlement_after_the_end_of_its_window_changes_no_other(limits: list[RedisLimits]) -> None:
    ended = await ask(limits[0], charge(100.0, key="$budget/ended", ends_in_s=-10.0))
    assert isinstance(ended, Grant)
    assert isinstance(await ask(limits[0], charge(60.0, key="$budget/open")), Grant)
    limits[0].settle(ended, RequestUsage(0.0, 10.0))

    async def is_settled() -> bool:
        return await level(limits[1], charge(0.0, key="$budget/ended", ends_in_s=-10.0)) == 90.0

    await eventually(is_settled)
    assert await level(limits[1], charge(0.0, key="$budget/open")) == 40.0


async def test_another_maximum_keeps_what_was_used(limits: list[RedisLimits]) -> None:
    await ask(limits[0], charge(40.0))
    assert await level(limits[1], charge(0.0, most=200.0)) == 160.0
    await ask(limits[1], charge(60.0, most=200.0))
    # two machines may have two configurations for a moment
    assert await level(limits[0], charge(0.0, most=100.0)) == 0.0
    assert await level(limits[1], charge(0.0, most=200.0)) == 100.0


async def test_a_lost_redis_begins_with_what_is_known_and_with_rows(limits: list[RedisLimits]) -> None:
    await ask(limits[0], charge(30.0))
    await limits[0]._redis.flushall()
    assert await level(limits[0], charge(0.0)) == 70.0
    rows = charge(0.0, key="$budget/rows")
    limits[0].cap_budgets([BucketLevel(rows.key, rows.limit, 25.0)])
    assert await level(limits[0], rows) == 25.0


async def test_rows_lower_a_bucket_that_is_there_and_never_raise_it(limits: list[RedisLimits]) -> None:
    running = await ask(limits[0], charge(30.0))
    assert isinstance(running, Grant)
    limits[1].cap_budgets([BucketLevel("$budget/k", running.charges[0].limit, 20.0)])

    async def is_lowered() -> bool:
        return await level(limits[2], charge(0.0)) == 20.0

    await eventually(is_lowered)
    limits[1].cap_budgets([BucketLevel("$budget/k", running.charges[0].limit, 60.0)])
    await eventually(lambda: not limits[1]._levels)
    assert await is_lowered()
    # what was reserved and not used comes back
    limits[0].settle(running, RequestUsage(0.0, 10.0))

    async def is_settled() -> bool:
        return await level(limits[2], charge(0.0)) == 40.0

    await eventually(is_settled)


async def test_a_bucket_that_redis_has_lost_is_told_to_whoever_asks_first(limits: list[RedisLimits]) -> None:
    told: list[int] = []
    for number, one in enumerate(limits):
        one.on_new_bucket = partial(told.append, number)
    await ask(limits[0], charge(90.0))
    await ask(limits[1], charge(0.0))
    assert told == [0]
    await limits[0]._redis.flushall()
    # a process that knows nothing of this budget
    assert await level(limits[2], charge(0.0)) == 100.0
    assert told == [0, 2]
    # the rows that it asks for then
    limits[2].cap_budgets([BucketLevel("$budget/k", charge(0.0).limit, 10.0)])

    async def is_lowered() -> bool:
        return await level(limits[3], charge(0.0)) == 10.0

    await eventually(is_lowered)


async def test_levels_of_rows_wait_for_a_redis_that_is_away(limits: list[RedisLimits], redis: Redis) -> None:
    await ask(limits[0], charge(30.0))
    redis.stop()
    limits[1].cap_budgets([BucketLevel("$budget/k", charge(0.0).limit, 20.0)])
    away = await limits[1].reserve([charge(1.0)])
    assert isinstance(away, StoreUnavailable)
    assert away.most_left == [20.0]
    redis.start()

    async def is_lowered() -> bool:
        return await level(limits[2], charge(0.0)) == 20.0

    await eventually(is_lowered)


async def test_what_was_granted_without_redis_is_not_left_when_the_part_grows(
    limits: list[RedisLimits], redis: Redis
) -> None:
    await ask(limits[0], charge(900.0, most=1000.0))
    redis.stop()
    peers = 2
    accounts = LimitAccounting(LocalLimits(), machine=None, peers=lambda: peers)
    granted = 0
    for most in (33, 200):
        for _ in range(most):
            one = charge(1.0, most=1000.0)
            away = await limits[0].reserve([one])
            assert isinstance(away, StoreUnavailable)
            out: list[Effect] = []
            try:
                accounts.reserve_without_store([one], away.most_left, 0.0, out)
            except BudgetSpent:
                break
            granted += 1
            for effect in out:
                if isinstance(effect, ChargeSharedStore):
                    limits[0].record_overdraft(effect.charge, effect.amount)
        peers = 0
    assert granted == 100


async def test_without_redis_no_more_is_left_than_was_known(limits: list[RedisLimits], redis: Redis) -> None:
    await ask(limits[0], charge(90.0))
    redis.stop()
    away = await limits[0].reserve([charge(20.0)])
    assert isinstance(away, StoreUnavailable)
    assert away.most_left == [10.0]
