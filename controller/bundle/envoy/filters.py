# SPDX-License-Identifier: Apache-2.0
"""The HTTP filters: call extproc, read bodies without it, read usage from responses."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import msgspec
from envoy_data_plane.envoy.config.common.mutation_rules.v3 import HeaderMutationRules
from envoy_data_plane.envoy.config.core.v3 import (
    BackoffStrategy,
    GrpcService,
    GrpcServiceEnvoyGrpc,
    HeaderValue,
    RetryPolicy,
    RetryPolicyRetryHostPredicate,
)
from envoy_data_plane.envoy.extensions.filters.http.cors.v3 import Cors
from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import (
    ExternalProcessor,
    MetadataOptions,
    MetadataOptionsMetadataNamespaces,
    ProcessingMode,
    ProcessingModeBodySendMode,
    ProcessingModeHeaderSendMode,
)
from envoy_data_plane.envoy.extensions.filters.http.health_check.v3 import HealthCheck
from envoy_data_plane.envoy.extensions.filters.http.router.v3 import Router
from envoy_data_plane.envoy.extensions.retry.host.previous_hosts.v3 import PreviousHostsPredicate
from envoy_data_plane.envoy.type.v3 import HttpStatus, Percent, StatusCode

from controller.bundle.envoy.authentication import authentication_filters
from controller.bundle.envoy.cost_header import cost_header_filter
from controller.bundle.envoy.envoy_json import PackedMessage, duration, http_filter, typed_extension
from controller.bundle.envoy.extproc_fail_open import CHANGES_FILTER, body_change_filter, body_reading_filter
from controller.bundle.envoy.filter_conditions import request_has, skip_filter_if
from controller.bundle.envoy.response_cache import response_copy_filter
from controller.bundle.envoy.response_filters import redirect_refusal_filters
from controller.bundle.envoy.usage_filters import completions_usage_filter, nested_usage_filter
from controller.bundle.envoy.usage_log import log_metadata_filter
from extproc.wire_names import (
    APIS_BY_PATH,
    BUNDLE_MARK,
    EXTPROC_CLUSTER,
    LB_NAMESPACE,
    LONGEST_MESSAGE_TIMEOUT_S,
    MIRROR_KEY,
    NAMESPACE,
    ROUTE_NAMESPACE,
    SERVER_HEADER,
    TOKENS_NAMESPACE,
    TRACE_NAMESPACE,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from envoy_data_plane.envoy.extensions.filters.http.lua.v3 import Lua
    from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import HttpFilter

    from extproc.api.gateway_config import GatewayConfigSpec

# Names of filters, by which routes and virtual hosts configure or disable them.
HEALTH_FILTER: Final = "envoy.filters.http.health_check"
CORS_FILTER: Final = "envoy.filters.http.cors"
_EXTPROC_FILTER: Final = "envoy.filters.http.ext_proc"
_SECOND_EXTPROC_FILTER: Final = "attache.extproc_again"
_ASKED_ONCE: Final = (_EXTPROC_FILTER,)
_ASKED_TWICE: Final = (_EXTPROC_FILTER, _SECOND_EXTPROC_FILTER)
_BODY_FILTER: Final = "attache.body_without_extproc"
_COST_FILTER: Final = "attache.cost"
_CACHE_FILTER: Final = "attache.response_cache"
_USAGE_FILTER: Final = "attache.usage"
_RESPONSES_FILTER: Final = "attache.usage_of_responses"
# Those that read bodies of requests without extproc, and those that read answers of engines.
BODY_FILTERS: Final = (_BODY_FILTER,)
USAGE_FILTERS: Final = (_USAGE_FILTER, _RESPONSES_FILTER)

# Where an HTTPRoute may cut a prefix off.
_ANY_PREFIX: Final = "[^?]*"


def _paths_where(usage: str) -> str:
    """A regular expression of the paths, with their query, of APIs that report usage under these names."""
    found = [path for path, api in APIS_BY_PATH.items() if api.spec.usage == usage]
    # one that others stand beneath stands for them
    shortest = [path for path in found if not any(path.startswith(f"{other}/") for other in found)]
    texts = [path + "(/[^?]*)?" * any(other.startswith(f"{path}/") for other in found) for path in shortest]
    return f"({'|'.join(texts)})(\\?.*)?"


# Answers of the first have JSON in them that a client or a model has written, which may contain a false ``usage``.
_INPUT_TOKENS_PATHS: Final = _paths_where("input_tokens")
_PROMPT_TOKENS_PATHS: Final = _paths_where("prompt_tokens")


class FilterNeeds(msgspec.Struct, frozen=True):
    """What routes need of the filters. ``cors``: some have policies for other origins. ``prefixes``: paths of inference
    may have something in front of them, which a route cuts off. ``times``: objectives are held against the first
    content of streams. ``model_paths``: some ModelServers have a protocol whose paths name the model. ``translates``:
    requests for some are translated. ``calls``: some are called by gRPC. ``mirrors``: copies of some requests are made.
    ``caches``: some have a response cache.
    """

    cors: bool = False
    prefixes: bool = False
    times: bool = False
    model_paths: bool = False
    translates: bool = False
    calls: bool = False
    mirrors: bool = False
    caches: bool = False


NO_NEEDS: Final = FilterNeeds()


def http_filters(gateway: GatewayConfigSpec, directory: str, needs: FilterNeeds = NO_NEEDS) -> list[HttpFilter]:
    """The chain of the HTTP connection manager."""
    prefix = _ANY_PREFIX if needs.prefixes else ""
    logs = gateway.usage_log is not None or needs.times
    chain = [
        # load balancers ask without credentials
        *([_health(gateway)] if gateway.health_path else []),
        # browsers send preflight requests without credentials
        *([http_filter(CORS_FILTER, Cors())] if needs.cors or gateway.cors is not None else []),
        *authentication_filters(gateway.authentication, directory),
        *([log_metadata_filter()] if logs else []),
        *_ask_extproc(gateway),
    ]
    if gateway.failure_mode == "Open":
        # not where extproc has chosen the server
        read = skip_filter_if(
            typed_extension("envoy.filters.http.lua", body_reading_filter(with_prefixes=needs.prefixes)),
            request_has(SERVER_HEADER, ".+"),
        )
        chain.append(http_filter(_BODY_FILTER, read))
        chain.append(http_filter(CHANGES_FILTER, body_change_filter()))
    if needs.caches:
        # responses pass all filters below first: what is kept is what clients get
        chain.append(http_filter(_CACHE_FILTER, response_copy_filter()))
    hides = gateway.cached_tokens == "Hidden"
    if gateway.usage_log is not None and gateway.usage_log.cost_header:
        # responses pass the filters below first, which read the counts
        chain.append(http_filter(_COST_FILTER, cost_header_filter(most_bytes=int(gateway.max_body_size))))
    chain += _usage_filters(prefix, hides_counts=hides, logs=logs)
    chain.extend(redirect_refusal_filters(model_paths=needs.model_paths))
    chain.append(http_filter("envoy.filters.http.router", Router(suppress_envoy_headers=True)))
    return chain


def _usage_filters(prefix: str, *, hides_counts: bool, logs: bool) -> list[HttpFilter]:
    streams, others = (
        completions_usage_filter(hides_counts=hides_counts, logs=logs),
        nested_usage_filter(hides_counts=hides_counts, logs=logs),
    )
    return [
        _read_usage(_USAGE_FILTER, prefix + _INPUT_TOKENS_PATHS, streams),
        _read_usage(_RESPONSES_FILTER, prefix + _PROMPT_TOKENS_PATHS, others),
    ]


def mirror_filters(gateway: GatewayConfigSpec) -> list[HttpFilter]:
    """Of the listener for copies of requests: extproc is asked once, and a copy that it does not decide ends."""
    asked = _external_processor(gateway, passes_failures=False, metadata={MIRROR_KEY: "1"})
    return [
        http_filter(_EXTPROC_FILTER, asked),
        *_usage_filters("", hides_counts=False, logs=False),
        http_filter("envoy.filters.http.router", Router(suppress_envoy_headers=True)),
    ]


def _health(gateway: GatewayConfigSpec) -> HttpFilter:
    """Answers for Envoy on routes that enable it: 503 while Envoy drains, and without extproc where it must decide."""
    needed = {} if gateway.failure_mode == "Open" else {EXTPROC_CLUSTER: Percent(value=1.0)}
    checked = http_filter(HEALTH_FILTER, HealthCheck(pass_through_mode=False, cluster_min_healthy_percentages=needed))
    checked.disabled = True
    return checked


def extproc_service(
    retry_policy: RetryPolicy | None = None, metadata: Mapping[str, str] = MappingProxyType({})
) -> GrpcService:
    """How Envoy calls extproc: streams without a timeout, with the mark that identifies our bundle, and more
    ``metadata``.
    """
    marks = {BUNDLE_MARK: "1", **metadata}
    return GrpcService(
        envoy_grpc=GrpcServiceEnvoyGrpc(cluster_name=EXTPROC_CLUSTER),
        initial_metadata=[HeaderValue(key=name, value=value) for name, value in marks.items()],
        retry_policy=retry_policy,
    )


def extproc_filter_names(gateway: GatewayConfigSpec) -> tuple[str, ...]:
    """The names of the filters that ask extproc: the second one asks again where the first got no decision.

    Envoy retries a stream until its first answer, that to the headers. Later the stream ends with its process, and the
    request goes on to the second filter, whole. A single process has no other that could be asked, but in mode Close
    the second filter is what refuses: a refusal by the first would cut off the answers that run while a process dies.
    """
    has_second = gateway.failure_mode == "Close" or gateway.extproc_workers > 1
    return _ASKED_TWICE if has_second else _ASKED_ONCE


def _ask_extproc(gateway: GatewayConfigSpec) -> Iterator[HttpFilter]:
    yield http_filter(_EXTPROC_FILTER, _external_processor(gateway, passes_failures=True))
    if _SECOND_EXTPROC_FILTER in extproc_filter_names(gateway):
        again = _external_processor(gateway, passes_failures=gateway.failure_mode == "Open")
        # not where the first has brought a decision
        skipped = skip_filter_if(typed_extension(_EXTPROC_FILTER, again), request_has(SERVER_HEADER, ".+"))
        yield http_filter(_SECOND_EXTPROC_FILTER, skipped)


def _stream_retries() -> RetryPolicy:
    """Before its first answer a stream is opened again, at another process than before if there is one."""
    return RetryPolicy(
        retry_on="reset,cancelled,unavailable",
        num_retries=2,
        retry_back_off=BackoffStrategy(base_interval=duration(0.01), max_interval=duration(0.1)),
        retry_host_predicate=[
            RetryPolicyRetryHostPredicate(
                name="envoy.retry_host_predicates.previous_hosts", typed_config=PackedMessage(PreviousHostsPredicate())
            )
        ],
        host_selection_retry_max_attempts=5,
    )


def processing_mode(*, reads_body: bool, logs_payloads: bool) -> ProcessingMode:
    """Send headers and the whole body, nothing of the answer. With header mode SKIP Envoy holds no requests. Where
    there is a payload log, extproc gets the answer's headers, and asks for the body of one that is logged.

    ``reads_body``: requests cannot be decided by their headers. Of others Envoy would end the stream as soon
    as they are decided, and so their count as in flight; it waits for an answer's trailers, which HTTP/1 has none of.
    """
    header, body = ProcessingModeHeaderSendMode, ProcessingModeBodySendMode
    return ProcessingMode(
        request_header_mode=header.SEND,
        request_body_mode=body.BUFFERED if reads_body else body.NONE,
        request_trailer_mode=header.SKIP,
        response_header_mode=header.SEND if logs_payloads else header.SKIP,
        response_body_mode=body.NONE,
        response_trailer_mode=header.SKIP if reads_body else header.SEND,
    )


def _external_processor(
    gateway: GatewayConfigSpec, *, passes_failures: bool, metadata: Mapping[str, str] = MappingProxyType({})
) -> ExternalProcessor:
    """``passes_failures``: a request whose stream fails goes on."""
    has_tokens = gateway.authentication is not None and bool(gateway.authentication.jwt)
    logs_payloads = gateway.payload_log is not None
    return ExternalProcessor(
        grpc_service=extproc_service(_stream_retries(), metadata),
        failure_mode_allow=passes_failures,
        processing_mode=processing_mode(reads_body=True, logs_payloads=logs_payloads),
        allow_mode_override=logs_payloads,
        message_timeout=duration(gateway.message_timeout),
        # extproc extends the timeout of each request that it holds
        max_message_timeout=duration(LONGEST_MESSAGE_TIMEOUT_S),
        # of system headers, extproc writes :path, which names the model in some protocols; Envoy refuses the others
        mutation_rules=HeaderMutationRules(allow_envoy=True, disallow_is_error=True),
        metadata_options=MetadataOptions(
            # the metadata of verified tokens: policies match their claims
            forwarding_namespaces=MetadataOptionsMetadataNamespaces(untyped=[TOKENS_NAMESPACE]) if has_tokens else None,
            receiving_namespaces=MetadataOptionsMetadataNamespaces(
                untyped=[
                    LB_NAMESPACE,
                    NAMESPACE,
                    ROUTE_NAMESPACE,
                    *([TRACE_NAMESPACE] if gateway.tracing is not None else []),
                ]
            ),
        ),
        status_on_error=HttpStatus(code=StatusCode.ServiceUnavailable),
    )


def _read_usage(name: str, other_paths: str, script: Lua) -> HttpFilter:
    read = typed_extension("envoy.filters.http.lua", script)
    return http_filter(name, skip_filter_if(read, request_has(":path", other_paths)))
