# SPDX-License-Identifier: Apache-2.0
"""Answers have the model's name that the client asked for, and nothing else in them changes."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import random
import signal
from typing import TYPE_CHECKING, Any, Final

import anthropic
import openai
import pytest
import pytest_asyncio

from bench.stack.loopback_stack import MODEL
from extproc.wire_names import COST_MICROS
from tests.examples import IS_SLOW
from tests.waiting import eventually
from tests.with_envoy.stand_in import gateway_on
from tests.with_envoy.test_fallback import Engine, document, running, server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence
    from pathlib import Path

    import httpx

    from tests.with_envoy.stand_in import Gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")

JSON, SSE = "application/json", "text/event-stream"
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
# of pieces; in single bytes an answer is cut everywhere
SIZES: Final = (1, 2, 3, 5, 8, 100_000) if IS_SLOW else (1, 100_000)
# what the client asks for, with what JSON and Lua escape in it; the name stands at MARK in the answers below
ASKED: Final = 'a "model": \\ é漢😀 %1'
MARK: Final = '"@@"'
LIE: Final = '"model": "x", {"model":"x"}\\'
SCHEMA: Final = {"name": "model", "model": "x", "parameters": {"properties": {"model": {"default": "model"}}}}
USAGE: Final = {"prompt_tokens": 3, "completion_tokens": 2}
HOSTILE: Final = {"a": LIE, "model ": "x", "b": {"model": "x", "c": [{"model": "x"}, "model", SCHEMA]}, "Model": "x"}


def text(value: object, indent: int | None = None) -> str:
    return json.dumps(value, indent=indent, ensure_ascii=False)


PLAIN: Final[Mapping[str, tuple[str, str]]] = {
    "chat": (CHAT, text({"id": "1", "created": 1, "model": "@@", "choices": [{"message": {"content": LIE}}]})),
    "first": (CHAT, '{"model":"@@","choices":[]}'),
    "indented": (CHAT, text({"id": "model", "n": None, "model": "@@", "choices": [HOSTILE]}, indent=2)),
    "last": (CHAT, text({"choices": [HOSTILE, [[]], {}], **HOSTILE, "system": LIE, "model": "@@"})),
    "twice": (CHAT, text({"object": "model", "z": True, "k": "model", "model": "@@", "tools": [SCHEMA]})),
    "none": (CHAT, text({"object": "model", "model": None, "x": "y", "choices": [{"model": "x"}]})),
    "object": (CHAT, text({"model": {"model": "x"}, "choices": ["model", ["model", "x"]]})),
    "nothing": (CHAT, text({"choices": [HOSTILE]})),
    "an array": (CHAT, text([{"model": "x"}, "model", "x"])),
    "no JSON": (CHAT, '}}{"model": "x"}'),
    "empty": (CHAT, text({"model": "@@"}).replace('"@@"', '"@@"   ')),
    "embeddings": ("/v1/embeddings", text({"object": "list", "data": [{"embedding": [0.5, -1e-3]}], "model": "@@"})),
    "rerank": ("/v1/rerank", text({"results": [{"document": {"text": LIE, "model": "x"}}], "model": "@@"})),
    "responses": (RESPONSES, text({"instructions": LIE, "tools": [SCHEMA], "metadata": HOSTILE, "model": "@@"})),
    "messages": (MESSAGES, text({"content": [{"type": "tool_use", "input": HOSTILE}], "model": "@@", "usage": {}})),
}
CHUNK: Final = (
    f'data: {{"id":"1","object":"chat.completion.chunk","model":{MARK},"choices":[{{"delta":{{"content":"a"}}}}]}}\n\n'
)
OTHER: Final = f"data: {text({'choices': [{'delta': {'content': LIE, 'tool': SCHEMA}}], 'model': '@@'})}\n\n"
DONE: Final = "data: [DONE]\n\n"
COMMENTS: Final = ': "a comment {\n\nevent: "x {\nid: [\nretry: 1\n\n'


def event(name: str, data: object) -> str:
    return f"event: {name}\ndata: {text(data)}\n\n"


RESPONSE: Final = {"id": "1", "instructions": LIE, "tools": [SCHEMA], "metadata": HOSTILE}
STREAMS: Final[Mapping[str, tuple[str, str]]] = {
    "chat": (CHAT, 3 * CHUNK + OTHER + CHUNK + COMMENTS + CHUNK + DONE),
    "CRLF": (CHAT, (2 * CHUNK + OTHER + COMMENTS + CHUNK + DONE).replace("\n", "\r\n")),
    "completions": ("/v1/completions", CHUNK.replace('"delta"', '"text"') + OTHER + DONE),
    # many lines with one JSON text, or with none: what follows a blank line is read anew
    "lines": (
        CHAT,
        f'data: {{\ndata:  "a": [\ndata: {{"model": "x"}}],\ndata:  "model"\ndata: : {MARK}, "b": {{\ndata: "model":'
        f' "x"}}}}\n\ndata: {{"model": {{\n\ndata: "model": "x"\n\ndata: {{"a": "model\n\n'
        f'data: }}}}{{"model": "x"}}\n\n{CHUNK}data:{{"model":{MARK}}}\n\ndata\n\ndat: {{"model": "x"}}\n\n',
    ),
    "responses": (
        RESPONSES,
        event("response.created", {"type": "response.created", "response": {**RESPONSE, "model": "@@"}})
        + event("response.output_text.delta", {"delta": LIE, "model": "x", "item": {"model": "x"}})
        + event("response.output_item.done", {"model": "x", "item": {"response": {"model": "x"}}, "response": "model"})
        + event("response.completed", {"a": ["response", {"model": "x"}], "response": {"model": "@@", **RESPONSE}}),
    ),
    "messages": (
        MESSAGES,
        event("message_start", {"type": "message_start", "message": {"id": "1", "content": [], "model": "@@"}})
        + event("ping", {"type": "ping"})
        + event("content_block_delta", {"delta": {"partial_json": LIE}, "message": ["model", {"model": "x"}]})
        + event("message_delta", {"delta": {"model": "x"}, "usage": {"output_tokens": 2}}),
    ),
}


def as_asked(whole: str, name: str = ASKED) -> bytes:
    return whole.replace(MARK, text(name)).encode()


def as_served(whole: str) -> bytes:
    # with an escaped quotation mark in it, and its end
    return whole.replace(MARK, '"@ \\"model\\": \\"x\\\\"').encode()


def pieces(whole: bytes, size: int) -> list[bytes]:
    return [whole[at : at + size] for at in range(0, len(whole), size)]


def route(**more: object) -> dict[str, object]:
    return {"modelName": ASKED, "loraAdapters": ["sql", "llama"], **more}


async def ask(
    gateway: Gateway, path: str, came: Sequence[bytes], kind: str = JSON, model: str = ASKED, **headers: str
) -> httpx.Response:
    gateway.engine.pieces, gateway.engine.headers = came, {"content-type": kind, **headers}
    body: dict[str, Any] = {"model": model, "messages": [], "prompt": "x", "input": "x", "max_tokens": 9}
    body |= {"query": "x", "documents": ["x"], "stream": kind == SSE}
    if kind == SSE and path not in {RESPONSES, MESSAGES}:
        body["stream_options"] = {"include_usage": True}
    return await gateway.http.post(f"{gateway.url}{path}", json=body)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    async with gateway_on(tmp_path_factory.mktemp("renamed"), route=route()) as running:
        running.engine.pause_s = 0.001
        yield running


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", PLAIN)
async def test_a_plain_answer_has_the_name_that_was_asked_for(gateway: Gateway, name: str, size: int) -> None:
    path, whole = PLAIN[name]
    answer = await ask(gateway, path, pieces(as_served(whole), size))
    assert answer.content == as_asked(whole)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", STREAMS)
async def test_each_event_has_the_name_that_was_asked_for(gateway: Gateway, name: str, size: int) -> None:
    path, whole = STREAMS[name]
    answer = await ask(gateway, path, pieces(as_served(whole), size), SSE)
    assert answer.content == as_asked(whole)


@pytest.mark.parametrize(
    ("path", "kind", "whole"),
    [
        (*PLAIN["first"][:1], JSON, text({"a": LIE, "model": "@@", "choices": []})),
        (CHAT, SSE, CHUNK + OTHER),
        (MESSAGES, SSE, event("message_start", {"a": LIE, "message": {"b": SCHEMA, "model": "@@", "c": LIE}})),
    ],
)
async def test_an_answer_in_two_pieces_may_be_cut_anywhere(gateway: Gateway, path: str, kind: str, whole: str) -> None:
    served = as_served(whole)
    for at in range(1, len(served), 1 if IS_SLOW else 2):
        answer = await ask(gateway, path, [served[:at], served[at:]], kind)
        assert answer.content == as_asked(whole), at


WORDS: Final = ('"', "\\", "model", ":", "{", "}", "[", "]", ",", " ", "é", "\n", "data:", '"model":"x"', "response")


def random_text(rng: random.Random) -> str:
    return "".join(rng.choices(WORDS, k=rng.randrange(6)))


def random_value(rng: random.Random, depth: int = 0) -> object:
    kind = rng.randrange(6 if depth < 4 else 4)
    if kind < 3:
        return ("model", random_text(rng), random_text(rng))[kind]
    if kind == 3:
        return rng.choice([None, True, -1.5e-3, 7, "", [], {}])
    size = rng.randrange(4)
    if kind == 4:
        return [random_value(rng, depth + 1) for _ in range(size)]
    return {rng.choice(["model", "message", random_text(rng)]): random_value(rng, depth + 1) for _ in range(size)}


def random_object(rng: random.Random) -> dict[str, object]:
    """With the name somewhere in it."""
    fields = [(random_text(rng) or "a", random_value(rng)) for _ in range(rng.randrange(5))]
    fields = [(name, value) for name, value in fields if name not in {"model", "message", "response"}]
    fields.insert(rng.randrange(len(fields) + 1), ("model", "@@"))
    return dict(fields)


@pytest.mark.parametrize("seed", range(40 if IS_SLOW else 8))
async def test_any_json_in_any_pieces_has_the_name_in_its_place_alone(gateway: Gateway, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(8):
        path, kind = rng.choice([(CHAT, JSON), (MESSAGES, JSON), (CHAT, SSE), (MESSAGES, SSE)])
        if kind == JSON:
            whole = text(random_object(rng), indent=rng.choice([None, None, 0, 2]))
        else:
            events = []
            for _ in range(rng.randrange(1, 5)):
                found = random_object(rng)
                if path == MESSAGES:
                    found = {"a": random_value(rng), "model": "x", "message": found, "b": random_value(rng)}
                events.append(rng.choice(["", "event: x\n", ": {\n"]) + f"data: {text(found)}\n\n")
                events += [events[-1]] * rng.randrange(3)
            whole = "".join(events)
        served = as_served(whole)
        cuts = sorted({0, len(served), *(rng.randrange(len(served)) for _ in range(rng.randrange(12)))})
        came = [served[start:end] for start, end in itertools.pairwise(cuts)]
        answer = await ask(gateway, path, came, kind)
        assert answer.content == as_asked(whole), came


async def test_a_piece_leaves_before_the_next_one_comes(gateway: Gateway) -> None:
    """Also in the middle of the old name."""
    for path, kind, began in (
        (CHAT, JSON, '{"id": "1", "model": "the o'),
        (MESSAGES, SSE, 'event: message_start\ndata: {"message": {"model": "the o'),
    ):
        gateway.engine.then = "hang"
        gateway.engine.pieces, gateway.engine.headers = [began.encode()], {"content-type": kind}
        body = {"model": ASKED, "messages": [], "max_tokens": 9, "stream": kind == SSE}
        got, expected = b"", began.replace('"the o', text(ASKED)).encode()
        async with gateway.http.stream("POST", f"{gateway.url}{path}", json=body) as answer:
            async for piece in answer.aiter_raw():
                got += piece
                if len(got) >= len(expected):
                    break
        gateway.engine.then = "end"
        assert got == expected


async def test_what_has_the_name_already_stays_byte_by_byte(gateway: Gateway) -> None:
    """An adapter has one name everywhere: the script does nothing, whatever the engine writes."""
    for path, kind, whole in (("/v1/completions", JSON, PLAIN["chat"][1]), (CHAT, SSE, STREAMS["chat"][1])):
        answer = await ask(gateway, path, [as_served(whole)], kind, "sql")
        assert answer.content == as_served(whole)


async def test_an_error_and_what_is_encoded_or_no_json_stay_as_they_are(gateway: Gateway) -> None:
    whole = as_served(PLAIN["chat"][1])
    gateway.engine.status = 400
    assert (await ask(gateway, CHAT, [whole])).content == whole
    gateway.engine.status = 200
    assert (await ask(gateway, CHAT, [whole], "text/plain")).content == whole
    assert (await ask(gateway, CHAT, [whole], "application/octet-stream")).content == whole
    for kind, body in ((JSON, whole), (SSE, as_served(CHUNK))):
        answer = await ask(gateway, CHAT, [gzip.compress(body)], kind, **{"content-encoding": "gzip"})
        assert answer.content == body


async def test_long_strings_and_hostile_bytes_cost_little_and_stay(gateway: Gateway) -> None:
    """What takes time at each byte would take minutes."""
    long = 300_000
    for filler in ('\\"', "\\\\", "model", ":", "{", '{"model"', "\\u0022model\\u0022:"):
        whole = f'{{"a": {json.dumps(filler * (long // len(filler)))}, "model": {MARK}, "z": "{MARK[1]}"}}'
        assert (await ask(gateway, CHAT, [as_served(whole)])).content == as_asked(whole)
        events = f"data: {whole}\n\n"
        assert (await ask(gateway, MESSAGES, [as_served(events)], SSE)).content == as_served(events)
    for junk in (b"[" * long, b'"model":' * (long // 8), b":" * long, b"data:\n" * (long // 6), b'data: {"\n' * 30_000):
        for kind in (JSON, SSE):
            assert (await ask(gateway, CHAT, [junk], kind)).content == junk


@pytest.mark.parametrize("is_cut", [False, True])
async def test_usage_is_read_and_dropped_as_before(gateway: Gateway, *, is_cut: bool) -> None:
    # outcomes of the tests before may come meanwhile, and none has these counts
    usage = {"prompt_tokens": 4_001 + is_cut, "completion_tokens": 29}
    whole = CHUNK + f"data: {text({'model': '@@', 'choices': [], 'usage': usage})}\n\n" + DONE
    gateway.engine.pieces, gateway.engine.headers = pieces(as_served(whole), 1 if is_cut else 100_000), {}
    body = {"model": ASKED, "messages": [], "stream": True}
    answer = await gateway.http.post(f"{gateway.url}{CHAT}", json=body)
    assert answer.content == as_asked(CHUNK + DONE)
    await eventually(lambda: {"prompt": 4_001 + is_cut, "completion": 29, "cached": None} in gateway.outcomes())


async def test_a_name_written_with_escapes_is_the_same_name(gateway: Gateway) -> None:
    gateway.engine.pieces, gateway.engine.headers = [as_served(CHUNK)], {}
    units = ASKED.encode("utf-16-be")
    escaped = "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))
    body = f'{{"model": "{escaped}", "messages": [], "stream": true}}'
    answer = await gateway.http.post(f"{gateway.url}{CHAT}", content=body)
    assert answer.content == as_asked(CHUNK)


async def test_clients_of_openai_and_anthropic_read_the_name_that_they_ask_for(gateway: Gateway) -> None:
    asked: Any = [{"role": "user", "content": "hi"}]
    chunk = CHUNK.replace('"choices"', '"created":1,"choices"').replace('"delta"', '"index":0,"delta"')
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        gateway.engine.pieces, gateway.engine.headers = [as_served(2 * chunk + DONE)], {"content-type": SSE}
        stream = await client.chat.completions.create(model=ASKED, messages=asked, stream=True)
        assert [(one.model, one.choices[0].delta.content) async for one in stream] == [(ASKED, "a")] * 2
    message = {
        "id": "m",
        "type": "message",
        "role": "assistant",
        "content": [],
        "model": "@@",
        "stop_reason": None,
        "usage": {"input_tokens": 1, "output_tokens": 1},
    }
    block = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    delta = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": LIE}}
    ends = {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 2}}
    whole = [{"type": "message_start", "message": message}, block, delta, {"type": "content_block_stop", "index": 0}]
    events = "".join(event(str(one["type"]), one) for one in [*whole, ends, {"type": "message_stop"}])
    async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key="none", max_retries=0) as claude:
        gateway.engine.pieces = [as_served(events)]
        async with claude.messages.stream(model=ASKED, messages=asked, max_tokens=9) as got:
            final = await got.get_final_message()
    assert (final.model, final.content[0].type) == (ASKED, "text")
    assert await got.get_final_text() == LIE


async def test_a_route_may_show_the_name_of_its_engines(tmp_path: Path) -> None:
    async with gateway_on(tmp_path, route=route(responseModel="Served"), gateway={"failureMode": "Open"}) as gateway:
        for is_decided in (True, False):
            if not is_decided:
                os.kill(gateway.extproc, signal.SIGKILL)
            for path, kind, whole in ((CHAT, JSON, PLAIN["chat"][1]), (CHAT, SSE, CHUNK)):
                answer = await ask(gateway, path, [as_served(whole)], kind)
                assert answer.content == as_served(whole)
                assert gateway.engine.asked["model"] == MODEL


async def test_without_extproc_the_name_is_the_routes(tmp_path: Path) -> None:
    spec = {"failureMode": "Open", "usageLog": {"path": str(tmp_path / "usage.log")}}
    async with gateway_on(tmp_path, route=route(), gateway=spec) as gateway:
        os.kill(gateway.extproc, signal.SIGKILL)
        for found, kind in ((PLAIN, JSON), (STREAMS, SSE)):
            for path, whole in found.values():
                for size in (7, 100_000):
                    answer = await ask(gateway, path, pieces(as_served(whole), size), kind)
                    assert answer.content == as_asked(whole)
                answer = await ask(gateway, path, [as_served(whole)], kind, "sql")
                assert answer.content == as_served(whole)


async def test_hidden_counts_are_hidden_beside_the_name(tmp_path: Path) -> None:
    usage = {**USAGE, "num_cached_tokens": 2}
    async with gateway_on(tmp_path, route=route(), gateway={"cachedTokens": "Hidden"}) as gateway:
        for size in (1, 4, 100_000):
            for path in (CHAT, RESPONSES):
                whole = text({"id": "1", "model": "@@", "usage": usage})
                shown = whole.replace('"num_cached_tokens": 2', '"num_cached_tokens": 0')
                answer = await ask(gateway, path, pieces(as_served(whole), size))
                assert answer.content == as_asked(shown)
                if path == RESPONSES:
                    whole, shown = (event("x", {"response": json.loads(one)}) for one in (whole, shown))
                else:
                    whole, shown = f"data: {whole}\n\n", f"data: {shown}\n\n"
                answer = await ask(gateway, path, pieces(as_served(whole), size), SSE)
                assert answer.content == as_asked(shown)


async def test_a_plain_answer_has_its_cost_and_no_length(tmp_path: Path) -> None:
    spec = {"usageLog": {"path": str(tmp_path / "usage.log"), "costHeader": True}}
    more = {"pricing": [{"perMillion": {"input": "1000000", "output": "1000000"}}]}
    async with gateway_on(tmp_path, route=route(), gateway=spec, more=more) as gateway:
        gateway.engine.is_plain = True
        for path, usage in ((CHAT, USAGE), (MESSAGES, {"input_tokens": 3, "output_tokens": 2})):
            whole = text({"model": "@@", "usage": usage})
            gateway.engine.pieces = [as_served(whole)]
            gateway.engine.headers = {}
            body = {"model": ASKED, "messages": [], "max_tokens": 9}
            answer = await gateway.http.post(f"{gateway.url}{path}", json=body)
            assert answer.content == as_asked(whole)
            assert answer.headers[COST_MICROS] == "5000000"
            # one that is too long to be held passes as it comes
            whole = text({"model": "@@", "a": "x" * 2_000_000, "usage": usage})
            gateway.engine.pieces = [as_served(whole)]
            answer = await gateway.http.post(f"{gateway.url}{path}", json=body)
            assert answer.content == as_asked(whole)
            assert COST_MICROS not in answer.headers


async def test_a_fallback_with_another_name_answers_under_the_same(tmp_path: Path) -> None:
    """Where the first ModelServer has the name that was asked for, too."""
    log: list[tuple[str, str]] = []
    engines = {name: Engine(name, log) for name in ("a1", "b1")}
    for one in engines.values():
        await one.start()
    rule = {"targetModels": [{"modelServerName": "a"}], "fallback": [{"modelServerName": "b"}]}
    spec = {"modelName": "m", "rules": [rule]}
    documents = [
        server("a", "m", [engines["a1"]]),
        server("b", "other", [engines["b1"]]),
        document("ModelRoute", "m", spec),
        document("ModelRoute", "shown", {**spec, "modelName": "shown", "responseModel": "Served"}),
    ]
    try:
        async with running(tmp_path / "stack", documents, engines, log, {"failureMode": "Open"}) as gateway:
            for is_decided in (True, False):
                if not is_decided:
                    await gateway.processes.end("extproc")
                await gateway.http.get(f"{gateway.url}/v1/models")
                for does, server_key in ((200, "default/a"), (503, "default/b")):
                    engines["a1"].does = does
                    answer = await gateway.ask("m")
                    assert answer.headers["x-attache-served-by"] == server_key
                    # the engine writes its own name
                    assert answer.json()["model"] == "m"
                    assert (await gateway.ask("shown")).json()["model"] == server_key[-1] + "1"
    finally:
        for one in engines.values():
            await one.stop()
