# SPDX-License-Identifier: Apache-2.0
"""The translator by itself: what it does where Envoy, or what comes from there, is not as it should be."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import threading
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from aiohttp import web

from bench.stack.processes import free_ports
from extproc.cli.translate import main
from extproc.listen_sockets import listen
from extproc.runtime import api_translator
from extproc.runtime.api_translator import running_translator
from extproc.runtime.api_translator_metrics import TranslatorMetrics, serving_metrics
from extproc.translate import json_fields
from extproc.wire_names import CUT_MARK, ENGINE_ANSWERED, LIMIT_MARK, TRANSLATE, TRANSLATED_SOCKET, TRANSLATOR_SOCKET
from tests.waiting import eventually

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator

MESSAGES = "/v1/messages"
DIRECTIVE = json.dumps({"client": "messages", "engine": "chat", "headers": {"x-gateway-destination-endpoint": "a:1"}})
BODY = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
ANSWER = {
    "id": "chatcmpl-1",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "hello"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 1},
}


@asynccontextmanager
async def client(folder: Path, metrics: TranslatorMetrics | None = None) -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.UnixConnector(str(folder / TRANSLATOR_SOCKET))
    async with (
        running_translator(folder, end_s=1.0, metrics=metrics),
        aiohttp.ClientSession("http://here", connector=connector) as http,
    ):
        yield http


@asynccontextmanager
async def envoy(folder: Path, answer: Any) -> AsyncIterator[list[dict[str, str]]]:  # noqa: ANN401 - a handler
    got: list[dict[str, str]] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        got.append({name.lower(): value for name, value in request.headers.items()})
        made: web.StreamResponse = await answer(request)
        return made

    app = web.Application()
    app.router.add_post("/{path:.*}", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.UnixSite(runner, str(folder / TRANSLATED_SOCKET)).start()
    yield got
    await runner.cleanup()


async def good(_: web.Request) -> web.StreamResponse:
    return web.json_response(ANSWER, headers={"x-attache-engine-host": "a:1", "x-other": "1", "retry-after": "3"})


async def post(
    http: aiohttp.ClientSession,
    path: str = MESSAGES,
    directive: str = DIRECTIVE,
    body: object = BODY,
    **more: Any,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    async with http.post(path, json=body, headers={TRANSLATE: directive, **more}) as answer:
        return answer.status, answer.headers, json.loads(await answer.read())


@pytest.mark.parametrize(
    "directive", ["", "{}", "nonsense", '{"client": "messages", "engine": "messages"}', '{"client": 1}']
)
async def test_without_a_directive_nothing_is_sent(tmp_path: Path, directive: str) -> None:
    async with envoy(tmp_path, good) as got, client(tmp_path) as http:
        status, _, body = await post(http, directive=directive)
    assert (status, got) == (500, [])
    assert "error" in body


async def test_while_envoy_does_not_listen_clients_are_told_to_try_again(tmp_path: Path) -> None:
    async with client(tmp_path) as http:
        for one, is_anthropic in (("messages", True), ("responses", False)):
            directive = json.dumps({"client": one, "engine": "chat"})
            status, _, body = await post(http, f"/v1/{one}", directive)
            assert status in {503, 400}
            assert (body.get("type") == "error") is is_anthropic
        status, _, body = await post(http)
        assert (status, body["error"]["type"]) == (503, "overloaded_error")
        # and it is found when it is there
        async with envoy(tmp_path, good):
            assert (await post(http))[0] == 200


async def test_headers_that_pass(tmp_path: Path) -> None:
    async with envoy(tmp_path, good) as got, client(tmp_path) as http:
        more = {
            "x-attache-other": "1",
            "x-envoy-retry-on": "5xx",
            "x-own": "1",
            "te": "trailers",
            "expect": "100-continue",
            "x-request-id": "r",
        }
        status, headers, _ = await post(http, **more, **{"anthropic-beta": "b"})
    assert status == 200
    (asked,) = got
    assert (asked["x-own"], asked["x-request-id"], asked["x-gateway-destination-endpoint"]) == ("1", "r", "a:1")
    assert not {*more, "anthropic-beta", TRANSLATE} - {"x-own", "x-request-id"} & asked.keys()
    assert (headers["x-attache-engine-host"], headers["retry-after"]) == ("a:1", "3")
    assert "x-other" not in headers


async def test_a_cookie_of_an_engine_is_sent_with_no_other_request(tmp_path: Path) -> None:
    async def sets_cookie(_: web.Request) -> web.StreamResponse:
        return web.json_response(ANSWER, headers={"set-cookie": "session=of-the-first; Path=/"})

    async with envoy(tmp_path, sets_cookie) as got, client(tmp_path) as http:
        for more in ({}, {}, {"cookie": "own=1"}):
            await post(http, **more)
    assert [asked.get("cookie") for asked in got] == [None, None, "own=1"]


@pytest.mark.parametrize("size", [20_000, 60_000])
async def test_a_long_header_of_an_engine_is_no_failure(tmp_path: Path, size: int) -> None:
    async def long(_: web.Request) -> web.StreamResponse:
        return web.json_response(ANSWER, headers={"x-policy": "a" * size})

    async with envoy(tmp_path, long), client(tmp_path) as http:
        assert (await post(http))[0] == 200


async def test_an_answer_that_is_not_http_is_a_502_in_the_clients_form(tmp_path: Path) -> None:
    async def broken(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.write(b"nonsense\r\n\r\n")
        request.transport.close()
        return web.Response()

    async with envoy(tmp_path, broken), client(tmp_path) as http:
        status, _, body = await post(http)
    assert (status, body["error"]["details"]["error_code"]) == (502, "answer_untranslatable")


async def test_an_engine_that_goes_on_after_an_error_is_ended(tmp_path: Path) -> None:
    left = asyncio.Event()

    async def goes_on(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await answer.prepare(request)
        await answer.write(b'data: {"error": {"message": "no"}}\n\n')
        try:
            while True:
                await answer.write(b"data: {}\n\n")
                await asyncio.sleep(0.01)
        except (OSError, asyncio.CancelledError):
            left.set()
            raise

    async with envoy(tmp_path, goes_on), client(tmp_path) as http, asyncio.timeout(10):
        body = {**BODY, "stream": True}
        async with http.post(MESSAGES, json=body, headers={TRANSLATE: DIRECTIVE}) as answer:
            assert (await answer.read()).startswith(b"event: error\n")
        await left.wait()


@pytest.mark.parametrize("is_answer", [False, True])
async def test_a_long_body_keeps_nobody_else_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_answer: bool
) -> None:
    """``is_answer``: the engine's is long, not the client's."""
    others = threading.Event()
    text = "a" * 1_000_000
    encode, decode = json_fields.encode_json, json_fields.decode_object

    def slow(body: bytes) -> Any:  # noqa: ANN401 - JSON
        if len(body) >= len(text):
            assert others.wait(10)
        return decode(body)

    async def long(_: web.Request) -> web.StreamResponse:
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        return web.Response(body=encode({"id": "1", "choices": [choice]}))

    monkeypatch.setattr(json_fields, "decode_object", slow)
    given = {**BODY, "messages": [{"role": "user", "content": "hi" if is_answer else text}]}
    async with envoy(tmp_path, long if is_answer else good) as got, client(tmp_path) as http:
        task = asyncio.create_task(post(http, body=given))
        if is_answer:
            await eventually(lambda: bool(got))
        await asyncio.sleep(0.2)
        assert (await post(http, directive=""))[0] == 500
        others.set()
        assert (await task)[0] == 200


async def test_a_long_event_keeps_nobody_else_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others, text, decode = threading.Event(), "a" * 1_000_000, json_fields.decode_object

    def slow(body: bytes) -> Any:  # noqa: ANN401 - JSON
        if len(body) >= len(text):
            assert others.wait(10)
        return decode(body)

    async def streams(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await answer.prepare(request)
        delta = {"index": 0, "delta": {"content": text}, "finish_reason": "stop"}
        await answer.write(
            b"data: " + json_fields.encode_json({"id": "1", "choices": [delta]}) + b"\n\ndata: [DONE]\n\n"
        )
        return answer

    monkeypatch.setattr(json_fields, "decode_object", slow)
    asked = {"json": {**BODY, "stream": True}, "headers": {TRANSLATE: DIRECTIVE}}
    async with envoy(tmp_path, streams), client(tmp_path) as http, http.post(MESSAGES, **asked) as answer:
        assert (await post(http, directive=""))[0] == 500
        others.set()
        whole = await answer.read()
    assert text.encode() in whole
    assert whole.endswith(b'data: {"type":"message_stop"}\n\n')


async def test_a_stream_that_an_engine_cuts_is_marked_behind_its_error(tmp_path: Path) -> None:
    async def cuts(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await answer.prepare(request)
        await answer.write(b'data: {"id": "1", "choices": [{"index": 0, "delta": {"content": "a"}}]}\n\n')
        assert request.transport is not None
        request.transport.close()
        return answer

    pieces = list[bytes]()

    async def read(answer: aiohttp.ClientResponse) -> None:
        async for piece in answer.content.iter_any():
            pieces.append(piece)

    asked = {"json": {**BODY, "stream": True}, "headers": {TRANSLATE: DIRECTIVE}}
    async with envoy(tmp_path, cuts), client(tmp_path) as http, http.post(MESSAGES, **asked) as answer:
        with pytest.raises(aiohttp.ClientPayloadError):
            await read(answer)
    error, mark = b"".join(pieces).rsplit(b"\n\n", 2)[:-1]
    assert b"event: error" in error
    assert mark + b"\n\n" == CUT_MARK


@pytest.mark.parametrize(("limit_s", "is_late"), [(0.3, True), (60.0, False), (None, False)])
@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_that_ends_at_its_time_limit_is_not_cut_by_the_engine(
    tmp_path: Path, *, limit_s: float | None, is_late: bool, stream: bool
) -> None:
    metrics = TranslatorMetrics()

    async def cuts(request: web.Request) -> web.StreamResponse:
        kind = "text/event-stream" if stream else "application/json"
        answer = web.StreamResponse(headers={"content-type": kind})
        await answer.prepare(request)
        await answer.write(b'data: {"id": "1", "choices": [{"index": 0, "delta": {"content": "a"}}]}\n\n')
        if is_late:
            await asyncio.sleep(0.3)
        assert request.transport is not None
        request.transport.close()
        return answer

    pieces = list[bytes]()

    async def read(answer: aiohttp.ClientResponse) -> None:
        async for piece in answer.content.iter_any():
            pieces.append(piece)

    order = json.dumps({"client": "messages", "engine": "chat", "limit_s": limit_s})
    asked = {"json": {**BODY, "stream": stream}, "headers": {TRANSLATE: order}}
    async with envoy(tmp_path, cuts), client(tmp_path, metrics) as http, http.post(MESSAGES, **asked) as answer:
        if stream:
            with pytest.raises(aiohttp.ClientPayloadError):
                await read(answer)
            assert b"".join(pieces).endswith(LIMIT_MARK if is_late else CUT_MARK)
        else:
            await read(answer)
            assert answer.status == (504 if is_late else 502)
            assert answer.headers.get(ENGINE_ANSWERED) == ("response_timeout" if is_late else None)
    assert (b"time allowed" in b"".join(pieces)) is is_late
    ended = "timeout" if is_late else "cut" if stream else "untranslatable"
    labels = {"client": "messages", "engine": "chat", "ended": ended}
    assert metrics.registry.get_sample_value("attache_translations_total", labels) == 1


def test_both_marks_of_a_cut_have_one_length() -> None:
    """Envoy's script reads the end of each piece once."""
    assert len(CUT_MARK) == len(LIMIT_MARK)


async def test_what_is_counted(tmp_path: Path) -> None:
    metrics, does = TranslatorMetrics(), [good]

    async def answer(request: web.Request) -> web.StreamResponse:
        return await does[0](request)

    async def none(_: web.Request) -> web.StreamResponse:
        return web.json_response({"choices": "none"})

    async def hangs(_: web.Request) -> web.StreamResponse:
        await asyncio.sleep(60)
        return web.Response()

    def value(ended: str) -> float | None:
        labels = {"client": "messages", "engine": "chat", "ended": ended}
        return metrics.registry.get_sample_value("attache_translations_total", labels)

    connector = aiohttp.UnixConnector(str(tmp_path / TRANSLATOR_SOCKET))
    async with (
        running_translator(tmp_path, end_s=1.0, metrics=metrics),
        aiohttp.ClientSession("http://here", connector=connector) as http,
        envoy(tmp_path, answer) as got,
    ):
        await post(http)
        await post(http, body={**BODY, "container": "c"})
        does[0] = none
        await post(http)
        does[0] = hangs
        asked = len(got)
        task = asyncio.create_task(post(http))
        await eventually(lambda: len(got) > asked)
        assert metrics.registry.get_sample_value("attache_translations_in_flight") == 1
        task.cancel()
        await eventually(lambda: value("left") == 1)
    assert [value(one) for one in ("answered", "refused", "untranslatable")] == [1, 1, 1]
    assert metrics.registry.get_sample_value("attache_translations_in_flight") == 0


async def test_its_page() -> None:
    (port,) = free_ports(1)
    metrics = TranslatorMetrics()
    url = f"http://127.0.0.1:{port}/metrics"
    async with serving_metrics(metrics, listen(f"127.0.0.1:{port}"), "127.0.0.1"), aiohttp.ClientSession() as http:
        async with http.get(url) as page:
            assert "attache_translations_in_flight 0.0" in await page.text()
        async with http.get(url, headers={"host": "elsewhere.example"}) as refused:
            assert refused.status >= 400


async def test_an_answer_without_end_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_translator, "_MOST_ANSWER_BYTES", 100_000)

    async def endless(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        while True:
            await answer.write(b"a" * 10_000)

    async with envoy(tmp_path, endless), client(tmp_path) as http:
        status, _, body = await post(http)
    assert (status, body["error"]["details"]["error_code"]) == (502, "answer_untranslatable")


async def test_an_answer_that_is_cut_is_a_502(tmp_path: Path) -> None:
    async def cut(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"content-length": "1000"})
        await answer.prepare(request)
        await answer.write(b"{")
        assert request.transport is not None
        request.transport.close()
        return answer

    async with envoy(tmp_path, cut), client(tmp_path) as http:
        assert (await post(http))[0] == 502


async def test_at_no_moment_others_reach_its_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modes = list[int]()

    def seen(address: str) -> socket.socket:
        made = listen(address)
        modes.append(stat.S_IMODE(Path(address.removeprefix("unix:")).stat().st_mode))
        return made

    monkeypatch.setattr("extproc.runtime.api_translator.listen", seen)
    before = os.umask(0)
    try:
        async with running_translator(tmp_path, end_s=1.0):
            assert modes == [0o600]
            assert os.umask(0) == 0
    finally:
        os.umask(before)


async def test_its_socket_is_its_users_alone_and_takes_the_place_of_an_old_one(tmp_path: Path) -> None:
    for _ in range(2):
        async with envoy(tmp_path, good), client(tmp_path) as http:
            assert (await post(http))[0] == 200
            assert stat.S_IMODE((tmp_path / TRANSLATOR_SOCKET).stat().st_mode) == 0o600


@pytest.mark.parametrize("kind", ["file", "long"])
def test_a_place_without_a_socket_is_said_at_the_start(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / ("a" * 120 if kind == "long" else "file")
    if kind == "file":
        folder.write_text("")
    assert main(["--bundle", str(folder)]) == 2
    assert folder.name in capsys.readouterr().err
