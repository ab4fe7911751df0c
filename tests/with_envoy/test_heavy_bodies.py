# SPDX-License-Identifier: Apache-2.0
"""Bodies whose decoding would cost far more than their size."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx
import pytest

from bench.stack.loopback_stack import ALIAS

if TYPE_CHECKING:
    from bench.stack.loopback_stack import Stack

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.parametrize(
    ("path", "fields", "advice"),
    [
        ("chat/completions", b'"messages":[' + b'{"role":""},' * 150_000 + b"{}]", "send fewer messages"),
        ("completions", b'"prompt":[' + b'"",' * 4_000_000 + b'""]', "send fewer messages or prompts"),
        ("completions", b'"prompt":[' + b"1," * 4_000_000 + b"1]", "send fewer messages or prompts"),
        ("chat/completions", b'"messages":[],"' + b"\\n" * 4_000_000 + b'":0', "send shorter tools"),
    ],
    ids=["messages", "prompts", "tokens", "name"],
)
async def test_a_body_that_costs_far_more_than_its_size_is_refused_with_advice(
    stack: Stack, path: str, fields: bytes, advice: str
) -> None:
    body = b'{"model":"%s",%s}' % (ALIAS.encode(), fields)
    async with httpx.AsyncClient(timeout=30) as http:
        refused = await http.post(f"{stack.url}/v1/{path}", content=body, headers={"content-type": "application/json"})
    assert refused.status_code == 400
    assert advice in refused.json()["error"]["message"]


async def test_a_long_prompt_of_source_code_is_served(stack: Stack) -> None:
    code = "if (a) { b: {} }\n" * 6_000
    body = {"model": ALIAS, "messages": [{"role": "user", "content": code}], "max_tokens": 2}
    async with httpx.AsyncClient(timeout=30) as http:
        served = await http.post(f"{stack.url}/v1/chat/completions", json=body)
    assert served.status_code == 200
