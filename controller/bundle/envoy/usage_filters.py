# SPDX-License-Identifier: Apache-2.0
"""Filters that read token usage in answers, and that hide from clients how many tokens were cached.

Two Lua scripts read usage: ``completions_usage_filter`` in answers of the chat, completions and embeddings APIs,
``nested_usage_filter`` in those of the responses and the Messages API. Plain answers are read as they pass: nothing
is held, so no buffer bounds them. In text of a model all names stand behind escaped quotes, and do not match.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from controller.bundle.envoy.extproc_fail_open import FALLBACK_NAMESPACE
from controller.bundle.envoy.lua import fill_placeholders, lua_bool, lua_filter_config, lua_set
from controller.bundle.envoy.response_model_name import response_model_script
from extproc.wire_names import (
    CACHED_TOKENS,
    COMPLETION_TOKENS,
    CREATED_TOKENS,
    EVENTS,
    FINISH,
    FIRST_CONTENT_US,
    HIDES_USAGE,
    NAMESPACE,
    PROMPT_TOKENS,
    REASONING_TOKENS,
    TICKET,
    USAGE_NAMESPACE,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from envoy_data_plane.envoy.extensions.filters.http.lua.v3 import Lua

# OpenAI's name, those of Anthropic's API, and others that engines have. vLLM's last one has a list of numbers.
_NAMES: Final = (
    *("cached_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"),
    *("num_cached_tokens", "prompt_cache_hit_tokens", "prompt_cache_miss_tokens", "cached_tokens_per_turn"),
)

_HIDING: Final = """
local HIDES_COUNTS, HIDDEN, DETAILS = @HIDES@, {@NAMES@}, '"prompt_tokens_details"'
-- SGLang's: counts by kind of memory, and what they stand in
local BY_MEMORY, EXTENSION = '"cached_tokens_details"', '"sglext"%s*:%s*{'
-- They come first in an object, and whether a comma follows is not known yet.
local OPEN = '{%s*' .. BY_MEMORY .. '[%s:]*{?[^{}]*}?%s*,?%s*$'
-- The end of a piece that may be the beginning of what is hidden.
local USAGE = '("usage"%s*:%s*{)([^{}]*)'
local BEGINNINGS = {
  '"usage"%s*:%s*{[^{}]*$', ',%s*$', ',?%s*"[%w_]*"?%s*:?%s*[%w.+-]*$', ',?%s*' .. DETAILS .. '%s*:%s*{[^{}]*$',
  '"cached_tokens_per_turn"%s*:%s*%[[%d%s,]*$', ',?%s*' .. BY_MEMORY .. '%s*:%s*{[^{}]*$',
  ',?%s*' .. EXTENSION .. '%s*"?[%w_]*"?%s*:?%s*$', ',?%s*"sglext"%s*:%s*' .. OPEN, OPEN
}

-- The inside of a usage object of the Messages API, with all of the prompt as its input.
local function whole_input(opening, usage)
  if not string.find(usage, '"input_tokens"', 1, true) then return nil end
  local sum = 0
  for _, name in ipairs({"cache_read_input_tokens", "cache_creation_input_tokens"}) do
    local key = '"' .. name .. '"%s*:%s*'
    local number = tonumber(string.match(usage, key .. "([%d.eE+-]+)")) or 0
    sum = sum + (math.abs(number) < math.huge and number or 0)
    usage = string.gsub(usage, ",%s*" .. key .. "[%w.+-]+", "")
    usage = string.gsub(usage, key .. "[%w.+-]+%s*,%s*", "")
  end
  return opening .. string.gsub(usage, '("input_tokens"%s*:%s*)(%d+)', function(name, number)
    return name .. string.format("%d", tonumber(number) + sum)
  end)
end

-- Without counts by memory: engines leave them out where nothing was cached.
local function without_memory(text)
  if not string.find(text, BY_MEMORY, 1, true) then return text end
  for _, value in ipairs({"{[^{}]*}", "null"}) do
    local member = BY_MEMORY .. "%s*:%s*" .. value
    text = string.gsub(text, ",%s*" .. member, "")
    text = string.gsub(text, member .. "%s*,?%s*", "")
  end
  text = string.gsub(text, ",%s*" .. EXTENSION .. "%s*}", "")
  return text
end

-- Text for the client; tail: the end of what came before.
local function without_counts(tail, text, is_end)
  text = tail .. text
  tail = ""
  if is_end or not string.find(text, OPEN, math.max(1, #text - 511)) then
    text = without_memory(text)
  end
  if not is_end then
    local last, at = math.max(1, #text - 511), #text + 1
    for _, beginning in ipairs(BEGINNINGS) do
      at = math.min(at, string.find(text, beginning, last) or at)
    end
    text, tail = string.sub(text, 1, at - 1), string.sub(text, at)
  end
  if @DROPS_DETAILS@ and string.find(text, DETAILS, 1, true) then
    text = string.gsub(text, ',%s*' .. DETAILS .. '%s*:%s*{[^{}]*}', "")
    text = string.gsub(text, ',%s*' .. DETAILS .. '%s*:%s*null', "")
  end
  if string.find(text, "cache", 1, true) then
    text = string.gsub(text, USAGE, whole_input)
    for _, name in ipairs(HIDDEN) do
      text = string.gsub(text, '("' .. name .. '"%s*:%s*)[%d.eE+-]+', "%10")
      text = string.gsub(text, '("' .. name .. '"%s*:%s*%[)([%d%s,]*)', function(opening, counts)
        return opening .. string.gsub(counts, "%d+", "0")
      end)
    end
  end
  return text, tail
end

local function is_encoded(headers)
  local encoding = string.lower(headers:get("content-encoding") or "")
  return encoding ~= "" and encoding ~= "identity"
end

-- Nothing can be hidden in an encoded answer: the client gets an error in its place. An engine's error has no counts.
local function pass_or_refuse(handle, headers)
  if not HIDES_COUNTS or string.sub(headers:get(":status"), 1, 1) ~= "2" then return end
  headers:replace(":status", "502")
  headers:replace("content-type", "application/json")
  headers:remove("content-encoding")
  headers:remove("content-length")
  local text = [[@REFUSAL@]]
  for chunk in handle:bodyChunks() do
    chunk:setBytes(text)
    text = ""
  end
end

-- What came in a piece, and whether it is the answer's end, which comes as an empty piece.
local function read(chunk)
  local size = chunk:length()
  return size > 0 and chunk:getBytes(0, size) or "", size == 0
end

-- Give the client text in place of what came in the piece; returns what is held back of it.
local function show(chunk, came, text, tail, is_end)
  if HIDES_COUNTS then
    text, tail = without_counts(tail, text, is_end)
  end
  if text ~= came then
    chunk:setBytes(text)
  end
  return tail
end
"""
# In OpenAI's form, and in Anthropic's.
_REFUSAL: Final = {
    "type": "error",
    "error": {
        "message": "The engine has compressed its answer, so the gateway cannot hide in it what was cached.",
        "type": "server_error",
        "param": None,
        "code": "encoded_answer",
    },
}
# When the request began, in microseconds since 1970: filter state that the bundle writes for these scripts.
STARTED_US: Final = "attache.started_us"
# What only the usage log needs of an answer. The numbers are in metadata after every piece: where a stream is cut, no
# script runs any more.
_LOGGING: Final = """
local LOGS = @LOGS@
local ENDS = {}
for _, reason in ipairs({"completed", "incomplete", "failed"}) do ENDS["response." .. reason] = reason end

local function begins(handle)
  local started = handle:streamInfo():filterState():get("@STARTED_US@")
  return {events = 0, started = tonumber(started or "")}
end

local function is_without_extproc(handle)
  return handle:streamInfo():dynamicMetadata():get("@FALLBACK_NAMESPACE@") ~= nil
end

-- more: how many events with content this piece has; finish: why the answer ended, if it has
local function log_events(handle, log, more, finish)
  if more == 0 and not finish then return end
  local metadata = handle:streamInfo():dynamicMetadata()
  if finish then metadata:set("@USAGE_NAMESPACE@", "@FINISH@", finish) end
  if more == 0 then return end
  if log.events == 0 and log.started then
    local now = tonumber(handle:timestampString(EnvoyTimestampResolution.MICROSECOND))
    metadata:set("@USAGE_NAMESPACE@", "@FIRST_CONTENT_US@", now - log.started)
  end
  log.events = log.events + more
  metadata:set("@USAGE_NAMESPACE@", "@EVENTS@", log.events)
end
"""
# Events of the responses and of the Messages API have the answer there.
_HOLDERS: Final = ("response", "message")
# Of the object with usage, which has some hundred bytes.
_MOST_KEPT: Final = 64 * 1024
# Wrappers such as dynamicMetadata() are valid within one piece only.
_NESTED: Final = """
-- the first of several that is there
local COUNTS = {
  @COMPLETION_TOKENS@ = {"output_tokens"},
  @CACHED_TOKENS@ = {"cached_tokens", "cache_read_input_tokens"},
  @CREATED_TOKENS@ = {"cache_creation_input_tokens"},
  @REASONING_TOKENS@ = {"reasoning_tokens"},
}
-- The prompt is their sum: of the Messages API, input_tokens are those that were not cached.
local INPUT = {"input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"}
-- Where events of streams have usage, if not in the outermost object.
local WITHIN = {@HOLDERS@}
local FINISH = {stop_reason = true, status = true}

local function count_of(usage, names)
  for _, name in ipairs(names) do
    local number = tonumber(string.match(usage, '"' .. name .. '"%s*:%s*([%d.eE+-]+)'))
    -- JSON, and so a line of the usage log, has no infinity
    if number and math.abs(number) < math.huge then return number end
  end
end

-- level: the depth of the object whose names are followed; within: its name, if it is not the outermost one
-- word: the last string in it, as far as it may be "usage"
-- kept: of the object with usage, while in it
-- input: the last counts of INPUT: events of a stream have some each
local function new_reader(is_stream)
  return {is_stream = is_stream, depth = 0, level = 1, in_string = false, is_escaped = false, word = "", input = {}}
end

-- Each line of a stream is read by itself: strings have no line ends in them.
local function start_line(reader)
  reader.depth, reader.level, reader.within, reader.word, reader.kept = 0, 1, nil, "", nil
  reader.in_string, reader.is_escaped = false, false
end

-- From a line's beginning: where the line begins that names usage next, or the last one, which may go on.
local function skip_lines(text, at)
  local named = string.find(text, '"usage"', at, true) or #text + 1
  local last = string.find(string.sub(text, at, named - 1), "\\n[^\\n]*$")
  return last and at + last or at
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
    if string.byte(text, at) ~= 10 then return at + 1 end
  end
  local stop = string.find(text, '["\\\\\\n]', at)
  if reader.depth == reader.level and #reader.word < 32 then
    reader.word = reader.word .. string.sub(text, at, math.min(stop and stop - 1 or #text, at + 32))
  end
  if not stop then
    return #text + 1
  end
  local mark = string.byte(text, stop)
  if mark == 10 then
    if not reader.is_stream then return stop + 1 end
    start_line(reader)
    return skip_lines(text, stop + 1)
  elseif mark == 34 then
    reader.in_string = false
    if reader.depth == 1 and reader.name then reader.finish = reader.word end
  else
    reader.is_escaped = true
    -- no name of ours
    reader.word = "\\\\"
  end
  return stop + 1
end

-- Whether the next string in the outermost object is a value: a colon is before it.
local function see_gap(reader, text, from, stop)
  if reader.depth ~= 1 then return end
  local gap = string.sub(text, from, (stop or #text + 1) - 1)
  if string.find(gap, ",", 1, true) then reader.is_value = false end
  if string.find(gap, ":%s*$") then reader.is_value = true end
end

local function write_usage(handle, reader, usage)
  local metadata, prompt = handle:streamInfo():dynamicMetadata(), 0
  for _, name in ipairs(INPUT) do
    reader.input[name] = count_of(usage, {name}) or reader.input[name]
    prompt = prompt + (reader.input[name] or 0)
  end
  if reader.input.input_tokens and math.abs(prompt) < math.huge then
    metadata:set("@USAGE_NAMESPACE@", "@PROMPT_TOKENS@", prompt)
  end
  for key, names in pairs(COUNTS) do
    local number = count_of(usage, names)
    -- At the start of a stream of the Messages API nothing is written yet: a client that disconnects after it would be
    -- charged for that.
    if number and not (key == "@COMPLETION_TOKENS@" and reader.within == "message") then
      metadata:set("@USAGE_NAMESPACE@", key, number)
    end
  end
end

-- Writes the usage of each object that ends in this piece.
local function follow(handle, reader, text)
  local at, from = 1, 1
  if reader.is_stream and reader.depth == 0 and not reader.in_string then at = skip_lines(text, at) end
  while at <= #text do
    if reader.in_string then
      at = through_string(reader, text, at)
    else
      local stop = string.find(text, '["{}%[%]\\n]', at)
      if LOGS and not reader.is_stream then see_gap(reader, text, at, stop) end
      if not stop then
        break
      end
      at = stop + 1
      local mark = string.sub(text, stop, stop)
      if mark == '"' then
        reader.in_string = true
        if reader.depth == reader.level then
          reader.name = reader.is_value and FINISH[reader.word] and reader.word
          reader.word = ""
        end
      elseif mark == "{" or mark == "[" then
        if mark == "{" and reader.depth == reader.level then
          if reader.word == "usage" then
            reader.kept, from = "", stop
          elseif reader.is_stream and reader.depth == 1 and WITHIN[reader.word] then
            reader.level, reader.within = 2, reader.word
          end
        end
        reader.depth = reader.depth + 1
      elseif mark == "\\n" then
        if reader.is_stream then
          start_line(reader)
          at = skip_lines(text, at)
        end
      else
        reader.depth = reader.depth - 1
        if reader.depth == reader.level and reader.kept then
          keep(reader, text, from, stop)
          write_usage(handle, reader, reader.kept)
          reader.kept = nil
        elseif reader.depth < reader.level then
          reader.level, reader.within = 1, nil
        end
      end
    end
  end
  keep(reader, text, from, #text)
end

local function read_events(handle, log, state, text)
  local more, finish, at = 0, nil, 1
  text = state.tail .. text
  while true do
    local start, stop, name = string.find(text, "event:%s*([%w_.]+)\\r?\\n", at)
    local before = string.sub(text, at, (start or #text + 1) - 1)
    finish = state.is_last and string.match(before, '"stop_reason"%s*:%s*"([%w_]+)"') or finish
    if not start then break end
    if name == "content_block_delta" or string.find(name, "^response%..*delta$") then more = more + 1 end
    finish = ENDS[name] or finish
    state.is_last, at = name == "message_delta", stop + 1
  end
  -- a line that may go on, or the data of the event with the reason; a pattern that begins with [^\\n]* would be tried
  -- at each byte of a long line, for minutes
  local begins = state.is_last and at or (string.find(text, "\\n[^\\n]*$") or 0) + 1
  local rest = string.sub(text, begins)
  state.tail = #rest <= (state.is_last and 4096 or 128) and rest or ""
  log_events(handle, log, more, finish)
end

function envoy_on_response(handle)
  local headers = handle:headers()
  local kind = string.lower(headers:get("content-type") or "")
  local is_plain = string.find(kind, "application/json", 1, true) == 1
  local is_stream = string.find(kind, "text/event-stream", 1, true) == 1
  if not is_plain and not is_stream then
    return
  end
  if is_encoded(headers) then
    return pass_or_refuse(handle, headers)
  end
  local decision = handle:streamInfo():dynamicMetadata():get("@NAMESPACE@")
  local asked = asked_model(handle)
  local is_ours = decision and decision["@TICKET@"]
  if not (is_ours or asked or HIDES_COUNTS or LOGS and is_without_extproc(handle)) then
    return
  end
  if HIDES_COUNTS then
    headers:remove("content-length")
  end
  local renamer = new_renamer(handle, asked, is_plain)
  local reader, tail = new_reader(is_stream), ""
  local log, events = LOGS and begins(handle), {tail = "", is_last = false}
  for chunk in handle:bodyChunks() do
    local came, is_end = read(chunk)
    follow(handle, reader, came)
    if LOGS and is_stream then read_events(handle, log, events, came) end
    if LOGS and reader.finish then
      log_events(handle, log, 0, reader.finish)
      reader.finish = nil
    end
    tail = show(chunk, came, rename(renamer, came), tail, is_end)
  end
end
"""
# An event with usage has some hundred bytes.
MOST_HELD_BYTES: Final = 64 * 1024
# The usage of a plain answer is no longer than this.
_OVERLAP_BYTES: Final = 2048
# Quotes within JSON strings are escaped, so text that a model writes matches none of the patterns.
# Wrappers such as dynamicMetadata() are valid within one piece only.
_STREAMS: Final = """
local USAGE = '"usage"%s*:%s*{'
local NO_CHOICES = '"choices"%s*:%s*%[%s*%]'
local COUNTS = {@COUNTS@}
local BEGINS_TEXT, REASON = '^%s*:%s*"[^"]', '^"finish_reason"%s*:%s*"([%w_]+)"'
-- by the name of a field: what follows it where the event has content
local CONTENT = {
  {'"content"', BEGINS_TEXT}, {'"text"', BEGINS_TEXT}, {'"reasoning_content"', BEGINS_TEXT},
  {'"reasoning"', BEGINS_TEXT}, {'"arguments"', BEGINS_TEXT}, {'"refusal"', BEGINS_TEXT},
  -- the tokens in, tokens out API
  {'"token_ids"', "^%s*:%s*%[%s*%d"},
}

-- Patterns are tried where a plain search has found the name: at every byte they take ten times as long.
local function has_content(event)
  for _, field in ipairs(CONTENT) do
    local _, stop = string.find(event, field[1], 1, true)
    while stop do
      if string.find(event, field[2], stop + 1) then return true end
      _, stop = string.find(event, field[1], stop + 1, true)
    end
  end
  return false
end

local function reason_in(text)
  local at = string.find(text, '"finish_reason"', 1, true)
  while at do
    local reason = string.match(text, REASON, at)
    if reason then return reason end
    at = string.find(text, '"finish_reason"', at + 1, true)
  end
end

-- text: whole events
local function read_events(handle, log, text)
  local start, more = 1, 0
  while start <= #text do
    local _, stop = string.find(text, "\\n\\n", start, true)
    if not stop then _, stop = string.find(text, "\\n\\r?\\n", start) end
    stop = stop or #text
    if has_content(stop - start + 1 < #text and string.sub(text, start, stop) or text) then more = more + 1 end
    start = stop + 1
  end
  log_events(handle, log, more, reason_in(text))
end

local function read_usage(handle, event)
  local at = string.find(event, USAGE)
  if not at then
    return false
  end
  local metadata = handle:streamInfo():dynamicMetadata()
  for key, pattern in pairs(COUNTS) do
    local number = tonumber(string.match(event, pattern, at))
    -- JSON, and so a line of the usage log, has no infinity
    if number and math.abs(number) < math.huge then
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

-- SGLang's event with counts by memory alone, which it leaves out where nothing was cached.
local function is_by_memory(event)
  return HIDES_COUNTS and string.find(event, BY_MEMORY, 1, true) and not string.find(event, '"routed_experts"', 1, true)
end

-- The events of text without those that carry nothing but usage; nil if all stay.
local function without_usage(handle, text, hides)
  local kept, start, dropped = {}, 1, false
  while start <= #text do
    local _, stop = string.find(text, "\\n\\r?\\n", start)
    stop = stop or #text
    local event = string.sub(text, start, stop)
    local has_usage = read_usage(handle, event)
    if (has_usage and hides or not has_usage and is_by_memory(event)) and string.find(event, NO_CHOICES) then
      dropped = true
    else
      kept[#kept + 1] = event
    end
    start = stop + 1
  end
  return dropped and table.concat(kept) or nil
end

-- An answer that is not streamed passes as it comes; usage may be cut anywhere.
local function read_plain(response_handle, renamer)
  local before, tail = "", ""
  local log = LOGS and begins(response_handle)
  for chunk in response_handle:bodyChunks() do
    local came, is_end = read(chunk)
    if not is_end then
      local text = before .. came
      if string.find(text, '"usage"', 1, true) then
        read_usage(response_handle, text)
      end
      if LOGS then log_events(response_handle, log, 0, reason_in(text)) end
      before = string.sub(text, -@OVERLAP@)
    end
    tail = show(chunk, came, rename(renamer, came), tail, is_end)
  end
end

function envoy_on_response(response_handle)
  local headers = response_handle:headers()
  local kind = string.lower(headers:get("content-type") or "")
  local decision = response_handle:streamInfo():dynamicMetadata():get("@NAMESPACE@")
  local is_ours = decision and decision["@TICKET@"]
  local asked = asked_model(response_handle)
  if not (is_ours or asked or HIDES_COUNTS or LOGS and is_without_extproc(response_handle)) then
    return
  end
  local is_plain = string.find(kind, "application/json", 1, true) == 1
  if not is_plain and string.find(kind, "text/event-stream", 1, true) ~= 1 then
    return
  end
  if is_encoded(headers) then
    return pass_or_refuse(response_handle, headers)
  end
  local hides = not is_plain and decision ~= nil and decision["@HIDES_USAGE@"] ~= nil
  if hides or HIDES_COUNTS then
    headers:remove("content-length")
  end
  local renamer = new_renamer(response_handle, asked, is_plain)
  if is_plain then
    return read_plain(response_handle, renamer)
  end
  -- held: what came of an event that has not ended; is_long: so much came of it that it passes as it comes
  local held, is_long, tail = "", false, ""
  local log = LOGS and begins(response_handle)
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
    if LOGS and whole > 0 then read_events(response_handle, log, events) end
    if string.find(events, '"usage"', 1, true) or string.find(events, BY_MEMORY, 1, true) then
      events = without_usage(response_handle, events, hides) or events
    end
    held = string.sub(text, whole + 1)
    tail = show(chunk, came, rename(renamer, passed .. events), tail, is_end)
  end
end
"""


def count_hiding_script(*, hides: bool, drops_details: bool) -> str:
    """Defines HIDES_COUNTS, ``read`` and ``show`` for the scripts of filters, which take an answer piece by piece.

    A hidden count becomes 0. In the Messages API cached tokens are no part of ``input_tokens``: they are added there,
    and the counts of caches are removed. Engines leave ``prompt_tokens_details`` out, or write null, where nothing was
    cached: so it is always removed, and so is SGLang's ``cached_tokens_details``. No byte of an answer, nor their
    number, depends on what was cached; so answers have no ``content-length``.

    An encoded answer, in which nothing can be hidden, becomes an error 502.

    The pieces of an answer may cut what is hidden in two: its beginning is held back until the next piece has come, at
    most 512 bytes.

    ``drops_details``: not for the responses API, whose answers always have theirs and repeat what clients sent.
    """
    names = ", ".join(f'"{name}"' for name in _NAMES)
    marks = {
        "@HIDES@": lua_bool(value=hides),
        "@NAMES@": names,
        "@DROPS_DETAILS@": lua_bool(value=drops_details),
        "@REFUSAL@": json.dumps(_REFUSAL),
    }
    return fill_placeholders(_HIDING, marks)


def _lua_of(script: str, marks: Mapping[str, str], *, logs: bool) -> Lua:
    """``script`` behind what it calls for the usage log, with ``marks`` replaced. Not ``logs``: no script calls it."""
    marks = {
        "@LOGS@": lua_bool(value=logs),
        "@STARTED_US@": STARTED_US,
        "@FALLBACK_NAMESPACE@": FALLBACK_NAMESPACE,
        "@FIRST_CONTENT_US@": FIRST_CONTENT_US,
        "@EVENTS@": EVENTS,
        "@FINISH@": FINISH,
        "@USAGE_NAMESPACE@": USAGE_NAMESPACE,
        **marks,
    }
    return lua_filter_config(_LOGGING + script, marks)


def nested_usage_filter(*, hides_counts: bool, logs: bool = False) -> Lua:
    """Reads usage in answers of the responses and the Messages API.

    Such an answer repeats what its client sent, tools and their schemas included, or has the input of tools as the
    model wrote it: there may be a ``usage`` as well. Only the object of that name in the outermost object counts, and
    in events of streams that in their ``response`` or ``message``. So the filter follows strings and brackets through
    the pieces of the answer, and keeps that object alone; whole lines of a stream that do not name it are not followed.
    Compressed answers and those that extproc has not decided pass untouched.

    ``hides_counts``: of cached tokens, also in answers that extproc has not decided. ``logs``: the usage log needs
    more; the events of streams are counted, by their names, which no model writes: line ends in JSON are escaped. The
    model's name is changed where the request asks for that (``response_model``).
    """
    marks = {
        "@HOLDERS@": lua_set(_HOLDERS),
        "@PROMPT_TOKENS@": PROMPT_TOKENS,
        "@COMPLETION_TOKENS@": COMPLETION_TOKENS,
        "@CACHED_TOKENS@": CACHED_TOKENS,
        "@NAMESPACE@": NAMESPACE,
        "@TICKET@": TICKET,
        "@MOST_KEPT@": str(_MOST_KEPT),
        "@CREATED_TOKENS@": CREATED_TOKENS,
        "@REASONING_TOKENS@": REASONING_TOKENS,
    }
    script = (
        count_hiding_script(hides=hides_counts, drops_details=False) + response_model_script(holders=_HOLDERS) + _NESTED
    )
    return _lua_of(script, marks, logs=logs)


def completions_usage_filter(*, hides_counts: bool, logs: bool = False) -> Lua:
    """Reads usage in responses of all other APIs, and drops a usage chunk that the client did not request.

    Engines send usage in a chunk of its own, without choices, and only with ``stream_options.include_usage``. extproc
    sets that where the client did not, and marks it in metadata; such a client must not receive a chunk without
    choices.

    A piece of an answer may end anywhere. What follows its last whole event is held back until the rest of that event
    has come: no client acts on half an event. What is held back is bounded; a longer event passes in pieces, and
    nothing is read from it. Compressed answers pass untouched, and so do those that extproc has not decided.

    ``hides_counts``: of cached tokens, also in answers that extproc has not decided. ``logs``: the usage log needs
    more; the events with content are counted. The model's name is changed where the request asks for that
    (``response_model``).
    """
    patterns = {
        PROMPT_TOKENS: "prompt_tokens",
        COMPLETION_TOKENS: "completion_tokens",
        CACHED_TOKENS: "cached_tokens",
        REASONING_TOKENS: "reasoning_tokens",
    }
    counts = ", ".join(f"""{key} = '"{name}"%s*:%s*([%d.eE+-]+)'""" for key, name in patterns.items())
    marks = {
        "@COUNTS@": counts,
        "@NAMESPACE@": NAMESPACE,
        "@TICKET@": TICKET,
        "@HIDES_USAGE@": HIDES_USAGE,
        "@MOST_HELD@": str(MOST_HELD_BYTES),
        "@OVERLAP@": str(_OVERLAP_BYTES),
    }
    script = count_hiding_script(hides=hides_counts, drops_details=True) + response_model_script() + _STREAMS
    return _lua_of(script, marks, logs=logs)
