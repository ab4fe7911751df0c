# SPDX-License-Identifier: Apache-2.0
"""Every API of the table, under each of its paths, from a client through Envoy to an engine and back."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import httpx
import pytest

from extproc.wire_names import APIS_BY_PATH, Api
from tests.fuzz.mutants import content_of
from tests.waiting import eventually

if TYPE_CHECKING:
    import openai

    from bench.stack.loopback_stack import Stack

pytestmark = pytest.mark.asyncio(loop_scope="module")

EVERY_PATH = pytest.mark.parametrize(("path", "api"), APIS_BY_PATH.items())


async def post(stack: Stack, path: str, api: Api, **fields: object) -> httpx.Response:
    async with httpx.AsyncClient(timeout=30) as http:
        content, content_type = content_of(api, {**api.spec.example, **fields})
        return await http.post(stack.url + path, content=content, headers={"content-type": content_type})


async def total(stack: Stack, name: str) -> float:
    async with httpx.AsyncClient(timeout=60) as http:
        text = (await http.get(f"{stack.metrics}/metrics")).text
    return sum(float(value) for value in re.findall(rf"^{name}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE))


@EVERY_PATH
async def test_an_engine_gets_it_under_its_own_name_of_the_model(stack: Stack, model: str, path: str, api: Api) -> None:
    """The simulator answers 404 to any other."""
    for asked in (model, "sql"):
        answer = await post(stack, path, api, model=asked)
        assert answer.status_code == 200, answer.text


@EVERY_PATH
async def test_it_is_refused_in_the_form_that_its_clients_read(stack: Stack, path: str, api: Api) -> None:
    async with httpx.AsyncClient(timeout=60) as http:
        wrong_method = await http.get(stack.url + path)
    for answer, status in ((wrong_method, 405), (await post(stack, path, api, model="unknown"), 404)):
        assert answer.status_code == status
        assert ("type" in answer.json()) == (api.spec.errors == "anthropic")
        assert answer.json()["error"]["message"]


@pytest.mark.parametrize("api", [api for api in Api if api.spec.reports_usage], ids=lambda api: api.name)
async def test_its_usage_is_read_from_the_answer(stack: Stack, model: str, api: Api) -> None:
    before = await total(stack, "attache_prompt_tokens_total")
    answer = await post(stack, api.spec.paths[0], api, model=model)
    usage = answer.json()["usage"]
    tokens = usage[api.spec.usage]

    async def is_counted() -> bool:
        return await total(stack, "attache_prompt_tokens_total") == before + tokens

    await eventually(is_counted)


async def test_openais_client_sends_forms_and_reads_sound(client: openai.AsyncOpenAI, model: str) -> None:
    sound = await client.audio.speech.create(model=model, input="Hello, " * 20, voice="alloy")
    assert sound.content[:4] == b"RIFF"
    # 140 characters
    assert len(sound.content) == 44 + 2 * 16_000 * 233 // 25
    for asked in (model, "sql"):
        heard = await client.audio.transcriptions.create(
            model=asked, file=("a.wav", sound.content), prompt="Say it.", timestamp_granularities=["word", "segment"]
        )
        assert heard.text


async def test_what_readers_of_forms_might_understand_differently_is_refused(stack: Stack, model: str) -> None:
    path = Api.TRANSCRIPTIONS.spec.paths[0]
    content, content_type = content_of(Api.TRANSCRIPTIONS, {"model": model, **Api.TRANSCRIPTIONS.spec.example})
    twice = content_of(Api.TRANSCRIPTIONS, {"model": "unknown"})[0].removesuffix(b"--cut--\r\n") + content
    async with httpx.AsyncClient(timeout=60) as http:
        for odd in (twice, b"before\r\n" + content, content + b"behind", content[:-9]):
            answer = await http.post(stack.url + path, content=odd, headers={"content-type": content_type})
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["type"] == "invalid_request_error"
