# SPDX-License-Identifier: Apache-2.0
"""Whose streams end with usage: who asked, and who would not see it."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from extproc.api.model_server import ModelServerSpec
from extproc.core.dispatch import asks_for_usage
from extproc.core.record import BUNDLE, Arrival, Attachment, Head
from extproc.protocol import Api
from extproc.request.parsing import parse
from extproc.routing.resolve import Destination

ELSEWHERE = Attachment(passes_usage=True)


def asks(attachment: Attachment, *, trusted: bool, spec: ModelServerSpec | None = None, **options: bool) -> bool:
    body: dict[str, Any] = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "a"}]}
    if options:
        body["stream_options"] = options
    text = json.dumps(body).encode()
    pool: Any = SimpleNamespace(spec=spec or ModelServerSpec(model="m"))
    head = Head("POST", "/v1/chat/completions", {}, has_body=True, is_trusted=trusted)
    arrival = Arrival(parse(Api.CHAT, text), Destination("default/m", "m"), pool, head, text)
    return asks_for_usage(arrival, attachment)


@pytest.mark.parametrize("attachment", [BUNDLE, ELSEWHERE])
def test_usage_is_asked_for_where_the_client_said_nothing(attachment: Attachment) -> None:
    assert asks(attachment, trusted=True)
    assert not asks(attachment, trusted=True, include_usage=True)
    as_requested = ModelServerSpec(model="m", stream_usage="AsRequested")
    assert not asks(attachment, trusted=True, spec=as_requested)


@pytest.mark.parametrize(
    ("attachment", "trusted", "is_asked"),
    [(BUNDLE, True, True), (BUNDLE, False, False), (ELSEWHERE, True, False), (ELSEWHERE, False, False)],
)
def test_a_client_that_declines_usage_would_not_see_it(attachment: Attachment, trusted: bool, is_asked: bool) -> None:
    """A gateway of somebody else may write trusted headers, and passes answers on as they are."""
    assert asks(attachment, trusted=trusted, include_usage=False) == is_asked
