# SPDX-License-Identifier: Apache-2.0
"""The cost of a request in the headers of its answer: ``x-attache-cost-micros`` and ``x-attache-cost-currency``.

Headers leave before the usage behind them is read. So a plain answer of known length is held in Envoy until it is
whole, at most some size. A stream is never held: its cost is in its row.

The price comes with extproc's decision (``UsageContext``, as extproc encodes it), and the counts from the filters that
read usage. Costs are computed as ``extproc.api.pricing.cost_micros`` computes them, and tests compare the two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from controller.bundle.envoy.lua import lua_filter_config
from extproc.wire_names import (
    CACHED_TOKENS,
    COMPLETION_TOKENS,
    COST_CURRENCY,
    COST_MICROS,
    CREATED_TOKENS,
    NAMESPACE,
    PROMPT_TOKENS,
    REASONING_TOKENS,
    RESPONSE_LENGTH,
    SERVED_BY,
    USAGE_CONTEXT,
    USAGE_NAMESPACE,
)

if TYPE_CHECKING:
    from envoy_data_plane.envoy.extensions.filters.http.lua.v3 import Lua

# A plain answer of 100,000 tokens has half of that.
_MOST_HELD_BYTES: Final = 1024 * 1024

# Names in the text are JSON strings: quotes in them are escaped, so that no text of others looks like a price.
_SCRIPT: Final = """
local MILLION, MOST = 1e6, 2 ^ 53

-- none that is not a whole number of tokens
local function count(value)
  value = tonumber(value) or 0
  return value >= 0 and value <= 1e12 and math.floor(value) or 0
end

local function cost_of(price, read)
  local input, output = count(read.@PROMPT_TOKENS@), count(read.@COMPLETION_TOKENS@)
  local cached = math.min(count(read.@CACHED_TOKENS@), input)
  local written = math.min(count(read.@CREATED_TOKENS@), input - cached)
  local reasoning = math.min(count(read.@REASONING_TOKENS@), output)
  local rates = string.match(price, '"rates":(%b{})') or "{}"
  for above, others in string.gmatch(price, '"above":(%d+),"rates":(%b{})') do
    if input > tonumber(above) then rates = others end
  end
  local function rate(name, whole)
    return tonumber(string.match(rates, '"' .. name .. '":(%d+)')) or whole
  end
  local of_input, of_output = rate("input", 0), rate("output", 0)
  local sum = (input - cached - written) * of_input + cached * rate("cached", of_input)
    + written * rate("written", of_input)
    + (output - reasoning) * of_output + reasoning * rate("reasoning", of_output)
  local parts = sum % MILLION
  local each = tonumber(string.match(price, '"request":(%d+)')) or 0
  local cost = each + (sum - parts) / MILLION + (parts > 0 and 1 or 0)
  -- beyond that, numbers are not exact
  return sum < MOST and cost < MOST and cost or nil
end

function envoy_on_response(handle)
  local headers = handle:headers()
  local decision = handle:streamInfo():dynamicMetadata():get("@NAMESPACE@")
  -- the second: where another name of the model is written into the answer
  local size = tonumber(headers:get("content-length") or "") or decision and decision["@RESPONSE_LENGTH@"]
  if headers:get(":status") ~= "200" or not size or size < 1 or size > @MOST_HELD@ then return end
  local kind = string.lower(headers:get("content-type") or "")
  if string.find(kind, "application/json", 1, true) ~= 1 then return end
  local price = decision and decision["@USAGE_CONTEXT@"]
  local fallbacks = price and string.match(price, '"fallbacks":(%b[])')
  local server = fallbacks and headers:get("@SERVED_BY@")
  for one in string.gmatch(server and string.sub(fallbacks, 2, -2) or "", "%b{}") do
    if string.find(one, '"server":"' .. server .. '"', 1, true) then price = one end
  end
  price = price and string.match(price, '"price":(%b{})')
  if not price or string.find(price, '"is_derived":true', 1, true) then return end
  -- wrappers of before are of no use after it
  handle:body()
  local read = handle:streamInfo():dynamicMetadata():get("@USAGE_NAMESPACE@")
  local cost = read and read.@PROMPT_TOKENS@ and cost_of(price, read)
  if cost then
    headers = handle:headers()
    headers:add("@MICROS@", string.format("%.0f", cost))
    headers:add("@CURRENCY@", string.match(price, '"currency":"(%u%u%u)"') or "")
  end
end
"""


def cost_header_filter(*, most_bytes: int) -> Lua:
    """``most_bytes``: what Envoy buffers of an answer; it answers 500 to one that it should hold and is longer."""
    marks = {
        "@PROMPT_TOKENS@": PROMPT_TOKENS,
        "@COMPLETION_TOKENS@": COMPLETION_TOKENS,
        "@CACHED_TOKENS@": CACHED_TOKENS,
        "@CREATED_TOKENS@": CREATED_TOKENS,
        "@REASONING_TOKENS@": REASONING_TOKENS,
        "@USAGE_NAMESPACE@": USAGE_NAMESPACE,
        "@NAMESPACE@": NAMESPACE,
        "@USAGE_CONTEXT@": USAGE_CONTEXT,
        "@RESPONSE_LENGTH@": RESPONSE_LENGTH,
        "@SERVED_BY@": SERVED_BY,
        "@MICROS@": COST_MICROS,
        "@CURRENCY@": COST_CURRENCY,
        "@MOST_HELD@": str(min(_MOST_HELD_BYTES, most_bytes)),
    }
    return lua_filter_config(_SCRIPT, marks)
