# SPDX-License-Identifier: Apache-2.0
"""The filter that reads usage from plain answers of the responses and the Messages API, on their way.

Such an answer repeats what its client sent, tools and their schemas included, or has the input of tools as the model
wrote it: there may be a ``usage`` as well. Only the object of that name in the outermost object counts. So the filter
follows strings and brackets through the pieces of the answer, and keeps that object alone: nothing is held back, and no
buffer bounds the answer.
"""

from __future__ import annotations

from typing import Final

from envoy_data_plane.envoy.config.core.v3 import DataSource
from envoy_data_plane.envoy.extensions.filters.http.lua.v3 import Lua

from controller.bundle.envoy.hidden_counts import hiding_script
from extproc.protocol import CACHED_TOKENS, COMPLETION_TOKENS, NAMESPACE, PROMPT_TOKENS, TICKET, USAGE_NAMESPACE

# Of the object with usage, which has some hundred bytes.
_MOST_KEPT: Final = 64 * 1024

# Wrappers such as dynamicMetadata() are valid within one piece only.
_SCRIPT: Final = """
-- the first of several that is there; of the Messages API, input_tokens are those that were not cached
local COUNTS = {
  @PROMPT_TOKENS@ = {"input_tokens"},
  @COMPLETION_TOKENS@ = {"output_tokens"},
  @CACHED_TOKENS@ = {"cached_tokens", "cache_read_input_tokens"},
}
local CACHED_INPUT = {"cache_read_input_tokens", "cache_creation_input_tokens"}

local function count_of(usage, names)
  for _, name in ipairs(names) do
    local number = tonumber(string.match(usage, '"' .. name .. '"%s*:%s*([%d.eE+-]+)'))
    if number then return number end
  end
end

-- word: the last string in the outermost object, as far as it may be "usage"
-- kept: of the object with usage, while in it
local function new_reader()
  return {depth = 0, in_string = false, is_escaped = false, word = "", kept = nil}
end

local function keep(reader, text, from, to)
  if reader.kept and #reader.kept < @MOST_KEPT@ then
    reader.kept = reader.kept .. string.sub(text, from, to)
  end
end

-- Through a string; returns where it goes on.
local function through_string(reader, text, at)
  if reader.is_escaped then
    reader.is_escaped = false
    return at + 1
  end
  local stop = string.find(text, '["\\\\]', at)
  if reader.depth == 1 and #reader.word < 8 then
    reader.word = reader.word .. string.sub(text, at, math.min(stop and stop - 1 or #text, at + 8))
  end
  if not stop then
    return #text + 1
  end
  if string.byte(text, stop) == 34 then
    reader.in_string = false
  else
    reader.is_escaped = true
    -- no name of ours
    reader.word = "\\\\"
  end
  return stop + 1
end

-- The object with usage as text, if it ends in this piece.
local function follow(reader, text)
  local at, from, found = 1, 1, nil
  while at <= #text do
    if reader.in_string then
      at = through_string(reader, text, at)
    else
      local stop = string.find(text, '["{}%[%]]', at)
      if not stop then
        break
      end
      local mark = string.sub(text, stop, stop)
      if mark == '"' then
        reader.in_string = true
        if reader.depth == 1 then
          reader.word = ""
        end
      elseif mark == "{" or mark == "[" then
        if mark == "{" and reader.depth == 1 and reader.word == "usage" then
          reader.kept, from = "", stop
        end
        reader.depth = reader.depth + 1
      else
        reader.depth = reader.depth - 1
        if reader.depth == 1 and reader.kept then
          keep(reader, text, from, stop)
          found, reader.kept = reader.kept, nil
        end
      end
      at = stop + 1
    end
  end
  keep(reader, text, from, #text)
  return found
end

function envoy_on_response(handle)
  local headers = handle:headers()
  local encoding = headers:get("content-encoding")
  if encoding and encoding ~= "identity" then
    return
  end
  local kind = string.lower(headers:get("content-type") or "")
  local is_plain = string.find(kind, "application/json", 1, true) == 1
  if not is_plain and not (HIDES_COUNTS and string.find(kind, "text/event-stream", 1, true) == 1) then
    return
  end
  local decision = handle:streamInfo():dynamicMetadata():get("@NAMESPACE@")
  if not (decision and decision["@TICKET@"] or HIDES_COUNTS) then
    return
  end
  if HIDES_COUNTS then
    headers:remove("content-length")
  end
  local reader, tail = new_reader(), ""
  for chunk in handle:bodyChunks() do
    local came, is_end = read(chunk)
    local usage = is_plain and follow(reader, came)
    tail = show(chunk, came, came, tail, is_end)
    if usage then
      local metadata = handle:streamInfo():dynamicMetadata()
      for key, names in pairs(COUNTS) do
        local number = count_of(usage, names)
        if number and key == "@PROMPT_TOKENS@" then
          for _, name in ipairs(CACHED_INPUT) do
            number = number + (count_of(usage, {name}) or 0)
          end
        end
        if number then
          metadata:set("@USAGE_NAMESPACE@", key, number)
        end
      end
    end
  end
end
"""


def responses_usage(*, hides_counts: bool) -> Lua:
    """The filter. Streams, compressed answers and those that extproc has not decided pass untouched.

    ``hides_counts``: of cached tokens, also in streams and in answers that extproc has not decided.
    """
    script = hiding_script(hides=hides_counts, drops_details=False) + _SCRIPT
    for mark, text in {
        "@PROMPT_TOKENS@": PROMPT_TOKENS,
        "@COMPLETION_TOKENS@": COMPLETION_TOKENS,
        "@CACHED_TOKENS@": CACHED_TOKENS,
        "@USAGE_NAMESPACE@": USAGE_NAMESPACE,
        "@NAMESPACE@": NAMESPACE,
        "@TICKET@": TICKET,
        "@MOST_KEPT@": str(_MOST_KEPT),
    }.items():
        script = script.replace(mark, text)
    return Lua(default_source_code=DataSource(inline_string=script))
