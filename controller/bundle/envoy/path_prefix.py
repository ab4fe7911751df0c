# SPDX-License-Identifier: Apache-2.0
"""What stands before the paths of a server: of engines whose API is not at the root, and of providers.

The request's headers are one object in all attempts, so the path that the client asked for is kept as metadata. Another
attempt begins with it, here or at a server without a prefix.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from controller.bundle.envoy.envoy_json import http_filter
from controller.bundle.envoy.fallback import ATTEMPT_NAMESPACE, HOST, PATH
from controller.bundle.envoy.lua import lua_filter_config, lua_string

if TYPE_CHECKING:
    from collections.abc import Mapping

    from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import HttpFilter

# Of Lua, before the functions of a filter that changes the path.
PATH_SCRIPT: Final = r"""
-- What the client asked for, before an attempt has changed it.
local function path_of(handle)
  local before = handle:streamInfo():dynamicMetadata():get("@ATTEMPT@") or {}
  return before["@PATH@"] or handle:headers():get(":path") or ""
end

local function keep_path(handle)
  local metadata, path = handle:streamInfo():dynamicMetadata(), path_of(handle)
  if not (metadata:get("@ATTEMPT@") or {})["@PATH@"] then
    metadata:set("@ATTEMPT@", "@HOST@", handle:headers():get(":authority"))
    metadata:set("@ATTEMPT@", "@PATH@", path)
  end
end
"""
_SCRIPT: Final = (
    PATH_SCRIPT
    + r"""
function envoy_on_request(handle)
  keep_path(handle)
  handle:headers():replace(":path", "@PREFIX@" .. path_of(handle))
end
"""
)
PATH_MARKS: Final[Mapping[str, str]] = MappingProxyType(
    {"@ATTEMPT@": ATTEMPT_NAMESPACE, "@PATH@": PATH, "@HOST@": HOST}
)


def path_prefix_filter(prefix: str) -> HttpFilter:
    """The filter of a cluster of engines."""
    return http_filter(
        "attache.path_prefix", lua_filter_config(_SCRIPT, {**PATH_MARKS, "@PREFIX@": lua_string(prefix.encode())})
    )
