# SPDX-License-Identifier: Apache-2.0
"""Fallbacks for prompts that a model refuses for their length or content, through a real Envoy."""

from __future__ import annotations

import asyncio
import gzip
import json
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import anthropic
import openai
import pytest
import pytest_asyncio
from aiohttp import web

from tests.waiting import eventually
from tests.with_envoy.test_fallback import Engine, route, running, server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
    from pathlib import Path

    from tests.with_envoy.test_fallback import Gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")

FAILURES: Final = ["connect", "timeout", "overloaded", "server-error"]
TOO_LONG: Final = {"error": {"message": "too many", "type": "invalid_request_error", "code": "context_length_exceeded"}}
# as engines and providers write it, and the status
CONTEXT: Final = [
    (400, TOO_LONG),
    (
        400,
        {
            "error": {
                "message": "This model's maximum context length is 4096 tokens. However, your request has 5000 input"
                " tokens. Please reduce the length of the input messages.",
                "type": "BadRequestError",
                "param": "input_tokens",
                "code": 400,
            }
        },
    ),
    (
        400,
        {"object": "error", "message": "The input (85050 tokens) is longer than the model's context length (32768)."},
    ),
    (
        400,
        {
            "object": "error",
            "message": "The sum of prompt length (5000.0), query length (0) should not exceed max_num_tokens (4096)",
            "type": "BadRequestError",
            "param": None,
            "code": 400,
        },
    ),
    (
        400,
        {
            "type": "error",
            "error": {"type": "invalid_request_error", "message": "prompt is too long: 213462 tokens > 200000 maximum"},
        },
    ),
    (413, TOO_LONG),
    (422, {"detail": "Input length 9000 exceeds maximum context length 4096"}),
]
POLICY: Final = [
    (
        400,
        {"error": {"message": "The response was filtered.", "type": None, "param": "prompt", "code": "content_filter"}},
    ),
    (400, {"error": {"code": "content_policy_violation", "message": "no", "type": "image_generation_user_error"}}),
    (
        400,
        {
            "type": "error",
            "error": {"type": "invalid_request_error", "message": "Output blocked by content filtering policy"},
        },
    ),
]


def says(
    content: object, *, status: int = 400, headers: Mapping[str, str] | None = None
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """An answer of known length; ``content``: bytes, or what becomes JSON."""

    async def answer(_: web.Request) -> web.StreamResponse:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        return web.Response(body=body, status=status, headers={"content-type": "application/json", **(headers or {})})

    return answer


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    log: list[tuple[str, str]] = []
    engines = {name: Engine(name, log) for name in ("a1", "a2", "b1", "b2", "c1")}
    for one in engines.values():
        await one.start()
    target = [{"modelServerName": "a"}]
    fallback = [
        {"modelServerName": "b", "on": FAILURES},
        {"modelServerName": "c", "on": [*FAILURES, "context-window", "content-policy"]},
    ]
    both = [{"modelServerName": name, "on": [*FAILURES, "context-window"]} for name in ("b", "c")]
    documents = [
        server("a", "big/model", [engines["a1"], engines["a2"]]),
        server("b", "another", [engines["b1"], engines["b2"]]),
        server("c", "long", [engines["c1"]]),
        route("m", {"targetModels": target, "fallback": fallback, "retry": {"idleTimeout": "2s"}}),
        route("both", {"targetModels": target, "fallback": both}),
        route("plain", {"targetModels": target, "fallback": [{"modelServerName": "c"}]}),
    ]
    async with running(tmp_path_factory.mktemp("refusals") / "stack", documents, engines, log) as found:
        yield found
    for one in engines.values():
        await one.stop()


def refuse(
    gateway: Gateway,
    *names: str,
    content: object = TOO_LONG,
    status: int = 400,
    headers: Mapping[str, str] | None = None,
) -> None:
    """So do these engines answer from now on."""
    for name in names:
        gateway.engines[name].says = says(content, status=status, headers=headers)


def letters(gateway: Gateway) -> str:
    """The ModelServers in the order of attempts."""
    return "".join(name[0] for name, _ in gateway.log)


@pytest.mark.parametrize(("status", "content"), [*CONTEXT, *POLICY])
async def test_the_fallback_that_takes_it_is_asked_next(gateway: Gateway, status: int, content: object) -> None:
    await gateway.heal()
    refuse(gateway, "a1", "a2", "b1", "b2", content=content, status=status)
    for stream in (False, True):
        answer = await gateway.ask(stream=stream)
        assert answer.status_code == 200, answer.text
        # no other engine of the model that has refused it, nor the fallback without that class
        assert letters(gateway) == "ac"
        assert answer.headers["x-attache-served-by"] == "default/c"
        assert "x-attache-refused-for" not in answer.headers
        assert gateway.log[1] == ("c1", "long")


async def test_they_are_no_failures_and_are_counted_by_their_reason(gateway: Gateway) -> None:
    await gateway.heal()

    async def counted(reason: str) -> float:
        return (await gateway.values("attache_fallbacks_total")).get((reason, "default/c"), 0.0)

    before = {reason: await counted(reason) for reason in ("context_window", "content_policy", "failed")}
    for content, times in ((TOO_LONG, 12), ({"error": {"code": "content_filter"}}, 5)):
        refuse(gateway, "a1", "a2", content=content)
        for _ in range(times):
            assert (await gateway.ask()).status_code == 200

    async def all_counted() -> bool:
        found = await counted("context_window") - before["context_window"]
        return (found, await counted("content_policy") - before["content_policy"]) == (12, 5)

    await eventually(all_counted)
    assert await counted("failed") == before["failed"]
    # breakers are closed: the own engines are still asked first
    assert not any((await gateway.values("attache_breaker_state")).values())
    assert (await gateway.ask()).headers["x-attache-served-by"] == "default/c"
    assert letters(gateway) == "ac"


async def test_if_nobody_takes_it_the_client_gets_the_first_models_words(gateway: Gateway) -> None:
    await gateway.heal()
    last = {"error": {"message": "prompt is too long", "type": "invalid_request_error", "code": "of c"}, "more": [1.50]}
    refuse(gateway, "a1", "a2", "b1", "b2")
    text = json.dumps(last, indent=3).encode()
    refuse(gateway, "c1", content=text, headers={"x-of-engine": "1"})
    answer = await gateway.ask()
    # each model is asked once, and its words are the client's as they are
    assert letters(gateway) == "ac"
    assert (answer.status_code, answer.content, answer.headers["x-of-engine"]) == (400, text, "1")
    assert answer.headers["content-length"] == str(len(text))
    assert not [name for name in answer.headers if "refused" in name]
    answer = await gateway.ask("both")
    assert letters(gateway) == "abc"
    assert answer.content == text


async def test_where_no_fallback_has_the_class_it_is_the_clients(gateway: Gateway) -> None:
    await gateway.heal()
    refuse(gateway, "a1", "a2")
    answer = await gateway.ask("plain")
    assert (answer.status_code, answer.json(), letters(gateway)) == (400, TOO_LONG, "a")
    # that of content is not among those of this rule
    refuse(gateway, "a1", "a2", content=POLICY[0][1])
    answer = await gateway.ask("both")
    assert (answer.status_code, answer.json(), letters(gateway)) == (400, POLICY[0][1], "a")


OTHERS: Final = [
    {"error": {"message": "The field 'n' is too large.", "type": "invalid_request_error", "code": None}},
    # text of others in it
    {"error": {"message": "no"}, "input": "the maximum context length", "code": ["context_length_exceeded"]},
    {"error": {"message": 'no field "code": "context_length_exceeded"', "type": "x"}},
    {"error": {"message": 'no field "message": "prompt is too long"'}},
    b"This model's maximum context length is 4096 tokens.",
    b'{"error": {"message": "cut in its mi',
    b"\xff\x00",
]


@pytest.mark.parametrize("content", OTHERS)
@pytest.mark.parametrize("status", [400, 422])
async def test_another_refusal_is_the_clients(gateway: Gateway, status: int, content: object) -> None:
    await gateway.heal()
    refuse(gateway, *gateway.engines, content=content, status=status)
    answer = await gateway.ask()
    assert letters(gateway) == "a"
    assert answer.status_code == status
    assert answer.content == (content if isinstance(content, bytes) else json.dumps(content).encode())


async def test_other_statuses_are_not_read(gateway: Gateway) -> None:
    await gateway.heal()
    for status in (401, 403, 404, 409):
        refuse(gateway, *gateway.engines, status=status)
        assert (await gateway.ask()).status_code == status
        assert letters(gateway) == "a"


async def test_a_compressed_error_is_the_clients(gateway: Gateway) -> None:
    await gateway.heal()
    packed = gzip.compress(json.dumps(TOO_LONG).encode())
    refuse(gateway, *gateway.engines, content=packed, headers={"content-encoding": "gzip"})
    answer = await gateway.ask()
    assert (answer.status_code, answer.json(), letters(gateway)) == (400, TOO_LONG, "a")


@pytest.mark.parametrize("size", [16 * 1024, 16 * 1024 + 1, 10 << 20])
async def test_a_long_error_is_not_held(gateway: Gateway, size: int) -> None:
    await gateway.heal()
    text = json.dumps(TOO_LONG).encode()
    refuse(gateway, "a1", "a2", content=text + b" " * (size - len(text)))
    answer = await gateway.ask()
    if size == 16 * 1024:
        assert (answer.status_code, letters(gateway)) == (200, "ac")
    else:
        assert (answer.status_code, len(answer.content), letters(gateway)) == (400, size, "a")


async def test_an_endless_error_passes_as_it_comes(gateway: Gateway) -> None:
    await gateway.heal()
    ended = asyncio.Event()

    async def endless(http: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(status=400, headers={"content-type": "application/json"})
        await answer.prepare(http)
        try:
            await answer.write(json.dumps(TOO_LONG).encode())
            while True:
                await answer.write(b" " * 65536)
        except ConnectionError:
            ended.set()
            raise

    for one in gateway.engines.values():
        one.says = endless
    gateway.log.clear()
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    async with gateway.http.stream("POST", f"{gateway.url}/v1/chat/completions", json=body) as answer:
        assert answer.status_code == 400
        read = 0
        async for piece in answer.aiter_bytes():
            read += len(piece)
            if read > 32 << 20:
                break
    await asyncio.wait_for(ended.wait(), 60)
    assert letters(gateway) == "a"
    gateway.asked += 1


async def test_an_error_may_come_in_pieces_and_one_that_is_cut_is_a_failure(gateway: Gateway) -> None:
    await gateway.heal()
    text = json.dumps(TOO_LONG).encode()

    async def in_pieces(http: web.Request, *, most: int) -> web.StreamResponse:
        headers = {"content-type": "application/json", "content-length": str(len(text))}
        answer = web.StreamResponse(status=400, headers=headers)
        await answer.prepare(http)
        for at in range(min(most, len(text))):
            await answer.write(text[at : at + 1])
            await asyncio.sleep(0)
        if most < len(text):
            assert http.transport is not None
            http.transport.abort()
        return answer

    for most in (len(text), text.index(b"length_exceeded")):
        await gateway.heal()
        for name in ("a1", "a2", "b1", "b2"):
            gateway.engines[name].says = partial(in_pieces, most=most)
        answer = await gateway.ask()
        assert answer.status_code == 200, answer.text
        assert letters(gateway) == ("ac" if most == len(text) else "aabbc")


async def test_no_engine_or_client_steers_by_headers(gateway: Gateway) -> None:
    await gateway.heal()
    marks = {"x-attache-refused-for": "context-window", "x-envoy-ratelimited": "true", "x-attache-degraded": "model"}
    for status in (200, 400, 404):
        refuse(gateway, *gateway.engines, content={"choices": []}, status=status, headers=marks)
        answer = await gateway.ask()
        assert (answer.status_code, letters(gateway)) == (status, "a")
        assert not marks.keys() & {name.lower() for name in answer.headers}
    # nor does it keep another engine from being asked
    await gateway.heal()
    refuse(gateway, "a1", "a2", "b1", "b2", content={}, status=503, headers=marks)
    assert (await gateway.ask()).status_code == 200
    assert letters(gateway) == "aabbc"
    await gateway.heal()
    refuse(gateway, *gateway.engines, content={"error": {}})
    gateway.http.headers.update({**marks, "x-envoy-retriable-status-codes": "400", "x-envoy-max-retries": "9"})
    gateway.http.headers["x-envoy-retriable-header-names"] = "content-type"
    try:
        assert (await gateway.ask()).status_code == 400
    finally:
        for name in (*marks, *[one for one in gateway.http.headers if one.startswith("x-envoy")]):
            gateway.http.headers.pop(name, None)
    assert letters(gateway) == "a"
    assert not any(name.startswith("x-attache") for name in gateway.engines["a1"].headers[-1])


async def test_after_failures_the_order_of_what_is_left_changes(gateway: Gateway) -> None:
    await gateway.heal()
    for name in ("a1", "a2"):
        gateway.engines[name].does = 503
    refuse(gateway, "b1", "b2")
    answer = await gateway.ask()
    assert answer.status_code == 200, answer.text
    assert letters(gateway) == "aabc"
    # where the fallback that takes it fails, the client gets the own model's words
    await gateway.heal()
    refuse(gateway, "a1", "a2")
    gateway.engines["c1"].does = 503
    answer = await gateway.ask()
    assert (answer.status_code, answer.json(), letters(gateway)) == (400, TOO_LONG, "aca")


async def test_sdks_see_the_error_of_the_model(gateway: Gateway) -> None:
    await gateway.heal()
    refuse(gateway, *gateway.engines)
    messages: Any = [{"role": "user", "content": "hi"}]
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as of_openai:
                await client.chat.completions.create(model="m", messages=messages, stream=stream)
            assert of_openai.value.code == "context_length_exceeded"
    words = {"type": "error", "error": {"type": "invalid_request_error", "message": "prompt is too long: 9 > 8"}}
    refuse(gateway, *gateway.engines, content=words)
    async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key="none", max_retries=0) as claude:
        with pytest.raises(anthropic.BadRequestError) as of_anthropic:
            await claude.messages.create(model="m", messages=messages, max_tokens=9)
        assert of_anthropic.value.body == words
    gateway.asked += 3


async def test_a_prompt_that_cannot_fit_is_sent_where_it_may(tmp_path: Path) -> None:
    log: list[tuple[str, str]] = []
    engines = {name: Engine(name, log) for name in ("a1", "b1", "c1")}
    for one in engines.values():
        await one.start()
    engines["a1"].pages = {
        "/metrics": 'vllm:num_requests_waiting{engine="0"} 0\nvllm:num_requests_running{engine="0"} 0\n',
        "/v1/models": '{"object": "list", "data": [{"id": "big/model", "max_model_len": 100}]}',
    }
    fallback = [
        {"modelServerName": "b", "on": FAILURES},
        {"modelServerName": "c", "on": [*FAILURES, "context-window"]},
    ]
    documents = [
        server("a", "big/model", [engines["a1"]], scrapeInterval="50ms"),
        server("b", "another", [engines["b1"]]),
        server("c", "long", [engines["c1"]]),
        route("m", {"targetModels": [{"modelServerName": "a"}], "fallback": fallback}),
    ]
    try:
        async with running(tmp_path / "stack", documents, engines, log) as gateway:
            long = [{"role": "user", "content": "word " * 2000}]

            async def is_known() -> bool:
                answer = await gateway.ask(messages=long)
                assert answer.status_code == 200
                return letters(gateway) == "c"

            await eventually(is_known)
            assert (await gateway.ask()).headers["x-attache-served-by"] == "default/a"
            counted = await gateway.values("attache_fallbacks_total")
            assert counted["context_window", "default/c"] >= 1
            # that one fails: there is none behind it, and the own engine is not asked for what it cannot do
            engines["c1"].does = 503
            assert (await gateway.ask(messages=long)).status_code == 503
            assert letters(gateway).strip("c") == ""
    finally:
        for one in engines.values():
            await one.stop()


async def test_without_extproc_attempts_go_down_the_list_and_a_small_buffer_holds_little(tmp_path: Path) -> None:
    log: list[tuple[str, str]] = []
    engines = {name: Engine(name, log) for name in ("a1", "b1", "c1")}
    for one in engines.values():
        await one.start()
    fallback = [
        {"modelServerName": "b", "on": FAILURES},
        {"modelServerName": "c", "on": [*FAILURES, "context-window"]},
    ]
    small = {"failureMode": "Open", "maxBodySize": "2Ki"}
    documents = [
        server("a", "big/model", [engines["a1"]]),
        server("b", "another", [engines["b1"]]),
        server("c", "long", [engines["c1"]]),
        route("m", {"targetModels": [{"modelServerName": "a"}], "fallback": fallback}),
        route("plain", {"targetModels": [{"modelServerName": "a"}], "fallback": fallback[:1]}),
    ]
    async with running(tmp_path / "stack", documents, engines, log, small) as gateway:
        text = json.dumps(TOO_LONG).encode()
        for size, tried in ((2048, "ac"), (2049, "a"), (16000, "a")):
            refuse(gateway, "a1", content=text + b" " * (size - len(text)))
            answer = await gateway.ask()
            assert (answer.status_code, letters(gateway)) == (200 if tried == "ac" else 400, tried)
        engines["a1"].says = None
        await gateway.processes.end("extproc")

        async def is_served() -> bool:
            return (await gateway.ask()).status_code == 200

        await eventually(is_served)
        refuse(gateway, "a1", "b1")
        answer = await gateway.ask()
        assert answer.status_code == 200, answer.text
        assert letters(gateway) == "aaabc"
        assert answer.headers["x-attache-served-by"] == "default/c"
        refuse(gateway, "c1")
        answer = await gateway.ask()
        assert (answer.status_code, answer.json(), letters(gateway)) == (400, TOO_LONG, "aaabc")
        assert "x-attache-refused-for" not in answer.headers
        answer = await gateway.ask("plain")
        assert (answer.status_code, letters(gateway)) == (400, "a")
        refuse(gateway, "a1", content=POLICY[0][1])
        answer = await gateway.ask()
        assert (answer.status_code, letters(gateway)) == (400, "a")
    for one in engines.values():
        await one.stop()


async def test_attempts_that_reach_no_engine_count_in_the_order(tmp_path: Path) -> None:
    log: list[tuple[str, str]] = []
    engines = {name: Engine(name, log) for name in ("a1", "a2", "b1", "c1")}
    for one in engines.values():
        await one.start()
    # nobody listens there any more
    await engines["a1"].stop()
    fallback = [
        {"modelServerName": "b", "on": FAILURES},
        {"modelServerName": "c", "on": [*FAILURES, "context-window"]},
    ]
    documents = [
        server("a", "big/model", [engines["a1"], engines["a2"]], picker="RoundRobin"),
        server("b", "another", [engines["b1"]]),
        server("c", "long", [engines["c1"]]),
        route("m", {"targetModels": [{"modelServerName": "a"}], "fallback": fallback}),
    ]
    try:
        async with running(tmp_path / "stack", documents, engines, log) as gateway:
            refuse(gateway, "a2")
            for _ in range(4):
                assert (await gateway.ask()).status_code == 200
                assert letters(gateway) == "ac"
    finally:
        for one in engines.values():
            await one.stop()
