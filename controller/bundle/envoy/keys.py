# SPDX-License-Identifier: Apache-2.0
"""API keys in Envoy: a filter that tells callers apart by the SHA-256 of their keys.

Envoy's own filter for API keys compares them in plain text, so every bundle, and every page of Envoy that shows its
configuration, would hold them all. Here the bundle holds digests alone, however a key was given.

Envoy lets a request go on whose script has failed. So a second filter asks for the header that the script writes, and
that no client can send.
"""

from __future__ import annotations

import math
from itertools import count, islice
from typing import TYPE_CHECKING, Final

from envoy_data_plane.envoy.config.core.v3 import DataSource
from envoy_data_plane.envoy.config.rbac.v3 import Permission, Policy, Principal, RbacAction
from envoy_data_plane.envoy.config.rbac.v3 import Rbac as Rules
from envoy_data_plane.envoy.config.route.v3 import HeaderMatcher
from envoy_data_plane.envoy.extensions.filters.http.lua.v3 import Lua
from envoy_data_plane.envoy.extensions.filters.http.rbac.v3 import Rbac

from extproc.protocol import CLIENT

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from extproc.api.authentication import ApiKey

# Longer values are no key of ours, and are not hashed.
_MOST_BYTES: Final = 4096

# SHA-256 as FIPS 180-4 has it; numbers are 32 bits wide and signed, as LuaJIT's bit operations return them.
_SCRIPT: Final = """
local CLIENTS = {@CLIENTS@}
local EXPIRES_AT_MS = {@EXPIRES@}
local INITIAL = {@INITIAL@}
local ROUND = {@ROUND@}
local band, bnot, bxor, bor = bit.band, bit.bnot, bit.bxor, bit.bor
local lshift, ror, rshift, tobit, tohex = bit.lshift, bit.ror, bit.rshift, bit.tobit, bit.tohex

local function compress(state, text, at, w)
  for i = 1, 16 do
    local b1, b2, b3, b4 = string.byte(text, at + 4 * i - 4, at + 4 * i - 1)
    w[i] = bor(lshift(b1, 24), lshift(b2, 16), lshift(b3, 8), b4)
  end
  for i = 17, 64 do
    local x, y = w[i - 15], w[i - 2]
    local s0 = bxor(ror(x, 7), ror(x, 18), rshift(x, 3))
    local s1 = bxor(ror(y, 17), ror(y, 19), rshift(y, 10))
    w[i] = tobit(w[i - 16] + s0 + w[i - 7] + s1)
  end
  local a, b, c, d, e, f, g, h = unpack(state)
  for i = 1, 64 do
    local s1 = bxor(ror(e, 6), ror(e, 11), ror(e, 25))
    local t1 = h + s1 + bxor(band(e, f), band(bnot(e), g)) + ROUND[i] + w[i]
    local s0 = bxor(ror(a, 2), ror(a, 13), ror(a, 22))
    local t2 = s0 + bxor(band(a, b), band(a, c), band(b, c))
    h, g, f, e, d, c, b, a = g, f, e, tobit(d + t1), c, b, a, tobit(t1 + t2)
  end
  for i, value in ipairs({a, b, c, d, e, f, g, h}) do
    state[i] = tobit(state[i] + value)
  end
end

local function sha256(text)
  local size = #text
  local bits = {}
  for i = 0, 7 do
    bits[8 - i] = string.char(math.floor(size * 8 / 256 ^ i) % 256)
  end
  text = text .. "\\128" .. string.rep("\\0", (55 - size) % 64) .. table.concat(bits)
  local state, w = {unpack(INITIAL)}, {}
  for at = 1, #text, 64 do
    compress(state, text, at, w)
  end
  for i = 1, 8 do
    state[i] = tohex(state[i])
  end
  return table.concat(state)
end

-- With or without "Bearer" before it.
local function key_in(value)
  local scheme, rest = string.match(value, "^(%a+) +(.*)$")
  return scheme and string.lower(scheme) == "bearer" and rest or value
end

function envoy_on_request(handle)
  local headers = handle:headers()
  local value = headers:get("authorization")
  if not value or value == "" then
    value = headers:get("x-api-key") or ""
  end
  local client
  if #value > 0 and #value <= @MOST_BYTES@ then
    local digest = sha256(key_in(value))
    local expires_at_ms = EXPIRES_AT_MS[digest]
    if not expires_at_ms or handle:timestamp() < expires_at_ms then
      client = CLIENTS[digest]
    end
  end
  if not client then
    handle:respond({[":status"] = "401"}, "")
    return
  end
  headers:remove("authorization")
  headers:remove("x-api-key")
  headers:replace("@CLIENT@", client)
end
"""


def known_keys(keys: Sequence[ApiKey]) -> Lua:
    """Writes the name of the caller's key into a header and removes the key; a request without a known key gets 401.

    Keys that are still to be read are unknown.
    """
    by_digest = {one.digest: one for one in reversed(keys) if one.digest is not None}
    expires = {
        digest: int(one.expires_at.timestamp() * 1000)
        for digest, one in by_digest.items()
        if one.expires_at is not None
    }
    script = _SCRIPT
    for mark, text in {
        "@CLIENTS@": ",".join(f'["{digest}"]="{one.name}"' for digest, one in sorted(by_digest.items())),
        "@EXPIRES@": ",".join(f'["{digest}"]={at_ms}' for digest, at_ms in sorted(expires.items())),
        "@INITIAL@": ",".join(f"bit.tobit({math.isqrt(prime << 64) % 2**32})" for prime in islice(_primes(), 8)),
        "@ROUND@": ",".join(f"bit.tobit({_cube_root(prime << 96) % 2**32})" for prime in islice(_primes(), 64)),
        "@MOST_BYTES@": str(_MOST_BYTES),
        "@CLIENT@": CLIENT,
    }.items():
        script = script.replace(mark, text)
    return Lua(default_source_code=DataSource(inline_string=script))


def identified_callers() -> Rbac:
    """Lets through whom ``known_keys`` has named."""
    named = Permission(header=HeaderMatcher(name=CLIENT, present_match=True))
    policy = Policy(permissions=[named], principals=[Principal(any=True)])
    return Rbac(rules=Rules(action=RbacAction.ALLOW, policies={"identified": policy}))


def _primes() -> Iterator[int]:
    return (number for number in count(2) if all(number % lower for lower in range(2, number)))


def _cube_root(number: int) -> int:
    """Rounded down."""
    low, high = 0, 1 << (number.bit_length() // 3 + 1)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if middle**3 <= number else (low, middle - 1)
    return low
