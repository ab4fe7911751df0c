# SPDX-License-Identifier: Apache-2.0
"""The HTTP filters: ask extproc, read bodies without it, read usage from answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
from envoy_data_plane.envoy.config.common.mutation_rules.v3 import HeaderMutationRules
from envoy_data_plane.envoy.config.core.v3 import (
    GrpcService,
    GrpcServiceEnvoyGrpc,
    HeaderValue,
    TypedExtensionConfig,
)
from envoy_data_plane.envoy.extensions.common.matching.v3 import ExtensionWithMatcher
from envoy_data_plane.envoy.extensions.content_parsers.json.v3 import JsonContentParser, JsonContentParserRuleConfig
from envoy_data_plane.envoy.extensions.filters.common.matcher.action.v3 import SkipFilter
from envoy_data_plane.envoy.extensions.filters.http.cors.v3 import Cors
from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import (
    ExternalProcessor,
    MetadataOptions,
    MetadataOptionsMetadataNamespaces,
    ProcessingMode,
    ProcessingModeBodySendMode,
    ProcessingModeHeaderSendMode,
)
from envoy_data_plane.envoy.extensions.filters.http.json_to_metadata.v3 import (
    JsonToMetadataKeyValuePair,
    JsonToMetadataRule,
    JsonToMetadataSelector,
    JsonToMetadataValueType,
)
from envoy_data_plane.envoy.extensions.filters.http.router.v3 import Router
from envoy_data_plane.envoy.extensions.filters.http.sse_to_metadata.v3 import (
    SseToMetadata,
    SseToMetadataProcessingRules,
)
from envoy_data_plane.envoy.type.matcher.v3 import HttpRequestHeaderMatchInput
from envoy_data_plane.envoy.type.v3 import HttpStatus, StatusCode
from envoy_data_plane.xds.core.v3 import TypedExtensionConfig as XdsTypedExtensionConfig
from envoy_data_plane.xds.type.matcher.v3 import (
    Matcher,
    MatcherMatcherList,
    MatcherMatcherListFieldMatcher,
    MatcherMatcherListPredicate,
    MatcherMatcherListPredicateSinglePredicate,
    MatcherOnMatch,
    RegexMatcher,
    RegexMatcherGoogleRe2,
    StringMatcher,
)

from controller.bundle.envoy.authentication import authentication_filters
from controller.bundle.envoy.clusters import EXTPROC_CLUSTER
from controller.bundle.envoy.envoy_json import Packed, http_filter, seconds, typed
from controller.bundle.envoy.usage import responses_usage, stream_usage
from controller.bundle.envoy.without_extproc import CHANGES_FILTER, changes_body, reads_body
from extproc.protocol import (
    APIS_BY_PATH,
    BUNDLE_MARK,
    CACHED_TOKENS,
    COMPLETION_TOKENS,
    CREATED_TOKENS,
    LB_NAMESPACE,
    LONGEST_MESSAGE_TIMEOUT_S,
    NAMESPACE,
    PROMPT_TOKENS,
    SERVER_HEADER,
    TOKENS_NAMESPACE,
    UNCACHED_TOKENS,
    USAGE_NAMESPACE,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from envoy_data_plane.envoy.extensions.filters.http.lua.v3 import Lua
    from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import HttpFilter

    from extproc.api.gateway_config import GatewayConfigSpec

# Names of filters, by which routes and virtual hosts configure or disable them.
CORS_FILTER: Final = "envoy.filters.http.cors"
EXTPROC_FILTER: Final = "envoy.filters.http.ext_proc"
_BODY_FILTER: Final = "attache.body_without_extproc"
_USAGE_FILTER: Final = "attache.usage"
_RESPONSES_FILTER: Final = "attache.usage_of_responses"
_STREAMED_RESPONSES_FILTER: Final = "attache.usage_of_streamed_responses"
# Those that read bodies of requests without extproc, and those that read answers of engines.
BODY_FILTERS: Final = (_BODY_FILTER,)
USAGE_FILTERS: Final = (_USAGE_FILTER, _RESPONSES_FILTER, _STREAMED_RESPONSES_FILTER)

# The last event of the responses API repeats the whole answer beside its usage.
_MAX_EVENT_BYTES: Final = 4 * 1024 * 1024


def _paths_where(usage: str) -> str:
    """A regular expression of the paths whose answers have usage under these names, with their query."""
    found = [path for path, api in APIS_BY_PATH.items() if api.spec.usage == usage]
    # one that others stand beneath stands for them
    shortest = [path for path in found if not any(path.startswith(f"{other}/") for other in found)]
    texts = [path + "(/[^?]*)?" * any(other.startswith(f"{path}/") for other in found) for path in shortest]
    return f"({'|'.join(texts)})(\\?.*)?"


# Answers of the first have JSON in them that a client or a model has written, where anybody may write ``usage``.
_INPUT_TOKENS_PATHS: Final = _paths_where("input_tokens")
_PROMPT_TOKENS_PATHS: Final = _paths_where("prompt_tokens")
# Where an HTTPRoute may cut a prefix off.
_ANY_PREFIX: Final = "[^?]*"

_USAGE_PATHS: Final = (
    (PROMPT_TOKENS, ("response", "usage", "input_tokens")),
    (COMPLETION_TOKENS, ("response", "usage", "output_tokens")),
    (CACHED_TOKENS, ("response", "usage", "input_tokens_details", "cached_tokens")),
    # the Messages API: message_start has usage in its message, message_delta beside it. Nothing is written at the
    # start: whoever hangs up after it would pay for nothing.
    *(
        (key, (*place, "usage", name))
        for place in (("message",), ())
        for key, name in (
            (UNCACHED_TOKENS, "input_tokens"),
            (COMPLETION_TOKENS, "output_tokens"),
            (CACHED_TOKENS, "cache_read_input_tokens"),
            (CREATED_TOKENS, "cache_creation_input_tokens"),
        )
        if not (place and key == COMPLETION_TOKENS)
    ),
)


class Needs(msgspec.Struct, frozen=True):
    """What routes need of the filters. ``cors``: some have policies for other origins. ``prefixes``: paths of inference
    may have something in front of them, which a route cuts off.
    """

    cors: bool = False
    prefixes: bool = False


NO_NEEDS: Final = Needs()


def http_filters(gateway: GatewayConfigSpec, directory: str, needs: Needs = NO_NEEDS) -> list[HttpFilter]:
    """The chain of the HTTP connection manager."""
    prefix = _ANY_PREFIX if needs.prefixes else ""
    chain = [
        # browsers ask without credentials
        *([http_filter(CORS_FILTER, Cors())] if needs.cors or gateway.cors is not None else []),
        *authentication_filters(gateway.authentication, directory),
        http_filter(EXTPROC_FILTER, _ask_extproc(gateway)),
    ]
    if gateway.failure_mode == "Open":
        # not where extproc has said which server the request goes to
        read = _skipped_if(
            SERVER_HEADER, ".+", typed("envoy.filters.http.lua", reads_body(with_prefixes=needs.prefixes))
        )
        chain.append(http_filter(_BODY_FILTER, read))
        chain.append(http_filter(CHANGES_FILTER, changes_body()))
    hides = gateway.cached_tokens == "Hidden"
    chain.append(_read_usage(_USAGE_FILTER, prefix + _INPUT_TOKENS_PATHS, stream_usage(hides_counts=hides)))
    # answers come the other way: what is hidden here has been read below
    chain.append(_read_usage(_RESPONSES_FILTER, prefix + _PROMPT_TOKENS_PATHS, responses_usage(hides_counts=hides)))
    chain.append(http_filter(_STREAMED_RESPONSES_FILTER, _read_usage_of_streamed_responses(prefix)))
    chain.append(http_filter("envoy.filters.http.router", Router(suppress_envoy_headers=True)))
    return chain


def extproc_service() -> GrpcService:
    """How Envoy calls extproc: streams without a timeout, with the mark by which extproc knows our bundle."""
    return GrpcService(
        envoy_grpc=GrpcServiceEnvoyGrpc(cluster_name=EXTPROC_CLUSTER),
        initial_metadata=[HeaderValue(key=BUNDLE_MARK, value="1")],
    )


def _ask_extproc(gateway: GatewayConfigSpec) -> ExternalProcessor:
    """Send headers and the whole body, nothing of the answer. With header mode SKIP Envoy holds no requests."""
    has_tokens = gateway.authentication is not None and bool(gateway.authentication.jwt)
    header, body = ProcessingModeHeaderSendMode, ProcessingModeBodySendMode
    return ExternalProcessor(
        grpc_service=extproc_service(),
        failure_mode_allow=gateway.failure_mode == "Open",
        processing_mode=ProcessingMode(
            request_header_mode=header.SEND,
            request_body_mode=body.BUFFERED,
            request_trailer_mode=header.SKIP,
            response_header_mode=header.SKIP,
            response_body_mode=body.NONE,
            response_trailer_mode=header.SKIP,
        ),
        message_timeout=seconds(gateway.message_timeout),
        # extproc asks for more time for each request that it holds
        max_message_timeout=seconds(LONGEST_MESSAGE_TIMEOUT_S),
        mutation_rules=HeaderMutationRules(disallow_system=True, disallow_is_error=True),
        metadata_options=MetadataOptions(
            # where verified tokens are: policies ask for their claims
            forwarding_namespaces=MetadataOptionsMetadataNamespaces(untyped=[TOKENS_NAMESPACE]) if has_tokens else None,
            receiving_namespaces=MetadataOptionsMetadataNamespaces(untyped=[LB_NAMESPACE, NAMESPACE]),
        ),
        status_on_error=HttpStatus(code=StatusCode.ServiceUnavailable),
    )


def _read_usage(name: str, other_paths: str, script: Lua) -> HttpFilter:
    return http_filter(name, _skipped_if(":path", other_paths, typed("envoy.filters.http.lua", script)))


def _read_usage_of_streamed_responses(prefix: str) -> ExtensionWithMatcher:
    """Usage of streams of the responses and the Messages API: only a parser finds it where others may write the same
    name.
    """
    parser = JsonContentParser(rules=[JsonContentParserRuleConfig(rule=rule) for rule in _usage_rules()])
    reads = SseToMetadata(
        response_rules=SseToMetadataProcessingRules(
            content_parser=typed("envoy.content_parsers.json", parser), max_event_size=_MAX_EVENT_BYTES
        )
    )
    return _skipped_if(":path", prefix + _PROMPT_TOKENS_PATHS, typed("envoy.filters.http.sse_to_metadata", reads))


def _usage_rules() -> Iterator[JsonToMetadataRule]:
    for name, path in _USAGE_PATHS:
        yield _rule(USAGE_NAMESPACE, name, path, JsonToMetadataValueType.NUMBER)


def _rule(namespace: str, key: str, path: tuple[str, ...], kind: JsonToMetadataValueType) -> JsonToMetadataRule:
    return JsonToMetadataRule(
        selectors=[JsonToMetadataSelector(key=step) for step in path],
        on_present=JsonToMetadataKeyValuePair(metadata_namespace=namespace, key=key, type=kind),
    )


def _skipped_if(header: str, regex: str, extension: TypedExtensionConfig) -> ExtensionWithMatcher:
    """``extension``, but not for requests whose ``header`` matches ``regex`` as a whole."""
    predicate = MatcherMatcherListPredicateSinglePredicate(
        input=XdsTypedExtensionConfig(
            name="request-header", typed_config=Packed(HttpRequestHeaderMatchInput(header_name=header))
        ),
        value_match=StringMatcher(safe_regex=RegexMatcher(google_re2=RegexMatcherGoogleRe2(), regex=regex)),
    )
    skip = MatcherOnMatch(action=XdsTypedExtensionConfig(name="skip", typed_config=Packed(SkipFilter())))
    return ExtensionWithMatcher(
        xds_matcher=Matcher(
            matcher_list=MatcherMatcherList(
                matchers=[
                    MatcherMatcherListFieldMatcher(
                        predicate=MatcherMatcherListPredicate(single_predicate=predicate), on_match=skip
                    )
                ]
            )
        ),
        extension_config=extension,
    )
