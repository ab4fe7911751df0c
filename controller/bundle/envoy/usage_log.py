# SPDX-License-Identifier: Apache-2.0
"""The usage log: Envoy writes a line of JSON to a file at the end of each inference request.

``extproc.api.usage_log.UsageLine`` describes a line. Envoy writes numbers as numbers, except for the time of arrival,
whole namespaces of metadata as objects, and escapes all text. A value that it does not have is null.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from envoy_data_plane.envoy.config.accesslog.v3 import AccessLog, AccessLogFilter, MetadataFilter, OrFilter
from envoy_data_plane.envoy.config.core.v3 import DataSource, SubstitutionFormatString
from envoy_data_plane.envoy.extensions.access_loggers.file.v3 import FileAccessLog
from envoy_data_plane.envoy.extensions.filters.common.set_filter_state.v3 import FilterStateValue
from envoy_data_plane.envoy.extensions.filters.http.set_filter_state.v3 import Config as SetFilterState
from envoy_data_plane.envoy.type.matcher.v3 import MetadataMatcher, MetadataMatcherPathSegment, ValueMatcher
from envoy_data_plane.google.protobuf import Struct, Value

from controller.bundle.envoy.envoy_json import PackedMessage, http_filter
from controller.bundle.envoy.extproc_fail_open import FALLBACK_MODEL, FALLBACK_NAMESPACE
from controller.bundle.envoy.local_replies import log_filter_when
from controller.bundle.envoy.usage_filters import STARTED_US
from extproc.wire_names import (
    CLIENT,
    NAMESPACE,
    REQUEST_ID,
    TENANT,
    TRANSLATED_NAMESPACE,
    USAGE_CONTEXT,
    USAGE_NAMESPACE,
    USER,
)

if TYPE_CHECKING:
    from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import HttpFilter

# Headers that name the caller, and the filter state that keeps each.
_KEPT: Final = {CLIENT: "attache.client", TENANT: "attache.tenant", USER: "attache.user"}
# Names and paths may be as long as a request's headers.
_MOST_CHARACTERS: Final = 256
_LINE: Final = {
    # not the request's id, which clients of a trusted gateway choose
    "id": "%UNIQUE_ID%",
    # text: as a number it would be an expression of CEL, which costs Envoy a third of the line and more
    "at": "%START_TIME(%s.%3f)%",
    "status": "%RESPONSE_CODE%",
    "request_id": f"%REQ({REQUEST_ID}):{_MOST_CHARACTERS}%",
    "trace_id": "%TRACE_ID%",
    # no query: it may have secrets
    "path": f"%PATH(NQ:ORIG_OR_PATH):{_MOST_CHARACTERS}%",
    "context": f"%DYNAMIC_METADATA({NAMESPACE}:{USAGE_CONTEXT})%",
    "usage": f"%DYNAMIC_METADATA({USAGE_NAMESPACE})%",
    "served": "%UPSTREAM_HOST%",
    "cluster": "%UPSTREAM_CLUSTER%",
    "client": f"%FILTER_STATE({_KEPT[CLIENT]}:PLAIN)%",
    "tenant": f"%FILTER_STATE({_KEPT[TENANT]}:PLAIN)%",
    "user": f"%FILTER_STATE({_KEPT[USER]}:PLAIN)%",
    "model": f"%DYNAMIC_METADATA({FALLBACK_NAMESPACE}:{FALLBACK_MODEL}):{_MOST_CHARACTERS}%",
    "duration_us": "%COMMON_DURATION(DS_RX_BEG:DS_TX_END:us)%",
    "duration_ms": "%DURATION%",
    "first_byte_us": "%COMMON_DURATION(DS_RX_BEG:US_RX_BODY_BEG:us)%",
    "answer_bytes": "%BYTES_SENT%",
    "attempts": "%UPSTREAM_REQUEST_ATTEMPT_COUNT%",
    "flags": "%RESPONSE_FLAGS%",
    "details": "%RESPONSE_CODE_DETAILS%",
}


def usage_access_log(path: str, *, translates: bool = False, calls: bool = False) -> AccessLog:
    """Lines of the requests that extproc has decided or refused, and of those that Envoy balanced or refused for want
    of extproc. ``translates``: some of them are translated. ``calls``: some are of gRPC.
    """
    texts = dict(_LINE)
    if translates:
        texts["translated"] = f"%DYNAMIC_METADATA({TRANSLATED_NAMESPACE})%"
    if calls:
        texts["grpc_status"] = "%GRPC_STATUS_NUMBER%"
    fields = {name: Value(string_value=text) for name, text in texts.items()}
    log_format = SubstitutionFormatString(json_format=Struct(fields=fields))
    return AccessLog(
        name="envoy.access_loggers.file",
        filter=AccessLogFilter(
            or_filter=OrFilter(
                filters=[
                    _has(NAMESPACE, USAGE_CONTEXT),
                    _has(FALLBACK_NAMESPACE, FALLBACK_MODEL),
                    log_filter_when("response.code_details.startsWith('ext_proc') && request.method == 'POST'"),
                ]
            )
        ),
        typed_config=PackedMessage(FileAccessLog(path=path, log_format=log_format)),
    )


def log_metadata_filter() -> HttpFilter:
    """Keeps who the caller is, as routes remove these headers, and when the request began, for the scripts that read
    usage: Lua has no access to that time.
    """
    texts = {STARTED_US: "%START_TIME(%s%6f)%"}
    texts.update((key, f"%REQ({header}):{_MOST_CHARACTERS}%") for header, key in _KEPT.items())
    return http_filter(
        "attache.kept_for_log",
        SetFilterState(
            on_request_headers=[
                FilterStateValue(
                    object_key=key,
                    factory_key="envoy.string",
                    format_string=SubstitutionFormatString(
                        text_format_source=DataSource(inline_string=text), omit_empty_values=True
                    ),
                    skip_if_empty=True,
                )
                for key, text in texts.items()
            ]
        ),
    )


def _has(namespace: str, key: str) -> AccessLogFilter:
    matcher = MetadataMatcher(
        filter=namespace, path=[MetadataMatcherPathSegment(key=key)], value=ValueMatcher(present_match=True)
    )
    return AccessLogFilter(metadata_filter=MetadataFilter(matcher=matcher, match_if_key_not_found=False))
