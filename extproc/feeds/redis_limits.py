# SPDX-License-Identifier: Apache-2.0
"""Rate limits and budgets that all machines share: buckets in Redis, one round trip a request.

Scripts change the buckets atomically, with the arithmetic of ``admission/token_buckets.py``. They use Redis' time, so
the machines' clocks need not agree. Grants made while Redis does not answer are charged to it afterwards, exactly once:
every message carries the amount that this process has yet to charge (``SharedStoreCopy``).

A budget never fills, so what a killed process has reserved of it must come back otherwise. Each bucket of a budget has
what each process has reserved of it. Processes send a heartbeat; what one has reserved that was not heard for a while
is given back by the next script that reads the bucket. If that process was only slow, its requests are charged what
they have used when they end. Settlements of budgets are repeated until Redis answers, and numbered, so that each counts
once.

Three cases remain inexact, each by the requests in flight at that moment. What Redis granted to a connection that broke
stays reserved until the process ends. Where one answer is late and others are still to come, the late request is
granted from all that was left, theirs included. And while a slow process is taken for dead, others may be granted what
its requests have reserved.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import deque
from typing import TYPE_CHECKING, Any, Final

import msgspec

from extproc.admission.limit_refusals import limit_refusal
from extproc.admission.rate_limits import Charge, Grant, RequestUsage, StoreUnavailable
from extproc.admission.token_buckets import BucketLevel, Reservation, SharedStoreCopy
from extproc.api.config_errors import one_line
from extproc.replication.buses import redis_client

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from extproc.admission.token_buckets import BucketReportToStore, Limit
    from extproc.metrics.request_metrics import Metrics
    from extproc.refusals import Refusal

# fill() reads a bucket, adds the inflow until now and subtracts the process's debt. A bucket that does not exist is
# full, or Redis has lost it: it begins with the most that the process states is left. Another process may have seen
# less of the lost bucket: once it states that, the difference is taken. "born" and "began" are the time and the amount
# for this. A bucket's first epoch is the time, so that no reservation of a lost bucket is worth anything in this one.
# "paid:PROCESS" is the running total that this bucket was charged for (SharedStoreCopy). A key expires some time after
# its bucket would be full; that of a budget a day after its window has ended. The bucket of a budget whose maximum
# changes keeps what was used. ``a``: where the bucket's arguments begin, of which each script gives the same eight
# first: rate to seen.
#
# KEYS[1] is the set of processes that share budgets, by when each was heard last. A process that is not in it is dead.
# While it has the member '', nobody is taken for dead: no process was heard for some time before, because Redis was
# away or has lost the set. "held:PROCESS" of a budget's bucket is what the process has reserved, the number of its last
# settlement, and since when the field is there: that is the epoch of the process's claims.
_FILL: Final = """
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1000000
local alive = table.remove(KEYS, 1)
local paid_field, held_field = 'paid:' .. ARGV[1], 'held:' .. ARGV[1]
local beat_s, gap_s, silence_s = 0.5, 3, 10
-- amounts are never below 0, infinite or not a number
local function amount_of(text)
  local amount = tonumber(text)
  if amount and amount > 0 and amount < math.huge then return amount end
  return 0
end
-- this process lives
local function beat()
  local last = redis.pcall('ZSCORE', alive, ARGV[1])
  if type(last) == 'table' then
    redis.call('DEL', alive)
  elseif last and math.abs(now - last) < beat_s then
    return
  end
  local newest = tonumber(redis.call('ZREVRANGE', alive, 0, 0, 'WITHSCORES')[2])
  local at = string.format('%.6f', now)
  if not newest or math.abs(now - newest) > gap_s then
    -- of a clock that ran ahead
    redis.call('ZREMRANGEBYSCORE', alive, now + gap_s, '+inf')
    redis.call('ZADD', alive, at, '')
  end
  redis.call('ZADD', alive, at, ARGV[1])
  redis.call('ZREMRANGEBYSCORE', alive, '-inf', now - silence_s)
  redis.call('EXPIRE', alive, 86400)
end
-- give back what dead processes have reserved of a budget
local function give_back(key, b)
  redis.call('HSET', key, 'looked', string.format('%.6f', now))
  if redis.call('ZSCORE', alive, '') then return end
  local fields = redis.call('HGETALL', key)
  for i = 1, #fields, 2 do
    local process = string.match(fields[i], '^held:(.*)$')
    if process and not redis.call('ZSCORE', alive, process) then
      local amount = math.min(b.claims, amount_of(string.match(fields[i + 1], '^%S+')))
      b.level, b.claims, b.has_changed = b.level + amount, b.claims - amount, true
      redis.call('HDEL', key, fields[i])
    end
  end
end
-- a key that somebody else has written is a lost bucket
local function held_in(key)
  local held = redis.pcall('HMGET', key, 'level', 'at', 'claims', 'shrink', 'epoch', paid_field, 'born', 'began',
    held_field, 'looked')
  for i = 1, 5 do
    local number = not held.err and tonumber(held[i])
    if not number or number ~= number or math.abs(number) == math.huge then
      redis.call('DEL', key)
      return {}
    end
    held[i] = number
  end
  return held
end
local function fill(key, a)
  local rate, capacity, most = tonumber(ARGV[a]), tonumber(ARGV[a + 1]), tonumber(ARGV[a + 2])
  local owed, told, ends_at = amount_of(ARGV[a + 3]), amount_of(ARGV[a + 4]), amount_of(ARGV[a + 5])
  local seen = amount_of(ARGV[a + 7])
  local held = held_in(key)
  local b = {level = math.min(capacity, most), at = now, claims = 0, shrink = 1, paid = 0, debt = 0}
  b.held, b.settled, b.since = 0, 0, math.floor(now * 1000000)
  b.rate, b.capacity, b.ends_at = rate, capacity, ends_at
  b.epoch = math.floor(now * 1000000)
  b.is_new = not held[1]
  b.born, b.began, b.has_changed = now, b.level, b.is_new and b.level < capacity
  if ends_at > 0 then beat() end
  if held[1] then
    b.level, b.at, b.claims = held[1], held[2], held[3]
    b.shrink, b.epoch, b.paid = held[4], held[5], amount_of(held[6])
    b.born, b.began = amount_of(held[7]), tonumber(held[8])
    -- without it, or after the clock was set back, what was seen may be of this bucket
    if not b.began or b.began ~= b.began or math.abs(b.began) == math.huge or b.born > now then
      b.born, b.began = 0, 0
    end
    if ends_at > 0 then
      local more = capacity - (tonumber(redis.call('HGET', key, 'capacity')) or capacity)
      b.level, b.began = b.level + more, b.began + more
      local reserved, number, since = string.match(held[9] or '', '^(%S+) (%d+) (%d+)$')
      if since then b.held, b.settled, b.since = amount_of(reserved), amount_of(number), tonumber(since) end
      if math.abs(now - amount_of(held[10])) >= beat_s then give_back(key, b) end
    end
    b.level = math.min(capacity, b.level + rate * math.max(0, now - b.at))
    -- a clock that ran ahead, and was set back since, must not stop the inflow until then
    if b.at > now + 1 then redis.call('HSET', key, 'at', string.format('%.17g', now)) end
    if b.at < now or b.at > now + 1 then b.at = now end
    local since = rate * (now - b.born)
    local less = math.min(capacity, b.began + since) - most
    if seen > 0 and seen < b.born and less > 0 then
      b.level, b.began, b.has_changed = b.level - less, most - since, true
    end
    local left = capacity - b.level
    if rate > 0 and b.claims > left then
      b.shrink = b.shrink * left / b.claims
      b.claims = left
      if b.shrink < 1e-9 or left <= 0 then
        b.shrink, b.claims, b.epoch = 1, 0, b.epoch + 1
      end
    end
  end
  b.debt = math.max(0, owed - math.max(b.paid, told))
  b.level = b.level - math.min(b.debt, amount_of(ARGV[a + 6]))
  b.paid = math.max(b.paid, owed)
  return b
end
local function store(key, b)
  redis.call('HSET', key, 'level', string.format('%.17g', b.level), 'at', string.format('%.17g', b.at),
    'claims', string.format('%.17g', b.claims), 'shrink', string.format('%.17g', b.shrink),
    'epoch', string.format('%.0f', b.epoch), 'born', string.format('%.17g', b.born),
    'began', string.format('%.17g', b.began))
  if b.debt > 0 then redis.call('HSET', key, paid_field, string.format('%.17g', b.paid)) end
  if b.ends_at > 0 then
    redis.call('HSET', key, 'capacity', string.format('%.17g', b.capacity),
      held_field, string.format('%.17g %.0f %.0f', b.held, b.settled, b.since))
    redis.call('EXPIREAT', key, math.ceil(b.ends_at) + 86400)
    return
  end
  redis.call('EXPIRE', key, math.ceil(math.min(31536000, 3600 + 2 * (b.capacity - b.level) / b.rate)))
end
"""
# ARGV: the process; then for each key rate, capacity, what is left at most, owed, told, when a budget's window ends,
# uncovered, when what is left was seen, amount. What is owed is taken in any case. Returns 1 if granted, else 0; the
# time; 1 if a budget's bucket is new, else 0; then level, shrink, epoch for each key.
RESERVE: Final = (
    _FILL
    + """
local buckets, granted = {}, 1
for i, key in ipairs(KEYS) do
  local a = 9 * i - 7
  local b = fill(key, a)
  buckets[i] = b
  if amount_of(ARGV[a + 8]) > b.level + 1e-6 then granted = 0 end
end
local answer = {granted, string.format('%.17g', now), 0}
for i, key in ipairs(KEYS) do
  local a, b = 9 * i - 7, buckets[i]
  if b.is_new and b.ends_at > 0 then answer[3] = 1 end
  if granted == 1 then
    b.level = b.level - amount_of(ARGV[a + 8])
    b.claims = b.claims + amount_of(ARGV[a + 8])
    b.held = b.held + amount_of(ARGV[a + 8])
  end
  if granted == 1 or b.debt > 0 or b.has_changed then store(key, b) end
  answer[#answer + 1] = string.format('%.17g', b.level)
  answer[#answer + 1] = string.format('%.17g', b.shrink)
  answer[#answer + 1] = string.format('%.0f', b.ends_at > 0 and b.since or b.epoch)
end
return answer
"""
)
# ARGV: the process; then for each key rate, capacity, what is left at most, owed, told, when a budget's window ends,
# uncovered, when what is left was seen, the claim's amount, shrink and epoch, used, the settlement's number. Returns
# the time; then the level for each key. The settlement of a budget that comes again changes nothing. A claim of this
# bucket and of another epoch was given back: the level has it already.
SETTLE: Final = (
    _FILL
    + """
local answer = {string.format('%.17g', now)}
for i, key in ipairs(KEYS) do
  local a = 13 * i - 11
  local b = fill(key, a)
  local amount, used, number = amount_of(ARGV[a + 8]), amount_of(ARGV[a + 11]), amount_of(ARGV[a + 12])
  local epoch = tonumber(ARGV[a + 10])
  local held, back = 0, math.min(amount - used, 0)
  if b.ends_at == 0 then
    if epoch == b.epoch then
      held = amount * b.shrink / tonumber(ARGV[a + 9])
      back = math.min(amount - used, held)
    end
  elseif number <= b.settled then
    back = 0
  elseif epoch >= b.epoch then
    if epoch == b.since then held = math.min(amount, b.held) end
    back = held - used
  end
  b.claims = math.max(0, b.claims - held)
  b.level = b.level + back
  b.held, b.settled = b.held - held, math.max(b.settled, number)
  store(key, b)
  answer[#answer + 1] = string.format('%.17g', b.level)
end
return answer
"""
)
# Budgets have no more left than another source knows. ARGV: the process; then for each key rate, capacity, what is left
# at most, owed, told, when its window ends, uncovered, when what is left was seen, and the level. Returns the time;
# then the level for each key.
LOWER: Final = (
    _FILL
    + """
local answer = {string.format('%.17g', now)}
for i, key in ipairs(KEYS) do
  local a = 9 * i - 7
  local b = fill(key, a)
  b.level = math.min(b.level, tonumber(ARGV[a + 8]))
  store(key, b)
  answer[#answer + 1] = string.format('%.17g', b.level)
end
return answer
"""
)

# This process lives. Returns the time.
BEAT: Final = (
    _FILL
    + """
beat()
return {string.format('%.17g', now)}
"""
)

log = logging.getLogger(__name__)
# Without an answer in this time, the local buckets decide.
_TIMEOUT_S: Final = 0.25
# A process that had no processor for so long finds that time over before it reads the answer that came meanwhile.
_READING_S: Final = 0.02
# After a failure, Redis is not asked for this long.
_PAUSE_S: Final = 1.0
_CONNECTIONS: Final = 16
# A script answers some numbers for each charge; a pipeline has 200 such answers.
_MOST_ANSWER_BYTES: Final = 256 << 10
# Bounds the settlements that wait for Redis. The oldest are dropped; their reservations are not refunded.
_MAX_SETTLEMENTS: Final = 100_000
_BATCH_SIZE: Final = 200
# Between two heartbeats of a process that has reserved of budgets; after ``silence_s`` of the scripts it is dead.
_BEAT_S: Final = 1.0


class _Settlement(msgspec.Struct, frozen=True):
    """``used`` None: the request was never dispatched. ``number``: counts those of this process from 1."""

    number: int
    grant: Grant
    used: RequestUsage | None


class UnexpectedReply(Exception):
    """Redis' answer has another form than its scripts' results."""


class RedisLimits:
    """Reserves and settles in Redis."""

    def __init__(self, url: str, prefix: str, metrics: Metrics, clock: Callable[[], float], *, process: str) -> None:
        """``url``: redis://host:port/db. ``prefix``: of the keys in Redis. ``process``: names this one among all,
        ever.
        """
        self._redis, _ = redis_client(
            url, timeout_s=2 * _TIMEOUT_S, connections=_CONNECTIONS, most_answer_bytes=_MOST_ANSWER_BYTES
        )
        self._reserve: Any = self._redis.register_script(RESERVE)
        self._settle: Any = self._redis.register_script(SETTLE)
        self._lower: Any = self._redis.register_script(LOWER)
        self._beat: Any = self._redis.register_script(BEAT)
        self._prefix = prefix
        self._process = process
        self._metrics = metrics
        self._clock = clock
        self._retry_at_s = 0.0
        self._settlements: deque[_Settlement] = deque(maxlen=_MAX_SETTLEMENTS)
        self._settled = 0
        # when Redis is to hear again that this process lives; it need not before a budget was reserved there
        self._beat_at_s = math.inf
        self._memory = SharedStoreCopy()
        # of budgets, that Redis does not have yet
        self._levels: dict[str, BucketLevel] = {}
        # called when Redis had to begin with a budget's bucket: a new caller's, or it has lost what it had
        self.on_new_bucket: Callable[[], None] = _nothing
        # settlements, debts or levels
        self._has_news = asyncio.Event()
        # look-ups whose request is gone, until Redis answers or the client library gives up
        self._late: set[asyncio.Future[list[Any]]] = set()

    async def reserve(self, charges: Sequence[Charge]) -> Grant | Refusal | StoreUnavailable:
        """Reserve all charges or none; StoreUnavailable if Redis does not answer in time."""
        now = self._clock()
        if now < self._retry_at_s:
            self._metrics.admission.observe_redis_call("away", 0.0)
            return self._away(charges)
        stated = self._state(charges, now)
        # a task of its own: Redis may grant what is not waited for any more, and that must be given back
        asked = asyncio.create_task(self._ask(charges, stated))
        try:
            found, levels, store_at_s, is_new = _read_answer(charges, await _in_time(asked))
        except asyncio.CancelledError:
            self._give_back_later(charges, asked)
            raise
        except Exception as error:  # noqa: BLE001 - the client library raises all sorts at what is not Redis' protocol
            self._give_back_later(charges, asked)
            self._note_failure(error)
            return self._away(charges)
        self._note_levels(charges, stated, levels, store_at_s)
        if is_new:
            self.on_new_bucket()
        if self._beat_at_s == math.inf and any(one.limit.ends_at_s for one in charges):
            self._beat_at_s = self._clock() + _BEAT_S
            self._has_news.set()
        result = "granted" if isinstance(found, Grant) else "refused"
        self._metrics.admission.observe_redis_call(result, self._clock() - now)
        return found

    def record_overdraft(self, charge: Charge, amount: float) -> None:
        """Charge Redis for what was used without it, as soon as it is back."""
        self._memory.record_overdraft(charge.key, charge.limit, amount, self._clock())
        if self._memory.has_debts:
            self._has_news.set()

    def cap_budgets(self, remaining: Sequence[BucketLevel]) -> None:
        """Budgets have no more left than this, in Redis and where it does not answer."""
        for one in remaining:
            self._memory.cap_level(one.key, one.limit, one.level, self._clock())
            self._levels[one.key] = one
        if self._levels:
            self._has_news.set()

    def budget_levels(self) -> list[BucketLevel]:
        """Of the budgets in Redis, as last known."""
        return [BucketLevel(*one) for one in self._memory.budget_levels()]

    def settle(self, grant: Grant, used: RequestUsage | None) -> None:
        """Settle a grant in the background, in a batch with others."""
        self._settled += 1
        self._settlements.append(_Settlement(self._settled, grant, used))
        self._has_news.set()

    async def run(self) -> None:
        """Send settlements and debts until cancelled."""
        task = asyncio.current_task()
        try:
            # the client library swallows a cancellation while it connects
            while task is None or not task.cancelling():
                await self._until_due()
                await asyncio.sleep(max(0.0, self._retry_at_s - self._clock()))
                if self._clock() >= self._beat_at_s:
                    await self.heartbeat()
                # what was used without Redis first: until then other processes may be granted the same
                if self._levels:
                    await self._lower_batch()
                await (self._pay_batch() if self._memory.has_debts else self._settle_batch())
                if not self._settlements and not self._memory.has_debts and not self._levels:
                    self._has_news.clear()
        finally:
            for one in self._late:
                one.cancel()
            await self._send_last()
            await self._redis.aclose()

    async def heartbeat(self) -> None:
        """Tell Redis that this process lives, so that what it has reserved stays so."""
        self._beat_at_s = self._clock() + _BEAT_S
        try:
            async with asyncio.timeout(1.0):
                await self._beat(keys=[self._alive], args=[self._process])
        except Exception as error:  # noqa: BLE001 - as above
            self._note_failure(error)

    async def _until_due(self) -> None:
        """Until there is something to send."""
        pause_s = None if self._beat_at_s == math.inf else max(0.0, self._beat_at_s - self._clock())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._has_news.wait()

    async def _send_last(self) -> None:
        """Send the last debts and settlements at the end, if Redis is reachable: no other process has them."""
        if self._memory.has_debts and self._clock() >= self._retry_at_s:
            await self._pay_batch()
        while self._settlements and self._clock() >= self._retry_at_s:
            await self._settle_batch()

    def _away(self, charges: Sequence[Charge]) -> StoreUnavailable:
        now, memory = self._clock(), self._memory
        keys = [(charge.key, charge.limit) for charge in charges]
        return StoreUnavailable([memory.level_before_debts(*one, now) - memory.unreported_debt(*one) for one in keys])

    def _state(self, charges: Sequence[Charge], now: float) -> list[BucketReportToStore]:
        return [self._memory.make_bucket_report(charge.key, charge.limit, now) for charge in charges]

    def _note_levels(
        self,
        charges: Sequence[Charge],
        stated: Sequence[BucketReportToStore],
        levels: Sequence[float],
        store_at_s: float,
    ) -> None:
        now = self._clock()
        for charge, statement, level in zip(charges, stated, levels, strict=True):
            budget = charge.limit if charge.limit.ends_at_s else None
            self._memory.on_store_answer(charge.key, statement, level, store_at_s=store_at_s, now=now, budget=budget)

    async def _ask(
        self,
        charges: Sequence[Charge],
        stated: Sequence[BucketReportToStore],
        client: Any = None,  # noqa: ANN401 - the library has no types
    ) -> list[Any]:
        numbers = [
            number
            for charge, statement in zip(charges, stated, strict=True)
            for number in (*_numbers(charge.limit, statement), charge.amount)
        ]
        answer: list[Any] = await self._reserve(keys=self._keys(charges), args=[self._process, *numbers], client=client)
        return answer

    def _give_back_later(self, charges: Sequence[Charge], asked: asyncio.Future[list[Any]]) -> None:
        """The answer's request is gone; if it is a grant, it is settled with nothing used."""

        def arrived(answer: asyncio.Future[list[Any]]) -> None:
            self._late.discard(answer)
            if answer.cancelled() or answer.exception() is not None:
                return
            with contextlib.suppress(UnexpectedReply):  # logged by the waiting call; it grants nothing
                found, *_ = _read_answer(charges, answer.result())
                if isinstance(found, Grant):
                    self.settle(found, None)

        self._late.add(asked)
        asked.add_done_callback(arrived)

    async def _pay_batch(self) -> None:
        """Charge Redis for one batch of what was used without it: state what is owed, and reserve nothing."""
        batch = [[Charge(key, limit, "requests", 0.0)] for key, limit in self._memory.buckets_in_debt(_BATCH_SIZE)]
        stated = [self._state(charges, self._clock()) for charges in batch]
        try:
            # left without its end, a pipeline would keep its connection
            async with asyncio.timeout(1.0), self._redis.pipeline(transaction=False) as pipe:
                for charges, statements in zip(batch, stated, strict=True):
                    await self._ask(charges, statements, client=pipe)
                found = [_read_answer(*one) for one in zip(batch, await pipe.execute(), strict=True)]
        except Exception as error:  # noqa: BLE001 - as above
            self._note_failure(error)
            return
        for charges, statements, (_, levels, store_at_s, _) in zip(batch, stated, found, strict=True):
            self._note_levels(charges, statements, levels, store_at_s)

    async def _lower_batch(self) -> None:
        """Lower one batch of budgets; what fails is repeated."""
        batch = [one for _, one in zip(range(_BATCH_SIZE), self._levels.values(), strict=False)]
        now = self._clock()
        stated = [self._memory.make_bucket_report(one.key, one.limit, now) for one in batch]
        try:
            async with asyncio.timeout(1.0), self._redis.pipeline(transaction=False) as pipe:
                for one, statement in zip(batch, stated, strict=True):
                    numbers = (*_numbers(one.limit, statement), one.level)
                    await self._lower(keys=self._keys([one]), args=[self._process, *numbers], client=pipe)
                found = [_numbers_in(answer, 2) for answer in await pipe.execute()]
        except Exception as error:  # noqa: BLE001 - as above
            self._note_failure(error)
            return
        for one, statement, (store_at_s, level) in zip(batch, stated, found, strict=True):
            # it may have been lowered further meanwhile
            if self._levels.get(one.key) is one:
                del self._levels[one.key]
            self._memory.on_store_answer(
                one.key, statement, level, store_at_s=store_at_s, now=self._clock(), budget=one.limit
            )

    async def _settle_batch(self) -> None:
        """Settle one batch."""
        count = min(_BATCH_SIZE, len(self._settlements))
        batch = [self._settlements.popleft() for _ in range(count)]
        stated = [self._state(one.grant.charges, self._clock()) for one in batch]
        try:
            # left without its end, a pipeline would keep its connection
            async with asyncio.timeout(1.0), self._redis.pipeline(transaction=False) as pipe:
                for one, statements in zip(batch, stated, strict=True):
                    await self._settle(
                        keys=self._keys(one.grant.charges),
                        args=[self._process, *_settled(one, statements)],
                        client=pipe,
                    )
                answers = await pipe.execute(raise_on_error=False)
        except asyncio.CancelledError:
            self._repeat(batch)
            raise
        except Exception as error:  # noqa: BLE001 - as above
            self._repeat(batch)
            self._note_failure(error)
            return
        for one, statements, answer in zip(batch, stated, answers, strict=True):
            try:
                store_at_s, *levels = _numbers_in(answer, 1 + len(one.grant.charges))
            except UnexpectedReply as error:
                self._record_overruns(one.grant.charges, one.used)
                self._note_failure(error)
            else:
                self._note_levels(one.grant.charges, statements, levels, store_at_s)

    def _repeat(self, batch: Sequence[_Settlement]) -> None:
        """Settle budgets again, in the same order. Rate limits are not: applied twice, it would refund too much. What
        went beyond is owed.
        """
        again: list[_Settlement] = []
        for one in batch:
            grant = one.grant
            parts = list(zip(grant.charges, grant.claims, strict=True))
            self._record_overruns([charge for charge, _ in parts if not charge.limit.ends_at_s], one.used)
            kept = [part for part in parts if part[0].limit.ends_at_s]
            if kept:
                part = Grant([charge for charge, _ in kept], [claim for _, claim in kept], (), is_global=True)
                again.append(_Settlement(one.number, part, one.used))
        self._settlements.extendleft(reversed(again))

    def _record_overruns(self, charges: Sequence[Charge], used: RequestUsage | None) -> None:
        """Record as debt by how much the usage exceeded the reservation."""
        if used is None:
            return
        for charge in charges:
            self.record_overdraft(charge, max(0.0, used.amount_of(charge.resource) - charge.amount))

    def _keys(self, buckets: Sequence[Charge | BucketLevel]) -> list[str]:
        return [self._alive, *(self._key(one.key) for one in buckets)]

    @property
    def _alive(self) -> str:
        return f"{self._prefix}:alive"

    def _key(self, key: str) -> str:
        return f"{self._prefix}:limit:{key}"

    def _note_failure(self, error: Exception) -> None:
        if self._clock() >= self._retry_at_s:
            reason = one_line(str(error)) or type(error).__name__
            log.warning("Redis does not answer, granting limits locally: %s", reason)
        self._retry_at_s = self._clock() + _PAUSE_S
        self._metrics.admission.observe_redis_call("failed", 0.0)


async def _in_time(asked: asyncio.Future[list[Any]]) -> list[Any]:
    """Redis' answer; raises TimeoutError."""
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            return await asyncio.shield(asked)
    except TimeoutError:
        async with asyncio.timeout(_READING_S):
            return await asyncio.shield(asked)


def _read_answer(charges: Sequence[Charge], answer: object) -> tuple[Grant | Refusal, list[float], float, bool]:
    """A script's result, the levels that are left, Redis' time, and whether a budget's bucket is new. Raises
    UnexpectedReply.
    """
    granted, store_at_s, is_new, *fields = _numbers_in(answer, 3 + 3 * len(charges))
    levels = fields[::3]
    if not granted:
        return limit_refusal(charges, levels), levels, store_at_s, bool(is_new)
    states = zip(charges, fields[1::3], fields[2::3], strict=True)
    claims = [Reservation(charge.amount, shrink, int(epoch)) for charge, shrink, epoch in states]
    return Grant(charges, claims, levels, is_global=True), levels, store_at_s, bool(is_new)


def _nothing() -> None:
    """Nobody is to be called."""


def _numbers_in(answer: object, count: int) -> list[float]:
    """The numbers in a script's answer. Raises UnexpectedReply."""
    if isinstance(answer, Exception):
        raise UnexpectedReply(str(answer))
    if not isinstance(answer, list) or len(answer) != count:
        raise UnexpectedReply(f"the answer has not {count} numbers")
    try:
        numbers = [float(one) for one in answer]
    except (TypeError, ValueError, OverflowError):
        raise UnexpectedReply("the answer has more than numbers") from None
    if not all(map(math.isfinite, numbers)):
        raise UnexpectedReply("the answer has numbers that are not finite")
    return numbers


def _numbers(limit: Limit, stated: BucketReportToStore) -> tuple[float, ...]:
    """With which a script's arguments for a bucket begin."""
    uncovered = min(stated.uncovered, max(0.0, stated.owed - stated.told))
    known = limit.rate, limit.capacity, stated.most_left, stated.owed, stated.told, limit.ends_at_s, uncovered
    return (*known, stated.seen_at_s)


def _settled(one: _Settlement, stated: Sequence[BucketReportToStore]) -> list[float]:
    return [
        number
        for charge, claim, statement in zip(one.grant.charges, one.grant.claims, stated, strict=True)
        for number in (
            *_numbers(charge.limit, statement),
            claim.amount,
            claim.shrink,
            claim.epoch,
            0.0 if one.used is None else one.used.amount_of(charge.resource),
            one.number,
        )
    ]
