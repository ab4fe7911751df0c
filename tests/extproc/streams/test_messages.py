# SPDX-License-Identifier: Apache-2.0
"""The generated messages are equal on the wire to those of envoy-data-plane."""

from __future__ import annotations

from envoy_data_plane.envoy.config.core.v3 import HeaderMap, HeaderValue, Metadata
from envoy_data_plane.envoy.service.ext_proc.v3 import HttpHeaders, ProcessingRequest
from envoy_data_plane.google.protobuf import Struct, Value

from extproc.streams import messages


def test_a_request_reads_the_same_as_written_by_envoy_data_plane() -> None:
    headers = HeaderMap(headers=[HeaderValue(key=":path", raw_value=b"/v1/models")])
    written = ProcessingRequest(
        request_headers=HttpHeaders(headers=headers, end_of_stream=True),
        metadata_context=Metadata(filter_metadata={"attache": Struct(fields={"ticket": Value(string_value="t")})}),
    )

    read = messages.ProcessingRequest.FromString(bytes(written))

    assert read.WhichOneof("request") == "request_headers"
    assert read.request_headers.headers.headers[0].raw_value == b"/v1/models"
    assert read.request_headers.end_of_stream
    assert read.metadata_context.filter_metadata["attache"].fields["ticket"].string_value == "t"
    assert ProcessingRequest.parse(read.SerializeToString()) == written
