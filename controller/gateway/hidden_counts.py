# SPDX-License-Identifier: Apache-2.0
"""Keeps from clients how many tokens of their prompts were cached, in the filters that read answers.

A count becomes 0, with blanks in front, so that no answer changes its length. A count may be cut in two by the pieces of an answer:
the beginning of one is held back until the next piece has come, at most 128 bytes.

In text of a model the names stand behind escaped quotes, and do not match.
"""

from __future__ import annotations

from typing import Final

# OpenAI's name, and those of Anthropic's API.
_NAMES: Final = ("cached_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")

_SCRIPT: Final = """
local HIDES_COUNTS, HIDDEN = @HIDES@, {@NAMES@}

-- Text for the client; tail: the end of what came before.
local function without_counts(tail, text, is_end)
  text = tail .. text
  tail = ""
  local last = math.max(1, #text - 127)
  local at = not is_end and string.find(text, '"[%w_]*"?%s*:?%s*[%d.eE+-]*$', last)
  if at then
    text, tail = string.sub(text, 1, at - 1), string.sub(text, at)
  end
  if string.find(text, '"cache', 1, true) then
    for _, name in ipairs(HIDDEN) do
      text = string.gsub(text, '("' .. name .. '"%s*:%s*)([%d.eE+-]+)', function(before, number)
        return before .. string.rep(" ", #number - 1) .. "0"
      end)
    end
  end
  return text, tail
end
"""


def hiding_script(*, hides: bool) -> str:
    """Defines HIDES_COUNTS and ``without_counts`` for the scripts of filters."""
    names = ", ".join(f'"{name}"' for name in _NAMES)
    return _SCRIPT.replace("@HIDES@", "true" if hides else "false").replace("@NAMES@", names)
