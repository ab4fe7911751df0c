# SPDX-License-Identifier: Apache-2.0
"""What OpenAI's Python client does, it can do through the gateway; what goes wrong has the class that it expects."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import httpx
import openai
import pytest

from bench.stack.stack import MODEL
from tests.waiting import eventually

if TYPE_CHECKING:
    from bench.stack.stack import Stack

pytestmark = pytest.mark.asyncio(loop_scope="module")

HELLO = [{"role": "user", "content": "Tell me something that I do not know, please. " * 20}]


async def metrics(stack: Stack) -> str:
    async with httpx.AsyncClient(timeout=60) as http:
        return (await http.get(f"{stack.metrics}/metrics")).text


def total(text: str, name: str) -> float:
    return sum(float(value) for value in re.findall(rf"^{name}\{{[^}}]*\}} (\S+)$", text, re.MULTILINE))


async def test_chat_plain_and_streamed(client: openai.AsyncOpenAI, model: str) -> None:
    plain = await client.chat.completions.create(model=model, messages=HELLO, max_tokens=5)
    assert plain.model == MODEL
    assert plain.usage is not None
    assert plain.usage.completion_tokens == 5

    stream = await client.chat.completions.create(model=model, messages=HELLO, max_tokens=5, stream=True)
    # usage is asked for by the gateway, which keeps the chunk with it, that has no choices
    assert len("".join([chunk.choices[0].delta.content or "" async for chunk in stream]).split()) == 5

    stream = await client.chat.completions.create(
        model=model, messages=HELLO, max_tokens=5, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens_details is not None
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens


async def test_a_client_that_declines_usage_gets_none(client: openai.AsyncOpenAI, model: str) -> None:
    stream = await client.chat.completions.create(
        model=model, messages=HELLO, max_tokens=2, stream=True, stream_options={"include_usage": False}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)


async def test_completions_embeddings_and_responses(client: openai.AsyncOpenAI, model: str) -> None:
    plain = await client.completions.create(model=model, prompt="once upon a time", max_tokens=3)
    assert len(plain.choices[0].text.split()) == 3
    stream = await client.completions.create(model=model, prompt="once upon a time", max_tokens=3, stream=True)
    assert len("".join([chunk.choices[0].text async for chunk in stream]).split()) == 3
    vectors = await client.embeddings.create(model=model, input=["one", "two"])
    assert len(vectors.data) == 2
    response = await client.responses.create(model=model, input="hello", max_output_tokens=3)
    assert len(response.output_text.split()) == 3
    events = await client.responses.create(model=model, input="hello", max_output_tokens=3, stream=True)
    assert [event.type async for event in events][-1] == "response.completed"


async def test_an_adapter_is_asked_for_by_its_own_name(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="sql", messages=HELLO, max_tokens=1)
    assert answer.model == "sql"


async def test_the_models_are_those_that_can_be_asked_for(client: openai.AsyncOpenAI, model: str) -> None:
    assert {one.id async for one in client.models.list()} == {model, "sql"}
    assert (await client.models.retrieve(model)).id == model


async def test_errors_have_the_classes_that_the_client_knows(client: openai.AsyncOpenAI, model: str) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        await client.chat.completions.create(model="gpt-17", messages=HELLO)
    assert unknown.value.code == "model_not_found"
    assert "gpt-17" in unknown.value.message
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("gpt-17")
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(model=model, messages="hello")  # type: ignore[arg-type]  # that is the point
    assert bad.value.param == "messages"
    with pytest.raises(openai.NotFoundError):
        await client.images.generate(prompt="a cat")


async def test_an_error_of_the_engine_is_passed_on_as_it_is(client: openai.AsyncOpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        await client.completions.create(model=model, prompt="word " * 600_000)


async def test_usage_host_and_times_come_back_to_extproc(stack: Stack, client: openai.AsyncOpenAI, model: str) -> None:
    async def settled() -> float:
        return total(await metrics(stack), "attache_access_log_entries_total")

    async def all_logged() -> bool:
        text = await metrics(stack)
        return total(text, "attache_requests_total") <= total(text, "attache_access_log_entries_total")

    await eventually(all_logged)
    before, text_before = await settled(), await metrics(stack)
    prompt = [{"role": "user", "content": "A prompt that nobody has sent before. " * 30}]
    for stream in (False, True):
        answer = await client.chat.completions.create(model=model, messages=prompt, max_tokens=4, stream=stream)
        if stream:
            async for _ in answer:
                pass

    async def both_logged() -> bool:
        return await settled() >= before + 2

    await eventually(both_logged)
    text = await metrics(stack)
    prompt_tokens = total(text, "attache_prompt_tokens_total") - total(text_before, "attache_prompt_tokens_total")
    cached = total(text, "attache_cached_tokens_total") - total(text_before, "attache_cached_tokens_total")
    # 1,140 characters: 285 tokens and the template's, twice; the second time all full blocks but the last are cached
    assert 580 <= prompt_tokens <= 610
    assert 256 <= cached <= 304
    assert 'first_choice="yes",server="default/llama",status_class="2xx"' in text
    assert total(text, "attache_in_flight") == 0


async def test_no_header_of_the_gateway_reaches_a_client(stack: Stack, model: str) -> None:
    async with httpx.AsyncClient(timeout=60) as http:
        answer = await http.post(f"{stack.url}/v1/completions", json={"model": model, "prompt": "x", "max_tokens": 1})
    assert not [name for name in answer.headers if name.startswith(("x-attache", "x-gateway", "x-envoy"))]
    assert json.loads(answer.text)["object"] == "text_completion"
