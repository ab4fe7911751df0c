# SPDX-License-Identifier: Apache-2.0
"""Each inference request leaves one whole line in the usage log, however it ends and whoever has died meanwhile."""

from __future__ import annotations

import json
import os
import signal
from typing import TYPE_CHECKING, Any, Final

import httpx
import msgspec
import pytest
import pytest_asyncio

from extproc.api.usage_log import UsageContext, UsageCounts, UsageLine
from tests.waiting import eventually
from tests.with_envoy.stand_in import gateway_on

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from tests.with_envoy.stand_in import Engine, Gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT: Final = "/v1/chat/completions"
HOSTILE: Final = 'a"b\\</script>\u2028é漢😀'
KEYS: Final = [
    {"name": "web", "key": "sk-of-the-web", "tenant": "acme", "user": "eve"},
    {"name": "odd", "key": "sk-of-the-odd", "tenant": HOSTILE},
    {"name": "small", "key": "sk-of-the-small", "tenant": "small"},
]
LIMIT: Final = {"tenants": ["small"], "unit": "month", "requests": 1}
FIRST: Final = b'data: {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}\n\n'
TOKEN: Final = b'data: {"choices": [{"index": 0, "delta": {"content": "hi"}, "finish_reason": null}]}\n\n'
LAST: Final = b'data: {"choices": [{"index": 0, "delta": {"content": ""}, "finish_reason": "stop"}]}\n\n'
USAGE: Final = (
    b'data: {"choices": [], "usage": {"prompt_tokens": 31, "completion_tokens": 3, "prompt_tokens_details": '
    b'{"cached_tokens": 16}, "completion_tokens_details": {"reasoning_tokens": 2}}}\n\n'
)
DONE: Final = b"data: [DONE]\n\n"


class Request(msgspec.Struct, frozen=True):
    """What became of a request: its line, and what extproc told of it."""

    line: UsageLine
    context: UsageContext | None
    answer: bytes

    @property
    def counts(self) -> dict[str, float | str]:
        """All that the answer had, without the time."""
        found = self.line.usage or UsageCounts()
        return {name: value for name, value in msgspec.structs.asdict(found).items() if value is not None} | (
            {} if found.first_content_us is None else {"first_content_us": 0.0}
        )


class Log:
    """The file."""

    def __init__(self, file: Path, gateway: Gateway) -> None:
        self.file = file
        self.gateway = gateway
        self._lines: dict[str | None, UsageLine] = {}
        self._offset = 0

    @property
    def engine(self) -> Engine:
        return self.gateway.engine

    def lines(self) -> dict[str | None, UsageLine]:
        """By the id of the request, those that are whole."""
        with self.file.open("rb") as file:
            file.seek(self._offset)
            whole, end, _ = file.read().rpartition(b"\n")
        self._offset += len(whole + end)
        for one in whole.splitlines():
            line = msgspec.json.decode(one, type=UsageLine, strict=False)
            assert line.request_id not in self._lines
            self._lines[line.request_id] = line
        return self._lines

    async def line_of(self, request_id: str) -> UsageLine:
        await eventually(lambda: request_id in self.lines())
        return self._lines[request_id]

    async def ask(
        self, path: str = CHAT, *, key: str = "sk-of-the-web", leaves_after: bytes | None = None, **fields: object
    ) -> Request:
        """``leaves_after``: how the part of the answer ends after which the client hangs up."""
        body = {"model": "llama", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 7, **fields}
        got = b""
        async with self.gateway.http.stream(
            "POST", f"{self.gateway.url}{path}", json=body, headers={"authorization": f"Bearer {key}"}
        ) as answer:
            try:
                async for piece in answer.aiter_raw():
                    got += piece
                    if leaves_after is not None and got.endswith(leaves_after):
                        break
            except httpx.RemoteProtocolError:
                # the engine was cut off, so the client is
                assert self.engine.then == "cut"
        line = await self.line_of(answer.headers["x-request-id"])
        assert line.status == answer.status_code
        context = None if line.context is None else msgspec.json.decode(line.context, type=UsageContext)
        return Request(line, context, got)

    def answers(self, *pieces: bytes, then: str = "end", plain: bool = False) -> None:
        """What the engine does from now on."""
        self.engine.pieces, self.engine.is_plain = pieces, plain
        self.engine.then = then  # type: ignore[assignment]  # one of them


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def log(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Log]:
    directory = tmp_path_factory.mktemp("usage-log")
    file = directory / "usage.log"
    spec = {"usageLog": {"path": str(file)}, "failureMode": "Open", "authentication": {"apiKeys": KEYS}}
    headers = {"authorization": "Bearer sk-of-the-web"}
    async with gateway_on(directory, gateway=spec, route={"rateLimits": [LIMIT]}, headers=headers) as running:
        yield Log(file, running)


def plain(**fields: object) -> bytes:
    return json.dumps({"id": "1", "model": "llama", **fields}).encode()


def events(*named: tuple[str, dict[str, object]]) -> list[bytes]:
    return [f"event: {name}\ndata: {json.dumps({'type': name, **data})}\n\n".encode() for name, data in named]


async def test_a_plain_answer_and_who_asked_for_it(log: Log) -> None:
    usage = {"prompt_tokens": 31, "completion_tokens": 3, "completion_tokens_details": {"reasoning_tokens": 2}}
    choice = {"index": 0, "message": {"content": '"finish_reason": "none"'}, "finish_reason": "stop"}
    log.answers(plain(choices=[choice], usage=usage), plain=True)
    found = await log.ask(f"{CHAT}?secret=1")
    assert found.counts == {"prompt_tokens": 31, "completion_tokens": 3, "reasoning_tokens": 2, "finish": "stop"}
    line, context = found.line, found.context
    assert context is not None
    assert (context.tenant, context.user, context.api_key) == ("acme", "eve", "web")
    assert (context.route, context.server, context.model) == ("default/llama", "default/llama", "llama")
    assert (context.api, context.streamed, context.refused) == ("CHAT", False, "")
    assert (line.path, line.cluster, line.attempts) == (CHAT, "server/default/llama", 1)
    # whose key it is, only extproc knows
    assert (line.client, line.tenant, line.user) == ("web", None, None)
    assert line.answer_bytes == len(found.answer)
    assert line.served is not None
    assert line.duration_us is not None
    assert line.first_byte_us is not None
    assert 0 < line.first_byte_us <= line.duration_us
    assert line.at > 1_700_000_000


@pytest.mark.parametrize("size", [1, 7, 10_000])
async def test_the_events_of_a_stream_are_counted_wherever_it_is_cut_into_pieces(log: Log, size: int) -> None:
    whole = FIRST + 3 * TOKEN + LAST + USAGE + DONE
    log.answers(*(whole[at : at + size] for at in range(0, len(whole), size)))
    found = await log.ask(stream=True)
    assert found.answer == whole.replace(USAGE, b"")
    counts = {"prompt_tokens": 31, "completion_tokens": 3, "cached_tokens": 16, "reasoning_tokens": 2}
    assert found.counts == {**counts, "events": 3, "first_content_us": 0, "finish": "stop"}
    assert found.line.usage is not None
    assert found.line.usage.first_content_us is not None
    # of this request, not of the time since 1970
    assert 0 < found.line.usage.first_content_us < 3_600_000_000


COMPLETION = b'data: {"choices": [{"index": 0, "text": " \\"text\\": \\"x", "finish_reason": null}]}\n\n'


async def test_the_events_of_completions_and_of_tokens_are_counted(log: Log) -> None:
    log.answers(COMPLETION, COMPLETION, DONE)
    assert (await log.ask("/v1/completions", prompt="x", stream=True)).counts["events"] == 2
    token = b'data: {"choices": [{"index": 0, "finish_reason": null, "token_ids": [5]}]}\n\n'
    log.answers(token, token, token, DONE)
    fields = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 3}}
    assert (await log.ask("/inference/v1/generate", stream=True, **fields)).counts["events"] == 3


MESSAGE_USAGE: Final = {"input_tokens": 20, "cache_read_input_tokens": 8, "cache_creation_input_tokens": 3}
MESSAGE: Final = events(
    ("message_start", {"message": {"usage": {**MESSAGE_USAGE, "output_tokens": 1}}}),
    ("content_block_start", {"index": 0, "content_block": {"type": "text", "text": ""}}),
    ("content_block_delta", {"index": 0, "delta": {"text": 'event: content_block_delta\n"stop_reason": "none"'}}),
    ("content_block_delta", {"index": 0, "delta": {"text": "b"}}),
    ("content_block_stop", {"index": 0}),
    ("message_delta", {"delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 2}}),
    ("message_stop", {}),
)
RESPONSE: Final = events(
    ("response.created", {"response": {"status": "in_progress"}}),
    ("response.reasoning_text.delta", {"delta": "event: response.x.delta\n"}),
    ("response.output_text.delta", {"delta": "b"}),
    ("response.output_text.done", {"text": "b"}),
    (
        "response.incomplete",
        {
            "response": {
                "status": "incomplete",
                "usage": {"input_tokens": 9, "output_tokens": 2, "output_tokens_details": {"reasoning_tokens": 1}},
            }
        },
    ),
)


@pytest.mark.parametrize("size", [1, 5, 10_000])
async def test_the_events_of_messages_and_responses_are_counted(log: Log, size: int) -> None:
    def pieces(whole: bytes) -> Sequence[bytes]:
        return [whole[at : at + size] for at in range(0, len(whole), size)]

    log.answers(*pieces(b"".join(MESSAGE)))
    found = await log.ask("/v1/messages", stream=True)
    assert found.answer == b"".join(MESSAGE)
    counts = {"prompt_tokens": 31, "completion_tokens": 2, "cached_tokens": 8, "created_tokens": 3}
    assert found.counts == {**counts, "events": 2, "first_content_us": 0, "finish": "end_turn"}
    log.answers(*pieces(b"".join(RESPONSE)))
    found = await log.ask("/v1/responses", input="hi", stream=True)
    assert found.answer == b"".join(RESPONSE)
    counts = {"prompt_tokens": 9, "completion_tokens": 2, "reasoning_tokens": 1}
    assert found.counts == {**counts, "events": 2, "first_content_us": 0, "finish": "incomplete"}


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
async def test_a_long_line_of_a_stream_costs_others_no_time(log: Log, path: str) -> None:
    """Envoy reads streams on the threads that serve all: 100 KB in one line kept one of them busy for minutes."""
    long = {"instructions": "x" * 1_000_000}
    usage = {"input_tokens": 9, "output_tokens": 4}
    log.answers(
        *events(("response.created", {"response": long}), ("response.completed", {"response": {"usage": usage}}))
    )
    found = await log.ask(path, input="hi", stream=True)
    assert len(found.answer) > 1_000_000
    assert found.line.status == 200


@pytest.mark.parametrize("cut", [False, True])
async def test_plain_messages_and_responses_tell_their_end_in_its_own_place_alone(log: Log, *, cut: bool) -> None:
    tool = {"stop_reason": "none", "usage": {"output_tokens": 99}}
    content = [{"type": "tool_use", "input": tool}]
    written = {**MESSAGE_USAGE, "output_tokens": 2}
    message = plain(content=content, note="stop_reason", stop_reason="end_turn", usage=written)
    own: dict[str, object] = {"metadata": {"status": "none"}, "instructions": "status", "note": "x"}
    details = {"output_tokens_details": {"reasoning_tokens": 1}}
    response = plain(status="completed", **own, usage={"input_tokens": 9, "output_tokens": 2, **details})
    for path, body, expected in (
        ("/v1/messages", message, {"prompt_tokens": 31, "cached_tokens": 8, "created_tokens": 3, "finish": "end_turn"}),
        ("/v1/responses", response, {"prompt_tokens": 9, "reasoning_tokens": 1, "finish": "completed"}),
    ):
        log.engine.headers = {"content-type": "application/json"} if cut else {}
        log.answers(*(body[at : at + 1] for at in range(len(body))) if cut else (body,), plain=not cut)
        try:
            found = await log.ask(path, input="hi")
        finally:
            log.engine.headers = {}
        assert found.answer == body
        assert found.counts == {**expected, "completion_tokens": 2}


async def test_embeddings_have_tokens_and_no_end(log: Log) -> None:
    log.answers(plain(data=[], usage={"prompt_tokens": 4, "total_tokens": 4}), plain=True)
    found = await log.ask("/v1/embeddings", input="hi")
    assert found.counts == {"prompt_tokens": 4}
    assert found.context is not None
    assert found.context.api == "EMBEDDINGS"


@pytest.mark.parametrize("k", range(4))
@pytest.mark.parametrize("then", ["hang", "cut"])
async def test_a_stream_that_ends_early_has_the_events_that_came(log: Log, k: int, then: str) -> None:
    log.answers(FIRST, *[TOKEN] * k, then=then)
    expected = FIRST + k * TOKEN
    found = await log.ask(stream=True, leaves_after=expected if then == "hang" else None)
    assert found.answer == expected
    assert found.counts.get("events", 0) == k
    assert found.context is not None
    assert (found.context.model, found.context.output_tokens) == ("llama", 7)
    assert found.line.flags in ({"DC"} if then == "hang" else {"UC", "UPE"})
    if then == "hang":
        assert found.line.duration_us is None
    assert found.line.duration_ms is not None


async def test_a_message_that_ends_early_has_its_prompt(log: Log) -> None:
    log.answers(*MESSAGE[:3], then="hang")
    found = await log.ask("/v1/messages", stream=True, leaves_after=MESSAGE[2])
    counts = {"prompt_tokens": 31, "cached_tokens": 8, "created_tokens": 3}
    assert found.counts == {**counts, "events": 1, "first_content_us": 0}


async def test_refusals_are_lines(log: Log) -> None:
    log.answers(plain(choices=[]), plain=True)
    assert (await log.ask(key="sk-of-the-small")).line.status == 200
    for status, refused, key, model in (
        (429, "rate_limited", "sk-of-the-small", "llama"),
        (404, "unknown_model", "sk-of-the-web", HOSTILE + "\u0001\n"),
    ):
        found = await log.ask(key=key, model=model)
        assert found.context is not None
        assert (found.line.status, found.context.refused, found.context.model) == (status, refused, model)
        assert (found.line.served, found.line.attempts, found.line.usage) == (None, 0, None)


async def test_a_hostile_name_stays_one_line_and_what_it_is(log: Log) -> None:
    log.answers(plain(choices=[]), plain=True)
    found = await log.ask(key="sk-of-the-odd")
    assert found.context is not None
    assert found.context.tenant == HOSTILE


async def test_requests_for_no_inference_leave_no_line(log: Log) -> None:
    before = list(log.lines().values())
    http, url = log.gateway.http, log.gateway.url
    for method, path in (("GET", "/healthz"), ("GET", "/v1/models"), ("POST", "/v1/nothing"), ("GET", CHAT)):
        await http.request(method, f"{url}{path}")
    refused = await http.post(f"{url}{CHAT}", json={}, headers={"authorization": "Bearer nobody"})
    assert refused.status_code == 401
    log.answers(plain(choices=[]), plain=True)
    after = await log.ask()
    assert [*before, after.line] == list(log.lines().values())


async def test_without_extproc_lines_are_whole_and_tell_what_envoy_knows(log: Log) -> None:
    log.answers(FIRST, TOKEN, then="hang")
    body: dict[str, Any] = {"model": "llama", "messages": [], "stream": True}
    async with log.gateway.http.stream("POST", f"{log.gateway.url}{CHAT}", json=body) as answer:
        got = b""
        async for piece in answer.aiter_raw():
            got += piece
            if got == FIRST + TOKEN:
                break
        # between the decision and the end of the request
        os.kill(log.gateway.extproc, signal.SIGKILL)
    line = await log.line_of(answer.headers["x-request-id"])
    assert line.context is not None
    assert msgspec.json.decode(line.context, type=UsageContext).tenant == "acme"
    assert line.usage is not None
    assert line.usage.events == 1

    log.answers(FIRST, TOKEN, TOKEN, LAST, USAGE, DONE)
    found = await log.ask(key="sk-of-the-odd", stream=True)
    assert found.context is None
    assert (found.line.client, found.line.model) == ("odd", "llama")
    assert (found.counts["events"], found.counts["prompt_tokens"], found.line.cluster) == (
        2,
        31,
        "server/default/llama",
    )
    assert len({one.id for one in log.lines().values()}) == len(log.lines())


@pytest.mark.parametrize("is_plain", [True, False])
async def test_a_number_that_is_none_costs_no_line(log: Log, *, is_plain: bool) -> None:
    """Lua reads 1e999 as infinity, which JSON cannot say."""
    usage = b'"usage": {"prompt_tokens": 1e999, "completion_tokens": -1e999}'
    if is_plain:
        log.answers(b'{"choices": [{"message": {"content": "hi"}}], ' + usage + b"}", plain=True)
    else:
        log.answers(FIRST, TOKEN, b'data: {"choices": [], ' + usage + b"}\n\n", DONE)
    found = await log.ask(stream=not is_plain)
    assert found.line.status == 200
    assert not {"prompt_tokens", "completion_tokens"} & found.counts.keys()
