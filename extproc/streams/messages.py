# SPDX-License-Identifier: Apache-2.0
"""Classes of the Envoy messages on the request path, in protobuf's C implementation (upb).

Their schema is ``messages.binpb``, a FileDescriptorSet that ``make generate`` writes from envoy-data-plane together
with the types in ``messages.pyi``. It is loaded into a pool of its own, where it cannot clash with other users of
Envoy's protos.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClassesForFiles

_described = FileDescriptorSet.FromString(Path(__file__).with_name("messages.binpb").read_bytes())
_pool: Final = DescriptorPool()
for _file in _described.file:
    _pool.Add(_file)
_classes: Final = GetMessageClassesForFiles([_file.name for _file in _described.file], _pool)

AccessLogCommon = _classes["AccessLogCommon"]
BodyMutation = _classes["BodyMutation"]
BodyResponse = _classes["BodyResponse"]
CommonResponse = _classes["CommonResponse"]
Duration = _classes["Duration"]
HeaderMap = _classes["HeaderMap"]
HeaderMutation = _classes["HeaderMutation"]
HeaderValue = _classes["HeaderValue"]
HeaderValueOption = _classes["HeaderValueOption"]
HeadersResponse = _classes["HeadersResponse"]
HttpAccessLogEntry = _classes["HttpAccessLogEntry"]
HttpBody = _classes["HttpBody"]
HttpHeaders = _classes["HttpHeaders"]
ImmediateResponse = _classes["ImmediateResponse"]
Metadata = _classes["Metadata"]
ProcessingMode = _classes["ProcessingMode"]
ProcessingRequest = _classes["ProcessingRequest"]
ProcessingResponse = _classes["ProcessingResponse"]
StreamAccessLogsMessage = _classes["StreamAccessLogsMessage"]
StreamAccessLogsResponse = _classes["StreamAccessLogsResponse"]
StreamedBodyResponse = _classes["StreamedBodyResponse"]
Struct = _classes["Struct"]
TrailersResponse = _classes["TrailersResponse"]
Value = _classes["Value"]
