# SPDX-License-Identifier: Apache-2.0
"""What is read out of a gateway's messages."""

from __future__ import annotations

import pytest
from google.protobuf.struct_pb2 import Struct

from extproc.streams.headers import read_claims, read_endpoint_subset, read_head, read_served_endpoint, read_status
from extproc.streams.messages import HttpHeaders, ProcessingRequest


def headers(*pairs: tuple[str, bytes], is_end: bool = False) -> HttpHeaders:
    message = HttpHeaders(end_of_stream=is_end)
    for key, value in pairs:
        message.headers.headers.add(key=key, raw_value=value)
    return message


def test_a_head_is_read_wherever_its_method_and_path_stand() -> None:
    pairs = [("x-first", b"1"), (":path", b"/v1/models?a=b?c"), ("x-second", b"\xe9"), (":method", b"GET"), ("x", b"3")]
    for ordered in (pairs, pairs[::-1]):
        head = read_head(headers(*ordered, is_end=True), is_trusted=True)

        assert (head.method, head.path, head.has_body, head.is_trusted) == ("GET", "/v1/models", False, True)
        assert dict(head.headers) == {key: value.decode("latin-1") for key, value in ordered}


def test_a_head_without_method_and_path_has_empty_ones() -> None:
    head = read_head(headers(("x", b"1")))

    assert (head.method, head.path, head.has_body) == ("", "", True)
    assert head.headers["x"] == "1"
    assert "y" not in head.headers


def test_values_may_come_as_text() -> None:
    message = HttpHeaders()
    message.headers.headers.add(key=":path", value="/v1/models")

    assert read_head(message).path == "/v1/models"


@pytest.mark.parametrize(("value", "status"), [(b"200", 200), (b"abc", 0), (b"", 0)])
def test_a_status_is_a_number_or_nothing(value: bytes, status: int) -> None:
    assert read_status(headers((":status", value))) == status


def test_no_status_is_0() -> None:
    assert read_status(headers(("x", b"200"))) == 0


def test_a_subset_comes_as_text_or_as_a_list() -> None:
    key = "x-gateway-destination-endpoint-subset"
    text, several, silent = ProcessingRequest(), ProcessingRequest(), ProcessingRequest()
    text.metadata_context.filter_metadata["envoy.lb.subset_hint"].fields[key].string_value = "10.0.0.1:1, 10.0.0.2:2,"
    values = several.metadata_context.filter_metadata["envoy.lb.subset_hint"].fields[key].list_value.values
    for address in ("10.0.0.1:1", "", "10.0.0.2:2"):
        values.add().string_value = address

    assert read_endpoint_subset(text) == read_endpoint_subset(several) == ["10.0.0.1:1", "10.0.0.2:2"]
    assert read_endpoint_subset(silent) is None
    assert not silent.metadata_context.filter_metadata


def test_who_served_is_read_from_metadata() -> None:
    message = ProcessingRequest()
    assert read_served_endpoint(message) == ""

    fields = message.metadata_context.filter_metadata["envoy.lb"].fields
    fields["x-gateway-destination-endpoint-served"].string_value = "10.0.0.1:1"

    assert read_served_endpoint(message) == "10.0.0.1:1"


TOKEN = {
    "groups": ["ml", "ops", 7, None, ["nested"]],
    "role": "admin",
    "scope": "read write",
    "suspended": True,
    "age": 7,
    "realm": {"roles": ["user"], "name": "lab"},
    "https://login.example/team": "red",
}


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("groups", {"ml", "ops"}),
        ("role", {"admin"}),
        ("scope", {"read", "write"}),
        ("suspended", {"true"}),
        ("age", set()),
        ("realm.roles", {"user"}),
        ("realm.name", {"lab"}),
        ("https://login.example/team", {"red"}),
    ],
)
def test_claims_are_values_whatever_form_they_have(name: str, values: set[str]) -> None:
    message = ProcessingRequest()
    tokens = message.metadata_context.filter_metadata["envoy.filters.http.jwt_authn"].fields
    tokens["login"].struct_value.MergeFromString(as_struct(TOKEN))
    tokens["another"].struct_value.MergeFromString(as_struct({"unused": "x"}))

    assert read_claims(message, {name}) == {name: values}


@pytest.mark.parametrize("name", ["nobody", "realm.nobody", "role.name", "groups.ml", "realm.roles.x"])
def test_claims_that_a_token_lacks_are_left_out(name: str) -> None:
    message = ProcessingRequest()
    tokens = message.metadata_context.filter_metadata["envoy.filters.http.jwt_authn"].fields
    tokens["login"].struct_value.MergeFromString(as_struct(TOKEN))

    assert read_claims(message, {name}) == {}
    assert read_claims(ProcessingRequest(), {name}) == {}


def as_struct(value: dict[str, object]) -> bytes:
    found = Struct()
    found.update(value)
    return found.SerializeToString()
