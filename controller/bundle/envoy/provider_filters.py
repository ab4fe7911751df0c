# SPDX-License-Identifier: Apache-2.0
"""Providers: what Envoy changes in requests to a server of others, and in its answers.

A provider gets its own host and path, the key of this gateway, and of the client's headers those of a list: nothing by
which a client or this gateway is known elsewhere. With that key, only the APIs that it is configured for can be
reached. Clients get its answers with the headers of another list. If it refuses the key, redirects, or switches to
another protocol, they get 502 and none of its words, so that Envoy goes on to a fallback and breakers count a failure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
from envoy_data_plane.envoy.config.common.mutation_rules.v3 import HeaderMutation, HeaderMutationRemoveOnMatch
from envoy_data_plane.envoy.config.core.v3 import DataSource, WatchedDirectory
from envoy_data_plane.envoy.extensions.common.aws.v3 import AwsCredentialProvider, CredentialsFileCredentialProvider
from envoy_data_plane.envoy.extensions.filters.http.aws_request_signing.v3 import AwsRequestSigning
from envoy_data_plane.envoy.extensions.filters.http.header_mutation.v3 import HeaderMutation as MutationFilter
from envoy_data_plane.envoy.extensions.filters.http.header_mutation.v3 import Mutations
from envoy_data_plane.envoy.type.matcher.v3 import RegexMatcher, StringMatcher

from controller.bundle.envoy.envoy_json import http_filter
from controller.bundle.envoy.fallback import KEYED
from controller.bundle.envoy.lua import lua_bool, lua_filter_config, lua_set, lua_string
from controller.bundle.envoy.path_prefix import PATH_MARKS, PATH_SCRIPT
from controller.bundle.envoy.response_filters import REPLACING
from controller.bundle.envoy.secrets import SECRETS_FOLDER
from extproc.wire_names import (
    ANTHROPIC_TYPES,
    ANTHROPIC_VERSION,
    APIS_BY_NAME,
    DEFAULT_ANTHROPIC_VERSION,
    PAUSES_NAMESPACE,
    REQUEST_ID,
    RETRY_AFTER,
    Api,
    paths_of_apis,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import HttpFilter

    from controller.bundle.envoy.secrets import SecretSource
    from extproc.api.model_server import ModelServer
    from extproc.api.provider import Provider

_AUTHORIZATION: Final = "authorization"
_API_KEY: Final = "x-api-key"
# What Envoy's filter writes when it signs a request.
_SIGNATURE: Final = "authorization x-amz-content-sha256 x-amz-date x-amz-security-token"
# Of requests. Not openai-organization and openai-project: by this gateway's key, they would be this gateway's.
_REQUEST_HEADERS: Final = (
    *(":authority", ":method", ":path", ":scheme"),
    *("accept", "content-length", "content-type", "transfer-encoding", "user-agent"),
    *("anthropic-beta", ANTHROPIC_VERSION, "openai-beta", REQUEST_ID),
)
# Of answers. Not the limits that the provider has for this gateway, and no cookies.
_ANSWER_HEADERS: Final = (
    *(":status", "cache-control", "content-encoding", "content-length", "content-type", "transfer-encoding"),
    *("openai-processing-ms", "openai-version", "request-id", RETRY_AFTER, "x-should-retry"),
)
_REFUSED_KEY: Final = "provider_refused_key"
_REDIRECTED: Final = "provider_redirected"
_SWITCHED: Final = "provider_switched_protocols"
_MESSAGES: Final = {
    _REFUSED_KEY: "The provider of this model does not accept the gateway's key; tell whoever runs the gateway.",
    _REDIRECTED: "The provider of this model is elsewhere; tell whoever runs the gateway.",
    _SWITCHED: "The provider of this model does not answer by HTTP; tell whoever runs the gateway.",
}
_SCRIPT: Final = (
    PATH_SCRIPT
    + REPLACING
    + r"""
local KEYS, PATHS, QUERIES = {@KEYS@}, {@PATHS@}, {@QUERIES@}
local ASKED, ANSWERED = {@ASKED@}, {@ANSWERED@}
local ERRORS = {@ERRORS@}

local function keep(headers, kept)
  local others = {}
  for name in pairs(headers) do
    if not kept[name] then others[name] = true end
  end
  for name in pairs(others) do headers:remove(name) end
end

local function form_of(handle)
  return string.find(path_of(handle), "@MESSAGES@", 1, true) and "anthropic" or "openai"
end

function envoy_on_request(handle)
  local headers, metadata = handle:headers(), handle:streamInfo():dynamicMetadata()
  local path = path_of(handle)
  local plain, query = string.match(path, "^([^?]*)%??(.*)")
  local wanted = KEYS[plain]
  if not wanted or headers:get(":method") ~= "POST" then
    local refusal = {[":status"] = "404", ["content-type"] = "application/json"}
    return handle:respond(refusal, ERRORS[form_of(handle)]["unknown_url"])
  end
  local key = @HAS_KEY@ and headers:get("@AUTHORIZATION@")
  keep(headers, ASKED)
  if form_of(handle) == "anthropic" and not headers:get("@ANTHROPIC_VERSION@") then
    headers:add("@ANTHROPIC_VERSION@", "@VERSION@")
  end
  if @SIGNS@ then metadata:set("@ATTEMPT@", "@KEYED@", "@SIGNATURE@") end
  if key then
    headers:replace(wanted, wanted == "@AUTHORIZATION@" and key or string.sub(key, #"Bearer " + 1))
    metadata:set("@ATTEMPT@", "@KEYED@", wanted)
  end
  keep_path(handle)
  headers:replace(":authority", "@AUTHORITY@")
  local there, sent = PATHS[plain], QUERIES[plain]
  if sent and string.find("&" .. query .. "&", "&" .. sent .. "&", 1, true) then
    there = there .. (string.find(there, "?", 1, true) and "&" or "?") .. sent
  end
  headers:replace(":path", there)
end

function envoy_on_response(handle)
  local headers = handle:headers()
  local status = headers:get(":status")
  keep(headers, ANSWERED)
  local pause = headers:get("@RETRY_AFTER@")
  if status == "429" or (status == "503" and pause) then
    handle:streamInfo():dynamicMetadata():set("@PAUSES@", "@SERVER@", pause or "")
  end
  local code = (status == "401" or status == "402" or status == "403") and "@REFUSED_KEY@"
  code = code or string.sub(status, 1, 1) == "3" and "@REDIRECTED@"
  -- unasked, what follows would be read as answers to others who share the client's connection
  code = code or status == "101" and "@SWITCHED@"
  if code then replace_answer(handle, ERRORS[form_of(handle)][code]) end
end
"""
)


def provider_filter(server: ModelServer, provider: Provider) -> HttpFilter:
    """The cluster's filter, behind the one that writes the key as ``authorization``."""
    apis = server.spec.apis or ()
    marks = {
        "@KEYS@": ", ".join(f'["{path}"] = "{header}"' for path, header in _key_headers(apis, provider)),
        "@PATHS@": ", ".join(f'["{path}"] = "{lua_string(there.encode())}"' for path, there in _paths(apis, provider)),
        "@QUERIES@": ", ".join(f'["{path}"] = "{query}"' for path, query in _queries(apis)),
        "@ASKED@": lua_set(_REQUEST_HEADERS),
        "@ANSWERED@": lua_set(_ANSWER_HEADERS),
        "@ERRORS@": _errors(apis),
        **PATH_MARKS,
        "@KEYED@": KEYED,
        "@MESSAGES@": Api.MESSAGES.spec.paths[0],
        "@SIGNS@": lua_bool(value=provider.signs_requests),
        "@SIGNATURE@": _SIGNATURE,
        "@HAS_KEY@": lua_bool(value=server.spec.connection.has_key and not provider.signs_requests),
        "@AUTHORIZATION@": _AUTHORIZATION,
        "@ANTHROPIC_VERSION@": ANTHROPIC_VERSION,
        "@VERSION@": DEFAULT_ANTHROPIC_VERSION,
        "@AUTHORITY@": lua_string(provider.authority.encode()),
        "@REFUSED_KEY@": _REFUSED_KEY,
        "@REDIRECTED@": _REDIRECTED,
        "@SWITCHED@": _SWITCHED,
        "@RETRY_AFTER@": RETRY_AFTER,
        "@PAUSES@": PAUSES_NAMESPACE,
        "@SERVER@": lua_string(server.metadata.key.encode()),
    }
    return http_filter("attache.provider", lua_filter_config(_SCRIPT, marks))


def request_signing_filter(provider: Provider, credentials: SecretSource | None, directory: str) -> HttpFilter:
    """The filter behind that, which signs what the provider gets, the whole body included. A request that cannot be
    signed goes out without a signature, is refused there, and goes on to a fallback: an answer of this filter would
    not. ``credentials``: None: those of the machine that Envoy runs on.
    """
    auth = provider.auth
    found = None
    if credentials is not None:
        # a file is read again when another one takes its place
        folder = WatchedDirectory(path=f"{directory}/{SECRETS_FOLDER}")
        source = DataSource(filename=f"{directory}/{credentials.file}", watched_directory=folder)
        file = CredentialsFileCredentialProvider(credentials_data_source=source, profile="default")
        found = AwsCredentialProvider(custom_credential_provider_chain=True, credentials_file_provider=file)
    signing = AwsRequestSigning(
        service_name=(auth and auth.service) or "bedrock",
        region=(auth and auth.region) or "",
        credential_provider=found,
        # beside the host and its own: others may be changed on the way
        match_included_headers=[StringMatcher(exact="content-type")],
    )
    return http_filter("envoy.filters.http.aws_request_signing", signing)


def trailer_removal_filter() -> HttpFilter:
    """The filter that removes what comes behind an answer over HTTP/2: none of these APIs has any, and what stands
    there would be no header of the list.
    """
    every = StringMatcher(safe_regex=RegexMatcher(regex=".+"))
    removed = HeaderMutation(remove_on_match=HeaderMutationRemoveOnMatch(key_matcher=every))
    return http_filter("attache.trailers", MutationFilter(mutations=Mutations(response_trailers_mutations=[removed])))


def _key_headers(apis: Iterable[str], provider: Provider) -> Iterable[tuple[str, str]]:
    """By path, the header that has the key. Without ``auth``, Anthropic's API has one of its own."""
    own = None if provider.auth is None else (provider.auth.header or _AUTHORIZATION).lower()
    for spec in (APIS_BY_NAME[name].spec for name in apis):
        yield spec.paths[0], own or (_API_KEY if spec.errors == "anthropic" else _AUTHORIZATION)


def _paths(apis: Iterable[str], provider: Provider) -> Iterable[tuple[str, str]]:
    """By path, what it is there."""
    for name in apis:
        (path, *_) = APIS_BY_NAME[name].spec.paths
        yield path, provider.paths.get(name, provider.path_prefix + path)


def _queries(apis: Iterable[str]) -> Iterable[tuple[str, str]]:
    """By path, the parameter that may be in its query."""
    for spec in (APIS_BY_NAME[name].spec for name in apis):
        if spec.query:
            yield spec.paths[0], spec.query


def _errors(apis: Iterable[str]) -> str:
    """A table of Lua: by the form of the client's API and by code, the body of the error."""
    where = ", ".join(paths_of_apis(apis))
    messages = {**_MESSAGES, "unknown_url": f"This model is not served under this path; write to {where}."}
    openai, anthropic = [], []
    for code, message in messages.items():
        status, kind = (404, "invalid_request_error") if code == "unknown_url" else (502, "server_error")
        error = {"message": message, "type": kind, "param": None, "code": code}
        openai.append(_entry(code, {"error": error}))
        error = {"type": ANTHROPIC_TYPES[status], "message": message}
        anthropic.append(_entry(code, {"type": "error", "error": error}))
    return f"openai = {{{', '.join(openai)}}}, anthropic = {{{', '.join(anthropic)}}}"


def _entry(code: str, body: object) -> str:
    return f'{code} = "{lua_string(msgspec.json.encode(body))}"'
