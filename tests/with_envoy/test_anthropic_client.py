# SPDX-License-Identifier: Apache-2.0
"""What Anthropic's Python client does, it can do through the gateway; what goes wrong has the class that it expects."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import anthropic
import httpx
import pydantic
import pytest
import pytest_asyncio

from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import openai

    from bench.stack.loopback_stack import Stack

pytestmark = pytest.mark.asyncio(loop_scope="module")

LONG: Final = "Tell me something that I do not know, please. " * 40
WEATHER: Final[Any] = {
    "name": "weather",
    "description": "The weather of a town.",
    "input_schema": {
        "type": "object",
        "properties": {"text": {"type": "string"}, "days": {"type": "integer", "minimum": 1, "maximum": 3}},
    },
}
CACHED: Final[Any] = {"type": "ephemeral"}
PICTURE: Final[Any] = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo" * 50},
}


@pytest_asyncio.fixture(loop_scope="module")
async def claude(stack: Stack) -> AsyncIterator[anthropic.AsyncAnthropic]:
    """Anthropic's own client, which retries nothing by itself."""
    async with anthropic.AsyncAnthropic(base_url=stack.url, api_key="none", max_retries=0, timeout=30) as one:
        yield one


def user(content: Any) -> Any:  # noqa: ANN401 - what the client takes
    return {"role": "user", "content": content}


async def metrics(stack: Stack) -> str:
    async with httpx.AsyncClient(timeout=60) as http:
        return (await http.get(f"{stack.metrics}/metrics")).text


def total(text: str, name: str) -> float:
    return sum(float(value) for value in re.findall(rf"^{name}\{{[^}}]*\}} (\S+)$", text, re.MULTILINE))


async def served(stack: Stack) -> list[int]:
    """How many requests each engine has answered."""
    async with httpx.AsyncClient(timeout=60) as http:
        pages = [(await http.get(f"{url}/metrics")).text for url in stack.engines]
    return [int(total(page, "vllm:request_success_total")) for page in pages]


async def test_messages_plain_and_streamed(claude: anthropic.AsyncAnthropic, model: str) -> None:
    plain = await claude.messages.create(
        model=model,
        max_tokens=5,
        system=[{"type": "text", "text": "Be short. ", "cache_control": CACHED}, {"type": "text", "text": LONG}],
        messages=[user(LONG)],
        stop_sequences=["STOP"],
    )
    assert plain.model == model
    assert plain.stop_reason == "max_tokens"
    assert plain.usage.output_tokens == 5
    assert plain.content[0].type == "text"

    async with claude.messages.stream(model=model, max_tokens=5, messages=[user(LONG)]) as stream:
        text = "".join([piece async for piece in stream.text_stream])
        final = await stream.get_final_message()
    assert len(text.split()) == 5
    assert final.usage.output_tokens == 5

    raw = await claude.messages.create(model=model, max_tokens=2, messages=[user(LONG)], stream=True)
    kinds = [event.type async for event in raw]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]


async def test_tools_their_results_pictures_and_thoughts(claude: anthropic.AsyncAnthropic, model: str) -> None:
    asked: list[Any] = [user([{"type": "text", "text": LONG}, PICTURE])]
    choice: Any = {"type": "tool", "name": "weather"}
    forced: Any = {"model": model, "messages": asked, "tools": [WEATHER], "tool_choice": choice}
    whole = await claude.messages.create(**forced, max_tokens=50)
    (use,) = whole.content
    assert use.type == "tool_use"
    assert whole.stop_reason == "tool_use"
    async with claude.messages.stream(**forced, max_tokens=50) as stream:
        final = await stream.get_final_message()
    for one in (use, final.content[0]):
        assert one.type == "tool_use"
        assert isinstance(one.input["text"], str)
        assert 1 <= one.input["days"] <= 3
    assert (await claude.messages.create(**forced, max_tokens=2)).stop_reason == "max_tokens"

    thought: Any = {"type": "thinking", "thinking": "Let me see.", "signature": "abc"}
    result: Any = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "rain"}, PICTURE]}
    asked += [
        {"role": "assistant", "content": [thought, use.model_dump()]},
        user([result, {"type": "text", "text": "And?", "cache_control": CACHED}]),
    ]
    answer = await claude.messages.create(model=model, max_tokens=3, messages=asked, tools=[WEATHER])
    assert answer.content[0].type == "text"


class Forecast(pydantic.BaseModel):
    town: str
    is_dry: bool


async def test_json_of_a_schema_is_parsed(claude: anthropic.AsyncAnthropic, model: str) -> None:
    asked: Any = {"model": model, "max_tokens": 100, "messages": [user(LONG)], "output_format": Forecast}
    assert isinstance((await claude.messages.parse(**asked)).parsed_output, Forecast)
    async with claude.messages.stream(**asked) as stream:
        final = await stream.get_final_message()
    assert isinstance(final.parsed_output, Forecast)
    assert final.stop_reason == "end_turn"


async def test_tokens_are_counted_by_an_engine_that_computes_nothing(
    stack: Stack, claude: anthropic.AsyncAnthropic, model: str
) -> None:
    before = await served(stack)
    counted = await claude.messages.count_tokens(model=model, system="Be short.", messages=[user(LONG)])
    assert counted.input_tokens >= len(LONG) // 4
    assert await served(stack) == before


async def test_the_beta_paths_of_its_client_are_the_same(claude: anthropic.AsyncAnthropic, model: str) -> None:
    """As Claude Code asks: with ``?beta=true``."""
    answer = await claude.beta.messages.create(model=model, max_tokens=3, messages=[user(LONG)])
    assert answer.usage.output_tokens == 3
    counted = await claude.beta.messages.count_tokens(model=model, messages=[user(LONG)])
    assert counted.input_tokens >= len(LONG) // 4


async def test_models_are_listed_in_its_form(claude: anthropic.AsyncAnthropic, model: str) -> None:
    assert {one.id async for one in claude.models.list()} == {model, "sql"}
    assert (await claude.models.retrieve(model)).type == "model"


async def test_errors_have_the_classes_that_the_client_knows(claude: anthropic.AsyncAnthropic, model: str) -> None:
    with pytest.raises(anthropic.NotFoundError) as unknown:
        await claude.messages.create(model="claude-99", max_tokens=1, messages=[user("hi")])
    assert unknown.value.type == "not_found_error"
    assert unknown.value.error_code == "model_not_found"
    assert "claude-99" in str(unknown.value.api_message)
    with pytest.raises(anthropic.BadRequestError) as bad:
        await claude.messages.create(model=model, max_tokens=1, messages="hi")  # type: ignore[arg-type]  # that is the point
    assert bad.value.type == "invalid_request_error"
    with pytest.raises(anthropic.BadRequestError, match="maximum context length"):
        await claude.messages.create(model=model, max_tokens=1, messages=[user("word " * 600_000)])
    with pytest.raises(anthropic.NotFoundError) as nowhere:
        await claude.messages.batches.list()
    assert nowhere.value.type == "not_found_error"


async def test_a_client_that_leaves_ends_its_request(
    stack: Stack, claude: anthropic.AsyncAnthropic, model: str
) -> None:
    async with claude.messages.stream(model=model, max_tokens=10_000, messages=[user(LONG)]) as stream:
        await anext(aiter(stream.text_stream))
        assert total(await metrics(stack), "attache_in_flight") == 1

    async def nobody() -> bool:
        return total(await metrics(stack), "attache_in_flight") == 0

    await eventually(nobody)
    with pytest.raises(anthropic.APITimeoutError):
        await claude.with_options(timeout=1.0).messages.create(model=model, max_tokens=10_000, messages=[user(LONG)])
    await eventually(nobody)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_usage_is_counted_whatever_part_of_it_was_cached(
    stack: Stack, claude: anthropic.AsyncAnthropic, model: str, *, is_streamed: bool
) -> None:
    async def all_logged() -> bool:
        text = await metrics(stack)
        return total(text, "attache_requests_total") <= total(text, "attache_access_log_entries_total")

    await eventually(all_logged)
    before = await metrics(stack)
    asked = user(f"A prompt that nobody has sent before, streamed: {is_streamed}. " * 30)
    prompts = cached = 0
    for _ in range(2):
        if is_streamed:
            async with claude.messages.stream(model=model, max_tokens=4, messages=[asked]) as stream:
                usage = (await stream.get_final_message()).usage
        else:
            usage = (await claude.messages.create(model=model, max_tokens=4, messages=[asked])).usage
        prompts += usage.input_tokens + (usage.cache_read_input_tokens or 0)
        cached += usage.cache_read_input_tokens or 0
    assert cached, "the second finds the first in the cache"

    async def counted() -> bool:
        text = await metrics(stack)
        return total(text, "attache_prompt_tokens_total") - total(before, "attache_prompt_tokens_total") >= prompts

    await eventually(counted)
    text = await metrics(stack)
    assert total(text, "attache_prompt_tokens_total") - total(before, "attache_prompt_tokens_total") == prompts
    assert total(text, "attache_cached_tokens_total") - total(before, "attache_cached_tokens_total") == cached


async def test_a_conversation_stays_where_its_prefix_is_whichever_client_goes_on(
    stack: Stack, claude: anthropic.AsyncAnthropic, client: openai.AsyncOpenAI, model: str
) -> None:
    """Six conversations of two clients: each has all of its turns on one engine, and together they use several."""

    async def turn(number: int, turns: int, *, by_claude: bool) -> int:
        """Turn ``turns`` of the conversation; which engine took it. Markers of caching move, as Claude Code moves
        them.
        """
        system = f"You are assistant number {number}. {LONG * 4}"
        said: list[Any] = [
            {"role": ("user", "assistant")[place % 2], "content": f"Turn {place} of {number}. {LONG}"}
            for place in range(2 * turns + 1)
        ]
        before = await served(stack)
        if by_claude:
            last = {"type": "text", "text": said[-1]["content"], "cache_control": CACHED}
            billing: Any = {"type": "text", "text": f"x-anthropic-billing-header: {number}.{turns}"}
            await claude.messages.create(
                model=model,
                max_tokens=2,
                system=[billing, {"type": "text", "text": system, "cache_control": CACHED}],
                messages=[*said[:-1], user([last])],
            )
        else:
            chat: list[Any] = [{"role": "system", "content": system}, *said]
            await client.chat.completions.create(model=model, max_tokens=2, messages=chat)
        after = await served(stack)
        (engine,) = [row for row, (old, new) in enumerate(zip(before, after, strict=True)) if new > old]
        return engine

    homes = {}
    for number in range(6):
        homes[number] = await turn(number, 0, by_claude=number % 2 == 0)
    landed = []
    for turns in (1, 2, 3):
        for number, home in homes.items():
            # the other client takes the third turn
            by_claude = (number % 2 == 0) != (turns == 2)
            landed.append(await turn(number, turns, by_claude=by_claude) == home)
    assert all(landed), landed
    assert len(set(homes.values())) > 1


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_tokens_in_tokens_out(stack: Stack, model: str, *, is_streamed: bool) -> None:
    """vLLM's own API: prompts of one prefix land on one engine."""
    before = await served(stack)
    async with httpx.AsyncClient(base_url=stack.url, timeout=30) as http:
        for turns in range(3):
            tokens = list(range(1000, 3000 + 500 * turns))
            body = {"model": model, "token_ids": tokens, "sampling_params": {"max_tokens": 3}, "stream": is_streamed}
            answer = await http.post("/inference/v1/generate", json=body)
            assert answer.status_code == 200, answer.text
            if is_streamed:
                assert answer.text.endswith("data: [DONE]\n\n")
                assert '"usage"' not in answer.text, "it was not asked for"
            else:
                assert len(answer.json()["choices"][0]["token_ids"]) == 3
        refused = await http.post(
            "/inference/v1/generate",
            json={
                "model": model,
                "token_ids": [1],
                "sampling_params": {"extra_args": {"kv_transfer_params": {"remote_host": "10.0.0.1"}}},
            },
        )
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "kv_transfer_params"
        nameless = await http.post("/inference/v1/generate", json={"token_ids": [1], "sampling_params": {}})
        assert nameless.json()["error"]["param"] == "model"
    after = await served(stack)
    assert sorted(new - old for old, new in zip(before, after, strict=True)) == [0, 0, 3]
