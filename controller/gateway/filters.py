# SPDX-License-Identifier: Apache-2.0
"""The HTTP filters: ask extproc, read the model without it, read usage from answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from envoy_data_plane.envoy.config.common.mutation_rules.v3 import HeaderMutation, HeaderMutationRules
from envoy_data_plane.envoy.config.core.v3 import (
    GrpcService,
    GrpcServiceEnvoyGrpc,
    HeaderValue,
    HeaderValueOption,
    HeaderValueOptionHeaderAppendAction,
    SubstitutionFormatString,
    TypedExtensionConfig,
)
from envoy_data_plane.envoy.extensions.common.matching.v3 import ExtensionWithMatcher
from envoy_data_plane.envoy.extensions.content_parsers.json.v3 import JsonContentParser, JsonContentParserRuleConfig
from envoy_data_plane.envoy.extensions.filters.common.matcher.action.v3 import SkipFilter
from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import (
    ExternalProcessor,
    MetadataOptions,
    MetadataOptionsMetadataNamespaces,
    ProcessingMode,
    ProcessingModeBodySendMode,
    ProcessingModeHeaderSendMode,
)
from envoy_data_plane.envoy.extensions.filters.http.header_mutation.v3 import HeaderMutation as HeaderMutationFilter
from envoy_data_plane.envoy.extensions.filters.http.header_mutation.v3 import Mutations
from envoy_data_plane.envoy.extensions.filters.http.json_to_metadata.v3 import (
    JsonToMetadata,
    JsonToMetadataKeyValuePair,
    JsonToMetadataMatchRules,
    JsonToMetadataRule,
    JsonToMetadataSelector,
    JsonToMetadataValueType,
)
from envoy_data_plane.envoy.extensions.filters.http.router.v3 import Router
from envoy_data_plane.envoy.extensions.filters.http.sse_to_metadata.v3 import (
    SseToMetadata,
    SseToMetadataProcessingRules,
)
from envoy_data_plane.envoy.extensions.filters.http.transform.v3 import (
    BodyTransformation,
    BodyTransformationTransformAction,
    Transformation,
    TransformConfig,
)
from envoy_data_plane.envoy.type.matcher.v3 import HttpRequestHeaderMatchInput
from envoy_data_plane.envoy.type.matcher.v3 import RegexMatcher as EnvoyRegex
from envoy_data_plane.envoy.type.v3 import HttpStatus, StatusCode
from envoy_data_plane.google.protobuf import Any, Struct, Value
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

from controller.gateway.authentication import authentication_filters
from controller.gateway.clusters import EXTPROC_CLUSTER
from controller.gateway.envoy_json import http_filter, seconds, typed
from controller.gateway.stream_usage import stream_usage
from extproc.config.validation import LONGEST_MESSAGE_S
from extproc.protocol import (
    BUNDLE_MARK,
    CACHED_TOKENS,
    CHAT_PATH,
    COMPLETION_TOKENS,
    COMPLETIONS_PATH,
    EMBEDDINGS_PATH,
    LB_NAMESPACE,
    NAMESPACE,
    PROMPT_TOKENS,
    SERVER_HEADER,
    USAGE_NAMESPACE,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import HttpFilter

    from extproc.config.types import GatewayConfigSpec

# Metadata with the model's name, for the routes without extproc.
FALLBACK_NAMESPACE: Final = "attache.fallback"
FALLBACK_MODEL: Final = "model"
# Does nothing by itself; the routes without extproc configure what it writes.
RENAME_FILTER: Final = "attache.rename_without_extproc"

# The last event of the responses API repeats the whole answer beside its usage.
_MAX_EVENT_BYTES: Final = 4 * 1024 * 1024

# Not the responses API.
_OTHER_PATHS: Final = f"({CHAT_PATH}|{COMPLETIONS_PATH}|{EMBEDDINGS_PATH})(\\?.*)?"

_USAGE_PATHS: Final = (
    (PROMPT_TOKENS, ("usage", "input_tokens")),
    (COMPLETION_TOKENS, ("usage", "output_tokens")),
    (CACHED_TOKENS, ("usage", "input_tokens_details", "cached_tokens")),
)


def http_filters(gateway: GatewayConfigSpec, longest_wait_s: float) -> list[HttpFilter]:
    """The chain of the HTTP connection manager. ``longest_wait_s``: how long extproc may hold a request."""
    chain = [
        *authentication_filters(gateway.authentication),
        http_filter("envoy.filters.http.ext_proc", _ask_extproc(gateway, longest_wait_s)),
    ]
    if gateway.failure_mode == "Open":
        chain.append(http_filter("attache.model_without_extproc", _read_model_without_extproc()))
        chain.append(http_filter("attache.content_type_without_extproc", _say_json_without_extproc()))
        chain.append(http_filter(RENAME_FILTER, TransformConfig()))
    chain.append(http_filter("attache.usage_of_streams", stream_usage()))
    chain.append(http_filter("attache.usage_of_responses", _read_usage_of_responses()))
    chain.append(http_filter("attache.usage", _read_usage()))
    chain.append(http_filter("envoy.filters.http.router", Router(suppress_envoy_headers=True)))
    return chain


def extproc_service() -> GrpcService:
    """How Envoy calls extproc: streams without a timeout, with the mark by which extproc knows our bundle."""
    return GrpcService(
        envoy_grpc=GrpcServiceEnvoyGrpc(cluster_name=EXTPROC_CLUSTER),
        initial_metadata=[HeaderValue(key=BUNDLE_MARK, value="1")],
    )


def rename_model(name: str) -> TransformConfig:
    """For the rename filter: put ``name`` in place of the model that the client asked for."""
    # Envoy reads %...% in it as a command
    text = name.replace("%", "%%")
    renamed = SubstitutionFormatString(json_format=Struct(fields={"model": Value(string_value=text)}))
    merge = BodyTransformation(body_format=renamed, action=BodyTransformationTransformAction.MERGE)
    return TransformConfig(request_transformation=Transformation(body_transformation=merge))


def _ask_extproc(gateway: GatewayConfigSpec, longest_wait_s: float) -> ExternalProcessor:
    """Send headers and the whole body, nothing of the answer. With header mode SKIP Envoy holds no requests."""
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
        # a held request is an unanswered message
        message_timeout=seconds(min(gateway.message_timeout + longest_wait_s, LONGEST_MESSAGE_S)),
        mutation_rules=HeaderMutationRules(disallow_system=True, disallow_is_error=True),
        metadata_options=MetadataOptions(
            receiving_namespaces=MetadataOptionsMetadataNamespaces(untyped=[LB_NAMESPACE, NAMESPACE])
        ),
        status_on_error=HttpStatus(code=StatusCode.ServiceUnavailable),
    )


def _read_model_without_extproc() -> ExtensionWithMatcher:
    """Reads ``model`` out of the body, unless extproc has already said which server the request goes to."""
    rule = _rule(FALLBACK_NAMESPACE, FALLBACK_MODEL, ("model",), JsonToMetadataValueType.STRING)
    reads = JsonToMetadata(
        request_rules=JsonToMetadataMatchRules(
            rules=[rule],
            # extproc parses a body whatever its content type claims: the same here
            allow_content_types_regex=EnvoyRegex(regex=".*"),
            allow_empty_content_type=True,
        )
    )
    return _skipped_if(SERVER_HEADER, ".+", typed("envoy.filters.http.json_to_metadata", reads))


def _say_json_without_extproc() -> ExtensionWithMatcher:
    """The rename filter passes over bodies that are not called JSON, in exactly this spelling; what was read above is."""
    says = HeaderValueOption(
        header=HeaderValue(key="content-type", value="application/json"),
        append_action=HeaderValueOptionHeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD,
    )
    mutation = HeaderMutationFilter(mutations=Mutations(request_mutations=[HeaderMutation(append=says)]))
    return _skipped_if(SERVER_HEADER, ".+", typed("envoy.filters.http.header_mutation", mutation))


def _read_usage() -> ExtensionWithMatcher:
    """Usage of plain answers of the responses API, which repeat what clients sent: they are held whole, for a parser."""
    reads = JsonToMetadata(response_rules=JsonToMetadataMatchRules(rules=list(_usage_rules())))
    return _skipped_if(":path", _OTHER_PATHS, typed("envoy.filters.http.json_to_metadata", reads))


def _read_usage_of_responses() -> ExtensionWithMatcher:
    """Usage of streams of the responses API, whose last event repeats what the client sent: only a parser finds it there."""
    parser = JsonContentParser(
        rules=[JsonContentParserRuleConfig(rule=rule) for rule in _usage_rules(under=("response",))]
    )
    reads = SseToMetadata(
        response_rules=SseToMetadataProcessingRules(
            content_parser=typed("envoy.content_parsers.json", parser), max_event_size=_MAX_EVENT_BYTES
        )
    )
    return _skipped_if(":path", _OTHER_PATHS, typed("envoy.filters.http.sse_to_metadata", reads))


def _usage_rules(under: tuple[str, ...] = ()) -> Iterator[JsonToMetadataRule]:
    for name, path in _USAGE_PATHS:
        yield _rule(USAGE_NAMESPACE, name, (*under, *path), JsonToMetadataValueType.NUMBER)


def _rule(namespace: str, key: str, path: tuple[str, ...], kind: JsonToMetadataValueType) -> JsonToMetadataRule:
    return JsonToMetadataRule(
        selectors=[JsonToMetadataSelector(key=step) for step in path],
        on_present=JsonToMetadataKeyValuePair(metadata_namespace=namespace, key=key, type=kind),
    )


def _skipped_if(header: str, regex: str, extension: TypedExtensionConfig) -> ExtensionWithMatcher:
    """``extension``, but not for requests whose ``header`` matches ``regex`` as a whole."""
    predicate = MatcherMatcherListPredicateSinglePredicate(
        input=XdsTypedExtensionConfig(
            name="request-header", typed_config=Any.pack(HttpRequestHeaderMatchInput(header_name=header))
        ),
        value_match=StringMatcher(safe_regex=RegexMatcher(google_re2=RegexMatcherGoogleRe2(), regex=regex)),
    )
    skip = MatcherOnMatch(action=XdsTypedExtensionConfig(name="skip", typed_config=Any.pack(SkipFilter())))
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
