# SPDX-License-Identifier: Apache-2.0
"""Lua for Envoy's filters that reads the top level of a JSON object, and no more of it.

It finds the members as any JSON reader finds them, or raises: for text that readers may understand differently (names
that occur twice or are written with escapes, text that is no object in UTF-8, anything after it) and for text that
would take long. What is nested is passed over, and not checked beyond its ends: that is the engine's to do.

Text is passed over with plain searches, which run at the speed of memory. Every position only grows, and the number of
marks that are looked at is bounded, so that no body stops Envoy for long.
"""

from __future__ import annotations

from typing import Final

# Quotation marks, brackets and braces outside of text, and what is escaped before quotation marks: several times what
# extproc lets through. A body of 16 MiB that comes to this many is refused within 0.2 s.
MOST_STEPS: Final = 1_000_000
# Fields of the whole object; APIs have about 50.
MOST_MEMBERS: Final = 1_000
# No name that matters is longer, even if all of it is escaped.
_MOST_NAME_BYTES: Final = 256

_SCRIPT: Final = r"""
local find, sub, byte, match = string.find, string.sub, string.byte, string.match
local PLAIN = {['"'] = '"', ["\\"] = "\\", ["/"] = "/", b = "\b", f = "\f", n = "\n", r = "\r", t = "\t"}
local BEYOND = math.huge
local TOO_MUCH = "Only shorter requests can be served at the moment; try again soon."

local function bad(message, param)
  error({message = message, param = param})
end

local function not_json()
  bad("The body is not a JSON object in UTF-8; send one with at least 'model'.")
end

-- So many more marks were read. Positions only grow, so this bounds the work.
local function step(text, count)
  text.steps = text.steps - count
  if text.steps < 0 then error({message = TOO_MUCH, is_too_much = true}) end
end

-- The quotation mark that ends the string whose contents begin at "at".
local function end_of_string(text, at)
  while true do
    local quote = find(text.json, '"', at, true)
    if not quote then not_json() end
    local before = quote - 1
    while before >= at and byte(text.json, before) == 92 do before = before - 1 end
    step(text, quote - before)
    if (quote - before) % 2 == 1 then return quote end
    at = quote + 1
  end
end

-- Where the next of these marks stands; looked for only once what was found is passed.
local function next_mark(text, mark, at)
  if text[mark] < at then text[mark] = find(text.json, mark, at, true) or BEYOND end
  return text[mark]
end

-- The bracket or brace that ends the one before "at". An engine sees for itself whether they are of a kind.
local function end_of_nested(text, at)
  local depth = 1
  while true do
    local quote = next_mark(text, '"', at)
    local opens = math.min(next_mark(text, "{", at), next_mark(text, "[", at))
    local closes = math.min(next_mark(text, "}", at), next_mark(text, "]", at))
    local first = math.min(quote, opens, closes)
    if first == BEYOND then not_json() end
    step(text, 1)
    if first == quote then
      at = end_of_string(text, quote + 1) + 1
    else
      depth = depth + (first == opens and 1 or -1)
      if depth == 0 then return first end
      at = first + 1
    end
  end
end

local function end_of_value(text, at)
  local first = byte(text.json, at)
  if first == 34 then return end_of_string(text, at + 1) end
  if first == 123 or first == 91 then return end_of_nested(text, at + 1) end
  local after = match(text.json, "^[%w.+-]+()", at)
  if not after then not_json() end
  return after - 1
end

-- The members of the object: where each begins, where its value begins and ends, and its name unless that is long.
local function members_of(json)
  local text = {json = json, steps = @MOST_STEPS@, ['"'] = 0, ["{"] = 0, ["}"] = 0, ["["] = 0, ["]"] = 0}
  local found, seen = {}, {}
  local at = match(json, "^[ \t\r\n]*{[ \t\r\n]*()")
  if not at then not_json() end
  local ends = match(json, "^}[ \t\r\n]*()", at)
  while not ends do
    if byte(json, at) ~= 34 then not_json() end
    local quote = end_of_string(text, at + 1)
    local name = quote - at <= @MOST_NAME@ and sub(json, at + 1, quote - 1) or nil
    if name and find(name, "\\", 1, true) then
      bad("A field's name is written with escapes; write it plainly.")
    end
    if name and seen[name] then bad("A field occurs twice; send each field once.") end
    local value = match(json, "^[ \t\r\n]*:[ \t\r\n]*()", quote + 1)
    if not value then not_json() end
    local stop = end_of_value(text, value)
    found[#found + 1] = {name = name, start = at, value = value, stop = stop}
    if name then seen[name] = found[#found] end
    if #found > @MOST_MEMBERS@ then bad("The body has more than @MOST_MEMBERS@ fields; send fewer.") end
    local mark, after = match(json, "^[ \t\r\n]*([,}])[ \t\r\n]*()", stop + 1)
    if not mark then not_json() end
    if mark == "}" then ends = after else at = after end
  end
  if ends <= #json then not_json() end
  return found, seen
end

local function in_utf8(code)
  local function rest(shift) return string.char(128 + math.floor(code / shift) % 64) end
  if code < 0x80 then return string.char(code) end
  if code < 0x800 then return string.char(192 + math.floor(code / 64)) .. rest(1) end
  if code < 0x10000 then return string.char(224 + math.floor(code / 4096)) .. rest(64) .. rest(1) end
  return string.char(240 + math.floor(code / 262144)) .. rest(4096) .. rest(64) .. rest(1)
end

-- A string without its escapes; nil if one of them is none.
local function unescaped(text)
  local parts, at = {}, 1
  while true do
    local slash = find(text, "\\", at, true)
    parts[#parts + 1] = sub(text, at, (slash or 0) - 1)
    if not slash then return table.concat(parts) end
    local mark = sub(text, slash + 1, slash + 1)
    at = slash + 2
    if mark == "u" then
      local code = tonumber(match(text, "^%x%x%x%x", at) or "", 16)
      if not code then return nil end
      at = at + 4
      local low = tonumber(match(text, "^\\u(%x%x%x%x)", at) or "", 16)
      if code >= 0xD800 and code < 0xDC00 and low and low >= 0xDC00 and low < 0xE000 then
        code, at = 0x10000 + (code - 0xD800) * 0x400 + low - 0xDC00, at + 6
      end
      parts[#parts + 1] = in_utf8(code)
    else
      if not PLAIN[mark] then return nil end
      parts[#parts + 1] = PLAIN[mark]
    end
  end
end
"""


def json_members() -> str:
    """Lua that defines ``members_of(json)`` and ``unescaped(text)``; both raise tables with a ``message``, see
    ``bad``.
    """
    script = _SCRIPT
    for mark, number in {
        "@MOST_STEPS@": MOST_STEPS,
        "@MOST_MEMBERS@": MOST_MEMBERS,
        "@MOST_NAME@": _MOST_NAME_BYTES,
    }.items():
        script = script.replace(mark, str(number))
    return script
