# SPDX-License-Identifier: Apache-2.0
"""What is written directly is what protobuf itself would write."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.streams.messages import (
    BodyMutation,
    BodyResponse,
    CommonResponse,
    HeaderMutation,
    HeaderValue,
    HeaderValueOption,
    HttpAccessLogEntry,
    ProcessingResponse,
    Struct,
    Value,
)
from extproc.streams.processing_responses import MARK, MessageTemplate, encode_field, encode_varint, field_tag


def nested(value: str) -> ProcessingResponse:
    """``value`` deep inside, with other fields before and behind it at every level."""
    header = HeaderValue(key="before", value=value, raw_value=b"behind")
    option = HeaderValueOption(header=header, append_action=300)
    mutation = HeaderMutation(set_headers=[HeaderValueOption(append_action=1), option], remove_headers=["behind"])
    common = CommonResponse(status=1, header_mutation=mutation, clear_route_cache=True)
    return ProcessingResponse(request_body=BodyResponse(response=common), dynamic_metadata=Struct())


@pytest.mark.parametrize("size", [1, 60, 100, 127, 128, 1023, 1024, 16_383, 16_384, 3_000_000])
def test_a_template_takes_values_of_any_size(size: int) -> None:
    template = MessageTemplate(nested(MARK))

    for _ in range(2):
        assert b"".join(template.fill(b"x" * size)) == nested("x" * size).SerializeToString()


@given(st.text(min_size=1, max_size=300))
def test_a_template_takes_any_text(value: str) -> None:
    assert b"".join(MessageTemplate(nested(MARK)).fill(value.encode())) == nested(value).SerializeToString()


def test_an_empty_value_reads_as_none() -> None:
    assert ProcessingResponse.FromString(b"".join(MessageTemplate(nested(MARK)).fill(b""))) == nested("")


def test_a_template_of_a_map() -> None:
    def message(value: str) -> Struct:
        return Struct(fields={"key": Value(string_value=value)})

    assert b"".join(MessageTemplate(message(MARK)).fill(b"value")) == message("value").SerializeToString()


def test_a_template_needs_a_mark() -> None:
    with pytest.raises(IndexError):
        MessageTemplate(nested("nothing varies"))


@given(st.integers(1, 2**63))
def test_numbers_are_written_as_protobuf_writes_them(number: int) -> None:
    entry = HttpAccessLogEntry()
    entry.request.request_body_bytes = number

    # one byte says which field it is
    assert entry.request.SerializeToString()[1:] == encode_varint(number)


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_a_field_holds_its_value_and_what_is_written_behind_it(head: bytes, behind: bytes) -> None:
    more = len(behind)
    written = encode_field(
        field_tag(CommonResponse, "body_mutation"),
        encode_field(field_tag(BodyMutation, "body"), head, more=more),
        more=more,
    )

    assert CommonResponse.FromString(written + behind).body_mutation.body == head + behind
