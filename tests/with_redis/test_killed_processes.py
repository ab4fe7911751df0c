# SPDX-License-Identifier: Apache-2.0
"""Processes that are killed, or slow, while they have reserved of budgets in Redis."""

from __future__ import annotations

import asyncio
import random
import signal
import sys
import textwrap
import time
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from extproc.admission.rate_limits import Charge, ChargedBudget, Grant, RequestUsage, StoreUnavailable
from extproc.admission.token_buckets import Limit
from extproc.feeds import redis_limits
from extproc.feeds.redis_limits import RedisLimits
from extproc.metrics.request_metrics import Metrics
from tests.examples import examples
from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from extproc.refusals import Refusal
    from tests.redis_server import Redis

CLOCK = time.monotonic  # noqa: TID251 - an edge
NOW = time.time()  # noqa: TID251 - Redis' own, when keys expire
PART = ChargedBudget("default/chat/b", "b", "b", "tenant", "month", "tokens")
MOST = 1000.0
# as the scripts have it
SILENCE_S = 10.0


def charge(amount: float, key: str = "$budget/k") -> Charge:
    return Charge(key, Limit(0.0, MOST, NOW + 3600.0), "output_tokens", amount, is_global=True, budget=PART)


def rate_limit(amount: float) -> Charge:
    return Charge("rate", Limit(1e-6, MOST), "output_tokens", amount, is_global=True)


class Machines:
    """Processes that share a Redis whose time is ``now``. Nothing of theirs runs by itself."""

    def __init__(self, redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("RESERVE", "SETTLE", "LOWER", "BEAT"):
            script = getattr(redis_limits, name).replace("redis.call('TIME')", "{redis.call('GET', 'now'), '0'}")
            monkeypatch.setattr(redis_limits, name, script)
        # on a busy machine Redis may be late
        monkeypatch.setattr(redis_limits, "_TIMEOUT_S", 60.0)
        self._url = redis.url
        self.now = NOW
        self.all: list[RedisLimits] = []
        self.observer = self.starts()

    def starts(self) -> RedisLimits:
        # its own clock is real: only Redis tells who is dead
        made = RedisLimits(self._url, "test", Metrics(list, CLOCK, CLOCK), CLOCK, process=f"p{len(self.all)}")
        self.all.append(made)
        return made

    async def passes(self, seconds: float) -> None:
        self.now += seconds
        await self.observer._redis.set("now", f"{self.now:.6f}")

    async def silent(self, *living: RedisLimits) -> None:
        """For longer than a process that lives is."""
        for _ in range(int(SILENCE_S) + 3):
            await self.passes(1.0)
            for one in living:
                await one.heartbeat()

    async def left(self, key: str = "$budget/k") -> float:
        """As a process finds it that asks for nothing."""
        await ask(self.observer, charge(0.0, key))
        return float(await self.observer._redis.hget(f"test:limit:{key}", "level") or MOST)


async def ask(limits: RedisLimits, *charges: Charge) -> Grant | Refusal:
    """As soon as Redis answers, which on a busy machine may be later than its clients wait."""
    async with asyncio.timeout(120):
        while isinstance(found := await limits.reserve(charges), StoreUnavailable):
            await asyncio.sleep(0.05)
            limits._retry_at_s = 0.0
    return found


async def reserve(limits: RedisLimits, *charges: Charge) -> Grant:
    found = await ask(limits, *charges)
    assert isinstance(found, Grant)
    return found


async def settle(limits: RedisLimits) -> None:
    """All that it has."""
    while limits._settlements:
        await limits._settle_batch()


@pytest.fixture
async def machines(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Machines]:
    made = Machines(redis, monkeypatch)
    await made.passes(0.0)
    yield made
    for one in made.all:
        await one._redis.aclose()


async def test_what_a_killed_process_has_reserved_comes_back_and_what_a_living_one_has_stays(
    machines: Machines,
) -> None:
    killed, lives = machines.starts(), machines.starts()
    await reserve(killed, charge(300.0), charge(1.0, "$budget/other"))
    await reserve(killed, charge(200.0))
    held = await reserve(lives, charge(100.0))
    await machines.silent(lives)
    assert await machines.left() == MOST - 100.0
    assert await machines.left("$budget/other") == MOST
    lives.settle(held, RequestUsage(0.0, 40.0))
    await settle(lives)
    await machines.passes(60.0)
    assert await machines.left() == MOST - 40.0


async def test_one_that_is_refused_finds_what_comes_back(machines: Machines) -> None:
    await reserve(machines.starts(), charge(MOST))
    lives = machines.starts()
    assert not isinstance(await ask(lives, charge(1.0)), Grant)
    await machines.silent(lives)
    await reserve(lives, charge(MOST))
    assert not isinstance(await ask(lives, charge(1.0)), Grant)


@pytest.mark.parametrize("used", [0.0, 30.0, 100.0, 250.0])
async def test_a_slow_process_gives_nothing_back_twice_and_is_charged_what_it_has_used(
    machines: Machines, used: float
) -> None:
    slow, lives = machines.starts(), machines.starts()
    held = await reserve(slow, charge(100.0))
    await machines.silent(lives)
    assert await machines.left() == MOST
    again = await reserve(slow, charge(100.0))
    slow.settle(held, RequestUsage(0.0, used))
    await settle(slow)
    assert await machines.left() == MOST - used - 100.0
    slow.settle(again, RequestUsage(0.0, 50.0))
    await settle(slow)
    assert await machines.left() == MOST - used - 50.0


async def test_a_settlement_whose_answer_is_lost_counts_once(machines: Machines, redis: Redis) -> None:
    one = machines.starts()
    held = await reserve(one, charge(100.0), rate_limit(100.0))
    one.settle(held, RequestUsage(0.0, 30.0))
    lose_answers(one)
    await one._settle_batch()
    assert one._settlements
    await settle(one)
    assert await machines.left() == MOST - 30.0
    # Redis was away: nothing arrived
    held = await reserve(one, charge(100.0))
    one.settle(held, RequestUsage(0.0, 30.0))
    redis.hang()
    await one._settle_batch()
    assert one._settlements
    redis.go_on()
    await settle(one)
    assert await machines.left() == MOST - 60.0


async def test_an_outage_takes_nobody_for_dead(machines: Machines) -> None:
    one, other = machines.starts(), machines.starts()
    await reserve(one, charge(100.0))
    # nobody reaches Redis
    await machines.passes(600.0)
    await reserve(other, charge(200.0))
    await machines.passes(1.0)
    await one.heartbeat()
    await machines.silent(one, other)
    assert await machines.left() == MOST - 300.0
    # nor does a clock that is set
    for seconds in (7200.0, -7200.0):
        await machines.passes(seconds)
        assert await machines.left() == MOST - 300.0
        await machines.silent(one, other)
        assert await machines.left() == MOST - 300.0
    await machines.silent(one)
    assert await machines.left() == MOST - 100.0


@pytest.mark.parametrize("lost", [("DEL",), ("SET", "text"), ("ZADD", "7", "")])
async def test_a_set_of_processes_that_was_lost_or_is_none_takes_nobody_for_dead(
    machines: Machines, lost: tuple[str, ...]
) -> None:
    one, other = machines.starts(), machines.starts()
    await reserve(one, charge(100.0))
    await reserve(other, charge(10.0))
    command, *rest = lost
    await one._redis.delete("test:alive")
    if rest:
        await one._redis.execute_command(command, "test:alive", *rest)
    await machines.passes(1.0)
    assert await machines.left() == MOST - 110.0
    await machines.silent(one, other)
    assert await machines.left() == MOST - 110.0
    await machines.silent(one)
    assert await machines.left() == MOST - 100.0


@pytest.mark.parametrize("text", ["", "x", "nan 1 1", "inf 1 1", "-5 1 1", "1e300 1 1", "1e300", b"\xff"])
async def test_what_somebody_else_has_written_gives_back_no_more_than_was_reserved(
    machines: Machines, text: str | bytes
) -> None:
    one = machines.starts()
    held = await reserve(one, charge(100.0))
    await one._redis.hset("test:limit:$budget/k", "held:nobody", text)
    await machines.silent(one)
    assert MOST - 100.0 <= await machines.left() <= MOST
    one.settle(held, RequestUsage(0.0, 10.0))
    await settle(one)
    assert MOST - 110.0 <= await machines.left() <= MOST


async def test_what_was_reserved_of_a_lost_bucket_does_not_come_back(machines: Machines) -> None:
    one, killed = machines.starts(), machines.starts()
    await reserve(killed, charge(100.0))
    await reserve(one, charge(1.0))
    # only the numbers are lost
    await one._redis.hset("test:limit:$budget/k", "level", "nan")
    await reserve(one, charge(0.0))
    await machines.silent(one)
    assert await machines.left() == MOST - 101.0


async def test_redis_keeps_no_field_of_a_dead_process(machines: Machines) -> None:
    lives = machines.starts()
    for _ in range(30):
        dies = machines.starts()
        dies.settle(await reserve(dies, charge(1.0)), None)
        await settle(dies)
        await reserve(dies, charge(1.0))
        await machines.silent(lives)
    await reserve(lives, charge(1.0))
    fields = await lives._redis.hkeys("test:limit:$budget/k")
    assert sum(one.startswith(b"held:") for one in fields) <= 2
    assert await lives._redis.zcard("test:alive") <= 2


def lose_answers(limits: RedisLimits) -> None:
    """Redis gets the next batch, and its answer is lost."""
    made = limits._redis.pipeline

    def pipeline(**options: Any) -> Any:  # noqa: ANN401 - the library has no types
        limits._redis.pipeline = made
        pipe = made(**options)
        execute = pipe.execute

        async def lost(**options: Any) -> list[Any]:  # noqa: ANN401 - as above
            await execute(**options)
            raise ConnectionError("lost")

        pipe.execute = lost
        return pipe

    limits._redis.pipeline = pipeline


class Running(msgspec.Struct, eq=False):
    """A request. ``is_held``: its reservation was not given back."""

    process: RedisLimits
    grant: Grant
    is_held: bool = True

    @property
    def amount(self) -> float:
        return self.grant.charges[0].amount


class History:
    """Three processes, of which one may pause; each that is killed is replaced."""

    def __init__(self, machines: Machines, seed: int) -> None:
        self.machines = machines
        self.chosen = random.Random(seed)
        self.living = [machines.starts() for _ in range(3)]
        self.heard = dict.fromkeys(self.living, machines.now)
        self.paused, self.pause_ends_s = self.living[0], 0.0
        self.running: list[Running] = []
        self.used = 0.0

    async def time_passes(self) -> list[RedisLimits]:
        """Returns the processes that do not pause."""
        machines, chosen = self.machines, self.chosen
        await machines.passes(chosen.choice([0.0, 0.1, 1.0, 1.0, 4.0]))
        for one in self.running:
            # a heartbeat half a second after another is none
            one.is_held = one.is_held and machines.now - self.heard[one.process] < SILENCE_S - 0.5
        if machines.now >= self.pause_ends_s and chosen.randrange(8) == 0:
            self.paused, self.pause_ends_s = chosen.choice(self.living), machines.now + chosen.choice([3.0, 9.0, 12.0])
        awake = [one for one in self.living if one is not self.paused or machines.now >= self.pause_ends_s]
        for one in awake:
            await one.heartbeat()
            self.heard[one] = machines.now
        return awake

    async def asks(self, process: RedisLimits) -> None:
        found = await ask(process, charge(float(self.chosen.randrange(200))))
        if isinstance(found, Grant):
            self.running.append(Running(process, found))

    async def ends(self, process: RedisLimits) -> None:
        ours = [one for one in self.running if one.process is process]
        if not ours:
            return
        one = self.chosen.choice(ours)
        self.running.remove(one)
        used = self.chosen.choice([0.0, 0.5, 1.0, 1.5]) * one.amount
        self.used += used
        process.settle(one.grant, RequestUsage(0.0, used))
        if self.chosen.randrange(4) == 0:
            lose_answers(process)
        await settle(process)

    def is_killed(self, process: RedisLimits) -> None:
        self.living.remove(process)
        self.living.append(self.machines.starts())
        self.heard[self.living[-1]] = self.machines.now


@pytest.mark.parametrize("seed", range(examples(60)))
async def test_a_budget_has_what_is_not_used_after_kills_and_pauses_at_any_time(machines: Machines, seed: int) -> None:
    """What was settled is charged once; what is reserved is in the level unless its process was not heard for long."""
    history = History(machines, seed)
    for _ in range(80):
        process = history.chosen.choice(await history.time_passes())
        match history.chosen.randrange(8):
            case 0:
                history.is_killed(process)
            case 1 | 2 | 3:
                await history.asks(process)
            case _:
                await history.ends(process)
        left = await machines.left()
        assert left <= MOST - history.used - sum(one.amount for one in history.running if one.is_held) + 1e-6
        # it may take longer until a process is dead
        assert left >= MOST - history.used - sum(one.amount for one in history.running) - 1e-6
    await machines.silent(*history.living)
    for process in history.living:
        while any(one.process is process for one in history.running):
            await history.ends(process)
    assert await machines.left() == pytest.approx(MOST - history.used)


HOLDER = """
    import asyncio, time
    from extproc.feeds.redis_limits import RedisLimits
    from extproc.metrics.request_metrics import Metrics
    from tests.with_redis.test_killed_processes import charge, reserve

    async def main():
        clock = time.monotonic
        limits = RedisLimits({url!r}, "test", Metrics(list, clock, clock), clock, process="q")
        running = asyncio.create_task(limits.run())
        await reserve(limits, charge(600.0))
        print("reserved", flush=True)
        await running

    asyncio.run(main())
"""


async def test_a_real_process_that_lives_keeps_what_it_has_reserved_until_it_is_killed(redis: Redis) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", textwrap.dedent(HOLDER.format(url=redis.url)), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"reserved\n"
    limits = RedisLimits(redis.url, "test", Metrics(list, CLOCK, CLOCK), CLOCK, process="p")
    running = asyncio.create_task(limits.run())

    async def left() -> float:
        return (await reserve(limits, charge(0.0))).levels[0]

    assert await left() == MOST - 600.0
    # as if Redis had run for long
    assert await limits._redis.zrem("test:alive", "") == 1
    assert await left() == MOST - 600.0
    process.send_signal(signal.SIGKILL)
    await process.wait()

    async def is_back() -> bool:
        return await left() == MOST

    await eventually(is_back)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
