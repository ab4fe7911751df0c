# SPDX-License-Identifier: Apache-2.0
"""Rate limits that all machines share: buckets in Redis, one round trip a request.

Scripts change the buckets atomically, with the arithmetic of ``admission/buckets.py``. They use Redis' time, so the
machines' clocks need not agree. What is granted while Redis is away is charged to it afterwards (``admission/store_memory.py``).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from extproc.admission.buckets import Claim
from extproc.admission.limits import Charge, Grant, StoreAway, refusal
from extproc.admission.store_memory import Debt, StoreMemory
from extproc.feeds.redis_scripts import RESERVE, SETTLE
from extproc.replication.redis_bus import redis_client

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from extproc.admission.limits import Usage
    from extproc.errors import RateLimited
    from extproc.metrics.registry import Metrics

log = logging.getLogger(__name__)

# Without an answer in this time, the local buckets decide.
_TIMEOUT_S: Final = 0.25
# A process that had no processor for so long finds that time over before it reads the answer that came meanwhile.
_READING_S: Final = 0.02
# After a failure, Redis is not asked for this long.
_PAUSE_S: Final = 1.0
_CONNECTIONS: Final = 16
# Bounds the settlements that wait for Redis. The oldest are dropped; their reservations are not refunded.
_MAX_SETTLEMENTS: Final = 100_000
_BATCH_SIZE: Final = 200


class RedisLimits:
    """Reserves and settles in Redis."""

    def __init__(self, url: str, prefix: str, metrics: Metrics, clock: Callable[[], float]) -> None:
        """``url``: redis://host:port/db. ``prefix``: of the keys in Redis."""
        self._redis, self._error = redis_client(url, timeout_s=2 * _TIMEOUT_S, connections=_CONNECTIONS)
        self._reserve: Any = self._redis.register_script(RESERVE)
        self._settle: Any = self._redis.register_script(SETTLE)
        self._prefix = prefix
        self._metrics = metrics
        self._clock = clock
        self._retry_at_s = 0.0
        self._settlements: deque[tuple[Grant, Usage | None]] = deque(maxlen=_MAX_SETTLEMENTS)
        self._memory = StoreMemory()
        # settlements or debts
        self._has_news = asyncio.Event()
        # look-ups whose request is gone, until Redis answers or the client library gives up
        self._late: set[asyncio.Future[list[Any]]] = set()

    async def reserve(self, charges: Sequence[Charge]) -> Grant | RateLimited | StoreAway:
        """Reserve all charges or none; StoreAway if Redis does not answer in time."""
        now = self._clock()
        if now < self._retry_at_s:
            self._metrics.admission.asked_redis("away", 0.0)
            return self._away(charges)
        debts = [Debt(charge.key, charge.limit, self._memory.take_debt(charge.key)) for charge in charges]
        # a task of its own: Redis may grant what is not waited for any more, and that must be given back
        asked = asyncio.create_task(self._ask(charges, debts))
        try:
            answer = await _in_time(asked)
        except asyncio.CancelledError:
            self._give_back_later(charges, debts, asked)
            raise
        except (self._error, OSError) as error:  # includes TimeoutError
            self._give_back_later(charges, debts, asked)
            self._note_failure(error)
            return self._away(charges)
        found, levels = _read_answer(charges, answer)
        self._memory.saw(charges, levels, self._clock())
        result = "granted" if isinstance(found, Grant) else "refused"
        self._metrics.admission.asked_redis(result, self._clock() - now)
        return found

    def owe(self, charge: Charge, amount: float) -> None:
        """Charge Redis for what was used without it, as soon as it is back."""
        self._memory.owe(charge.key, charge.limit, amount)
        if self._memory.has_debts:
            self._has_news.set()

    def settle(self, grant: Grant, used: Usage | None) -> None:
        """Settle a grant in the background, in a batch with others."""
        self._settlements.append((grant, used))
        self._has_news.set()

    async def run(self) -> None:
        """Send settlements and debts until cancelled."""
        task = asyncio.current_task()
        try:
            # the client library swallows a cancellation while it connects
            while task is None or not task.cancelling():
                await self._has_news.wait()
                await asyncio.sleep(max(0.0, self._retry_at_s - self._clock()))
                # what was used without Redis first: until then others may be granted the same
                await (self._pay_batch() if self._memory.has_debts else self._settle_batch())
                if not self._settlements and not self._memory.has_debts:
                    self._has_news.clear()
        finally:
            for one in self._late:
                one.cancel()
            await self._send_last()
            await self._redis.aclose()

    async def _send_last(self) -> None:
        """What is left at the end, if Redis is there: nobody else knows of it."""
        if self._memory.has_debts and self._clock() >= self._retry_at_s:
            await self._pay_batch()
        if self._settlements and self._clock() >= self._retry_at_s:
            await self._settle_batch()

    def _away(self, charges: Sequence[Charge]) -> StoreAway:
        now = self._clock()
        return StoreAway([self._memory.most_left(charge.key, charge.limit, now) for charge in charges])

    async def _ask(self, charges: Sequence[Charge], debts: Sequence[Debt], client: Any = None) -> list[Any]:  # noqa: ANN401 - the library has no types
        now = self._clock()
        numbers = [
            number
            for charge, debt in zip(charges, debts, strict=True)
            for number in (
                charge.limit.rate,
                charge.limit.capacity,
                charge.amount,
                debt.amount,
                self._memory.most_left(charge.key, charge.limit, now),
            )
        ]
        answer: list[Any] = await self._reserve(
            keys=[self._key(charge.key) for charge in charges], args=numbers, client=client
        )
        return answer

    def _give_back_later(
        self, charges: Sequence[Charge], debts: Sequence[Debt], asked: asyncio.Future[list[Any]]
    ) -> None:
        """Nobody waits for this answer any more; if it is a grant, it is settled with nothing used."""

        def arrived(answer: asyncio.Future[list[Any]]) -> None:
            self._late.discard(answer)
            if answer.cancelled() or answer.exception() is not None:
                # Redis may have taken them; twice is safer than never
                self._owe_again(debts)
                return
            found, _ = _read_answer(charges, answer.result())
            if isinstance(found, Grant):
                self.settle(found, None)

        self._late.add(asked)
        asked.add_done_callback(arrived)

    def _owe_again(self, debts: Sequence[Debt]) -> None:
        for debt in debts:
            if debt.amount > 0:
                self._memory.owe(debt.key, debt.limit, debt.amount)
                self._has_news.set()

    async def _pay_batch(self) -> None:
        """Charge Redis for one batch of what was used without it."""
        debts = self._memory.take_debts(_BATCH_SIZE)
        try:
            # left without its end, a pipeline would keep its connection
            async with asyncio.timeout(1.0), self._redis.pipeline(transaction=False) as pipe:
                for debt in debts:
                    await self._ask([Charge(debt.key, debt.limit, "requests", 0.0)], [debt], client=pipe)
                await pipe.execute()
        except (self._error, OSError) as error:
            self._owe_again(debts)
            self._note_failure(error)

    async def _settle_batch(self) -> None:
        """Settle one batch. A failed batch is not repeated: applied twice, it would refund too much; what went beyond is owed."""
        count = min(_BATCH_SIZE, len(self._settlements))
        batch = [self._settlements.popleft() for _ in range(count)]
        try:
            # left without its end, a pipeline would keep its connection
            async with asyncio.timeout(1.0), self._redis.pipeline(transaction=False) as pipe:
                for grant, used in batch:
                    await self._settle(
                        keys=[self._key(charge.key) for charge in grant.charges],
                        args=list(_settled(grant, used)),
                        client=pipe,
                    )
                await pipe.execute()
        except (self._error, OSError) as error:
            for grant, used in batch:
                self._owe_again(_overruns(grant, used))
            self._note_failure(error)

    def _key(self, key: str) -> str:
        return f"{self._prefix}:limit:{key}"

    def _note_failure(self, error: Exception) -> None:
        if self._clock() >= self._retry_at_s:
            log.warning("Redis does not answer, granting limits locally: %r", error)
        self._retry_at_s = self._clock() + _PAUSE_S
        self._metrics.admission.asked_redis("failed", 0.0)


async def _in_time(asked: asyncio.Future[list[Any]]) -> list[Any]:
    """Redis' answer; raises TimeoutError."""
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            return await asyncio.shield(asked)
    except TimeoutError:
        async with asyncio.timeout(_READING_S):
            return await asyncio.shield(asked)


def _read_answer(charges: Sequence[Charge], answer: list[Any]) -> tuple[Grant | RateLimited, list[float]]:
    """What was found, and the levels that are left."""
    granted, *fields = answer
    levels = [float(one) for one in fields[::3]]
    if not granted:
        return refusal(charges, levels), levels
    states = zip(charges, fields[1::3], fields[2::3], strict=True)
    claims = [Claim(charge.amount, float(shrink), int(epoch)) for charge, shrink, epoch in states]
    return Grant(charges, claims, levels, is_global=True), levels


def _overruns(grant: Grant, used: Usage | None) -> list[Debt]:
    """By how much the usage went beyond the reservation."""
    if used is None:
        return []
    return [Debt(one.key, one.limit, used.of(one.resource) - one.amount) for one in grant.charges]


def _settled(grant: Grant, used: Usage | None) -> list[float]:
    return [
        number
        for charge, claim in zip(grant.charges, grant.claims, strict=True)
        for number in (
            charge.limit.rate,
            charge.limit.capacity,
            claim.amount,
            claim.shrink,
            claim.epoch,
            0.0 if used is None else used.of(charge.resource),
        )
    ]
