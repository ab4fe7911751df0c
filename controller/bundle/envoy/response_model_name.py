# SPDX-License-Identifier: Apache-2.0
"""The model's name in answers: the one that the client asked for, in place of the engine's.

The scripts that read usage call ``rename`` once for each piece of an answer. It follows strings and brackets to the
field ``model`` of the outermost object, or of the object that events of some APIs have in ``response`` or ``message``,
and replaces the string there. Text of a model, JSON that clients sent and all other fields pass unchanged. Nothing is
held back: a piece may end anywhere, and the new name leaves as soon as the old one begins.

Events of a stream usually begin with the same bytes, up to the model's name: such an event costs one comparison.
"""

from __future__ import annotations

from typing import Final

from controller.bundle.envoy.extproc_fail_open import FALLBACK_NAMESPACE
from controller.bundle.envoy.lua import fill_placeholders, lua_set
from extproc.wire_names import NAMESPACE, RESPONSE_LENGTH, RESPONSE_MODEL, TICKET

# Of an event, up to the end of the model's name: some hundred bytes.
_MOST_HEAD: Final = 2048
_SCRIPT: Final = r"""
local asked_model, new_renamer, rename
do
local find, sub, byte = string.find, string.sub, string.byte
local BEYOND, MARKS, DATA = math.huge, {'"', "{", "[", "}", "]"}, "data:"
-- the fields of an event of which one has the object with the model; none: the event is that object
local HOLDERS = {@HOLDERS@}

-- The name that the client asked for, as JSON text; nil if the answer stays as it is.
function asked_model(handle)
  if sub(handle:headers():get(":status"), 1, 1) ~= "2" then return nil end
  local metadata = handle:streamInfo():dynamicMetadata()
  local decision = metadata:get("@NAMESPACE@")
  if not (decision and decision["@TICKET@"]) then decision = metadata:get("@FALLBACK_NAMESPACE@") end
  return decision and decision["@RESPONSE_MODEL@"]
end

-- depth: brackets that are open; word: the last name in the object; is_value: what comes next has that name
-- is_inside: the object is one of HOLDERS; is_old: in the string that is replaced; is_done: nothing more is
local function begin_text(state)
  state.depth, state.word, state.is_value, state.is_inside, state.is_done = 0, "", false, false, false
  -- is_odd: the text so far ends in a backslash that escapes what follows
  state.in_string, state.is_odd, state.is_name, state.is_old = false, false, false, false
end

-- name: see asked_model, nil: there is nothing to do. Plain answers lose their length, which the new name changes.
function new_renamer(handle, name, is_plain)
  if not name then return nil end
  local level = not is_plain and next(HOLDERS) and 2 or 1
  -- line: the first bytes of the line; head: what an event before began with, and what became of it
  local state = {name = name, is_plain = is_plain, level = level, line = "", head = "", new_head = "", places = {}}
  begin_text(state)
  local headers = handle:headers()
  local size = tonumber(headers:get("content-length") or "")
  headers:remove("content-length")
  if is_plain and size then
    handle:streamInfo():dynamicMetadata():set("@NAMESPACE@", "@RESPONSE_LENGTH@", size + #name)
  end
  return state
end

-- The quotation mark that ends the string in which text goes on at "at"; nil if it goes on behind text.
local function end_of_string(state, text, at)
  local from = at
  while true do
    local quote = find(text, '"', from, true)
    local before = (quote or #text + 1) - 1
    local last = before
    while before >= at and byte(text, before) == 92 do before = before - 1 end
    local is_odd = (last - before) % 2 == 1
    if before < at and state.is_odd then is_odd = not is_odd end
    if not quote then
      state.is_odd = is_odd
      return nil
    end
    if not is_odd then return quote end
    from = quote + 1
  end
end

-- Where the next of MARKS stands, and which one it is; each is looked for only once what was found is passed.
local function next_mark(places, text, at)
  local first, which = BEYOND, 0
  for index, mark in ipairs(MARKS) do
    local place = places[index]
    if place < at then
      place = find(text, mark, at, true) or BEYOND
      places[index] = place
    end
    if place < first then first, which = place, index end
  end
  return first, which
end

-- What stands between two marks in an object: whether the next string is a value.
local function see_gap(state, gap)
  if find(gap, ",", 1, true) then state.is_value = false end
  if find(gap, ":%s*$") then state.is_value = true end
end

local function see_quote(state)
  state.in_string, state.is_odd, state.is_name = true, false, not state.is_value
  if state.is_name then
    state.word = ""
  else
    local is_there = state.depth == state.level and (state.level == 1 or state.is_inside)
    state.is_old = is_there and state.word == "model"
  end
end

local function see_bracket(state, opens, is_brace)
  if opens and state.depth == 1 then state.is_inside = is_brace and state.is_value and HOLDERS[state.word] or false end
  state.depth = state.depth + (opens and 1 or -1)
  state.is_value, state.word, state.is_done = false, "", state.depth <= 0
end

-- What becomes of the next part of a JSON text; where the old name ended in it, if it did, and where the new one.
local function scan(state, text)
  local at, copied, made, size, places = 1, 1, nil, #text, state.places
  local old_end, new_end
  for index = 1, #MARKS do places[index] = 0 end
  while at <= size and not state.is_done do
    if state.in_string then
      local quote = end_of_string(state, text, at)
      local stop = quote or size
      if state.is_old then
        copied = stop + 1
        if quote then
          state.is_old, state.is_done, old_end, new_end = false, true, stop, made and #made
        end
      elseif state.is_name and #state.word < 16 then
        state.word = state.word .. sub(text, at, math.min(quote and quote - 1 or size, at + 15))
      end
      state.in_string, at = quote == nil, stop + 1
    else
      local mark, which = next_mark(places, text, at)
      if state.depth <= state.level then see_gap(state, sub(text, at, math.min(mark - 1, size))) end
      if which == 1 then
        see_quote(state)
        if state.is_old then
          made, copied = sub(text, 1, mark - 1) .. state.name, mark + 1
        end
      elseif which > 1 then
        see_bracket(state, which <= 3, which == 2)
      end
      at = mark + 1
    end
  end
  if not made and copied == 1 then return text end
  return (made or "") .. sub(text, copied), old_end, new_end
end

local function is_blank(text, at)
  return byte(text, at) == 10 or byte(text, at) == 13 and byte(text, at + 1) == 10
end

-- Through one piece of a stream. The lines that begin with "data:" are one JSON text until a blank line.
local function rename_events(state, text)
  local parts, copied, at, size, model = {}, 1, 1, #text, 0
  while at <= size do
    local stop = find(text, "\n", at, true)
    local last = (stop or size + 1) - 1
    local is_fresh, is_passed = state.line == "" and state.depth == 0 and not state.is_done, false
    local head = is_fresh and last - at + 1 >= #state.head and state.head
    if head and head ~= "" and sub(text, at, at + #head - 1) == head then
      parts[#parts + 1], parts[#parts + 2] = sub(text, copied, at - 1), state.new_head
      at, copied, state.line, state.is_done = at + #head, at + #head, DATA, true
    elseif is_fresh and stop and is_blank(text, stop + 1) then
      -- the last line of an event, whole: most have no model
      if model and model < at then model = find(text, '"model"', at, true) end
      is_passed = not model or model > stop
    end
    local begins = is_fresh and at
    if not is_passed and #state.line < #DATA then
      local part = sub(text, at, math.min(last, at + #DATA - 1 - #state.line))
      state.line, at = state.line .. part, at + #part
    end
    if not is_passed and state.line == DATA and not state.is_done and at <= last then
      local came = sub(text, at, last)
      local made, old_end, new_end = scan(state, came)
      if made ~= came then
        parts[#parts + 1], parts[#parts + 2], copied = sub(text, copied, at - 1), made, last + 1
      end
      if begins and new_end and at + old_end - begins <= @MOST_HEAD@ then
        state.head, state.new_head = sub(text, begins, at + old_end - 1), DATA .. sub(made, 1, new_end)
      end
    end
    at = last + 2
    if stop then
      if state.line == "" or state.line == "\r" then
        if not is_passed then begin_text(state) end
      elseif state.in_string then
        -- no JSON
        state.in_string, state.is_old, state.is_done = false, false, true
      end
      state.line = ""
    end
  end
  if copied == 1 and #parts == 0 then return text end
  parts[#parts + 1] = sub(text, copied)
  return table.concat(parts)
end

-- What the client gets of the next piece.
function rename(state, text)
  if not state or state.is_plain and state.is_done then return text end
  if state.is_plain then return (scan(state, text)) end
  return rename_events(state, text)
end
end
"""


def response_model_script(*, holders: tuple[str, ...] = ()) -> str:
    """Defines ``asked_model``, ``new_renamer`` and ``rename`` for the scripts of filters, which take an answer piece by
    piece. ``holders``: the fields of a stream's events of which one has the object with the model.
    """
    marks = {
        "@HOLDERS@": lua_set(holders),
        "@NAMESPACE@": NAMESPACE,
        "@TICKET@": TICKET,
        "@FALLBACK_NAMESPACE@": FALLBACK_NAMESPACE,
        "@RESPONSE_MODEL@": RESPONSE_MODEL,
        "@RESPONSE_LENGTH@": RESPONSE_LENGTH,
        "@MOST_HEAD@": str(_MOST_HEAD),
    }
    return fill_placeholders(_SCRIPT, marks)
