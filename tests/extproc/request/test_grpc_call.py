# SPDX-License-Identifier: Apache-2.0
"""Where a message of gRPC names its model, and the message with another name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.refusals import BadRequest, CompressedMessage, MethodNotAllowed, ModelRepositoryRefused, UnknownPath
from extproc.request.grpc_call import MOST_FIELDS, MOST_NAME_BYTES, api_of_call, read_call, with_model_name
from extproc.wire_names import REPOSITORY_CALLS, SERVER_CALLS, V2_SERVICE, Api
from tests.model_calls import INFER, TENSORFLOW, V2, framed, infer

HEADERS = {"content-type": "application/grpc", "te": "trailers"}
NAMES = st.text(min_size=1, max_size=200)


def renamed(api: Api, body: bytes, model: str) -> bytes:
    call = read_call(api, body).call
    assert call is not None
    return with_model_name(body, call, model)


@given(NAMES, NAMES, st.binary(max_size=300))
def test_a_name_is_read_and_replaced_and_nothing_else(before: str, after: str, raw: bytes) -> None:
    message = infer(before, 1.5, id="42", raw_input_contents=[raw])
    body = framed(message.SerializeToString())
    assert read_call(Api.V2_GRPC, body).model == before
    assert renamed(Api.V2_GRPC, body, after) == framed(
        infer(after, 1.5, id="42", raw_input_contents=[raw]).SerializeToString()
    )


@given(NAMES, NAMES)
def test_lengths_around_the_name_change_with_it(before: str, after: str) -> None:
    def asked(name: str) -> bytes:
        spec = TENSORFLOW["ModelSpec"](name=name, signature_name="s", version_label="stable")
        return framed(TENSORFLOW["PredictRequest"](model_spec=spec, output_filter=["y"]).SerializeToString())

    assert read_call(Api.TENSORFLOW_GRPC, asked(before)).model == before
    assert renamed(Api.TENSORFLOW_GRPC, asked(before), after) == asked(after)


def test_a_name_may_stand_behind_all_else() -> None:
    message = infer("", 1.0).SerializeToString() + b"\x0a\x04iris"
    body = renamed(Api.V2_GRPC, framed(message), "another")
    read = V2["ModelInferRequest"].FromString(body[5:])
    assert (read.model_name, len(read.inputs)) == ("another", 1)


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(message: bytes) -> None:
    try:
        model = read_call(Api.V2_GRPC, framed(message)).model
    except BadRequest:
        return
    # what is read here is what an engine reads
    assert V2["ModelReadyRequest"].FromString(message).name == model


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (b"", "names no model"),
        (b"\x0a\x00", "names no model"),
        (b"\x12\x01\x33", "names no model"),
        (b"\x0a\x01a\x0a\x01b", "more than once"),
        (b"\x08\x01", "not as text"),
        (b"\x0a\x7fa", "at byte 1"),
        (b"\x0a" + b"\xff" * 11, "at byte 1"),
        (b"\x8a\x80\x80\x80\x80\x01\x01b", "at byte 0"),
        (b"\x00\x01", "at byte 0"),
        (b"\x0b\x0c", "at byte 1"),
        (b"\x0a\x01\xff", "not UTF-8"),
        (b"\x0a\x81\x08" + b"a" * (MOST_NAME_BYTES + 1), f"at most {MOST_NAME_BYTES}"),
        (b"\x0a\x01a" + b"\x10\x01" * MOST_FIELDS, f"more than {MOST_FIELDS} fields"),
    ],
)
def test_a_message_that_engines_may_read_otherwise_is_refused(message: bytes, why: str) -> None:
    with pytest.raises(BadRequest, match=why):
        read_call(Api.V2_GRPC, framed(message))


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "no message"),
        (b"\0\0\0\0", "no message"),
        (framed(b"\x0a\x01a", size=4), "has 3 bytes and says that it has 4"),
        (framed(b"\x0a\x01a", size=2), "more than one message"),
        (framed(b"\x0a\x01a", flag=9), "no flag"),
    ],
)
def test_a_body_is_one_message(body: bytes, why: str) -> None:
    with pytest.raises(BadRequest, match=why):
        read_call(Api.V2_GRPC, body)


def test_a_compressed_message_is_refused_with_what_is_taken() -> None:
    with pytest.raises(CompressedMessage) as found:
        read_call(Api.V2_GRPC, framed(b"\x0a\x01a", flag=1))
    assert (found.value.grpc_status, found.value.headers["grpc-accept-encoding"]) == (12, "identity")


def test_calls_are_known_by_their_paths() -> None:
    assert api_of_call("/v1/chat/completions", "POST", headers={}, has_body=True) is None
    assert {api_of_call(path, "POST", headers=HEADERS, has_body=True) for path in (INFER, *SERVER_CALLS)} == {
        Api.V2_GRPC
    }
    refused: list[tuple[str, str, bool, type[Exception]]] = [
        (INFER, "GET", True, MethodNotAllowed),
        (INFER, "POST", False, BadRequest),
        (f"{V2_SERVICE}ModelStreamInfer", "POST", True, UnknownPath),
        *((path, "POST", True, ModelRepositoryRefused) for path in REPOSITORY_CALLS),
    ]
    for path, method, has_body, error in refused:
        with pytest.raises(error):
            api_of_call(path, method, headers=HEADERS, has_body=has_body)


@pytest.mark.parametrize(
    ("name", "taken", "refused"),
    [
        (
            "content-type",
            ["application/grpc", "application/grpc+proto", "application/grpc;v=1"],
            [
                "",
                "application/grpc-web",
                "application/grpc+json",
                "application/grpcx",
                "application/json",
                "text/plain",
            ],
        ),
        ("te", ["trailers"], ["", "gzip", "trailers,gzip"]),
        (
            "grpc-timeout",
            ["0n", "300m", "99999999H"],
            ["", "1", "garbage", "-1S", "999999999H", "1X", "5S,garbage", "1S ", "\u0661S"],
        ),
    ],
)
def test_headers_that_engines_fail_at_are_refused(name: str, taken: list[str], refused: list[str]) -> None:
    for value in taken:
        assert api_of_call(INFER, "POST", headers={**HEADERS, name: value}, has_body=True) is Api.V2_GRPC, value
    for value in refused:
        with pytest.raises(BadRequest, match=name):
            api_of_call(INFER, "POST", headers={**HEADERS, name: value}, has_body=True)
