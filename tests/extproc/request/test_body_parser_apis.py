# SPDX-License-Identifier: Apache-2.0
"""APIs by their bodies."""

from __future__ import annotations

import pytest

from extproc.request.body_parser import api_by_body
from extproc.wire_names import Api

CLAUDE = {"anthropic-version": "2023-06-01"}


@pytest.mark.parametrize(
    ("body", "headers", "api"),
    [
        (b'{"messages": []}', {}, Api.CHAT),
        (b'{"messages": []}', {"anthropic-version": ""}, Api.CHAT),
        (b'{"messages": [], "max_tokens": 7}', CLAUDE, Api.MESSAGES),
        (b'{"messages": [], "system": "help"}', {}, Api.MESSAGES),
        (b'{"prompt": "hello"}', CLAUDE, Api.COMPLETIONS),
        (b'{"token_ids": [1], "sampling_params": {}}', {}, Api.GENERATE),
        (b'{"token_ids": [1]}', {}, None),
        (b'{"input": "hello"}', {}, Api.RESPONSES),
        (b'{"input": [{"role": "user"}]}', {}, Api.RESPONSES),
        (b'{"input": "hello", "dimensions": 7}', {}, Api.EMBEDDINGS),
        (b'{"input": ["hello"]}', {}, Api.EMBEDDINGS),
        (b'{"model": "m"}', CLAUDE, None),
        (b"[" * 2000, CLAUDE, None),
        (b"\x00\x01", CLAUDE, None),
    ],
)
def test_the_fields_and_the_clients_version_tell(body: bytes, headers: dict[str, str], api: Api | None) -> None:
    assert api_by_body(body, headers) is api


def test_no_client_gets_a_generation_taken_for_a_count_of_tokens() -> None:
    """Which would cost it nothing."""
    assert api_by_body(b'{"messages": []}', CLAUDE) is Api.MESSAGES
