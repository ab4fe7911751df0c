# SPDX-License-Identifier: Apache-2.0
"""The buckets in Redis keep the same promise as those in memory, whoever asks and whatever goes wrong."""

from __future__ import annotations

import asyncio
import math
import random
import time
from typing import TYPE_CHECKING, Any

import pytest

from extproc.admission.rate_limits import Charge, Grant, RequestUsage, StoreUnavailable
from extproc.admission.token_buckets import BucketReportToStore, Limit
from extproc.feeds.redis_limits import RedisLimits, _read_answer, _settled, _Settlement
from extproc.metrics.request_metrics import Metrics
from extproc.refusals import RateLimited
from tests.programs import program
from tests.store_model import Store
from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.redis_server import Redis

CLOCK = time.monotonic  # noqa: TID251 - an edge


def charge(amount: float, *, rate: float = 1e-6, capacity: float = 100.0, key: str = "k") -> Charge:
    return Charge(key, Limit(rate, capacity), "output_tokens", amount, is_global=True)


def client(redis: Redis, process: str) -> RedisLimits:
    return RedisLimits(redis.url, "test", Metrics(list, CLOCK, CLOCK), CLOCK, process=process)


@pytest.fixture
async def limits(redis: Redis) -> AsyncIterator[list[RedisLimits]]:
    """Four processes' clients, with their settlements running."""
    clients = [client(redis, str(number)) for number in range(4)]
    tasks = [asyncio.create_task(one.run()) for one in clients]
    yield clients
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def ask(limits: RedisLimits, *charges: Charge) -> Grant | RateLimited:
    """As soon as Redis answers, which on a busy machine may be later than its clients wait."""
    async with asyncio.timeout(120):
        while isinstance(found := await limits.reserve(charges), StoreUnavailable):  # noqa: ASYNC110 - Redis comes back by itself
            await asyncio.sleep(0.05)
    return found


async def reserve(limits: RedisLimits, *charges: Charge) -> Grant:
    """Granted."""
    found = await ask(limits, *charges)
    assert isinstance(found, Grant)
    return found


async def level(limits: RedisLimits, one: Charge) -> float:
    (left,) = (await reserve(limits, Charge(one.key, one.limit, one.resource, 0.0))).levels
    return left


async def until(limits: RedisLimits, one: Charge, queued: float) -> None:
    async with asyncio.timeout(120):
        while abs(await level(limits, one) - queued) > 0.01:  # noqa: ASYNC110 - it happens in another process
            await asyncio.sleep(0.01)


async def test_all_of_it_or_nothing(limits: list[RedisLimits]) -> None:
    await reserve(limits[0], charge(60))
    refused = await ask(limits[1], charge(50), charge(10, key="other"))
    assert isinstance(refused, RateLimited)
    assert "50, 40 of 100 are left" in refused.message
    assert await level(limits[2], charge(0, key="other")) == 100
    assert await level(limits[3], charge(0)) == pytest.approx(40, abs=0.01)


async def test_what_was_not_used_comes_back_and_debts_are_kept(limits: list[RedisLimits]) -> None:
    grant = await reserve(limits[0], charge(80))
    limits[0].settle(grant, RequestUsage(0, 30))
    await until(limits[1], charge(0), 70)
    grant = await reserve(limits[1], charge(70))
    limits[1].settle(grant, RequestUsage(0, 200))
    await asyncio.sleep(0.2)
    assert isinstance(await ask(limits[2], charge(1)), RateLimited)


async def test_an_answer_that_was_there_in_time_counts_though_we_were_too_busy_to_read_it(
    limits: list[RedisLimits], redis: Redis
) -> None:
    await reserve(limits[0], charge(10))

    async def is_granted() -> bool:
        redis.hang()
        asked = asyncio.create_task(limits[0].reserve([charge(10)]))
        await asyncio.sleep(0.05)
        redis.go_on()
        # the whole process has no processor, and meanwhile the time is over
        time.sleep(0.4)  # noqa: ASYNC251 - that is what is tested
        return isinstance(await asked, Grant)

    # on a busy machine Redis itself may have answered too late
    await eventually(is_granted)


async def test_a_request_that_never_went_gives_everything_back(limits: list[RedisLimits]) -> None:
    limits[0].settle(await reserve(limits[0], charge(100)), None)
    await until(limits[1], charge(0), 100)


@pytest.mark.real_time
async def test_what_would_have_run_over_meanwhile_does_not_come_back(limits: list[RedisLimits]) -> None:
    fast = charge(100, rate=1000.0)
    old = await reserve(limits[0], fast)
    await asyncio.sleep(0.15)
    new = await reserve(limits[0], fast)
    limits[0].settle(old, RequestUsage(0, 0))
    await asyncio.sleep(0.02)
    # had the first taken nothing, the second would have found no more than it did
    assert await level(limits[1], fast) < 70
    limits[0].settle(new, None)


@pytest.mark.real_time
async def test_four_processes_never_grant_more_than_one_would(limits: list[RedisLimits]) -> None:
    rng, rate, capacity = random.Random(5), 2000.0, 300.0
    granted: list[tuple[float, float, float]] = []

    async def ask(one: RedisLimits) -> None:
        until_s = CLOCK() + 2.0
        while CLOCK() < until_s:
            amount = rng.uniform(1, 120)
            began_s = CLOCK()
            found = await one.reserve([charge(amount, rate=rate, capacity=capacity)])
            if isinstance(found, Grant):
                used = amount * rng.random()
                granted.append((began_s, CLOCK(), used))
                await asyncio.sleep(rng.expovariate(100))
                one.settle(found, RequestUsage(0, used))
            await asyncio.sleep(rng.expovariate(300))

    await asyncio.gather(*(ask(one) for one in limits for _ in range(3)))
    assert len(granted) > 50
    for begin_s, _, _ in granted:
        total = 0.0
        for sent_s, answered_s, used in sorted(granted, key=lambda one: one[1]):
            if sent_s >= begin_s:
                total += used
                assert total <= rate * (answered_s - begin_s) + capacity + 1
    # more than the reservations alone would have allowed: what was not used was granted again
    assert sum(used for _, _, used in granted) > 0.5 * 2.0 * rate


@pytest.mark.real_time
async def test_a_redis_that_begins_anew_is_told_how_full_its_buckets_were(
    redis: Redis, limits: list[RedisLimits]
) -> None:
    await reserve(limits[0], charge(70))
    redis.stop()
    away = await limits[0].reserve([charge(1)])
    assert isinstance(away, StoreUnavailable)
    assert away.most_left == pytest.approx([30.0], abs=0.01)
    # and nobody waits for it again so soon
    began_s = CLOCK()
    assert isinstance(await limits[0].reserve([charge(1)]), StoreUnavailable)
    assert CLOCK() - began_s < 0.1
    # what is granted meanwhile is charged afterwards
    limits[0].record_overdraft(charge(0), 20.0)
    limits[0].record_overdraft(charge(0), -5.0)
    redis.start()

    assert await level(limits[0], charge(0)) == pytest.approx(15, abs=0.01)
    # who knows nothing of the bucket finds it so
    assert await level(limits[1], charge(0)) == pytest.approx(15, abs=0.01)


@pytest.mark.real_time
async def test_debts_are_paid_though_nobody_asks(redis: Redis, limits: list[RedisLimits]) -> None:
    await reserve(limits[0], charge(10))
    limits[0].record_overdraft(charge(0), 30.0)
    await until(limits[1], charge(0), 60)
    redis.stop()
    assert isinstance(await limits[0].reserve([charge(1)]), StoreUnavailable)
    limits[0].record_overdraft(charge(0), 100.0)
    limits[0].record_overdraft(charge(0, key="other"), 40.0)
    redis.start()

    async def is_charged() -> bool:
        return isinstance(await limits[1].reserve([charge(1)]), RateLimited)

    await eventually(is_charged)
    assert await level(limits[1], charge(0, key="other")) == pytest.approx(60, abs=0.01)


@pytest.mark.real_time
async def test_what_went_beyond_while_redis_was_away_is_charged(redis: Redis, limits: list[RedisLimits]) -> None:
    grant = await reserve(limits[0], charge(10))
    redis.stop()
    limits[0].settle(grant, RequestUsage(0, 35))
    await eventually(lambda: limits[0]._memory.has_debts)
    redis.start()
    await until(limits[0], charge(0), 65)


@pytest.mark.real_time
async def test_a_redis_that_hangs_is_charged_once_it_goes_on(redis: Redis, limits: list[RedisLimits]) -> None:
    await reserve(limits[0], charge(10))
    redis.hang()
    assert isinstance(await limits[0].reserve([charge(20)]), StoreUnavailable)
    limits[0].record_overdraft(charge(0), 50.0)
    redis.go_on()

    # what it granted too late is given back, and the debt is taken once, whether its first answer came or not
    await until(limits[1], charge(0), 40)


async def test_buckets_do_not_stay_in_redis_for_ever(redis: Redis, limits: list[RedisLimits]) -> None:
    await reserve(limits[0], charge(50, rate=1.0))
    process = await asyncio.create_subprocess_exec(
        program("redis-cli"), "-p", str(redis.port), "ttl", "test:limit:k", stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    assert 3600 <= int(out) <= 3800


@pytest.mark.parametrize("amount", [-1e15, -1.0, float("nan"), float("inf")])
async def test_amounts_that_are_none_change_nothing(limits: list[RedisLimits], amount: float) -> None:
    held = await reserve(limits[0], charge(60))
    odd = await reserve(limits[0], charge(amount))
    assert odd.levels == pytest.approx([40.0], abs=0.01)
    limits[0].settle(odd, RequestUsage(0, amount))
    limits[0].settle(held, RequestUsage(0, amount))
    await until(limits[1], charge(0), 100)
    assert isinstance(await ask(limits[2], charge(101)), RateLimited)


async def test_a_look_up_whose_client_goes_away_gives_its_grant_back(limits: list[RedisLimits]) -> None:
    await level(limits[0], charge(0))
    for _ in range(20):
        asking = asyncio.create_task(limits[0].reserve([charge(90)]))
        # it has been sent by then, and is not answered
        for _ in range(4):
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        assert asking.cancelled()
        await until(limits[1], charge(0), 100)
    assert not limits[0]._late


async def test_a_clock_that_ran_ahead_does_not_freeze_a_limit(limits: list[RedisLimits]) -> None:
    fast = charge(100, rate=1000.0)
    await reserve(limits[0], fast)
    await limits[0]._redis.hset("test:limit:k", "at", str(time.time() + 1e6))  # noqa: TID251 - Redis' own time
    async with asyncio.timeout(20):
        while isinstance(await limits[0].reserve([fast]), RateLimited):  # noqa: ASYNC110 - Redis' time passes
            await asyncio.sleep(0.01)


async def test_a_process_that_ends_charges_what_it_owes(redis: Redis, limits: list[RedisLimits]) -> None:
    ending = client(redis, "ending")
    task = asyncio.create_task(ending.run())
    ending.settle(await reserve(ending, charge(50)), RequestUsage(0, 20))
    ending.record_overdraft(charge(0), 30.0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert await level(limits[0], charge(0)) == pytest.approx(50, abs=0.01)


def delayed(limits: RedisLimits) -> asyncio.Event:
    """The client's batches wait for this before they are sent."""
    may_go, made = asyncio.Event(), limits._redis.pipeline

    def pipeline(**options: Any) -> Any:  # noqa: ANN401 - the library has no types
        pipe = made(**options)
        execute = pipe.execute

        async def later() -> list[Any]:
            await may_go.wait()
            return list(await execute())

        pipe.execute = later
        return pipe

    limits._redis.pipeline = pipeline
    return may_go


async def test_a_question_that_overtakes_the_payment_of_a_debt_pays_it(redis: Redis) -> None:
    one = client(redis, "one")
    await reserve(one, charge(10))
    one.record_overdraft(charge(0), 40.0)
    # as if it had begun anew
    await one._redis.flushall()
    may_go = delayed(one)
    paying = asyncio.create_task(one._pay_batch())
    await asyncio.sleep(0)
    assert isinstance(await one.reserve([charge(51)]), RateLimited)
    may_go.set()
    await paying
    assert await level(one, charge(0)) == pytest.approx(50, abs=0.01)
    await one._redis.aclose()


async def test_a_settlement_does_not_fill_a_redis_that_comes_back_empty(limits: list[RedisLimits]) -> None:
    ending = await reserve(limits[0], charge(70))
    await limits[0]._redis.flushall()
    limits[0].settle(ending, RequestUsage(0, 70))

    async def is_settled() -> bool:
        return bool(await limits[0]._redis.exists("test:limit:k"))

    await eventually(is_settled)
    # who knows nothing of the bucket finds it so
    assert await level(limits[1], charge(0)) == pytest.approx(30, abs=0.01)


async def test_a_redis_that_lost_a_bucket_gives_nothing_back_that_any_process_knows_of(
    limits: list[RedisLimits],
) -> None:
    idle, busy, new, _ = limits
    await reserve(idle, charge(10))
    await reserve(busy, charge(20))
    await busy._redis.flushall()
    assert await level(new, charge(0)) == 100
    await reserve(idle, charge(30))
    for one in (busy, idle, busy, new):
        assert await level(one, charge(0)) == pytest.approx(40, abs=0.01)


async def test_a_lost_bucket_that_was_empty_is_kept_though_nothing_is_granted(limits: list[RedisLimits]) -> None:
    idle, busy, *_ = limits
    await reserve(idle, charge(10))
    await reserve(busy, charge(90))
    await busy._redis.flushall()
    assert isinstance(await ask(busy, charge(1)), RateLimited)
    assert isinstance(await ask(idle, charge(1)), RateLimited)


async def test_the_scripts_and_their_model_agree(limits: list[RedisLimits]) -> None:
    """With next to no inflow: virtual and real time need not agree."""
    rng, store, now = random.Random(7), Store(), 0.0
    one, limit = limits[0], charge(0).limit
    granted, grants, settled = list[tuple[Grant, Grant]](), 0, 0
    for _ in range(400):
        now += 1e-6
        told = rng.choice([0.0, 5.0, 10.0])
        owed, uncovered = told + rng.choice([0.0, 0.0, 5.0]), rng.choice([0.0, 3.0, math.inf])
        # of no answer, of an earlier life of the bucket, or of this one
        seen_at_s = rng.choice([0.0, 0.0, 1e-9, 1e12])
        stated = BucketReportToStore(rng.uniform(20, 100), owed, told, uncovered, seen_at_s)
        if rng.random() < 0.05:
            await one._redis.flushall()
            store.forget()
        if granted and rng.random() < 0.4:
            real, model = granted.pop(rng.randrange(len(granted)))
            settled += 1
            used = RequestUsage(0, rng.uniform(0, 1.2) * real.charges[0].amount)
            answer = await one._settle(
                keys=one._keys(real.charges),
                args=[one._process, *_settled(_Settlement(settled, real, used), [stated])],
                client=None,
            )
            expected = store.settle("0", model, used, stated, now)
            assert float(answer[1]) == pytest.approx(expected, abs=0.01)
            continue
        asked = Charge("k", limit, "output_tokens", rng.choice([0.0, 5.0, 20.0]), is_global=True)
        found, (left,), *_ = _read_answer([asked], await one._ask([asked], [stated]))
        also_found, expected = store.reserve("0", asked, stated, now)
        assert isinstance(found, Grant) == isinstance(also_found, Grant)
        assert left == pytest.approx(expected, abs=0.01)
        if isinstance(found, Grant) and isinstance(also_found, Grant):
            grants += 1
            granted.append((found, also_found))
    assert grants > 50
    assert settled > 50


@pytest.mark.parametrize(
    "words",
    [
        ("HSET", "level", "nan"),
        ("HSET", "claims", "inf"),
        ("HSET", "at", "x"),
        ("HSET", "shrink", b"\xff"),
        ("HDEL", "epoch"),
        ("SET", "text"),
        ("RPUSH", "a", "b"),
    ],
)
async def test_a_key_that_somebody_else_has_written_is_a_lost_bucket(
    words: tuple[str | bytes, ...], limits: list[RedisLimits]
) -> None:
    one = charge(60.0)
    granted = await reserve(limits[0], one)
    command, *rest = words
    if command in {"SET", "RPUSH"}:
        await limits[0]._redis.delete("test:limit:k")
    await limits[0]._redis.execute_command(command, "test:limit:k", *rest)
    # the process states what was left
    assert await level(limits[0], one) == pytest.approx(40.0)
    limits[0].settle(granted, None)
    await until(limits[0], one, 40.0)
    assert isinstance(await ask(limits[1], charge(41.0)), RateLimited)
