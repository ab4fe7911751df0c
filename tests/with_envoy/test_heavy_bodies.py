# SPDX-License-Identifier: Apache-2.0
"""Bodies whose decoding would cost far more than their size."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx
import pytest

from bench.stack import ALIAS

if TYPE_CHECKING:
    from bench.stack import Stack

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_body_of_empty_messages_is_refused_with_advice(stack: Stack) -> None:
    messages = b",".join([b'{"role":""}'] * 150_000)
    body = b'{"model":"%s","messages":[%s]}' % (ALIAS.encode(), messages)
    async with httpx.AsyncClient(timeout=30) as http:
        refused = await http.post(
            f"{stack.url}/v1/chat/completions", content=body, headers={"content-type": "application/json"}
        )
    assert refused.status_code == 400
    assert "send fewer messages" in refused.json()["error"]["message"]


async def test_a_long_prompt_of_source_code_is_served(stack: Stack) -> None:
    code = "if (a) { b: {} }\n" * 6_000
    body = {"model": ALIAS, "messages": [{"role": "user", "content": code}], "max_tokens": 2}
    async with httpx.AsyncClient(timeout=30) as http:
        served = await http.post(f"{stack.url}/v1/chat/completions", json=body)
    assert served.status_code == 200
