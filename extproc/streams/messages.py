"""Envoy's messages on the request path, at C speed. The types in ``messages.pyi`` are generated: `make generate`."""

from __future__ import annotations

from envoy_data_plane.envoy.service.accesslog.v3 import StreamAccessLogsMessage as _StreamAccessLogsMessage
from envoy_data_plane.envoy.service.accesslog.v3 import StreamAccessLogsResponse as _StreamAccessLogsResponse
from envoy_data_plane.envoy.service.ext_proc.v3 import ProcessingRequest as _ProcessingRequest
from envoy_data_plane.envoy.service.ext_proc.v3 import ProcessingResponse as _ProcessingResponse

from extproc.streams.derive import derive

ROOTS = (_ProcessingRequest, _ProcessingResponse, _StreamAccessLogsMessage, _StreamAccessLogsResponse)

_derived = derive(ROOTS)

ProcessingRequest = _derived["ProcessingRequest"]
ProcessingResponse = _derived["ProcessingResponse"]
AccessLogCommon = _derived["AccessLogCommon"]
Duration = _derived["Duration"]
HeadersResponse = _derived["HeadersResponse"]
HttpBody = _derived["HttpBody"]
HttpHeaders = _derived["HttpHeaders"]
HeaderMap = _derived["HeaderMap"]
ImmediateResponse = _derived["ImmediateResponse"]
HttpAccessLogEntry = _derived["HttpAccessLogEntry"]
Metadata = _derived["Metadata"]
StreamAccessLogsMessage = _derived["StreamAccessLogsMessage"]
StreamAccessLogsResponse = _derived["StreamAccessLogsResponse"]
Struct = _derived["Struct"]
BodyResponse = _derived["BodyResponse"]
CommonResponse = _derived["CommonResponse"]
HeaderValue = _derived["HeaderValue"]
TrailersResponse = _derived["TrailersResponse"]
Value = _derived["Value"]
