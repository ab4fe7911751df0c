# SPDX-License-Identifier: Apache-2.0
"""Guards through a real Envoy, with the clients of OpenAI and Anthropic: what they get, and what the engine does."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

import anthropic
import openai
import pytest
import pytest_asyncio
from aiohttp import web

from tests.waiting import eventually
from tests.with_envoy.stand_in import gateway_on

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    import httpx

    from tests.with_envoy.stand_in import Gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT: Final = "/v1/chat/completions"
ALLOW: Final = {"action": "allow"}
REDACTED: Final = [{"role": "user", "content": "my key is [redacted]"}]
ANSWER: Final = json.dumps(
    {
        "id": "c-1",
        "object": "chat.completion",
        "created": 1,
        "model": "llama",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "fine"}, "finish_reason": "stop"}],
    }
).encode()
MESSAGE: Final = json.dumps(
    {
        "id": "m-1",
        "type": "message",
        "role": "assistant",
        "model": "llama",
        "content": [{"type": "text", "text": "fine"}],
        "stop_reason": "end_turn",
        "usage": {"input_tokens": 1, "output_tokens": 1},
    }
).encode()


class Guarded:
    """The gateway, and the service that it asks: it gives ``answer``, or hangs without one, and on ``slow`` texts."""

    def __init__(self) -> None:
        self.gateway: Gateway
        self.answer: dict[str, Any] | None = ALLOW
        self.asked: list[tuple[dict[str, str], bytes]] = []
        self.left = 0
        self.slow = b"\0"

    async def check(self, request: web.Request) -> web.Response:
        self.asked.append(({name.lower(): value for name, value in request.headers.items()}, await request.read()))
        if self.answer is None or self.slow in self.asked[-1][1]:
            try:
                await asyncio.Event().wait()
            finally:
                self.left += 1
        return web.json_response(self.answer)

    def chat(self, text: str, **fields: object) -> dict[str, Any]:
        return {"model": "llama", "messages": [{"role": "user", "content": text}], **fields}

    async def post(self, path: str = CHAT, **request: Any) -> httpx.Response:  # noqa: ANN401 - as the client takes them
        return await self.gateway.http.post(f"{self.gateway.url}{path}", **request)

    async def metric(self, name: str, **labels: str) -> float:
        text = (await self.gateway.http.get(f"{self.gateway.metrics}/metrics")).text
        found = [line for line in text.splitlines() if line.startswith(f"{name}{{")]
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        return sum(float(one.rpartition(" ")[2]) for one in found if all(label in one for label in wanted))


@asynccontextmanager
async def guarded_on(
    directory: Path, *, headers: dict[str, str] | None = None, **more: object
) -> AsyncIterator[Guarded]:
    """``headers``: of clients. ``more``: of the GatewayConfig."""
    made = Guarded()
    app = web.Application(client_max_size=1 << 26)
    app.add_routes([web.post("/check", made.check)])
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/check"
    gateway = {"guards": [{"name": "pii", "url": url, "timeout": "2s", "headers": ["x-team"]}], **more}
    limits = [{"unit": "day", "requests": 1000}]
    try:
        async with gateway_on(
            directory,
            gateway=gateway,
            headers=headers,
            route={"guard": {"name": "pii"}, "rateLimits": limits},
        ) as running:
            made.gateway = running
            yield made
    finally:
        await runner.cleanup()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Guarded]:
    async with guarded_on(tmp_path_factory.mktemp("guards")) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def guarded(stack: Guarded) -> Guarded:
    """As it begins."""
    engine = stack.gateway.engine
    engine.pieces, engine.is_plain, engine.then = (ANSWER,), True, "end"
    engine.body, stack.answer = b"", ALLOW
    stack.asked.clear()
    return stack


async def test_an_allowed_request_reaches_the_engine_as_its_client_wrote_it(guarded: Guarded) -> None:
    body = json.dumps(guarded.chat("hi")).encode()
    headers = {"content-type": "application/json", "x-team": "blue", "authorization": "Bearer mine", "x-other": "1"}
    assert (await guarded.post(content=body, headers=headers)).content == ANSWER
    ((shown, content),) = guarded.asked
    assert content == body
    assert (shown["x-team"], shown["ce-route"], shown["ce-model"], shown["ce-api"]) == (
        "blue",
        "default/llama",
        "llama",
        "chat",
    )
    assert not {"authorization", "x-other"} & shown.keys()
    # what came of the request may be written by now, too
    assert (await guarded.gateway.logged("guard"))[-1]["guard"] == "'pii' allowed it"


@pytest.mark.parametrize("streams", [False, True])
async def test_the_client_of_openai_gets_the_refusal_in_its_form(guarded: Guarded, streams: bool) -> None:
    guarded.answer = {"action": "refuse", "status": 422, "message": "no keys, please", "reason": "sk-"}
    async with openai.AsyncOpenAI(base_url=f"{guarded.gateway.url}/v1", api_key="none") as client:
        with pytest.raises(openai.UnprocessableEntityError) as refused:
            await client.chat.completions.create(
                model="llama", messages=[{"role": "user", "content": "my key is sk-1"}], stream=streams
            )
    assert refused.value.body == {
        "message": "no keys, please",
        "type": "invalid_request_error",
        "param": None,
        "code": "guard_refused",
    }
    # asked once: the client does not try again
    assert len(guarded.asked) == 1
    assert guarded.gateway.engine.body == b""


async def test_the_client_of_anthropic_gets_the_refusal_in_its_form(guarded: Guarded) -> None:
    guarded.answer = {"action": "refuse", "message": "no keys, please"}
    async with anthropic.AsyncAnthropic(base_url=guarded.gateway.url, api_key="none") as client:
        with pytest.raises(anthropic.PermissionDeniedError) as refused:
            await client.messages.create(model="llama", max_tokens=9, messages=[{"role": "user", "content": "sk-1"}])
        assert refused.value.body == {
            "type": "error",
            "error": {
                "type": "permission_error",
                "message": "no keys, please",
                "details": {"error_code": "guard_refused"},
            },
        }
        guarded.answer = {"action": "change", "fields": {"messages": REDACTED}}
        guarded.gateway.engine.pieces = (MESSAGE,)
        answer = await client.messages.create(model="llama", max_tokens=9, messages=[{"role": "user", "content": "sk"}])
    assert answer.content[0].type == "text"
    assert json.loads(guarded.gateway.engine.body)["messages"] == REDACTED
    assert guarded.asked[-1][0]["ce-api"] == "messages"


async def test_the_engine_gets_the_changed_request(guarded: Guarded) -> None:
    guarded.answer = {"action": "change", "fields": {"messages": REDACTED}, "reason": "a key"}
    async with openai.AsyncOpenAI(base_url=f"{guarded.gateway.url}/v1", api_key="none") as client:
        answer = await client.chat.completions.create(
            model="llama", messages=[{"role": "user", "content": "my key is sk-1"}], temperature=0.5
        )
    assert answer.choices[0].message.content == "fine"
    asked = json.loads(guarded.gateway.engine.body)
    assert asked["messages"] == REDACTED
    assert asked["temperature"] == 0.5
    assert b"sk-1" not in guarded.gateway.engine.body


async def test_a_change_to_a_much_longer_body_passes(guarded: Guarded) -> None:
    longer = [{"role": "user", "content": "word " * 200_000}]
    guarded.answer = {"action": "change", "fields": {"messages": longer}}
    assert (await guarded.post(json=guarded.chat("hi"))).status_code == 200
    assert json.loads(guarded.gateway.engine.body)["messages"] == longer


async def test_a_changed_model_is_refused(guarded: Guarded) -> None:
    guarded.answer = {"action": "change", "fields": {"model": "sql"}}
    answer = await guarded.post(json=guarded.chat("hi"))
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "guard_unavailable")
    assert await guarded.metric("attache_guard_requests_total", guard="pii", result="invalid", goes_on="no") == 1


async def test_a_form_is_shown_without_its_content(guarded: Guarded) -> None:
    files = {"file": ("a.wav", b"RIFF", "audio/wav")}
    guarded.answer = {"action": "refuse", "message": "no sound"}
    answer = await guarded.post("/v1/audio/transcriptions", data={"model": "llama"}, files=files)
    assert (answer.status_code, answer.json()["error"]["message"]) == (403, "no sound")
    ((shown, content),) = guarded.asked
    assert (shown["ce-omitted"], content) == ("not-json", b"")


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"prompt_token_ids": [1, 2]}),
        ("/v1/chat/completions", {"input_ids": [1, 2]}),
        ("/v1/completions", {"prompt": [1, 2]}),
        ("/v1/completions", {"prompt": "hi", "prompt_embeds": "AAAA"}),
    ],
)
async def test_a_guard_of_texts_can_refuse_what_is_no_text(
    guarded: Guarded, path: str, fields: dict[str, object]
) -> None:
    guarded.answer = {"action": "refuse", "status": 422, "message": "text, please"}
    answer = await guarded.post(path, json={**guarded.chat("hi"), **fields})
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "guard_refused")
    ((shown, content),) = guarded.asked
    assert shown["ce-unreadable"] == "tokens"
    assert fields.items() <= json.loads(content).items()
    assert guarded.gateway.engine.body == b""
    guarded.answer = ALLOW
    await guarded.post(json=guarded.chat("hi"))
    assert "ce-unreadable" not in guarded.asked[-1][0]


async def test_a_guard_that_hangs_costs_its_time_and_no_more(guarded: Guarded) -> None:
    guarded.answer, left = None, guarded.left
    answer = await guarded.post(json=guarded.chat("hi", stream=True))
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "guard_unavailable")
    assert answer.headers["retry-after"] == "1"
    await eventually(lambda: guarded.left == left + 1)


async def test_a_client_that_leaves_ends_the_call(guarded: Guarded) -> None:
    guarded.answer, left = None, guarded.left
    call = asyncio.create_task(guarded.post(json=guarded.chat("hi")))
    await eventually(lambda: len(guarded.asked) == 1)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await eventually(lambda: guarded.left == left + 1)


async def test_slow_texts_of_one_tenant_turn_the_guard_off_for_nobody_else(tmp_path: Path) -> None:
    keys = [{"name": name, "key": f"sk-secret-{name}", "tenant": name} for name in ("evil", "bell")]
    of_bell = {"authorization": "Bearer sk-secret-bell"}
    async with guarded_on(tmp_path, headers=of_bell, authentication={"apiKeys": keys}) as guarded:
        guarded.gateway.engine.pieces, guarded.gateway.engine.is_plain = (ANSWER,), True
        guarded.slow = b"slow"

        async def ask(who: str, text: str) -> int:
            headers = {"authorization": f"Bearer sk-secret-{who}"}
            return (await guarded.post(json=guarded.chat(text), headers=headers)).status_code

        async with asyncio.timeout(60):
            slow = [asyncio.create_task(ask("evil", "slow")) for _ in range(12)]
            others = [await ask("bell", "hi") for _ in range(5)]
            assert await asyncio.gather(*slow) == [503] * 12
            others += [await ask("bell", "hi") for _ in range(133)]
        assert others.count(503) == 0, f"{others.count(503)} of {len(others)}"


async def test_refused_requests_give_back_what_their_limits_reserved(guarded: Guarded) -> None:
    async def left() -> int:
        return int((await guarded.post(json=guarded.chat("hi"))).headers["x-ratelimit-remaining-requests"])

    before = await left()
    guarded.answer = {"action": "refuse"}
    for _ in range(5):
        assert (await guarded.post(json=guarded.chat("hi"))).status_code == 403
    guarded.answer = ALLOW
    assert await left() == before - 1
    assert await guarded.metric("attache_requests_total", outcome="guard") >= 5
