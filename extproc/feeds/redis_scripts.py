# SPDX-License-Identifier: Apache-2.0
"""The scripts that change buckets in Redis, with the arithmetic of ``admission/buckets.py``."""

from __future__ import annotations

from typing import Final

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
-- most: what a bucket that is not here has at most; it is full, or Redis has lost it
local function fill(key, rate, capacity, most)
  local held = redis.call('HMGET', key, 'level', 'at', 'claims', 'shrink', 'epoch')
  local b = {level = math.min(capacity, most or capacity), at = now, claims = 0, shrink = 1, epoch = 0}
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

# ARGV: rate, capacity, amount, debt, most left for each key. The debt is taken in any case. Returns 1 if granted, else 0; then level,
# shrink, epoch for each key.
RESERVE: Final = (
    _FILL
    + """
local buckets, granted = {}, 1
for i, key in ipairs(KEYS) do
  local a = 5 * i - 4
  local b = fill(key, tonumber(ARGV[a]), tonumber(ARGV[a + 1]), tonumber(ARGV[a + 4]))
  b.level = b.level - amount_of(ARGV[a + 3])
  buckets[i] = b
  if amount_of(ARGV[a + 2]) > b.level + 1e-6 then granted = 0 end
end
local answer = {granted}
for i, key in ipairs(KEYS) do
  local a, b = 5 * i - 4, buckets[i]
  if granted == 1 then
    b.level = b.level - amount_of(ARGV[a + 2])
    b.claims = b.claims + amount_of(ARGV[a + 2])
  end
  if granted == 1 or amount_of(ARGV[a + 3]) > 0 then
    store(key, b, tonumber(ARGV[a]), tonumber(ARGV[a + 1]))
  end
  answer[#answer + 1] = string.format('%.17g', b.level)
  answer[#answer + 1] = string.format('%.17g', b.shrink)
  answer[#answer + 1] = tostring(b.epoch)
end
return answer
"""
)

# ARGV: rate, capacity, amount, shrink, epoch, used for each key.
SETTLE: Final = (
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
