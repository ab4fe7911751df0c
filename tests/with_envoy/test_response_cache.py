# SPDX-License-Identifier: Apache-2.0
"""Equal requests are answered from the response cache, each caller's from its own, and only with whole answers."""

from __future__ import annotations

import contextlib
import json
import re
from itertools import count
from typing import TYPE_CHECKING, Any, Final

import anthropic
import httpx
import openai
import pytest
import pytest_asyncio
from aiohttp import web

from controller.usage.rows import UsageRow, parse_usage_line
from tests.waiting import eventually
from tests.with_envoy.stand_in import gateway_on
from tests.with_envoy.test_fallback import Engine, document, running, server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.with_envoy.stand_in import Gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT, MESSAGES, EMBEDDINGS = "/v1/chat/completions", "/v1/messages", "/v1/embeddings"
ALICE, BOB, CAROL = "sk-alice-0123", "sk-bob-01234", "sk-carol-0123"
KEYS: Final = [
    {"name": "alice", "key": ALICE, "tenant": "a"},
    {"name": "carol", "key": CAROL, "tenant": "a"},
    {"name": "bob", "key": BOB, "tenant": "b"},
]
USAGE: Final = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
NUMBERS: Final = count(1)


def plain(content: str = "hello", **more: object) -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": "stop"}
    common = {"id": "c-1", "object": "chat.completion", "created": 1, "model": "m"}
    return {**common, "choices": [choice], "usage": USAGE, **more}


def chunk(delta: dict[str, object], finish: str | None = None) -> bytes:
    choices = [{"index": 0, "delta": delta, "finish_reason": finish}]
    common = {"id": "c-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    return b"data: %s\n\n" % json.dumps({**common, "choices": choices}).encode()


def event(name: str, **data: object) -> bytes:
    return f"event: {name}\ndata: {json.dumps({'type': name, **data})}\n\n".encode()


USAGE_CHUNK: Final = (
    b"data: %s\n\n"
    % json.dumps(
        {"id": "c-1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [], "usage": USAGE}
    ).encode()
)
DONE: Final = b"data: [DONE]\n\n"
CHUNKS: Final = [
    chunk({"role": "assistant", "content": ""}),
    chunk({"content": "hel"}),
    chunk({"content": "lo"}),
    chunk({}, "stop"),
    USAGE_CHUNK,
    DONE,
]
MESSAGE: Final = {"id": "m-1", "type": "message", "role": "assistant", "model": "m", "stop_sequence": None}
WHOLE_MESSAGE: Final = {
    **MESSAGE,
    "content": [{"type": "text", "text": "hello"}],
    "stop_reason": "end_turn",
    "usage": {"input_tokens": 3, "output_tokens": 2},
}
EVENTS: Final = [
    event("message_start", message={**WHOLE_MESSAGE, "content": [], "stop_reason": None}),
    event("content_block_start", index=0, content_block={"type": "text", "text": ""}),
    event("content_block_delta", index=0, delta={"type": "text_delta", "text": "hello"}),
    event("content_block_stop", index=0),
    event("message_delta", delta={"stop_reason": "end_turn", "stop_sequence": None}, usage={"output_tokens": 2}),
    event("message_stop"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    """Bodies up to 1 MiB are kept."""
    async with gateway_on(
        tmp_path_factory.mktemp("cached"),
        gateway={"authentication": {"apiKeys": KEYS}},
        route={"cache": {"maxAnswerBytes": "1Mi"}},
        headers={"authorization": f"Bearer {ALICE}"},
    ) as running:
        yield running


def says(gateway: Gateway, *pieces: bytes, is_plain: bool = True, **more: object) -> None:
    engine = gateway.engine
    engine.pieces, engine.is_plain, engine.headers, engine.status, engine.then = pieces, is_plain, {}, 200, "end"
    engine.compresses = False
    for name, value in more.items():
        setattr(engine, name, value)


async def ask(
    gateway: Gateway, path: str = CHAT, headers: dict[str, str] | None = None, **fields: object
) -> httpx.Response:
    """A request like no other before, unless ``prompt`` is given."""
    prompt = fields.pop("prompt", None) or f"prompt {next(NUMBERS)}"
    body = {"model": "llama", "temperature": 0, "max_tokens": 9, "messages": [{"role": "user", "content": prompt}]}
    return await gateway.http.post(gateway.url + path, json={**body, **fields}, headers=headers)


async def came(gateway: Gateway) -> dict[str, float]:
    """Answers for the cache, by what became of them."""
    page = (await gateway.http.get(f"{gateway.metrics}/metrics")).text
    found = re.findall(r'^attache_response_cache_answers_total\{result="(\w+)"\} (\S+)$', page, re.MULTILINE)
    return {name: float(value) for name, value in found}


async def asked(
    gateway: Gateway, path: str = CHAT, headers: dict[str, str] | None = None, **fields: object
) -> httpx.Response:
    """The answer to a request, once its copy has come to extproc."""
    before = sum((await came(gateway)).values())
    answer = await ask(gateway, path, headers, **fields)
    assert answer.headers["x-attache-cache"] == "miss"

    async def is_there() -> bool:
        return sum((await came(gateway)).values()) > before

    await eventually(is_there)
    return answer


def verdict(answer: httpx.Response) -> str:
    return answer.headers.get("x-attache-cache", "")


async def test_an_equal_request_gets_the_same_answer_without_an_engine(gateway: Gateway) -> None:
    says(gateway, json.dumps(plain()).encode())
    first = await asked(gateway, prompt="equal")
    before = gateway.engine.requests
    again = await ask(gateway, prompt="equal")
    assert (again.status_code, again.content, verdict(again)) == (200, first.content, "hit")
    assert again.headers["content-type"] == "application/json"
    assert int(again.headers["age"]) >= 0
    assert gateway.engine.requests == before
    assert verdict(await ask(gateway, prompt="equal", user="somebody")) == "hit"
    assert verdict(await ask(gateway, prompt="equal", top_p=0.5)) == "miss"


async def test_tenants_share_nothing_and_keys_of_one_tenant_do(gateway: Gateway) -> None:
    says(gateway, json.dumps(plain("secret of a")).encode())
    await asked(gateway, prompt="whose")
    assert verdict(await ask(gateway, prompt="whose", headers={"authorization": f"Bearer {CAROL}"})) == "hit"
    says(gateway, json.dumps(plain("secret of b")).encode())
    other = await ask(gateway, prompt="whose", headers={"authorization": f"Bearer {BOB}"})
    assert (verdict(other), other.json()["choices"][0]["message"]["content"]) == ("miss", "secret of b")


async def test_openais_client_reads_streams_again_with_and_without_usage(gateway: Gateway) -> None:
    says(gateway, *CHUNKS, is_plain=False)
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=ALICE, max_retries=0) as client:
        for options in ({}, {"stream_options": {"include_usage": True}}):
            seen = []
            for _ in range(2):
                before = sum((await came(gateway)).values()), gateway.engine.requests
                stream = await client.chat.completions.create(
                    model="llama",
                    messages=[{"role": "user", "content": "a stream"}],
                    temperature=0,
                    stream=True,
                    **options,  # type: ignore[call-overload]
                )
                seen.append([one.model_dump() async for one in stream])
                if gateway.engine.requests > before[1]:

                    async def is_there(known: float = before[0]) -> bool:
                        return sum((await came(gateway)).values()) > known

                    await eventually(is_there)
            assert seen[0] == seen[1]
            assert gateway.engine.requests == before[1]
            assert "".join(one["choices"][0]["delta"]["content"] or "" for one in seen[1] if one["choices"]) == "hello"
            assert bool(options) == any(one["usage"] for one in seen[1])


async def test_anthropics_client_reads_answers_and_streams_again(gateway: Gateway) -> None:
    async with anthropic.AsyncAnthropic(base_url=gateway.url, auth_token=ALICE, api_key=None, max_retries=0) as client:
        ask_it: dict[str, Any] = {
            "model": "llama",
            "max_tokens": 9,
            "messages": [{"role": "user", "content": "hi"}],
        }
        # the client has no parameter for it
        cold = {"extra_body": {"temperature": 0}}
        says(gateway, json.dumps(WHOLE_MESSAGE).encode())
        await asked(gateway, path=MESSAGES, **ask_it)
        before = gateway.engine.requests
        # another version of the API has another key
        missed = await client.messages.create(**ask_it, **cold)
        assert gateway.engine.requests == before + 1
        assert missed.content[0].text == "hello"  # type: ignore[union-attr]

        says(gateway, *EVENTS, is_plain=False)
        for _ in range(2):
            known, before = sum((await came(gateway)).values()), gateway.engine.requests
            async with client.messages.stream(**ask_it, **cold) as stream:
                assert await stream.get_final_text() == "hello"
            if gateway.engine.requests > before:

                async def is_there(known: float = known) -> bool:
                    return sum((await came(gateway)).values()) > known

                await eventually(is_there)
        assert gateway.engine.requests == before


async def test_embeddings_need_no_temperature(gateway: Gateway) -> None:
    says(gateway, json.dumps({"object": "list", "data": [{"embedding": [0.5, 1]}], "model": "m"}).encode())
    first = await asked(gateway, path=EMBEDDINGS, temperature=None, input="text")
    del first
    body = {"model": "llama", "input": "text two"}
    assert verdict(await gateway.http.post(gateway.url + EMBEDDINGS, json=body)) == "miss"

    async def hits() -> bool:
        return verdict(await gateway.http.post(gateway.url + EMBEDDINGS, json=body)) == "hit"

    await eventually(hits)


async def test_a_stream_that_is_cut_anywhere_is_not_stored(gateway: Gateway) -> None:
    for then in ("cut", "end"):
        for kept in range(1, len(CHUNKS)):
            says(gateway, *CHUNKS[:kept], is_plain=False, then=then)
            prompt = f"cut {then} {kept}"
            # the gateway cuts the answer as the engine did
            with contextlib.suppress(httpx.RemoteProtocolError):
                await ask(gateway, prompt=prompt, stream=True)
    says(gateway, *CHUNKS, is_plain=False)
    stored = (await came(gateway)).get("stored", 0)
    for then in ("cut", "end"):
        for kept in range(1, len(CHUNKS)):
            assert verdict(await ask(gateway, prompt=f"cut {then} {kept}", stream=True)) == "miss", (then, kept)

    async def all_stored() -> bool:
        return (await came(gateway)).get("stored", 0) == stored + 2 * (len(CHUNKS) - 1)

    await eventually(all_stored)


LIES: Final[dict[str, dict[str, Any]]] = {
    "an error": {"pieces": (json.dumps({"error": {"message": "no"}}).encode(),)},
    "a filtered answer": {"pieces": (json.dumps(plain()).replace('"stop"', '"content_filter"').encode(),)},
    "half of the JSON": {"pieces": (json.dumps(plain()).encode()[:-1],)},
    "a stream by its header": {"pieces": (json.dumps(plain()).encode(),), "is_plain": False},
    "an answer by its header": {"pieces": CHUNKS, "is_plain": True},
    "an error in the stream": {
        "pieces": (*CHUNKS[:2], b'data: {"error": {"message": "no"}}\n\n', *CHUNKS[2:]),
        "is_plain": False,
    },
    "something behind the end": {"pieces": (*CHUNKS, CHUNKS[1]), "is_plain": False},
    "an encoding": {"pieces": (json.dumps(plain()).encode(),), "headers": {"content-encoding": "x-own"}},
    "another status": {"pieces": (json.dumps(plain()).encode(),), "status": 201},
    "more than is kept": {"pieces": (json.dumps(plain("x" * (1 << 20))).encode(),)},
    "a stream of more than is kept": {
        "pieces": (*CHUNKS[:2], chunk({"content": "x" * (1 << 20)}), *CHUNKS[2:]),
        "is_plain": False,
    },
    "nothing": {"pieces": (b"",)},
    "nested deeply": {"pieces": (b'{"choices":' + b"[" * 100_000,)},
}


@pytest.mark.parametrize("lie", LIES)
async def test_what_is_no_whole_answer_is_not_stored(gateway: Gateway, lie: str) -> None:
    stored = (await came(gateway)).get("stored", 0)
    says(gateway, *LIES[lie]["pieces"], **{name: one for name, one in LIES[lie].items() if name != "pieces"})
    gateway.engine.headers = {"x-attache-cache": "hit", **gateway.engine.headers}
    first = await ask(gateway, prompt=lie)
    assert verdict(first) == "miss"
    # all of it has come; the name of the model is longer
    assert len(first.content) >= sum(map(len, LIES[lie]["pieces"]))
    says(gateway, json.dumps(plain()).encode())
    # a copy that came would be here before that of another request
    await asked(gateway)
    assert (await came(gateway))["stored"] == stored + 1
    assert verdict(await asked(gateway, prompt=lie)) == "miss"


async def test_clients_decide_what_they_read_and_what_is_stored(gateway: Gateway) -> None:
    says(gateway, json.dumps(plain("old")).encode())
    never = await ask(gateway, prompt="control", headers={"cache-control": "only-if-cached"})
    assert (never.status_code, never.json()["error"]["code"]) == (504, "not_cached")
    assert verdict(await ask(gateway, prompt="control", headers={"cache-control": "no-store"})) == ""
    await asked(gateway, prompt="control")
    assert verdict(await ask(gateway, prompt="control", headers={"cache-control": "only-if-cached"})) == "hit"
    assert verdict(await ask(gateway, prompt="control", headers={"cache-control": "max-age=1000"})) == "hit"
    says(gateway, json.dumps(plain("new")).encode())
    renewed = await asked(gateway, prompt="control", headers={"cache-control": "no-cache"})
    assert (await ask(gateway, prompt="control")).content == renewed.content


async def test_a_megabyte_comes_back_as_it_was(gateway: Gateway) -> None:
    says(gateway, json.dumps(plain("é\u0000\\" * 70_000)).encode())
    first = await asked(gateway, prompt="long")
    assert len(first.content) > 900_000
    again = await ask(gateway, prompt="long")
    assert (again.status_code, verdict(again)) == (200, "hit")
    assert again.content == first.content


async def test_requests_that_are_not_deterministic_pass_by(gateway: Gateway) -> None:
    says(gateway, json.dumps(plain()).encode())
    for fields in ({"temperature": 1}, {"n": 2}, {"store": True}, {"tools": [{"type": "web_search"}]}):
        for _ in range(2):
            assert verdict(await ask(gateway, prompt="passes", **fields)) == ""


@pytest.mark.parametrize("hides", [False, True])
async def test_a_hit_costs_nothing_and_shows_no_more_than_the_first_answer(tmp_path: Path, *, hides: bool) -> None:
    log = tmp_path / "usage.log"
    usage = {**USAGE, "prompt_tokens_details": {"cached_tokens": 2}}
    spec = {"usageLog": {"path": str(log), "costHeader": not hides}, "cachedTokens": "Hidden" if hides else "Shown"}
    price = {"currency": "USD", "perMillion": {"input": "1", "output": "2"}}
    async with gateway_on(tmp_path, gateway=spec, more={"pricing": [price]}, route={"cache": {}}) as gateway:
        says(gateway, json.dumps(plain(usage=usage)).encode())
        first = await asked(gateway, prompt="cost")
        again = await ask(gateway, prompt="cost")
        assert (verdict(again), again.content) == ("hit", first.content)
        assert ("prompt_tokens_details" in again.json()["usage"]) is not hides
        assert ("x-attache-cost-micros" in first.headers) is not hides
        assert "x-attache-cost-micros" not in again.headers

        def rows() -> list[UsageRow]:
            return [parse_usage_line(one, 4e9) for one in log.read_bytes().splitlines()] if log.exists() else []

        await eventually(lambda: len(rows()) >= 2)
        paid, free = (one for one in rows() if one.api)
        assert (paid.refused, paid.input, paid.output, bool(paid.cost_micros)) == ("", 3, 2, True)
        assert (free.refused, free.ended, free.status) == ("cache_hit", "whole", 200)
        assert (free.input, free.output, free.cost_micros or 0, free.is_unpriced) == (0, 0, 0, False)


async def test_two_workers_share_answers_and_a_fallbacks_answer_is_not_stored(tmp_path: Path) -> None:
    log: list[tuple[str, str]] = []
    engines = {name: Engine(name, log) for name in ("a", "b")}

    async def answer(_: web.Request) -> web.StreamResponse:
        return web.json_response(plain())

    for one in engines.values():
        await one.start()
        one.says = answer
    rule = {"targetModels": [{"modelServerName": "a"}], "fallback": [{"modelServerName": "b"}]}
    spec = {"modelName": "m", "rules": [rule], "cache": {"scope": "Route"}}
    documents = [server("a", "x", [engines["a"]]), server("b", "y", [engines["b"]]), document("ModelRoute", "m", spec)]
    try:
        async with running(tmp_path / "stack", documents, engines, log, workers=2) as gateway:

            async def verdicts(prompt: str) -> list[str]:
                # connections of many clients come to both workers
                found = []
                for _ in range(8):
                    messages = [{"role": "user", "content": prompt}]
                    found.append(verdict(await gateway.ask(messages=messages, temperature=0)))
                return found

            for number in range(4):

                async def all_hit(prompt: str = f"prompt {number}") -> bool:
                    return await verdicts(prompt) == ["hit"] * 8

                await eventually(all_hit, pause_s=0.2)
            engines["a"].does, engines["a"].says = 500, None
            assert await verdicts("served by b") == ["miss"] * 8
    finally:
        for one in engines.values():
            await one.stop()
