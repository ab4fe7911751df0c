# SPDX-License-Identifier: Apache-2.0
"""The batcher before a model server: answers are those of each alone, and no client costs another one its answer."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
from typing import Any

import httpx
import pytest

from controller.agents.runtime.batching.queue import BatchLimits
from tests.controller.agents.runtime.batching.double import INFER, PREDICT, batched
from tests.waiting import eventually


def tensor(*numbers: float, **more: object) -> dict[str, Any]:
    return {"inputs": [{"name": "x", "datatype": "FP64", "shape": [len(numbers)], "data": numbers}], **more}


async def test_requests_that_wait_are_one_call_and_get_their_own_answers() -> None:
    async with batched() as one:
        answers = await one.behind_a_call(*(one.predict(number, -number) for number in range(1, 9)))
    assert [answer.json() for answer in answers] == [{"predictions": [2 * n, -2 * n]} for n in range(1, 9)]
    assert one.engine.rows == [1, 16]
    assert one.counters.requests == {"joined": 8, "alone": 1, "passed": 0, "refused": 0}


async def test_v2_requests_are_joined_and_keep_their_ids() -> None:
    async with batched() as one:
        calls = (one.http.post(INFER, json=tensor(number, id=str(number))) for number in range(1, 9))
        answers = await one.behind_a_call(*calls)
    assert [(a.json()["id"], a.json()["outputs"][0]["data"]) for a in answers] == [
        (str(n), [2 * n]) for n in range(1, 9)
    ]
    assert one.engine.rows == [1, 8]


async def test_without_load_nothing_waits() -> None:
    async with batched(BatchLimits(max_delay_s=1000.0)) as one:
        for number in range(3):
            assert (await one.predict(number)).json() == {"predictions": [2 * number]}
    assert one.engine.rows == [1, 1, 1]


async def test_a_request_alone_reaches_the_engine_as_it_came() -> None:
    body = b'{ "instances": [ 1.0e0 ]\n}'
    headers = {"content-type": "application/json", "x-own": "a", "x-request-id": "7", "authorization": "Bearer t"}
    async with batched() as one:
        await one.http.post(PREDICT, content=body, headers=headers)
    assert one.engine.bodies == [body]
    assert headers.items() <= one.engine.seen[0].items()


@pytest.mark.parametrize("status", [400, 422, 500, 503])
async def test_a_request_that_the_engine_refuses_fails_alone(status: int) -> None:
    async with batched() as one:
        one.engine.poison, one.engine.poison_status = 13, status
        answers = await one.behind_a_call(*(one.predict(number) for number in range(32)))
    assert [a.status_code for a in answers] == [status if number == 13 else 200 for number in range(32)]
    assert [a.json() for number, a in enumerate(answers) if number != 13] == [
        {"predictions": [2 * number]} for number in range(32) if number != 13
    ]
    # one call for all, and each once by itself
    assert one.engine.rows == [1, 32, *[1] * 32]
    assert one.counters.failed_batches == 1


async def test_an_answer_of_another_length_is_not_shared_out(caplog: pytest.LogCaptureFixture) -> None:
    async with batched() as one:
        one.engine.drops = True
        answers = await one.behind_a_call(one.predict(1), one.predict(-1), one.predict(3))
    assert [a.json() for a in answers] == [{"predictions": [2]}, {"predictions": []}, {"predictions": [6]}]
    assert "2 predictions for 3 instances" in caplog.text


@pytest.mark.parametrize("header", ["Set-Cookie", "Content-Encoding"])
async def test_an_answer_with_a_header_for_one_client_is_not_shared_out(header: str) -> None:
    async with batched() as one:
        one.engine.headers = {header: "identity"}
        await one.behind_a_call(one.predict(1), one.predict(2))
    assert one.engine.rows == [1, 2, 1, 1]


async def test_requests_with_other_headers_are_not_joined() -> None:
    tokens = ["a", "a", "b", "b"]
    async with batched() as one:
        calls = (
            one.predict(number, headers={"authorization": token, "x-request-id": str(number), "x-attache-user": token})
            for number, token in enumerate(tokens)
        )
        answers = await one.behind_a_call(*calls)
    assert [a.json()["predictions"] for a in answers] == [[0], [2], [4], [6]]
    assert one.engine.rows == [1, 2, 2]
    assert sorted(seen["authorization"] for seen in one.engine.seen[1:]) == ["a", "b"]
    assert not any("x-request-id" in seen or "x-attache-user" in seen for seen in one.engine.seen[1:])


async def test_an_engine_that_ends_in_a_batch_fails_its_requests_in_time() -> None:
    async with batched() as one:
        one.engine.hangs = True
        first = asyncio.create_task(one.predict(0, 0))
        await eventually(lambda: bool(one.engine.rows))
        calls = [asyncio.create_task(one.predict(number)) for number in range(1, 5)]
        await eventually(lambda: one.batcher.queue.held == 5)
        await one.engine.stop()
        answers = await asyncio.gather(first, *calls)
    assert {a.status_code for a in answers} == {502}
    assert all("the engine does not answer" in a.json()["error"] for a in answers)


async def test_after_a_broken_connection_each_is_tried_once_by_itself() -> None:
    async with batched() as one:
        one.engine.hangs = True

        async def restart() -> None:
            await eventually(lambda: 4 in one.engine.rows)
            await one.engine.stop()
            await one.engine.start()

        restarting = asyncio.create_task(restart())
        answers = await one.behind_a_call(*(one.predict(number) for number in range(4)))
        await restarting
    # connections are refused for a moment; who gets through then has the right answer
    assert all(a.status_code == 502 or a.json() == {"predictions": [2 * n]} for n, a in enumerate(answers))


async def test_a_joined_call_has_a_time_limit() -> None:
    async with batched(timeout_s=0.2) as one:
        one.engine.hangs = True
        answers = await one.behind_a_call(*(one.predict(number) for number in range(3)))
    assert {a.status_code for a in answers} == {504}
    assert "has not answered in 0.2 s" in answers[0].json()["error"]
    assert one.engine.rows == [1, 3]


async def test_a_client_that_leaves_is_not_in_the_batch() -> None:
    async with batched() as one:
        one.engine.gate.clear()
        first = asyncio.create_task(one.predict(0))
        await eventually(lambda: bool(one.engine.rows))
        calls = [asyncio.create_task(one.predict(number)) for number in range(1, 4)]
        await eventually(lambda: one.batcher.queue.waiting_count == 3)
        calls[1].cancel()
        await eventually(lambda: one.batcher.queue.waiting_count == 2)
        one.engine.gate.set()
        answers = await asyncio.gather(first, calls[0], calls[2])
    assert [a.json()["predictions"] for a in answers] == [[0], [2], [6]]
    assert one.engine.rows == [1, 2]


async def test_a_call_ends_when_all_of_its_clients_have_left() -> None:
    async with batched() as one:
        one.engine.hangs = True
        calls = [asyncio.create_task(one.predict(number)) for number in range(3)]
        await eventually(lambda: 2 in one.engine.rows)
        for call in calls:
            call.cancel()
        await eventually(lambda: one.engine.cancelled == 1)
        assert (one.batcher.queue.held, one.batcher.queue.held_bytes) == (0, 0)


async def test_too_many_requests_are_refused() -> None:
    async with batched(BatchLimits(max_delay_s=10.0, max_held=4)) as one:
        answers = await one.behind_a_call(*(one.predict(number) for number in range(8)))
    assert sorted(a.status_code for a in answers) == [200] * 3 + [503] * 5
    assert one.counters.requests["refused"] == 5
    assert one.batcher.queue.held == 0


async def test_too_many_bytes_are_refused() -> None:
    async with batched(BatchLimits(max_delay_s=10.0, max_bytes=200_000)) as one:
        answers = await one.behind_a_call(*(one.predict(*[1.5] * 20_000) for _ in range(4)))
    assert sorted(a.status_code for a in answers) == [200, 200, 503, 503]
    assert one.batcher.queue.held_bytes == 0


async def test_a_body_that_comes_too_slowly_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controller.agents.runtime.batcher._BODY_S", 0.1)
    async with batched() as one:
        reader, writer = await asyncio.open_connection("127.0.0.1", one.http.base_url.port)
        head = f"POST {PREDICT} HTTP/1.1\r\nHost: m\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{{"
        writer.write(head.encode())
        assert (await reader.readline()).startswith(b"HTTP/1.1 408")
        writer.close()
    assert one.batcher.queue.held == 0


async def test_an_answer_that_is_too_long_is_not_shared_out() -> None:
    async with batched() as one:
        one.engine.answer_bytes = 3 * 1024 * 1024
        answers = await one.behind_a_call(one.predict(1), one.predict(2))
    assert [len(a.content) > 3 * 1024 * 1024 for a in answers] == [True, True]
    assert one.engine.rows == [1, 2, 1, 1]


PASSED: list[dict[str, Any]] = [
    {"method": "POST", "url": "/echo", "content": os.urandom(3_000_000)},
    {"method": "PUT", "url": "/echo/a%2Fb/../c?x=%20&y", "content": b"{}"},
    {"method": "POST", "url": "/echo", "content": gzip.compress(b"{}"), "headers": {"content-encoding": "gzip"}},
    {"method": "DELETE", "url": "/echo//x"},
    {"method": "GET", "url": "/echo"},
    {"method": "HEAD", "url": "/echo/1"},
]


@pytest.mark.parametrize("call", PASSED, ids=lambda call: f"{call['method']} {call['url'][:8]}")
async def test_other_requests_pass_byte_for_byte(call: dict[str, Any]) -> None:
    async with batched() as one:
        request = one.http.build_request(**call)
        answer = await one.http.send(request, stream=True)
        raw = b"".join([piece async for piece in answer.aiter_raw()])
        await answer.aclose()
    assert (answer.status_code, raw) == (207, call.get("content", b""))
    path = request.url.raw_path.decode()
    assert answer.headers["x-seen"] == f"{call['method']} {path} {one.http.base_url.netloc.decode()}"


async def test_bodies_without_a_length_pass() -> None:
    async def pieces() -> Any:  # noqa: ANN401 - an async generator
        for number in range(20):
            yield bytes([number]) * 10_000

    async with batched() as one:
        answer = await one.http.post("/echo", content=pieces())
    assert answer.content == b"".join([bytes([number]) * 10_000 for number in range(20)])


@pytest.mark.parametrize(
    ("path", "content", "headers"),
    [
        (INFER, b'{"inputs":[]}\x01\x02\xff', {"Inference-Header-Content-Length": "13"}),
        (PREDICT, b'{"instances":[1],"a":[' + b"1," * 150_000 + b"1]}", {}),
        (PREDICT, b'{"instances":[1, 2, [3]]}', {}),
        (PREDICT, json.dumps({"instances": [1] * 33}).encode(), {}),
    ],
)
async def test_predictions_that_cannot_be_joined_pass_byte_for_byte(
    path: str, content: bytes, headers: dict[str, str]
) -> None:
    async with batched() as one:
        headers = {"content-type": "application/json", **headers}
        await one.behind_a_call(*(one.http.post(path, content=content, headers=headers) for _ in range(2)))
    assert one.engine.bodies[1:] == [content] * 2
    assert one.counters.requests["passed"] == 2


async def test_streams_pass_as_they_come() -> None:
    async with batched() as one, one.http.stream("GET", "/stream") as answer:
        pieces = answer.aiter_raw()
        assert await anext(pieces) == b"data: 1\n\n"
        one.engine.release.set()
        assert b"".join([piece async for piece in pieces]) == b"data: 2\n\n"
        assert answer.headers["content-type"] == "text/event-stream"


async def test_an_answer_that_is_cut_does_not_look_whole() -> None:
    async with batched() as one, one.http.stream("GET", "/stream") as answer:
        pieces = answer.aiter_raw()
        await anext(pieces)
        await one.engine.stop()
        with pytest.raises(httpx.RemoteProtocolError):
            await anext(pieces)


async def test_without_an_engine_the_error_says_so() -> None:
    async with batched() as one:
        await one.engine.stop()
        answers = [await one.predict(1), await one.http.get("/echo")]
    assert [a.status_code for a in answers] == [502, 502]
    assert "the engine does not answer" in answers[1].json()["error"]


@pytest.mark.parametrize("target", ["@example.com/x", "http://example.com/x", "*"])
async def test_no_target_reaches_another_host(target: str) -> None:
    async with batched() as one:
        reader, writer = await asyncio.open_connection("127.0.0.1", one.http.base_url.port)
        writer.write(f"GET {target} HTTP/1.1\r\nHost: m\r\nConnection: close\r\n\r\n".encode())
        assert b" 40" in await reader.readline()
        writer.close()
