# SPDX-License-Identifier: Apache-2.0
"""Keeps from clients how many tokens of their prompts were cached, in the filters that read answers.

A count becomes 0. In the Messages API what was cached is no part of ``input_tokens``: it is added there, and the counts
of caches go. Engines leave ``prompt_tokens_details`` out, or write null, where nothing was cached: so it goes
altogether. No byte of an answer, nor their number, depends on what was cached; so answers come without
``content-length``.

What is hidden may be cut in two by the pieces of an answer: the beginning of it is held back until the next piece has
come, at most 512 bytes.

In text of a model the names stand behind escaped quotes, and do not match.
"""

from __future__ import annotations

from typing import Final

# OpenAI's name, and those of Anthropic's API.
_NAMES: Final = ("cached_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")

_SCRIPT: Final = """
local HIDES_COUNTS, HIDDEN, DETAILS = @HIDES@, {@NAMES@}, '"prompt_tokens_details"'
-- The end of a piece that may be the beginning of what is hidden.
local USAGE = '("usage"%s*:%s*{)([^{}]*)'
local BEGINNINGS = {
  '"usage"%s*:%s*{[^{}]*$', ',%s*$', ',?%s*"[%w_]*"?%s*:?%s*[%w.+-]*$', ',?%s*' .. DETAILS .. '%s*:%s*{[^{}]*$'
}

-- The inside of a usage object of the Messages API, with all of the prompt as its input.
local function whole_input(opening, usage)
  if not string.find(usage, '"input_tokens"', 1, true) then return nil end
  local sum = 0
  for _, name in ipairs({"cache_read_input_tokens", "cache_creation_input_tokens"}) do
    local key = '"' .. name .. '"%s*:%s*'
    sum = sum + (tonumber(string.match(usage, key .. "([%d.eE+-]+)")) or 0)
    usage = string.gsub(usage, ",%s*" .. key .. "[%w.+-]+", "")
    usage = string.gsub(usage, key .. "[%w.+-]+%s*,%s*", "")
  end
  return opening .. string.gsub(usage, '("input_tokens"%s*:%s*)(%d+)', function(name, number)
    return name .. string.format("%d", tonumber(number) + sum)
  end)
end

-- Text for the client; tail: the end of what came before.
local function without_counts(tail, text, is_end)
  text = tail .. text
  tail = ""
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
  if string.find(text, '"cache', 1, true) then
    text = string.gsub(text, USAGE, whole_input)
    for _, name in ipairs(HIDDEN) do
      text = string.gsub(text, '("' .. name .. '"%s*:%s*)[%d.eE+-]+', "%10")
    end
  end
  return text, tail
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


def hiding_script(*, hides: bool, drops_details: bool) -> str:
    """Defines HIDES_COUNTS, ``read`` and ``show`` for the scripts of filters, which take an answer piece by piece.

    ``drops_details``: not for the responses API, whose answers always have theirs and repeat what clients sent.
    """
    names = ", ".join(f'"{name}"' for name in _NAMES)
    marks = {"@HIDES@": _lua(value=hides), "@NAMES@": names, "@DROPS_DETAILS@": _lua(value=drops_details)}
    script = _SCRIPT
    for mark, text in marks.items():
        script = script.replace(mark, text)
    return script


def _lua(*, value: bool) -> str:
    return "true" if value else "false"
