# SPDX-License-Identifier: Apache-2.0
"""The filter that sends extproc a copy of each answer that its response cache may keep.

extproc marks such a request at its decision, and Envoy never waits for it here. The copy is what the client gets, after
all other filters, and is sent once, when the answer has come to its end: an answer that is cut, by whomever, never
comes to that. Whether a copy is whole, extproc decides. All other answers cost one look at the metadata.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from controller.bundle.envoy.lua import lua_filter_config
from extproc.wire_names import (
    CACHE,
    CACHE_HEADER,
    EXTPROC_CLUSTER,
    NAMESPACE,
    SERVED_HOST,
    SERVED_NAMESPACE,
    STORE_KIND,
    STORE_PATH,
    STORE_TICKET,
    TICKET,
)

if TYPE_CHECKING:
    from envoy_data_plane.envoy.extensions.filters.http.lua.v3 import Lua

# Nobody waits for it.
_TIMEOUT_MS: Final = 5000
_SCRIPT: Final = """
-- Whether one of the endpoints has answered that the key is of; only: each behind a space, empty for all.
local function is_served_by(handle, only)
  if only == "" then return true end
  local served = handle:streamInfo():dynamicMetadata():get("@SERVED_NAMESPACE@")
  local host = served and served["@SERVED_HOST@"]
  return host ~= nil and string.find(only .. " ", " " .. host .. " ", 1, true) ~= nil
end

-- A message of gRPC: not compressed, its length, and itself.
local function message(body)
  local size = #body
  local prefix = string.char(0, math.floor(size / 16777216), math.floor(size / 65536) % 256,
    math.floor(size / 256) % 256, size % 256)
  return prefix .. body
end

function envoy_on_response(handle)
  local decision = handle:streamInfo():dynamicMetadata():get("@NAMESPACE@")
  local ticket = decision and decision["@TICKET@"]
  if not ticket then return end
  local headers = handle:headers()
  -- an engine's own
  headers:remove("@CACHE_HEADER@")
  local wanted = decision["@CACHE@"]
  if not wanted then return end
  headers:replace("@CACHE_HEADER@", "miss")
  local most, only = string.match(wanted, "^(%d+)(.*)$")
  local media = string.lower(headers:get("content-type") or "")
  local kind = string.find(media, "text/event-stream", 1, true) == 1 and "stream"
    or string.find(media, "application/json", 1, true) == 1 and "json"
  local encoding = string.lower(headers:get("content-encoding") or "identity")
  if headers:get(":status") ~= "200" or not kind or encoding ~= "identity" then return end
  if tonumber(headers:get("content-length") or "0") > tonumber(most) or not is_served_by(handle, only) then return end
  local left, pieces = tonumber(most), {}
  for chunk in handle:bodyChunks() do
    local size = chunk:length()
    left = left - size
    if left < 0 then
      pieces = nil
      break
    end
    if size > 0 then pieces[#pieces + 1] = chunk:getBytes(0, size) end
  end
  if not pieces or #pieces == 0 then return end
  handle:httpCall("@CLUSTER@", {
    [":method"] = "POST", [":path"] = "@STORE_PATH@", [":authority"] = "@CLUSTER@", ["te"] = "trailers",
    ["content-type"] = "application/grpc", ["@STORE_TICKET@"] = ticket, ["@STORE_KIND@"] = kind
  }, message(table.concat(pieces)), @TIMEOUT_MS@, true)
end
"""


def response_copy_filter() -> Lua:
    """Of a listener with a route that has a response cache."""
    return lua_filter_config(
        _SCRIPT,
        {
            "@NAMESPACE@": NAMESPACE,
            "@TICKET@": TICKET,
            "@CACHE@": CACHE,
            "@CACHE_HEADER@": CACHE_HEADER,
            "@SERVED_NAMESPACE@": SERVED_NAMESPACE,
            "@SERVED_HOST@": SERVED_HOST,
            "@CLUSTER@": EXTPROC_CLUSTER,
            "@STORE_PATH@": STORE_PATH,
            "@STORE_TICKET@": STORE_TICKET,
            "@STORE_KIND@": STORE_KIND,
            "@TIMEOUT_MS@": str(_TIMEOUT_MS),
        },
    )
