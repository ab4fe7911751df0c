# SPDX-License-Identifier: Apache-2.0
"""The filter that reads token usage in answers of all APIs but that of responses.

It drops the chunk of a stream that has the usage where only we asked for it.

Engines send usage in a chunk of its own, without choices, and only if ``stream_options.include_usage`` asks for it.
extproc asks where the client did not, and says so in metadata; a client that did not ask must not meet a chunk without
choices.

A piece of an answer may end anywhere. What follows its last whole event is held back until the rest of that event has
come: no client acts on half an event. What is held back is bounded; a longer event passes in pieces, and nothing is
read from it.

Plain answers are read on their way as well: nothing is held, so no buffer bounds them.
"""

from __future__ import annotations

from typing import Final

from envoy_data_plane.envoy.config.core.v3 import DataSource
from envoy_data_plane.envoy.extensions.filters.http.lua.v3 import Lua

from controller.bundle.envoy.hidden_counts import hiding_script
from extproc.protocol import (
    CACHED_TOKENS,
    COMPLETION_TOKENS,
    HIDES_USAGE,
    NAMESPACE,
    PROMPT_TOKENS,
    TICKET,
    USAGE_NAMESPACE,
)

# An event with usage has some hundred bytes.
MOST_HELD_BYTES: Final = 64 * 1024
# The usage of a plain answer is no longer than this.
_OVERLAP_BYTES: Final = 2048

# Quotes within JSON strings are escaped, so text that a model writes matches none of the patterns.
# Wrappers such as dynamicMetadata() are valid within one piece only.
_SCRIPT: Final = """
local USAGE = '"usage"%s*:%s*{'
local NO_CHOICES = '"choices"%s*:%s*%[%s*%]'
local COUNTS = {@COUNTS@}

local function read_usage(handle, event)
  local at = string.find(event, USAGE)
  if not at then
    return false
  end
  local metadata = handle:streamInfo():dynamicMetadata()
  for key, pattern in pairs(COUNTS) do
    local number = tonumber(string.match(event, pattern, at))
    if number then
      metadata:set("@USAGE_NAMESPACE@", key, number)
    end
  end
  return true
end

-- Where the last whole event ends; 0 if none does.
local function end_of_events(text)
  if string.find(text, "\\n\\r?\\n$", -3) then
    return #text
  end
  local last, at = 0, 1
  while true do
    local _, stop = string.find(text, "\\n\\r?\\n", at)
    if not stop then
      return last
    end
    last, at = stop, stop
  end
end

-- The events of text without those that carry nothing but usage; nil if all stay.
local function without_usage(handle, text, hides)
  local kept, start, dropped = {}, 1, false
  while start <= #text do
    local _, stop = string.find(text, "\\n\\r?\\n", start)
    stop = stop or #text
    local event = string.sub(text, start, stop)
    if read_usage(handle, event) and hides and string.find(event, NO_CHOICES) then
      dropped = true
    else
      kept[#kept + 1] = event
    end
    start = stop + 1
  end
  return dropped and table.concat(kept) or nil
end

-- An answer that is not streamed passes as it comes; usage may be cut anywhere.
local function read_plain(response_handle)
  local before, tail = "", ""
  for chunk in response_handle:bodyChunks() do
    local came, is_end = read(chunk)
    if not is_end then
      local text = before .. came
      if string.find(text, '"usage"', 1, true) then
        read_usage(response_handle, text)
      end
      before = string.sub(text, -@OVERLAP@)
    end
    tail = show(chunk, came, came, tail, is_end)
  end
end

function envoy_on_response(response_handle)
  local headers = response_handle:headers()
  local kind, encoding = string.lower(headers:get("content-type") or ""), headers:get("content-encoding")
  if encoding and encoding ~= "identity" then
    return
  end
  local decision = response_handle:streamInfo():dynamicMetadata():get("@NAMESPACE@")
  if not (decision and decision["@TICKET@"] or HIDES_COUNTS) then
    return
  end
  local is_plain = string.find(kind, "application/json", 1, true) == 1
  if not is_plain and string.find(kind, "text/event-stream", 1, true) ~= 1 then
    return
  end
  local hides = not is_plain and decision ~= nil and decision["@HIDES_USAGE@"] ~= nil
  if hides or HIDES_COUNTS then
    headers:remove("content-length")
  end
  if is_plain then
    return read_plain(response_handle)
  end
  -- held: what came of an event that has not ended; is_long: so much came of it that it passes as it comes
  local held, is_long, tail = "", false, ""
  for chunk in response_handle:bodyChunks() do
    local came, is_end = read(chunk)
    local text, passed = held .. came, ""
    if is_long then
      local _, stop = string.find(text, "\\n\\r?\\n")
      is_long = stop == nil
      -- an end of the event may be cut in two
      stop = stop or #text - #string.match(text, "[\\r\\n]*$")
      passed, text = string.sub(text, 1, stop), string.sub(text, stop + 1)
    end
    local whole = is_end and #text or end_of_events(text)
    if #text - whole > @MOST_HELD@ then
      is_long, whole = true, #text - #string.match(text, "[\\r\\n]*$")
    end
    local events = string.sub(text, 1, whole)
    if string.find(events, '"usage"', 1, true) then
      events = without_usage(response_handle, events, hides) or events
    end
    held = string.sub(text, whole + 1)
    tail = show(chunk, came, passed .. events, tail, is_end)
  end
end
"""


def stream_usage(*, hides_counts: bool) -> Lua:
    """The filter. Compressed answers pass untouched, and so do those that extproc has not decided.

    ``hides_counts``: of cached tokens, also in answers that extproc has not decided.
    """
    patterns = {
        PROMPT_TOKENS: "prompt_tokens",
        COMPLETION_TOKENS: "completion_tokens",
        CACHED_TOKENS: "cached_tokens",
    }
    counts = ", ".join(f"""{key} = '"{name}"%s*:%s*([%d.eE+-]+)'""" for key, name in patterns.items())
    script = hiding_script(hides=hides_counts, drops_details=True) + _SCRIPT
    for mark, text in {
        "@COUNTS@": counts,
        "@USAGE_NAMESPACE@": USAGE_NAMESPACE,
        "@NAMESPACE@": NAMESPACE,
        "@TICKET@": TICKET,
        "@HIDES_USAGE@": HIDES_USAGE,
        "@MOST_HELD@": str(MOST_HELD_BYTES),
        "@OVERLAP@": str(_OVERLAP_BYTES),
    }.items():
        script = script.replace(mark, text)
    return Lua(default_source_code=DataSource(inline_string=script))
