# SPDX-License-Identifier: Apache-2.0
"""Requests that are translated: the cluster of the translator, the listener to which they come back, and its routes.

A request passes Envoy twice. On its first way all is done that is done for any request: authentication, extproc, usage,
access log. It goes to the translator, which sends it to a second listener. That one has neither extproc nor an access
log, and does what an attempt needs: the engine that extproc has chosen, tries at others, time limits, keys. What it
sees of the engines it adds to its answers, and the first listener keeps it as metadata for the access log.

Both have a socket in the bundle's directory, which only Envoy's user can connect to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from envoy_data_plane.envoy.config.common.mutation_rules.v3 import HeaderMutation
from envoy_data_plane.envoy.config.core.v3 import (
    HeaderValue,
    HeaderValueOption,
    HeaderValueOptionHeaderAppendAction,
    Http1ProtocolOptions,
    HttpProtocolOptions,
)
from envoy_data_plane.envoy.config.route.v3 import (
    HeaderMatcher,
    RetryPolicy,
    RetryPolicyRetryBackOff,
    Route,
    RouteAction,
    RouteMatch,
)
from envoy_data_plane.envoy.extensions.filters.http.header_mutation.v3 import HeaderMutation as MutationFilter
from envoy_data_plane.envoy.extensions.filters.http.header_mutation.v3 import Mutations
from envoy_data_plane.envoy.extensions.filters.http.header_to_metadata.v3 import (
    Config as HeaderToMetadata,
)
from envoy_data_plane.envoy.extensions.filters.http.header_to_metadata.v3 import (
    ConfigKeyValuePair,
    ConfigRule,
)
from envoy_data_plane.envoy.extensions.filters.http.router.v3 import Router
from envoy_data_plane.envoy.extensions.filters.http.upstream_codec.v3 import UpstreamCodec
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import (
    HttpFilter,
    Rds,
)
from envoy_data_plane.envoy.extensions.upstreams.http.v3 import HttpProtocolOptions as UpstreamOptions
from envoy_data_plane.envoy.extensions.upstreams.http.v3 import HttpProtocolOptionsExplicitHttpConfig as ExplicitHttp

from controller.bundle.envoy.bootstrap import file_config_source
from controller.bundle.envoy.clusters import socket_cluster
from controller.bundle.envoy.envoy_json import duration, http_filter, to_plain
from controller.bundle.envoy.inner_listeners import inner_listener
from controller.bundle.envoy.lua import lua_filter_config, lua_string
from controller.bundle.envoy.response_filters import redirect_refusal_filters
from extproc.wire_names import (
    CUT_MARK,
    DESTINATION,
    ENGINE_ANSWERED,
    ENGINE_ATTEMPTS,
    ENGINE_HOST,
    LB_NAMESPACE,
    LIMIT_MARK,
    OUT_OF_TIME,
    SERVED_HOST,
    SERVED_NAMESPACE,
    SERVER_HEADER,
    TRANSLATE,
    TRANSLATED_ATTEMPTS,
    TRANSLATED_CUT,
    TRANSLATED_DETAILS,
    TRANSLATED_NAMESPACE,
    TRANSLATED_SOCKET,
    TRANSLATOR_CLUSTER,
    TRANSLATOR_SOCKET,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from extproc.api.gateway_config import GatewayConfigSpec
    from extproc.api.model_server import ModelServer

# The second listener and its routes; as part of the names of Envoy's statistics, too.
TRANSLATED: Final = "attache_translated"
TRANSLATED_ROUTES_FILE: Final = "rds/translated.json"
# The translator closes connections that are idle for longer.
_IDLE_S: Final = 30.0
# An answer's headers as metadata, which the access log has; no client gets them.
_SCRIPT: Final = """
-- of one length
local CUT, LATE = "@MARK@", "@LATE@"

function envoy_on_response(handle)
  local headers, metadata = handle:headers(), handle:streamInfo():dynamicMetadata()
  local host, details = headers:get("@HOST@"), headers:get("@ANSWERED@")
  local attempts = tonumber(headers:get("@ATTEMPTS@") or "")
  for _, name in ipairs({"@HOST@", "@ANSWERED@", "@ATTEMPTS@"}) do headers:remove(name) end
  if not details then return end
  metadata:set("@NAMESPACE@", "@DETAILS_KEY@", details)
  metadata:set("@NAMESPACE@", "@ATTEMPTS_KEY@", attempts or 0)
  if host then
    metadata:set("@NAMESPACE@", "@HOST_KEY@", host)
    metadata:set("@SERVED@", "@HOST_KEY@", host)
  end
  if string.find(headers:get("content-type") or "", "text/event-stream", 1, true) ~= 1 then return end
  for chunk in handle:bodyChunks() do
    local rest = chunk:length() - #CUT
    local mark = rest >= 0 and chunk:getBytes(rest, #CUT)
    if mark == CUT or mark == LATE then
      chunk:setBytes(chunk:getBytes(0, rest))
      -- of the metadata, what was there before the wait is gone
      local anew = handle:streamInfo():dynamicMetadata()
      anew:set("@NAMESPACE@", "@CUT_KEY@", true)
      if mark == LATE then anew:set("@NAMESPACE@", "@DETAILS_KEY@", "@OUT_OF_TIME@") end
    end
  end
end
"""


def needs_translation(servers: Iterable[ModelServer]) -> bool:
    """Whether some request is."""
    return any(one.spec.accepts_translated_requests for one in servers)


def translator_cluster(directory: str) -> dict[str, object]:
    """The translator, which is one process."""
    marks = {
        "@HOST@": ENGINE_HOST,
        "@ANSWERED@": ENGINE_ANSWERED,
        "@ATTEMPTS@": ENGINE_ATTEMPTS,
        "@NAMESPACE@": TRANSLATED_NAMESPACE,
        "@DETAILS_KEY@": TRANSLATED_DETAILS,
        "@ATTEMPTS_KEY@": TRANSLATED_ATTEMPTS,
        "@CUT_KEY@": TRANSLATED_CUT,
        "@MARK@": lua_string(CUT_MARK),
        "@LATE@": lua_string(LIMIT_MARK),
        "@OUT_OF_TIME@": OUT_OF_TIME,
        "@HOST_KEY@": SERVED_HOST,
        "@SERVED@": SERVED_NAMESPACE,
    }
    filters = [
        http_filter("envoy.filters.http.lua", lua_filter_config(_SCRIPT, marks)),
        http_filter("envoy.filters.http.upstream_codec", UpstreamCodec()),
    ]
    options = UpstreamOptions(
        common_http_protocol_options=HttpProtocolOptions(idle_timeout=duration(_IDLE_S)),
        explicit_http_config=ExplicitHttp(http_protocol_options=Http1ProtocolOptions()),
        http_filters=filters,
    )
    return socket_cluster(TRANSLATOR_CLUSTER, directory, TRANSLATOR_SOCKET, options)


def translator_route() -> dict[str, object]:
    """Of requests that extproc has translated. The second listener has time limits and tries at engines; here a
    translator that is started again is tried once more, before it has the request.
    """
    action = RouteAction(
        cluster=TRANSLATOR_CLUSTER,
        timeout=duration(0),
        idle_timeout=duration(0),
        retry_policy=RetryPolicy(
            retry_on="connect-failure",
            num_retries=5,
            retry_back_off=RetryPolicyRetryBackOff(base_interval=duration(0.1), max_interval=duration(0.5)),
        ),
    )
    headers = [HeaderMatcher(name=one, present_match=True) for one in (SERVER_HEADER, TRANSLATE)]
    return to_plain(Route(name="decided/translated", match=RouteMatch(prefix="/", headers=headers), route=action))


def translated_listener(gateway: GatewayConfigSpec, directory: str) -> dict[str, object]:
    """Where the translator sends requests."""
    socket = f"{directory}/{TRANSLATED_SOCKET}"
    rds = Rds(route_config_name=TRANSLATED, config_source=file_config_source(directory, TRANSLATED_ROUTES_FILE))
    return inner_listener(gateway, socket, rds, _filters())


def _filters() -> list[HttpFilter]:
    chosen = ConfigRule(
        header=DESTINATION,
        on_header_present=ConfigKeyValuePair(metadata_namespace=LB_NAMESPACE, key=DESTINATION),
        remove=True,
    )
    values = {
        ENGINE_HOST: f"%DYNAMIC_METADATA({SERVED_NAMESPACE}:{SERVED_HOST})%",
        ENGINE_ATTEMPTS: "%UPSTREAM_REQUEST_ATTEMPT_COUNT%",
        ENGINE_ANSWERED: "%RESPONSE_CODE_DETAILS%",
    }
    written = [
        HeaderMutation(
            append=HeaderValueOption(
                header=HeaderValue(key=name, value=value),
                append_action=HeaderValueOptionHeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD,
            )
        )
        for name, value in values.items()
    ]
    return [
        http_filter("envoy.filters.http.header_to_metadata", HeaderToMetadata(request_rules=[chosen])),
        http_filter(
            "envoy.filters.http.header_mutation",
            MutationFilter(mutations=Mutations(response_mutations=written)),
        ),
        *redirect_refusal_filters(model_paths=False),
        http_filter("envoy.filters.http.router", Router(suppress_envoy_headers=True)),
    ]
