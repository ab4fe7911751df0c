# SPDX-License-Identifier: Apache-2.0
"""Rate limits that all machines share: buckets in Redis, one round trip a request.

Scripts change the buckets atomically, with the arithmetic of ``admission/buckets.py``. They use Redis' time, so the
machines' clocks need not agree.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from extproc.admission.buckets import Claim
from extproc.admission.limits import Grant, refusal
from extproc.replication.redis_bus import redis_client

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from extproc.admission.limits import Charge, Usage
    from extproc.errors import RateLimited
    from extproc.metrics.registry import Metrics

log = logging.getLogger(__name__)

# Without an answer in this time, the local buckets decide.
_TIMEOUT_S: Final = 0.25
# After a failure, Redis is not asked for this long.
_PAUSE_S: Final = 1.0
_CONNECTIONS: Final = 16
# Bounds the settlements that wait for Redis. The oldest are dropped; their reservations are not refunded.
_MAX_SETTLEMENTS: Final = 100_000
_BATCH_SIZE: Final = 200

# fill() reads a bucket and adds the inflow until now. A key expires some time after its bucket would be full.
_FILL: Final = """
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1000000
-- amounts are never below 0, infinite or not a number
local function amount_of(text)
  local amount = tonumber(text)
  if amount and amount > 0 and amount < math.huge then return amount end
  return 0
end
local function fill(key, rate, capacity)
  local held = redis.call('HMGET', key, 'level', 'at', 'claims', 'shrink', 'epoch')
  local b = {level = capacity, at = now, claims = 0, shrink = 1, epoch = 0}
  if held[1] then
    b.level, b.at, b.claims = tonumber(held[1]), tonumber(held[2]), tonumber(held[3])
    b.shrink, b.epoch = tonumber(held[4]), tonumber(held[5])
    b.level = math.min(capacity, b.level + rate * math.max(0, now - b.at))
    -- a clock that ran ahead, and was set back since, must not stop the inflow until then
    if b.at > now + 1 then redis.call('HSET', key, 'at', string.format('%.17g', now)) end
    if b.at < now or b.at > now + 1 then b.at = now end
    local left = capacity - b.level
    if b.claims > left then
      b.shrink = b.shrink * left / b.claims
      b.claims = left
      if b.shrink < 1e-9 or left <= 0 then
        b.shrink, b.claims, b.epoch = 1, 0, b.epoch + 1
      end
    end
  end
  return b
end
local function store(key, b, rate, capacity)
  redis.call('HSET', key, 'level', string.format('%.17g', b.level), 'at', string.format('%.17g', b.at),
    'claims', string.format('%.17g', b.claims), 'shrink', string.format('%.17g', b.shrink), 'epoch', b.epoch)
  redis.call('EXPIRE', key, math.ceil(math.min(31536000, 3600 + 2 * (capacity - b.level) / rate)))
end
"""

# ARGV: rate, capacity, amount for each key. Returns 1 if granted, else 0; then level, shrink, epoch for each key.
_RESERVE: Final = (
    _FILL
    + """
local buckets, granted = {}, 1
for i, key in ipairs(KEYS) do
  local b = fill(key, tonumber(ARGV[3 * i - 2]), tonumber(ARGV[3 * i - 1]))
  buckets[i] = b
  if amount_of(ARGV[3 * i]) > b.level + 1e-6 then granted = 0 end
end
local answer = {granted}
for i, key in ipairs(KEYS) do
  local b = buckets[i]
  if granted == 1 then
    b.level = b.level - amount_of(ARGV[3 * i])
    b.claims = b.claims + amount_of(ARGV[3 * i])
    store(key, b, tonumber(ARGV[3 * i - 2]), tonumber(ARGV[3 * i - 1]))
  end
  answer[#answer + 1] = string.format('%.17g', b.level)
  answer[#answer + 1] = string.format('%.17g', b.shrink)
  answer[#answer + 1] = tostring(b.epoch)
end
return answer
"""
)

# ARGV: rate, capacity, amount, shrink, epoch, used for each key.
_SETTLE: Final = (
    _FILL
    + """
for i, key in ipairs(KEYS) do
  local a = 6 * i - 5
  local rate, capacity, amount = tonumber(ARGV[a]), tonumber(ARGV[a + 1]), amount_of(ARGV[a + 2])
  local b = fill(key, rate, capacity)
  local held = 0
  if tonumber(ARGV[a + 4]) == b.epoch then held = amount * b.shrink / tonumber(ARGV[a + 3]) end
  b.claims = math.max(0, b.claims - held)
  b.level = b.level + math.min(amount - amount_of(ARGV[a + 5]), held)
  store(key, b, rate, capacity)
end
return 1
"""
)


class RedisLimits:
    """Reserves and settles in Redis."""

    def __init__(self, url: str, prefix: str, metrics: Metrics, clock: Callable[[], float]) -> None:
        """``url``: redis://host:port/db. ``prefix``: of the keys in Redis."""
        self._redis, self._error = redis_client(url, timeout_s=_TIMEOUT_S, connections=_CONNECTIONS)
        self._reserve: Any = self._redis.register_script(_RESERVE)
        self._settle: Any = self._redis.register_script(_SETTLE)
        self._prefix = prefix
        self._metrics = metrics
        self._clock = clock
        self._retry_at_s = 0.0
        self._settlements: deque[tuple[Grant, Usage | None]] = deque(maxlen=_MAX_SETTLEMENTS)
        self._has_settlements = asyncio.Event()
        # look-ups whose request is gone, until Redis answers or the client library gives up
        self._late: set[asyncio.Future[list[Any]]] = set()

    async def reserve(self, charges: Sequence[Charge]) -> Grant | RateLimited | None:
        """Reserve all charges or none; None if Redis does not answer in time."""
        now = self._clock()
        if now < self._retry_at_s:
            self._metrics.admission.asked_redis("away", 0.0)
            return None
        numbers = [part for charge in charges for part in (charge.limit.rate, charge.limit.capacity, charge.amount)]
        # a task of its own: Redis may grant what is not waited for any more, and that must be given back
        asked = asyncio.create_task(self._reserve(keys=[self._key(charge) for charge in charges], args=numbers))
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                answer = await asyncio.shield(asked)
        except asyncio.CancelledError:
            self._give_back_later(charges, asked)
            raise
        except (self._error, OSError) as error:  # includes TimeoutError
            self._give_back_later(charges, asked)
            self._note_failure(error)
            return None
        found = _read_answer(charges, answer)
        result = "granted" if isinstance(found, Grant) else "refused"
        self._metrics.admission.asked_redis(result, self._clock() - now)
        return found

    def settle(self, grant: Grant, used: Usage | None) -> None:
        """Settle a grant in the background, in a batch with others."""
        self._settlements.append((grant, used))
        self._has_settlements.set()

    async def run(self) -> None:
        """Send settlements until cancelled."""
        task = asyncio.current_task()
        try:
            # the client library swallows a cancellation while it connects
            while task is None or not task.cancelling():
                await self._has_settlements.wait()
                await asyncio.sleep(max(0.0, self._retry_at_s - self._clock()))
                await self._settle_batch()
                if not self._settlements:
                    self._has_settlements.clear()
        finally:
            for one in self._late:
                one.cancel()
            await self._redis.aclose()

    def _give_back_later(self, charges: Sequence[Charge], asked: asyncio.Future[list[Any]]) -> None:
        """Nobody waits for this answer any more; if it is a grant, it is settled with nothing used."""

        def arrived(answer: asyncio.Future[list[Any]]) -> None:
            self._late.discard(answer)
            if answer.cancelled() or answer.exception() is not None:
                return
            found = _read_answer(charges, answer.result())
            if isinstance(found, Grant):
                self.settle(found, None)

        self._late.add(asked)
        asked.add_done_callback(arrived)

    async def _settle_batch(self) -> None:
        """Settle one batch. A failed batch is not repeated: applied twice, it would refund too much."""
        count = min(_BATCH_SIZE, len(self._settlements))
        batch = [self._settlements.popleft() for _ in range(count)]
        try:
            async with asyncio.timeout(1.0):
                pipe = self._redis.pipeline(transaction=False)
                for grant, used in batch:
                    await self._settle(
                        keys=[self._key(charge) for charge in grant.charges],
                        args=list(_settled(grant, used)),
                        client=pipe,
                    )
                await pipe.execute()
        except (self._error, OSError) as error:
            self._note_failure(error)

    def _key(self, charge: Charge) -> str:
        return f"{self._prefix}:limit:{charge.key}"

    def _note_failure(self, error: Exception) -> None:
        if self._clock() >= self._retry_at_s:
            log.warning("Redis does not answer, granting limits locally: %r", error)
        self._retry_at_s = self._clock() + _PAUSE_S
        self._metrics.admission.asked_redis("failed", 0.0)


def _read_answer(charges: Sequence[Charge], answer: list[Any]) -> Grant | RateLimited:
    granted, *fields = answer
    levels = [float(one) for one in fields[::3]]
    if not granted:
        return refusal(charges, levels)
    states = zip(charges, fields[1::3], fields[2::3], strict=True)
    claims = [Claim(charge.amount, float(shrink), int(epoch)) for charge, shrink, epoch in states]
    return Grant(charges, claims, levels, is_global=True)


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
