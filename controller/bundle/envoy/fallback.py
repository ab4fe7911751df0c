# SPDX-License-Identifier: Apache-2.0
"""Fallback across ModelServers: routes whose attempts go to several clusters, and what each of these clusters adds.

An attempt goes to the cluster that stands at its place in a list. extproc writes that list into dynamic metadata; a
route without extproc has one of its own. The body is the same for all attempts but for the model's name, the answer's
length where extproc limits it, and what is for the decode engine of a pair alone: a Lua filter of each cluster puts its
own in, or nothing, at the places that the metadata name. Requests of these routes have Envoy's high priority, whose
only use is a retry budget of its own: it bounds what a cluster gets from others, and leaves its own retries alone.

Envoy decides by the headers of an answer whether another attempt follows. What an engine refuses for the length or the
content of the prompt shows in the body alone: where a fallback takes such requests, the filter holds a short error
until it is whole, and marks its headers. The ModelServers that take the request are next then, and others are last. If
none is left that may take it, the answer is the client's, as it is.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import msgspec
from envoy_data_plane.envoy.config.cluster.v3 import CircuitBreakersThresholds, CircuitBreakersThresholdsRetryBudget
from envoy_data_plane.envoy.config.core.v3 import (
    HeaderValue,
    HeaderValueOption,
    HeaderValueOptionHeaderAppendAction,
    Metadata,
    RoutingPriority,
)
from envoy_data_plane.envoy.config.route.v3 import HeaderMatcher
from envoy_data_plane.envoy.type.v3 import Percent
from envoy_data_plane.google.protobuf import Struct, Value

from controller.bundle.envoy.envoy_json import duration, http_filter, to_plain
from controller.bundle.envoy.lua import lua_bool, lua_filter_config, lua_string
from controller.bundle.envoy.response_filters import redirect_status_matcher
from extproc.api.fallback import CONDITIONS, REFUSALS, STATUSES, retried_failures
from extproc.wire_names import (
    CLAMPS,
    DEGRADED,
    DEGRADED_SERVERS,
    ERRORS,
    GROUPS,
    NAMESPACE,
    REFUSED,
    REFUSED_FOR,
    ROUTE_NAMESPACE,
    SALT,
    SERVED_BY,
    SERVED_HOST,
    SERVED_NAMESPACE,
    SERVER_CLUSTER,
    SPLICE,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from envoy_data_plane.envoy.config.route.v3 import RetryPolicy, Route
    from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import HttpFilter

    from extproc.api.config_snapshot import Snapshot
    from extproc.api.fallback import FailureClass, Fallback, FallbackRetry
    from extproc.api.model_server import ModelServer

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
# An engine's error has some hundred bytes.
_LONGEST_ERROR_BYTES: Final = 16 * 1024
# By class of refusals: values of ``code`` or ``type`` in an error, and what is part of its message, in small letters.
_WORDS: Final[Mapping[FailureClass, tuple[tuple[str, ...], tuple[str, ...]]]] = MappingProxyType(
    {
        "context-window": (
            # OpenAI and most others; llama.cpp
            ("context_length_exceeded", "exceed_context_size_error"),
            (
                # vLLM, SGLang, Mistral; OpenAI's responses API
                *("context length", "context window"),
                # vLLM, SGLang
                *("maximum model length", "exceeds the maximum allowed length"),
                # TensorRT-LLM
                *("max_num_tokens", "max_seq_len", "maximum input length"),
                # Anthropic
                *("prompt is too long", "exceed context limit"),
                # Bedrock, Gemini
                *("input is too long", "exceeds the maximum number of tokens"),
            ),
        ),
        "content-policy": (
            # Azure, OpenAI's images, OpenAI's reasoning models
            ("content_filter", "content_policy_violation", "moderation_blocked"),
            # Anthropic; OpenAI
            ("content filtering policy", "usage policy", "content management policy"),
        ),
    }
)
_SCRIPT: Final = r"""
local function chosen(handle)
  return handle:streamInfo():dynamicMetadata():get("@NAMESPACE@") or {}
end

-- Headers are the same object in all attempts: what stands there may be another ModelServer's.
local function change_back(handle)
  local headers, metadata = handle:headers(), handle:streamInfo():dynamicMetadata()
  local before = metadata:get("@ATTEMPT@") or {}
  for name in string.gmatch(before["@KEYED@"] or "", "%S+") do headers:remove(name) end
  if before["@PATH@"] then
    headers:replace(":path", before["@PATH@"])
    headers:replace(":authority", before["@HOST@"])
  end
  if @HAS_KEY@ then metadata:set("@ATTEMPT@", "@KEYED@", "authorization") end
end

-- The request may be the reason, and not the engine: its attempts are no evidence that no other one could have.
local function note_error(handle)
  local metadata = handle:streamInfo():dynamicMetadata()
  local host = (metadata:get("@SERVED_NAMESPACE@") or {})["@SERVED_HOST@"]
  if handle:headers():get(":status") ~= "500" or not host then return end
  local errors = chosen(handle)["@ERRORS@"] or {}
  errors[host] = "500"
  metadata:set("@NAMESPACE@", "@ERRORS@", errors)
end

@REFUSALS@
function envoy_on_request(handle)
  change_back(handle)
  @COUNT@
  local read, edits = chosen(handle), {}
  local first, length = string.match(read["@SPLICE@"] or "", "^(%d+),(%d+)$")
  if first then edits[1] = {at = tonumber(first), length = tonumber(length), text = "@MODEL@"} end
  local clamps = (read["@CLAMPS@"] or {})["@SERVER@"] or ""
  for first, length, text in string.gmatch(clamps, "(%d+),(%d+),([^;]*);") do
    edits[#edits + 1] = {at = tonumber(first), length = tonumber(length), text = text}
  end
  first, length = string.match(@CUTS@ and read["@SALT@"] or "", "^(%d+),(%d+)$")
  if first then edits[#edits + 1] = {at = tonumber(first), length = tonumber(length), text = ""} end
  if #edits == 0 then return end
  -- what is put in comes before what begins there
  table.sort(edits, function(one, other)
    return one.at < other.at or one.at == other.at and one.length < other.length
  end)
  local body = handle:body()
  local size = body:length()
  local json = body:getBytes(0, size)
  local pieces, from = {}, 1
  for _, edit in ipairs(edits) do
    pieces[#pieces + 1] = string.sub(json, from, edit.at)
    pieces[#pieces + 1], from = edit.text, edit.at + edit.length + 1
  end
  pieces[#pieces + 1] = string.sub(json, from)
  length = body:setBytes(table.concat(pieces))
  -- each attempt writes the length of its own body
  handle:headers():replace("content-length", tostring(length))
  if size > @LARGE@ then
    json, pieces = nil, nil
    collectgarbage()
  end
end

function envoy_on_response(handle)
  local degraded = chosen(handle)["@SERVERS@"]
  local how = degraded and degraded["@SERVER@"]
  if how then handle:headers():replace("@DEGRADED@", how) end
  note_error(handle)
  @READ@
end
"""
# Only in clusters of rules with such a class. Names in JSON strings stand behind escaped quotes, and do not match.
_REFUSALS_SCRIPT: Final = r"""
local OWN = "@CLUSTER@"
local STATUSES = {["400"] = true, ["413"] = true, ["422"] = true}
local WORDS = {@WORDS@}

local function reason_in(text)
  text = string.lower(text)
  for _, one in ipairs(WORDS) do
    for _, code in ipairs(one.codes) do
      local value = '"%s*:%s*"' .. code .. '"'
      if string.find(text, '"code' .. value) or string.find(text, '"type' .. value) then return one.class end
    end
    for _, field in ipairs({"message", "detail"}) do
      for message in string.gmatch(text, '"' .. field .. '"%s*:%s*"([^"]*)') do
        for _, phrase in ipairs(one.phrases) do
          if string.find(message, phrase, 1, true) then return one.class end
        end
      end
    end
  end
end

-- The attempts with those behind the first "tried" in another order: first the clusters that take the request. nil:
-- none is left that does.
local function reordered(groups, tried, takes, asked)
  local made, others, count = {}, {}, 0
  for index, group in ipairs(groups) do
    local cluster = group.clusters[1].cluster_name
    if index <= tried then
      made[index] = group
    elseif takes[cluster] and not asked[cluster] then
      made[#made + 1], count = group, count + 1
    else
      others[#others + 1] = group
    end
  end
  for _, group in ipairs(others) do made[#made + 1] = group end
  return count > 0 and made or nil
end

local function count_attempt(handle)
  local read = chosen(handle)
  for _, one in ipairs(WORDS) do
    if read[one.class] then
      return handle:streamInfo():dynamicMetadata():set("@NAMESPACE@", "tried", (read.tried or 0) + 1)
    end
  end
end

local function read_refusal(handle)
  local headers, read = handle:headers(), chosen(handle)
  if not (STATUSES[headers:get(":status")] and read.tried) then return end
  local size = tonumber(headers:get("content-length") or "")
  local kind = string.lower(headers:get("content-type") or "")
  if not size or size < 1 or size > @LONGEST@ or string.find(kind, "application/json", 1, true) ~= 1 then return end
  local encoding = string.lower(headers:get("content-encoding") or "identity")
  if encoding ~= "identity" then return end
  -- wrappers of before are of no use after it
  local body = handle:body()
  local class = body and reason_in(body:getBytes(0, body:length()))
  local takes = class and read[class]
  if not takes then return end
  local metadata = handle:streamInfo():dynamicMetadata()
  local host = (metadata:get("@SERVED_NAMESPACE@") or {})["@SERVED_HOST@"]
  local refused, asked = read["@REFUSED@"] or {}, read.asked or {}
  asked[OWN] = true
  if host then refused[host] = class end
  metadata:set("@NAMESPACE@", "@REFUSED@", refused)
  metadata:set("@NAMESPACE@", "asked", asked)
  if read["@GROUPS@"] then
    local groups = reordered(read["@GROUPS@"], read.tried, takes, asked)
    if not groups then return end
    metadata:set("@NAMESPACE@", "@GROUPS@", groups)
  end
  handle:headers():replace("@REFUSED_FOR@", class)
end
"""


class FallbackRuleLimits(msgspec.Struct, frozen=True):
    """A ModelServer in a rule with fallbacks. ``budget_percent``, ``min_concurrency``: the largest of the rules whose
    fallback it is; None if it is none. ``most_read``: the longest error in bytes that its filter reads, 0 if no
    fallback of these rules takes what others have refused.
    """

    budget_percent: int | None = None
    min_concurrency: int | None = None
    most_read: int = 0

    def raise_fallback_budget(self, retry: FallbackRetry) -> FallbackRuleLimits:
        """It is the fallback of one more rule."""
        return msgspec.structs.replace(
            self,
            budget_percent=max(self.budget_percent or 0, retry.budget_percent),
            min_concurrency=max(self.min_concurrency or 0, retry.min_concurrency),
        )

    def raise_error_read_limit(self, most_read: int) -> FallbackRuleLimits:
        """It is in one more rule."""
        return msgspec.structs.replace(self, most_read=max(self.most_read, most_read))


def fallback_servers(snapshot: Snapshot) -> Mapping[str, FallbackRuleLimits]:
    """By key: those that are a target of a rule with fallbacks, or a fallback."""
    found: dict[str, FallbackRuleLimits] = {}
    # Envoy answers 500 in place of a longer one that it should hold
    longest = min(_LONGEST_ERROR_BYTES, int(snapshot.gateway.max_body_size))
    for route in snapshot.routes:
        for rule in route.spec.rules:
            most_read = 0 if retried_failures(rule.fallback).isdisjoint(REFUSALS) else longest
            for target in rule.target_models if rule.fallback else ():
                key = route.server_key(target)
                found[key] = found.get(key, FallbackRuleLimits()).raise_error_read_limit(most_read)
            for one in rule.fallback:
                key = route.server_key(one)
                found[key] = (
                    found.get(key, FallbackRuleLimits())
                    .raise_fallback_budget(rule.fallback_retry)
                    .raise_error_read_limit(most_read)
                )
    return found


def cluster_metadata(server: ModelServer) -> Metadata:
    """From which answers get the name of the ModelServer."""
    return Metadata(filter_metadata={NAMESPACE: Struct(fields={_SERVER: Value(string_value=server.metadata.key)})})


def high_priority_thresholds(chained: FallbackRuleLimits, own: CircuitBreakersThresholds) -> CircuitBreakersThresholds:
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


def model_name_filter(server: ModelServer, *, most_read: int) -> HttpFilter:
    """The cluster's filter: its model's name into bodies, and headers into answers that are degraded, or refused for a
    reason that another ModelServer may not have. It takes back what an attempt before has changed for another
    ModelServer, and a provider gets no cache salt. ``most_read``: see Chained.
    """
    marks = {
        "@REFUSALS@": _REFUSALS_SCRIPT if most_read else "",
        "@COUNT@": "count_attempt(handle)" if most_read else "",
        "@READ@": "read_refusal(handle)" if most_read else "",
        "@WORDS@": ", ".join(_lua_words(one) for one in REFUSALS),
        "@CLUSTER@": lua_string((SERVER_CLUSTER + server.metadata.key).encode()),
        "@REFUSED_FOR@": REFUSED_FOR,
        "@REFUSED@": REFUSED,
        "@ERRORS@": ERRORS,
        "@GROUPS@": GROUPS,
        "@SERVED_NAMESPACE@": SERVED_NAMESPACE,
        "@SERVED_HOST@": SERVED_HOST,
        "@LONGEST@": str(most_read),
        "@NAMESPACE@": ROUTE_NAMESPACE,
        "@SPLICE@": SPLICE,
        "@CLAMPS@": CLAMPS,
        "@MODEL@": lua_string(msgspec.json.encode(server.spec.model)),
        "@SERVERS@": DEGRADED_SERVERS,
        "@SERVER@": lua_string(server.metadata.key.encode()),
        "@DEGRADED@": DEGRADED,
        "@ATTEMPT@": ATTEMPT_NAMESPACE,
        "@KEYED@": KEYED,
        "@PATH@": PATH,
        "@HOST@": HOST,
        "@CUTS@": lua_bool(value=server.spec.provider is not None),
        "@SALT@": SALT,
        "@HAS_KEY@": lua_bool(value=server.spec.connection.has_key),
        "@LARGE@": str(_LARGE_BYTES),
    }
    return http_filter("envoy.filters.http.lua", lua_filter_config(_SCRIPT, marks))


def _lua_words(one: FailureClass) -> str:
    codes, phrases = ("{" + ", ".join(f'"{word}"' for word in words) + "}" for words in _WORDS[one])
    return f'{{class = "{one}", codes = {codes}, phrases = {phrases}}}'


def route_across_clusters(
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
    route.response_headers_to_remove = [REFUSED_FOR]
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


def fallback_retry_policy(
    policy: RetryPolicy, fallbacks: Sequence[Fallback], retry: FallbackRetry, attempts: int
) -> RetryPolicy:
    """``policy`` for so many attempts in all, in the clusters of a list, after failures of the fallbacks' classes."""
    classes = [one for one in CONDITIONS if one in retried_failures(fallbacks)]
    statuses = [status for one in classes for status in STATUSES[one]]
    conditions = dict.fromkeys(condition for one in classes for condition in CONDITIONS[one])
    policy.retry_on = ",".join([*conditions, *(["retriable-status-codes"] if statuses else [])])
    policy.retriable_headers = [redirect_status_matcher()] if "server-error" in classes else []
    if not retried_failures(fallbacks).isdisjoint(REFUSALS):
        policy.retriable_headers.append(HeaderMatcher(name=REFUSED_FOR, present_match=True))
    policy.retriable_status_codes = sorted(statuses)
    policy.num_retries = attempts - 1
    policy.refresh_cluster_on_retry = True
    if retry.idle_timeout is not None:
        policy.per_try_idle_timeout = duration(retry.idle_timeout)
    return policy
