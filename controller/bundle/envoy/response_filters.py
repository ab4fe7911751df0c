# SPDX-License-Identifier: Apache-2.0
"""Answers of servers: headers that only the gateway writes are removed, and an engine's redirects do not reach clients.

The cluster of each server removes these headers, before other filters, retries and routes read or write any. A redirect
of an engine, or its switch to another protocol, is a failure: routes have the next endpoint tried after it, and the
last one becomes an error of the gateway's. That needs a script, and each script has memory in each of Envoy's threads,
so it is one of the listener's, which Envoy skips for all other statuses. A provider's cluster has a script anyway.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import msgspec
from envoy_data_plane.envoy.config.common.mutation_rules.v3 import HeaderMutation, HeaderMutationRemoveOnMatch
from envoy_data_plane.envoy.config.route.v3 import HeaderMatcher
from envoy_data_plane.envoy.extensions.filters.http.header_mutation.v3 import HeaderMutation as MutationFilter
from envoy_data_plane.envoy.extensions.filters.http.header_mutation.v3 import Mutations
from envoy_data_plane.envoy.type.matcher.v3 import RegexMatcher, StringMatcher

from controller.bundle.envoy.envoy_json import http_filter, typed_extension
from controller.bundle.envoy.filter_conditions import answer_has, request_has, skip_filter_if
from controller.bundle.envoy.lua import lua_filter_config, lua_string
from extproc.api.session_affinity import session_token_headers
from extproc.wire_names import SERVED_HOST, SERVED_NAMESPACE, TEXT_ERROR_PATHS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from envoy_data_plane.envoy.config.core.v3 import TypedExtensionConfig
    from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import HttpFilter

    from extproc.api.config_snapshot import Snapshot

# Statuses of a server that are no answer to a request for inference.
_NO_ANSWER: Final = "101|3.."
# Those for which the script need not run.
_OTHERS: Final = "[^13].."
_HAS_TEXT_ERRORS: Final = f".*({'|'.join(map(re.escape, TEXT_ERROR_PATHS))}).*"
# A body of known length up to this is replaced when it is whole, a longer one while it comes.
_SHORT_BYTES: Final = 64 * 1024
REPLACING: Final = rf"""
-- 502, and this text in place of the body.
local function replace_answer(handle, text)
  local headers = handle:headers()
  -- one kind has no body, and says no length
  local status = headers:get(":status")
  local length = status == "304" and 0 or tonumber(headers:get("content-length") or "") or math.huge
  for _, name in ipairs({{"content-encoding", "content-length", "location", "retry-after", "x-should-retry"}}) do
    headers:remove(name)
  end
  -- of a switch to another protocol
  headers:remove("upgrade")
  headers:remove("connection")
  headers:replace(":status", "502")
  headers:replace("content-type", "application/json")
  if length <= {_SHORT_BYTES} then
    handle:body(true):setBytes(text)
    -- after the wait for the body, the object of before is gone
    return handle:headers():replace("content-length", tostring(#text))
  end
  -- one that is longer than what Envoy keeps would end in an answer that is never tried again
  for chunk in handle:bodyChunks() do
    chunk:setBytes(text)
    text = ""
  end
end
"""
_SCRIPT: Final = (
    REPLACING
    + r"""
function envoy_on_response(handle)
  local status = handle:headers():get(":status")
  local is_redirect = string.sub(status, 1, 1) == "3"
  -- engines alone are picked by their address
  local served = handle:streamInfo():dynamicMetadata():get("@SERVED@")
  if not (is_redirect or status == "101") or not (served and served["@HOST@"]) then return end
  replace_answer(handle, is_redirect and "@REDIRECTED@" or "@SWITCHED@")
end
"""
)
_REDIRECTED: Final = "engine_redirected", "An engine of this model redirects requests; tell whoever runs the gateway."
_SWITCHED: Final = (
    "engine_switched_protocols",
    "An engine of this model does not answer by HTTP; tell whoever runs the gateway.",
)


def redirect_status_matcher() -> HeaderMatcher:
    """For retries: an engine's redirect, or its switch to another protocol."""
    return HeaderMatcher(name=":status", string_match=StringMatcher(safe_regex=RegexMatcher(regex=_NO_ANSWER)))


def configured_response_headers(snapshot: Snapshot) -> tuple[str, ...]:
    """What the gateway writes into answers under names that its operator has chosen."""
    served = snapshot.gateway.served_header
    return *(() if served is None else (served.lower(),)), *session_token_headers(snapshot)


def reserved_header_filter(prefixes: Sequence[str], names: Sequence[str], *, has_trailers: bool) -> HttpFilter:
    """A cluster's filter, behind all others of it. ``has_trailers``: answers come by HTTP/2; Envoy drops those of
    HTTP/1.
    """
    removed = [
        HeaderMutation(
            remove_on_match=HeaderMutationRemoveOnMatch(key_matcher=StringMatcher(prefix=one, ignore_case=True))
        )
        for one in prefixes
    ]
    removed += [HeaderMutation(remove=one) for one in names]
    mutations = Mutations(response_mutations=removed, response_trailers_mutations=removed if has_trailers else [])
    return http_filter("attache.reserved", MutationFilter(mutations=mutations))


def redirect_refusal_filters(*, model_paths: bool) -> Iterator[HttpFilter]:
    """The listener's filters, in front of the router. ``model_paths``: some paths have errors that are texts."""
    in_objects, in_texts = ([form(*one) for one in (_REDIRECTED, _SWITCHED)] for form in (_object, _text))
    usual = answer_has(":status", _OTHERS)
    if not model_paths:
        yield http_filter("attache.answers", skip_filter_if(_script(in_objects), usual))
        return
    has_texts = request_has(":path", _HAS_TEXT_ERRORS)
    has_objects = request_has(":path", _HAS_TEXT_ERRORS, but_not=True)
    yield http_filter("attache.answers", skip_filter_if(_script(in_objects), has_texts, usual))
    yield http_filter("attache.text_answers", skip_filter_if(_script(in_texts), has_objects, usual))


def _script(texts: Sequence[str]) -> TypedExtensionConfig:
    redirected, switched = texts
    marks = {
        "@SERVED@": SERVED_NAMESPACE,
        "@HOST@": SERVED_HOST,
        "@REDIRECTED@": redirected,
        "@SWITCHED@": switched,
    }
    return typed_extension("envoy.filters.http.lua", lua_filter_config(_SCRIPT, marks))


def _object(code: str, message: str) -> str:
    """In OpenAI's form, and in Anthropic's."""
    error = {"message": message, "type": "server_error", "param": None, "code": code}
    return lua_string(msgspec.json.encode({"type": "error", "error": error}))


def _text(_code: str, message: str) -> str:
    return lua_string(msgspec.json.encode({"error": message}))
