# SPDX-License-Identifier: Apache-2.0
"""Where requests come in: how often their bodies are read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from extproc.core import request_builder as module
from extproc.core.record import Head
from extproc.request.body_parser import parse_body
from tests.extproc.scenes import core_of, endpoints

if TYPE_CHECKING:
    from collections.abc import Mapping

    from extproc.protocol import Api
    from extproc.request.model import InferenceRequest

HEAD = Head("POST", "/v1/chat/completions", {}, has_body=True)


@pytest.mark.parametrize(("model", "sent"), [("chat", "llama-8b"), ("other", "other")])
def test_a_body_behind_a_pool_is_read_once_whoever_routes_it(
    monkeypatch: pytest.MonkeyPatch, model: str, sent: str
) -> None:
    read = list[bytes]()

    def counted(api: Api, body: bytes, headers: Mapping[str, str]) -> InferenceRequest:
        read.append(body)
        return parse_body(api, body, headers)

    monkeypatch.setattr(module, "parse_body", counted)
    core = core_of(
        servers={"llama": "model: llama-8b\n" + endpoints("10.0.0.1:8000")}, routes={"chat": "modelName: chat"}
    )
    body = f'{{"model": "{model}", "messages": []}}'.encode()
    assert core.builder.build_for_pool("default/llama", HEAD, body).destination.model == sent
    assert read == [body]
