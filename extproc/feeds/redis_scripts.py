# SPDX-License-Identifier: Apache-2.0
"""The scripts that change buckets in Redis, with the arithmetic of ``admission/buckets.py``."""

from __future__ import annotations

from typing import Final

# fill() reads a bucket, adds the inflow until now and takes what the process owes it. A bucket that is not here is
# full, or Redis has lost it: it begins with what the process says is left at most. Its first epoch is the time, so that
# no reservation of a lost bucket is worth anything in this one. "paid:PROCESS" is the running total that this bucket
# was charged for (admission/store_memory.py). A key expires some time after its bucket would be full.
_FILL: Final = """
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1000000
local paid_field = 'paid:' .. ARGV[1]
-- amounts are never below 0, infinite or not a number
local function amount_of(text)
  local amount = tonumber(text)
  if amount and amount > 0 and amount < math.huge then return amount end
  return 0
end
local function fill(key, rate, capacity, most, owed, told)
  local held = redis.call('HMGET', key, 'level', 'at', 'claims', 'shrink', 'epoch', paid_field)
  local b = {level = math.min(capacity, most), at = now, claims = 0, shrink = 1, paid = 0, debt = 0}
  b.epoch = math.floor(now * 1000000)
  if held[1] then
    b.level, b.at, b.claims = tonumber(held[1]), tonumber(held[2]), tonumber(held[3])
    b.shrink, b.epoch, b.paid = tonumber(held[4]), tonumber(held[5]), amount_of(held[6])
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
  b.debt = math.max(0, owed - math.max(b.paid, told))
  b.level = b.level - b.debt
  b.paid = math.max(b.paid, owed)
  return b
end
local function store(key, b, rate, capacity)
  redis.call('HSET', key, 'level', string.format('%.17g', b.level), 'at', string.format('%.17g', b.at),
    'claims', string.format('%.17g', b.claims), 'shrink', string.format('%.17g', b.shrink),
    'epoch', string.format('%.0f', b.epoch))
  if b.debt > 0 then redis.call('HSET', key, paid_field, string.format('%.17g', b.paid)) end
  redis.call('EXPIRE', key, math.ceil(math.min(31536000, 3600 + 2 * (capacity - b.level) / rate)))
end
"""

# ARGV: the process; then for each key rate, capacity, what is left at most, owed, told, amount. What is owed is taken
# in any case. Returns 1 if granted, else 0; the time; then level, shrink, epoch for each key.
RESERVE: Final = (
    _FILL
    + """
local buckets, granted = {}, 1
for i, key in ipairs(KEYS) do
  local a = 6 * i - 4
  local rate, capacity, most = tonumber(ARGV[a]), tonumber(ARGV[a + 1]), tonumber(ARGV[a + 2])
  local b = fill(key, rate, capacity, most, amount_of(ARGV[a + 3]), amount_of(ARGV[a + 4]))
  buckets[i] = b
  if amount_of(ARGV[a + 5]) > b.level + 1e-6 then granted = 0 end
end
local answer = {granted, string.format('%.17g', now)}
for i, key in ipairs(KEYS) do
  local a, b = 6 * i - 4, buckets[i]
  if granted == 1 then
    b.level = b.level - amount_of(ARGV[a + 5])
    b.claims = b.claims + amount_of(ARGV[a + 5])
  end
  if granted == 1 or b.debt > 0 then
    store(key, b, tonumber(ARGV[a]), tonumber(ARGV[a + 1]))
  end
  answer[#answer + 1] = string.format('%.17g', b.level)
  answer[#answer + 1] = string.format('%.17g', b.shrink)
  answer[#answer + 1] = string.format('%.0f', b.epoch)
end
return answer
"""
)

# ARGV: the process; then for each key rate, capacity, what is left at most, owed, told, the claim's amount, shrink and
# epoch, used. Returns the time; then the level for each key.
SETTLE: Final = (
    _FILL
    + """
local answer = {string.format('%.17g', now)}
for i, key in ipairs(KEYS) do
  local a = 9 * i - 7
  local rate, capacity, amount = tonumber(ARGV[a]), tonumber(ARGV[a + 1]), amount_of(ARGV[a + 5])
  local b = fill(key, rate, capacity, tonumber(ARGV[a + 2]), amount_of(ARGV[a + 3]), amount_of(ARGV[a + 4]))
  local held = 0
  if tonumber(ARGV[a + 7]) == b.epoch then held = amount * b.shrink / tonumber(ARGV[a + 6]) end
  b.claims = math.max(0, b.claims - held)
  b.level = b.level + math.min(amount - amount_of(ARGV[a + 8]), held)
  store(key, b, rate, capacity)
  answer[#answer + 1] = string.format('%.17g', b.level)
end
return answer
"""
)
