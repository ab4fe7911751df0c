# SPDX-License-Identifier: Apache-2.0
"""What a stream's metadata say of it, and of whom they are believed."""

from __future__ import annotations

import pytest

from extproc.streams.headers import StreamOrigin, read_origin

SAID = [("x-attache-server-key", "ns/llama"), ("x-attache-listener", "caf%C3%A9"), ("x-attache-http-route", "ns/r")]


def test_our_bundle_is_believed() -> None:
    found = read_origin([("x-attache-bundle", "1"), *SAID, ("trace-bin", b"\x00")])

    assert found == StreamOrigin(listener="café", http_route="ns/r", server="ns/llama")


@pytest.mark.parametrize(
    ("said", "path", "engine_reads"),
    [
        ([], "/v1/models", "/v1/models"),
        ([("x-attache-path", "/v1/chat/completions")], "/ask", "/v1/chat/completions"),
        (
            [("x-attache-path", "/v1/chat"), ("x-attache-path-prefix", "/ask")],
            "/ask/completions",
            "/v1/chat/completions",
        ),
        ([("x-attache-path", "/v1/"), ("x-attache-path-prefix", "/")], "/completions", "/v1/completions"),
    ],
)
def test_a_path_that_the_gateway_rewrites_is_the_engines(
    said: list[tuple[str, str]], path: str, engine_reads: str
) -> None:
    assert read_origin([("x-attache-bundle", "1"), *said]).engine_path(path) == engine_reads


def test_other_gateways_are_not() -> None:
    assert read_origin(SAID) == StreamOrigin()


def test_what_is_not_said_is_empty() -> None:
    assert read_origin([("x-attache-bundle", "1")]) == StreamOrigin(listener="", http_route="", server="")
