# SPDX-License-Identifier: Apache-2.0
"""What OpenAI's Python client does, it can do through the gateway; what goes wrong has the class that it expects."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import httpx
import openai
import pydantic
import pytest

from tests.waiting import eventually

if TYPE_CHECKING:
    from bench.stack.loopback_stack import Stack

pytestmark = pytest.mark.asyncio(loop_scope="module")

HELLO = [{"role": "user", "content": "Tell me something that I do not know, please. " * 20}]


async def metrics(stack: Stack) -> str:
    async with httpx.AsyncClient(timeout=60) as http:
        return (await http.get(f"{stack.metrics}/metrics")).text


def total(text: str, name: str) -> float:
    return sum(float(value) for value in re.findall(rf"^{name}\{{[^}}]*\}} (\S+)$", text, re.MULTILINE))


async def test_chat_plain_and_streamed(client: openai.AsyncOpenAI, model: str) -> None:
    plain = await client.chat.completions.create(model=model, messages=HELLO, max_tokens=5)
    assert plain.model == model
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


class Visit(pydantic.BaseModel):
    town: Literal["Berlin", "Paris"]
    days: Annotated[int, pydantic.Field(ge=1, le=30)]
    guests: list[str]


VISIT: Final[Any] = {
    "type": "function",
    "function": {"name": "visit", "parameters": Visit.model_json_schema(), "strict": True},
}
OTHER: Final[Any] = {"type": "function", "function": {"name": "other", "parameters": {"type": "object"}}}


async def test_json_mode_and_json_of_a_schema(client: openai.AsyncOpenAI, model: str) -> None:
    asked: Any = {"model": model, "messages": HELLO, "response_format": {"type": "json_object"}, "max_tokens": 20}
    plain = await client.chat.completions.create(**asked)
    assert isinstance(json.loads(plain.choices[0].message.content or ""), dict)
    assert plain.choices[0].finish_reason == "stop"
    stream = await client.chat.completions.create(**asked, stream=True)
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert isinstance(json.loads(text), dict)

    parsed = await client.chat.completions.parse(model=model, messages=HELLO, response_format=Visit, n=2)  # type: ignore[arg-type]
    assert [type(one.message.parsed) for one in parsed.choices] == [Visit, Visit]
    async with client.chat.completions.stream(model=model, messages=HELLO, response_format=Visit) as events:  # type: ignore[arg-type]
        final = await events.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Visit)
    with pytest.raises(openai.LengthFinishReasonError):
        await client.chat.completions.parse(model=model, messages=HELLO, response_format=Visit, max_tokens=2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("choice", "reason"), [("required", "tool_calls"), ({"type": "function", "function": {"name": "visit"}}, "stop")]
)
async def test_a_tool_that_is_forced_is_called(
    client: openai.AsyncOpenAI,
    model: str,
    choice: Any,  # noqa: ANN401 - what the client takes
    reason: str,
) -> None:
    asked: Any = {"model": model, "messages": HELLO, "tools": [VISIT, OTHER], "tool_choice": choice}
    plain = await client.chat.completions.create(**asked)
    (call,) = plain.choices[0].message.tool_calls or ()
    assert call.type == "function"
    assert call.function.name == "visit"
    Visit.model_validate_json(call.function.arguments)
    assert plain.choices[0].finish_reason == reason
    async with client.chat.completions.stream(**asked) as events:
        final = await events.get_final_completion()
    (call,) = final.choices[0].message.tool_calls or ()
    Visit.model_validate_json(call.function.arguments)
    # what is not forced is text
    free = await client.chat.completions.create(**{**asked, "tool_choice": "auto"}, max_tokens=2)
    assert free.choices[0].message.content
    with pytest.raises(openai.BadRequestError, match="no tool 'nobody'"):
        await client.chat.completions.create(
            **{**asked, "tool_choice": {"type": "function", "function": {"name": "nobody"}}}
        )


async def test_responses_have_tools_and_json_too(client: openai.AsyncOpenAI, model: str) -> None:
    parsed = await client.responses.parse(model=model, input="hello", text_format=Visit)
    assert isinstance(parsed.output_parsed, Visit)
    async with client.responses.stream(model=model, input="hello", text_format=Visit) as events:
        final = await events.get_final_response()
    assert isinstance(final.output_parsed, Visit)
    tool: Any = {"type": "function", "name": "visit", "parameters": Visit.model_json_schema(), "strict": True}
    asked: Any = {"model": model, "input": "hello", "tools": [tool], "tool_choice": "required"}
    plain = await client.responses.create(**asked)
    async with client.responses.stream(**asked) as events:
        streamed = await events.get_final_response()
    for one in (plain, streamed):
        (call,) = one.output
        assert call.type == "function_call"
        Visit.model_validate_json(call.arguments)


async def test_a_list_of_prompts_has_a_choice_for_each(client: openai.AsyncOpenAI, model: str) -> None:
    prompts = ["once upon a time", "long ago", "tomorrow"]
    plain = await client.completions.create(model=model, prompt=prompts, max_tokens=3)
    assert [one.index for one in plain.choices] == [0, 1, 2]
    assert plain.usage is not None
    assert plain.usage.completion_tokens == 9
    stream = await client.completions.create(model=model, prompt=prompts, max_tokens=3, stream=True)
    texts = ["", "", ""]
    async for chunk in stream:
        for one in chunk.choices:
            texts[one.index] += one.text
    assert [len(one.split()) for one in texts] == [3, 3, 3]


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
