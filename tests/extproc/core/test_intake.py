# SPDX-License-Identifier: Apache-2.0
"""Where requests come in: how often their bodies are read."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from extproc.api.load import load
from extproc.core import request_builder as module
from extproc.core.core import Core
from extproc.core.record import Head
from extproc.request.parsing import parse

if TYPE_CHECKING:
    from collections.abc import Mapping

    from extproc.protocol import Api
    from extproc.request.model import InferenceRequest

DIRECTORY = """
apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {name: llama}
spec: {model: llama-8b, endpoints: [{address: "10.0.0.1:8000"}]}
---
apiVersion: attache.dev/v1alpha1
kind: ModelRoute
metadata: {name: chat}
spec: {modelName: chat, rules: [{targetModels: [{modelServerName: llama}]}]}
"""
HEAD = Head("POST", "/v1/chat/completions", {}, has_body=True)


@pytest.mark.parametrize(("model", "sent"), [("chat", "llama-8b"), ("other", "other")])
def test_a_body_behind_a_pool_is_read_once_whoever_routes_it(
    monkeypatch: pytest.MonkeyPatch, model: str, sent: str
) -> None:
    read = list[bytes]()

    def counted(api: Api, body: bytes, headers: Mapping[str, str]) -> InferenceRequest:
        read.append(body)
        return parse(api, body, headers)

    monkeypatch.setattr(module, "parse", counted)
    core = Core(load({"a.yaml": DIRECTORY.encode()}), rng=random.Random(1), ticket_prefix="t")
    body = f'{{"model": "{model}", "messages": []}}'.encode()
    assert core.intake.receive_pooled("default/llama", HEAD, body).destination.model == sent
    assert read == [body]
