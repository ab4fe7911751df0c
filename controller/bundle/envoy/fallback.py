# SPDX-License-Identifier: Apache-2.0
"""Fallback across ModelServers: routes whose attempts go to several clusters, and what each of these clusters adds.

An attempt goes to the cluster that stands at its place in a list. extproc writes that list into dynamic metadata; a
route without extproc has one of its own. The body is the same for all attempts but for the model's name: a Lua filter
of each cluster puts its own in, at the place that the metadata name. Requests of these routes have Envoy's high
priority, whose only use is a retry budget of its own: it bounds what a cluster gets from others, and leaves its own
retries alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec
from envoy_data_plane.envoy.config.cluster.v3 import CircuitBreakersThresholds, CircuitBreakersThresholdsRetryBudget
from envoy_data_plane.envoy.config.core.v3 import (
    DataSource,
    HeaderValue,
    HeaderValueOption,
    HeaderValueOptionHeaderAppendAction,
    Metadata,
    RoutingPriority,
)
from envoy_data_plane.envoy.extensions.filters.http.lua.v3 import Lua
from envoy_data_plane.envoy.type.v3 import Percent
from envoy_data_plane.google.protobuf import Struct, Value

from controller.bundle.envoy.envoy_json import http_filter, seconds, to_plain
from extproc.api.fallback import CONDITIONS, STATUSES
from extproc.protocol import (
    DEGRADED,
    DEGRADED_SERVERS,
    NAMESPACE,
    ROUTE_NAMESPACE,
    SALT,
    SERVED_BY,
    SERVER_CLUSTER,
    SPLICE,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from envoy_data_plane.envoy.config.route.v3 import RetryPolicy, Route
    from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import HttpFilter

    from extproc.api.fallback import Fallback, FallbackRetry
    from extproc.api.model_server import ModelServer
    from extproc.api.snapshot import Snapshot

# The library has no class of it.
_SPECIFIER: Final = (
    "type.googleapis.com/envoy.extensions.router.cluster_specifiers.priority_group.v3.PriorityGroupClusterSpecifier"
)
# A cluster's own metadata, from which answers get the name of its ModelServer.
_SERVER: Final = "server"
# Dynamic metadata of what attempts have changed in the request's headers: that a ModelServer's key is among them, and
# the path and host before a provider's took their place.
ATTEMPT_NAMESPACE: Final = "attache.attempt"
KEYED: Final = "keyed"
PATH: Final = "path"
HOST: Final = "host"
# After such a body its text is collected at once: collections come by the number of objects, not by their size.
_LARGE_BYTES: Final = 256 * 1024
_SCRIPT: Final = r"""
local function chosen(handle)
  return handle:streamInfo():dynamicMetadata():get("@NAMESPACE@") or {}
end

-- Headers are the same object in all attempts: what stands there may be another ModelServer's.
local function change_back(handle)
  local headers, metadata = handle:headers(), handle:streamInfo():dynamicMetadata()
  local before = metadata:get("@ATTEMPT@") or {}
  if before["@KEYED@"] then
    headers:remove("authorization")
    headers:remove("x-api-key")
  end
  if before["@PATH@"] then
    headers:replace(":path", before["@PATH@"])
    headers:replace(":authority", before["@HOST@"])
  end
  if @HAS_KEY@ then metadata:set("@ATTEMPT@", "@KEYED@", true) end
end

-- A place, as "first byte,length", and what is to stand there.
local function edit(place, text)
  local first, length = string.match(place or "", "^(%d+),(%d+)$")
  return first and {first = tonumber(first), after = first + length + 1, text = text}
end

function envoy_on_request(handle)
  change_back(handle)
  local named = edit(chosen(handle)["@SPLICE@"], "@MODEL@")
  local cut = @CUTS@ and edit(chosen(handle)["@SALT@"], "")
  if not named and not cut then return end
  local one, other = named or cut, named and cut
  if other and other.first < one.first then one, other = other, one end
  local body = handle:body()
  local size = body:length()
  local json = body:getBytes(0, size)
  local parts = {string.sub(json, 1, one.first), one.text}
  if other then
    parts[3], parts[4] = string.sub(json, one.after, other.first), other.text
    one = other
  end
  parts[#parts + 1] = string.sub(json, one.after)
  local length = body:setBytes(table.concat(parts))
  -- each attempt writes the length of its own body
  handle:headers():replace("content-length", tostring(length))
  if size > @LARGE@ then
    json, parts = nil, nil
    collectgarbage()
  end
end

function envoy_on_response(handle)
  local degraded = chosen(handle)["@SERVERS@"]
  if degraded and degraded["@SERVER@"] then handle:headers():replace("@DEGRADED@", "model") end
end
"""


class Chained(msgspec.Struct, frozen=True):
    """A ModelServer in a rule with fallbacks. ``budget_percent``, ``min_concurrency``: the largest of the rules whose
    fallback it is; None if it is none.
    """

    budget_percent: int | None = None
    min_concurrency: int | None = None

    def plus(self, retry: FallbackRetry) -> Chained:
        """It is the fallback of one more rule."""
        return Chained(
            max(self.budget_percent or 0, retry.budget_percent), max(self.min_concurrency or 0, retry.min_concurrency)
        )


def chained_servers(snapshot: Snapshot) -> Mapping[str, Chained]:
    """By key: those that are a target of a rule with fallbacks, or a fallback."""
    found: dict[str, Chained] = {}
    for route in snapshot.routes:
        for rule in route.spec.rules:
            for target in rule.target_models if rule.fallback else ():
                found.setdefault(route.server_key(target), Chained())
            for one in rule.fallback:
                key = route.server_key(one)
                found[key] = found.get(key, Chained()).plus(rule.fallback_retry)
    return found


def cluster_metadata(server: ModelServer) -> Metadata:
    """From which answers get the name of the ModelServer."""
    return Metadata(filter_metadata={NAMESPACE: Struct(fields={_SERVER: Value(string_value=server.metadata.key)})})


def high_priority(chained: Chained, own: CircuitBreakersThresholds) -> CircuitBreakersThresholds:
    """The thresholds of requests of rules with fallbacks. ``own``: of all others."""
    found = CircuitBreakersThresholds(
        priority=RoutingPriority.HIGH,
        max_connections=own.max_connections,
        max_pending_requests=own.max_pending_requests,
        max_requests=own.max_requests,
        retry_budget=own.retry_budget,
    )
    if chained.budget_percent is not None:
        found.retry_budget = CircuitBreakersThresholdsRetryBudget(
            budget_percent=Percent(value=float(chained.budget_percent)), min_retry_concurrency=chained.min_concurrency
        )
    return found


def names_model(server: ModelServer) -> HttpFilter:
    """The cluster's filter: its model's name into bodies, and a header into answers that are degraded. It takes back
    what an attempt before has changed for another ModelServer, and a provider gets no cache salt.
    """
    marks = {
        "@NAMESPACE@": ROUTE_NAMESPACE,
        "@SPLICE@": SPLICE,
        "@MODEL@": lua_text(msgspec.json.encode(server.spec.model)),
        "@SERVERS@": DEGRADED_SERVERS,
        "@SERVER@": lua_text(server.metadata.key.encode()),
        "@DEGRADED@": DEGRADED,
        "@ATTEMPT@": ATTEMPT_NAMESPACE,
        "@KEYED@": KEYED,
        "@PATH@": PATH,
        "@HOST@": HOST,
        "@CUTS@": "true" if server.spec.provider is not None else "false",
        "@SALT@": SALT,
        "@HAS_KEY@": "true" if server.spec.connection.has_key else "false",
        "@LARGE@": str(_LARGE_BYTES),
    }
    script = _SCRIPT
    for mark, text in marks.items():
        script = script.replace(mark, text)
    return http_filter("envoy.filters.http.lua", Lua(default_source_code=DataSource(inline_string=script)))


def lua_text(value: bytes) -> str:
    """Within quotation marks, whatever it has in it."""
    return "".join(f"\\{byte:03d}" for byte in value)


def across_clusters(
    route: Route, groups: Sequence[Sequence[tuple[str, int]]], *, is_decided: bool = False
) -> dict[str, object]:
    """``route``, whose attempts go to the clusters of ``groups``, each group's by weight. ``is_decided``: to those that
    extproc writes, and ``groups`` only must exist.
    """
    route.response_headers_to_add = [
        HeaderValueOption(
            header=HeaderValue(key=SERVED_BY, value=f"%METADATA(CLUSTER:{NAMESPACE}:{_SERVER})%"),
            append_action=HeaderValueOptionHeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD,
        )
    ]
    if route.route is not None:
        # the specifier takes its place
        route.route.cluster = "placeholder"
        route.route.priority = RoutingPriority.HIGH
    plain: dict[str, Any] = to_plain(route)
    specifier: dict[str, object] = {
        "@type": _SPECIFIER,
        "priority_groups": [
            {
                "name": str(number),
                "clusters": [{"cluster_name": SERVER_CLUSTER + server, "weight": weight} for server, weight in group],
            }
            for number, group in enumerate(groups)
        ],
    }
    if is_decided:
        specifier["override_metadata_namespace"] = ROUTE_NAMESPACE
    action = {name: value for name, value in plain["route"].items() if name != "cluster"}
    action["inline_cluster_specifier_plugin"] = {"extension": {"name": "attache.fallback", "typed_config": specifier}}
    return {**plain, "route": action}


def attempts_of(policy: RetryPolicy, fallbacks: Sequence[Fallback], retry: FallbackRetry, attempts: int) -> RetryPolicy:
    """``policy`` for so many attempts in all, in the clusters of a list, after failures of the fallbacks' classes."""
    classes = fallbacks[0].on
    statuses = [status for one in classes for status in STATUSES[one]]
    conditions = [condition for one in classes for condition in CONDITIONS[one]]
    policy.retry_on = ",".join([*conditions, *(["retriable-status-codes"] if statuses else [])])
    policy.retriable_status_codes = sorted(statuses)
    policy.num_retries = attempts - 1
    policy.refresh_cluster_on_retry = True
    if retry.idle_timeout is not None:
        policy.per_try_idle_timeout = seconds(retry.idle_timeout)
    return policy
