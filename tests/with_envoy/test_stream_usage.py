# SPDX-License-Identifier: Apache-2.0
"""Clients see streams as engines made them: the chunk with usage that we asked for is gone, and its usage is
counted.
"""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING

import openai
import pytest
import pytest_asyncio

from controller.bundle.envoy.usage_filters import MOST_HELD_BYTES
from controller.bundle.sync import write_bundle_once
from extproc.wire_names import USAGE_NAMESPACE
from tests.examples import IS_SLOW
from tests.waiting import eventually
from tests.with_envoy import stand_in
from tests.with_envoy.stand_in import Gateway, gateway_on

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from extproc.api.config_snapshot import Snapshot

pytestmark = pytest.mark.asyncio(loop_scope="module")

METADATA = "metadata.jsonl"
TOKEN = b'data: {"id": "1", "choices": [{"index": 0, "delta": {"content": "hi"}}], "usage": null}\n\n'
USAGE = (
    b'data: {"id": "1", "choices": [], "usage": {"prompt_tokens": 31, "completion_tokens": 7, '
    b'"prompt_tokens_details": {"cached_tokens": 16}}}\n\n'
)
DONE = b"data: [DONE]\n\n"
COUNTED = {"prompt": 31, "completion": 7, "cached": 16}
UNKNOWN = dict.fromkeys(COUNTED)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    directory = tmp_path_factory.mktemp("usage")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stand_in, "write_bundle_once", partial(write_with_metadata, directory / METADATA))
        async with gateway_on(directory) as running:
            yield running


def write_with_metadata(log: Path, snapshot: Snapshot, bundle: Path, *rest: str) -> None:
    """As the bundle is, and ``log`` gets a line of JSON for each request: what the filters have read in its answer."""
    write_bundle_once(snapshot, bundle, *rest)
    file = bundle / "lds.json"
    content = json.loads(file.read_text())
    for listener in content["resources"]:
        for chain in listener["filter_chains"]:
            chain["filters"][0]["typed_config"]["access_log"].append(
                {
                    "name": "envoy.access_loggers.file",
                    "typed_config": {
                        "@type": "type.googleapis.com/envoy.extensions.access_loggers.file.v3.FileAccessLog",
                        "path": str(log),
                        "log_format": {"json_format": {"usage": f"%DYNAMIC_METADATA({USAGE_NAMESPACE})%"}},
                    },
                }
            )
    file.write_text(json.dumps(content))


async def answer_to(
    gateway: Gateway, pieces: Sequence[bytes], path: str = "chat/completions", **fields: object
) -> bytes:
    gateway.engine.pieces = pieces
    body = {"model": "llama", "messages": [], "prompt": "x", "stream": True, **fields}
    answer = await gateway.http.post(f"{gateway.url}/v1/{path}", json=body)
    assert answer.status_code == 200
    return answer.content


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"], ids=["LF", "CRLF"])
async def test_a_chunk_cut_anywhere_is_dropped_whole_and_counted(gateway: Gateway, end: bytes) -> None:
    token, usage, done = (event.replace(b"\n\n", end) for event in (TOKEN, USAGE, DONE))
    whole = token + usage + done
    first, last = len(token) - len(end), len(token) + len(usage) + len(end)
    # where lines end in CRLF, the ends of events alone are new
    cuts = [*range(first, first + 12), *range(last - 12, last)]
    if end == b"\n\n":
        cuts += range(first + 12, last - 12, 1 if IS_SLOW else 4)
    before = len(gateway.outcomes())
    for cut in cuts:
        assert await answer_to(gateway, [whole[:cut], whole[cut:]]) == token + done
    assert await gateway.outcomes_since(before, len(cuts)) == [COUNTED] * len(cuts)


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
async def test_a_stream_in_single_bytes_loses_the_chunk_only(gateway: Gateway, path: str) -> None:
    before = len(gateway.outcomes())
    whole = TOKEN + USAGE + DONE
    assert await answer_to(gateway, [whole[at : at + 1] for at in range(len(whole))], path) == TOKEN + DONE
    assert await gateway.outcomes_since(before) == [COUNTED]


@pytest.mark.parametrize(
    "pieces",
    [
        [TOKEN, DONE],
        # text of a model that looks like the chunk
        [
            b'data: {"choices": [{"delta": {"content": "\\"choices\\": [], \\"usage\\": {\\"prompt_tokens\\":'
            b' 9}"}}]}\n\n'
        ],
        [TOKEN, b"data: an end without its blank line"],
        [b": a comment\n\n", b"data: not JSON\n\n", b"\n\n\n"],
        # longer than what is held back
        [b"data: " + b"x" * MOST_HELD_BYTES, b"y" * MOST_HELD_BYTES + b"\n", b"\n" + TOKEN, DONE],
    ],
    ids=["no usage", "text", "no end", "odd events", "a long event"],
)
async def test_all_else_passes_unchanged(gateway: Gateway, pieces: list[bytes]) -> None:
    before = len(gateway.outcomes())
    assert await answer_to(gateway, pieces) == b"".join(pieces)
    assert await gateway.outcomes_since(before) == [UNKNOWN]


@pytest.mark.parametrize("data", ["null", "7", "-1.5e9", "true", '"usage"', "[]", "[null]", "{", '{"usage":', '"\\'])
@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses", "messages"])
async def test_an_event_whose_data_is_no_object_passes(gateway: Gateway, path: str, data: str) -> None:
    piece = f"event: odd\ndata: {data}\n\n".encode()
    counts = {"input_tokens": 31, "prompt_tokens": 31, "output_tokens": 7, "completion_tokens": 7, "cached_tokens": 16}
    usage = f"data: {json.dumps({'choices': [{}], 'usage': counts})}\n\n".encode()
    before = len(gateway.outcomes())
    assert await answer_to(gateway, [piece + usage], path, input="x", max_tokens=7) == piece + usage
    assert await gateway.outcomes_since(before) == [COUNTED]


# the second becomes too long with the first half of its end
@pytest.mark.parametrize("size", [3 * MOST_HELD_BYTES, MOST_HELD_BYTES])
async def test_the_chunk_is_dropped_after_an_event_that_was_too_long_to_hold(gateway: Gateway, size: int) -> None:
    long = b"data: ".ljust(size, b"x")
    before = len(gateway.outcomes())
    assert await answer_to(gateway, [long, b"\n", b"\n" + USAGE + DONE]) == long + b"\n\n" + DONE
    assert await gateway.outcomes_since(before) == [COUNTED]


async def test_usage_of_a_plain_answer_is_read_wherever_it_is_cut(gateway: Gateway) -> None:
    whole = (
        b'{"choices": [{"message": {"content": "\\"usage\\": {\\"prompt_tokens\\": 9}"}}], '
        + USAGE[USAGE.index(b'"usage"') : -2]
    )
    before = len(gateway.outcomes())
    gateway.engine.headers = {"content-type": "application/json"}
    try:
        for pieces in ([whole], [whole[at : at + 1] for at in range(len(whole))]):
            assert await answer_to(gateway, pieces, stream=False) == whole
    finally:
        gateway.engine.headers = {}
    assert await gateway.outcomes_since(before, 2) == [COUNTED, COUNTED]


async def test_usage_beside_choices_is_counted_and_stays(gateway: Gateway) -> None:
    last = USAGE.replace(b"[]", b'[{"index": 0, "delta": {}}]')
    before = len(gateway.outcomes())
    assert await answer_to(gateway, [TOKEN, last, DONE]) == TOKEN + last + DONE
    assert await gateway.outcomes_since(before) == [COUNTED]


async def test_a_client_that_asks_for_usage_gets_it(gateway: Gateway) -> None:
    before = len(gateway.outcomes())
    pieces = [TOKEN, USAGE, DONE]
    assert await answer_to(gateway, pieces, stream_options={"include_usage": True}) == b"".join(pieces)
    assert await gateway.outcomes_since(before) == [COUNTED]


@pytest.mark.parametrize("is_plain", [True, False])
async def test_no_client_has_an_engine_compress_what_it_used(gateway: Gateway, *, is_plain: bool) -> None:
    whole = b'{"choices": [], ' + USAGE[USAGE.index(b'"usage"') : -2] if is_plain else TOKEN + USAGE + DONE
    before, gateway.engine.pieces = len(gateway.outcomes()), [whole]
    gateway.engine.is_plain, gateway.engine.compresses = is_plain, True
    try:
        asked = {"model": "llama", "messages": [], "stream": not is_plain}
        headers = {"accept-encoding": "gzip"}
        answer = await gateway.http.post(f"{gateway.url}/v1/chat/completions", json=asked, headers=headers)
    finally:
        gateway.engine.is_plain = gateway.engine.compresses = False
    assert answer.content == (whole if is_plain else TOKEN + DONE)
    assert await gateway.outcomes_since(before) == [COUNTED]


async def test_a_compressed_stream_passes(gateway: Gateway) -> None:
    before = len(gateway.outcomes())
    # not really compressed: whoever looks inside would drop the chunk
    gateway.engine.headers = {"content-encoding": "br"}
    gateway.engine.pieces = [TOKEN, USAGE, DONE]
    try:
        asked = {"model": "llama", "messages": [], "stream": True}
        async with gateway.http.stream("POST", f"{gateway.url}/v1/chat/completions", json=asked) as answer:
            assert b"".join([piece async for piece in answer.aiter_raw()]) == TOKEN + USAGE + DONE
        assert await gateway.outcomes_since(before) == [UNKNOWN]
    finally:
        gateway.engine.headers = {}
    # which is no failure of the engine
    assert json.loads(gateway.decisions.read_text().splitlines()[-1])["is_encoded"]


async def test_the_plainest_loops_of_openais_client_work(gateway: Gateway) -> None:
    before = len(gateway.outcomes())
    gateway.engine.pieces = [TOKEN, TOKEN, USAGE, DONE]
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        chat = await client.chat.completions.create(model="llama", messages=[], stream=True)
        assert [chunk.choices[0].delta.content async for chunk in chat] == ["hi", "hi"]
        assert gateway.engine.asked["stream_options"] == {"include_usage": True}
        gateway.engine.pieces = [TOKEN.replace(b'"delta": {"content": "hi"}', b'"text": "hi"'), USAGE, DONE]
        completion = await client.completions.create(model="llama", prompt="x", stream=True)
        assert [chunk.choices[0].text async for chunk in completion] == ["hi"]
    assert await gateway.outcomes_since(before, 2) == [COUNTED, COUNTED]


async def test_usage_of_the_responses_api_is_read_where_a_request_repeats_the_name(gateway: Gateway) -> None:
    response = {
        "tools": [{"parameters": {"usage": {"input_tokens": 0, "output_tokens": 0}}}],
        "usage": {"input_tokens": 31, "output_tokens": 7, "input_tokens_details": {"cached_tokens": 16}},
    }
    event = {"type": "response.completed", "response": response}
    piece = f"event: response.completed\ndata: {json.dumps(event)}\n\n".encode()
    before = len(gateway.outcomes())
    assert await answer_to(gateway, [piece], "responses", input="x") == piece
    assert await gateway.outcomes_since(before) == [COUNTED]


FORGED = {"prompt_tokens": 0, "completion_tokens": 0, "input_tokens": 0, "output_tokens": 0, "cached_tokens": 0}
OWN = {"input_tokens": 31, "output_tokens": 7, "input_tokens_details": {"cached_tokens": 16}}
ANSWERS = {
    "before": {"tools": [{"parameters": {"usage": FORGED}}], "output": [], "usage": OWN},
    "after": {"usage": OWN, "metadata": {"usage": FORGED}, "tools": [{"usage": FORGED}]},
    "text": {"instructions": '"usage": {"input_tokens": 0}} \\', "a": "usage", "b": {"input_tokens": 0}, "usage": OWN},
    "words": {
        "usag": FORGED,
        "usages": FORGED,
        "the usage": FORGED,
        "us\\age": FORGED,
        "usage": OWN,
        "z": ["usage", FORGED],
    },
}


@pytest.mark.parametrize("name", ANSWERS)
async def test_usage_of_a_plain_response_is_its_own_wherever_it_is_cut(gateway: Gateway, name: str) -> None:
    whole = json.dumps(ANSWERS[name]).encode()
    before = len(gateway.outcomes())
    gateway.engine.headers = {"content-type": "application/json"}
    cuts = [
        [whole],
        [whole[at : at + 1] for at in range(len(whole))],
        [whole[at : at + 7] for at in range(0, len(whole), 7)],
    ]
    try:
        for pieces in cuts:
            assert await answer_to(gateway, pieces, "responses", stream=False, input="x") == whole
    finally:
        gateway.engine.headers = {}
    assert await gateway.outcomes_since(before, len(cuts)) == [COUNTED] * len(cuts)


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("line_end", ["\n", "\r\n"], ids=["LF", "CRLF"])
async def test_a_streamed_response_cannot_forge_usage_wherever_it_is_cut(
    gateway: Gateway, name: str, line_end: str
) -> None:
    forged = json.dumps({"usage": FORGED})
    events = [
        {"type": "response.created", "response": {**ANSWERS[name], "usage": None}},
        {"type": "response.output_text.delta", "delta": forged, "item": {"usage": FORGED}, "message": "usage"},
        {"a": {"usage": FORGED, "response": {"usage": FORGED}}, "response": ANSWERS[name], "b": [{"usage": FORGED}]},
    ]
    lines = [line for event in events for line in (f"event: {event.get('type')}", f"data: {json.dumps(event)}", "")]
    whole = line_end.join([*lines, ""]).encode()
    before = len(gateway.outcomes())
    cuts = [[whole[at : at + size] for at in range(0, len(whole), size)] for size in (1, 7, 100, 10_000)]
    for pieces in cuts:
        assert await answer_to(gateway, pieces, "responses", input="x") == whole
    assert await gateway.outcomes_since(before, len(cuts)) == [COUNTED] * len(cuts)


async def test_an_engine_that_takes_no_stream_options_is_sent_none(tmp_path: Path) -> None:
    async with gateway_on(tmp_path, more={"streamUsage": "AsRequested"}) as quiet:
        assert await answer_to(quiet, [TOKEN, USAGE, DONE]) == TOKEN + USAGE + DONE
        assert "stream_options" not in quiet.engine.asked


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def hiding(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    directory = tmp_path_factory.mktemp("hiding")
    async with gateway_on(directory, gateway={"cachedTokens": "Hidden", "failureMode": "Open"}) as running:
        yield running


RESPONSE = json.dumps({"output": ['"cached_tokens": 5'], "usage": OWN}).encode()
PLAIN = b'{"choices": [{"message": {"content": "\\"cached_tokens\\": 5"}}], ' + USAGE[USAGE.index(b'"usage"') : -2]
CLAUDE = b'{"usage": {"cache_read_input_tokens":1024,"cache_creation_input_tokens" : 12,"prompt_tokens": 31, "x": 16}}'
HIDDEN_CLAUDE = (
    b'{"usage": {"cache_read_input_tokens":0,"cache_creation_input_tokens" : 0,"prompt_tokens": 31, "x": 16}}'
)
SSE, JSON = "text/event-stream", "application/json"
# of the Messages API: what was cached is no part of the input
MESSAGE_USAGE = (
    b'"usage":{"input_tokens":15,"output_tokens":7,"cache_creation_input_tokens":0,"cache_read_input_tokens":16}'
)
HIDDEN_MESSAGE_USAGE = b'"usage":{"input_tokens":31,"output_tokens":7}'
MESSAGE = (
    b'{"content":[{"type":"tool_use","input":{"usage":{"input_tokens":900000}}},{"type":"text","text":"\\"usage\\":{"}],'
    + MESSAGE_USAGE
    + b"}"
)
EVENTS = (
    b"event: message_start\ndata:"
    b' {"type":"message_start","message":{"usage":{"input_tokens":31,"output_tokens":0}}}\n\nevent:'
    b' content_block_start\ndata: {"type":"content_block_start","content_block":{"usage":{"input_tokens":9}}}\n\nevent:'
    b' message_delta\ndata: {"type":"message_delta",'
    + MESSAGE_USAGE
    + b'}\n\nevent: message_stop\ndata: {"type":"message_stop"}\n\n'
)


@pytest.mark.parametrize(
    ("path", "kind", "whole", "cached"),
    [
        ("chat/completions", SSE, TOKEN + USAGE + DONE, 16),
        ("chat/completions", JSON, PLAIN, 16),
        ("chat/completions", JSON, CLAUDE, None),
        ("completions", SSE, TOKEN + USAGE + DONE, 16),
        ("responses", JSON, RESPONSE, 16),
        ("responses", SSE, b'data: {"response": ' + RESPONSE + b"}\n\n" + DONE, 16),
        ("messages", JSON, MESSAGE, 16),
        ("messages", SSE, EVENTS, 16),
    ],
)
async def test_cached_tokens_are_hidden_wherever_an_answer_is_cut(
    hiding: Gateway, path: str, kind: str, whole: bytes, cached: int | None
) -> None:
    shown = whole.replace(b', "prompt_tokens_details": {"cached_tokens": 16}', b"")
    shown = shown.replace(MESSAGE_USAGE, HIDDEN_MESSAGE_USAGE)
    shown = HIDDEN_CLAUDE if whole is CLAUDE else shown.replace(b'"cached_tokens": 16', b'"cached_tokens": 0')
    before = len(hiding.outcomes())
    hiding.engine.headers = {"content-type": kind}
    cuts = [[whole], *([whole[at : at + size] for at in range(0, len(whole), size)] for size in (1, 5))]
    asked = {"stream_options": {"include_usage": True}} if kind == SSE and path not in {"responses", "messages"} else {}
    try:
        for pieces in cuts:
            assert await answer_to(hiding, pieces, path, stream=kind == SSE, input="x", **asked) == shown
    finally:
        hiding.engine.headers = {}
    # accounts and indexes are settled by what the engine reported
    assert {one["cached"] for one in await hiding.outcomes_since(before, len(cuts))} == {cached}


@pytest.mark.parametrize("size", [1, 7, 10_000])
@pytest.mark.parametrize("kind", [SSE, JSON])
async def test_what_was_cached_changes_no_byte_of_an_answer_nor_their_number(
    hiding: Gateway, kind: str, size: int
) -> None:
    shown = set()
    # with a length of its own
    hiding.engine.is_plain = is_whole = kind == JSON and size == 10_000
    hiding.engine.headers = {} if is_whole else {"content-type": kind}
    try:
        for details in (
            b', "prompt_tokens_details": {"cached_tokens": 1024, "audio_tokens": null}',
            b', "prompt_tokens_details": {"cached_tokens":16}',
            b', "prompt_tokens_details" : null',
            b"",
        ):
            usage = b'{"choices": [], "usage": {"prompt_tokens": 2000, "completion_tokens": 7%b}}' % details
            whole = usage if kind == JSON else b"data: " + usage + b"\n\n" + DONE
            pieces = [whole[at : at + size] for at in range(0, len(whole), size)]
            asked = {} if kind == JSON else {"stream_options": {"include_usage": True}}
            hiding.engine.pieces = pieces
            body = {"model": "llama", "messages": [], "stream": kind == SSE, **asked}
            answer = await hiding.http.post(f"{hiding.url}/v1/chat/completions", json=body)
            assert (answer.status_code, "content-length" in answer.headers) == (200, False)
            shown.add(answer.content)
    finally:
        hiding.engine.headers, hiding.engine.is_plain = {}, False
    assert len(shown) == 1


@pytest.mark.parametrize("size", [1, 7, 10_000])
@pytest.mark.parametrize(
    ("path", "kind", "told"),
    [
        *(
            ("chat/completions", kind, told)
            for kind in (SSE, JSON)
            for told in (
                (
                    b', "sglext": {"cached_tokens_details": {"device": 1024, "host": 16, "storage_backend": "a"}}',
                    b', "sglext":{"cached_tokens_details":{"device":2,"host":0}}',
                    b"",
                ),
                (
                    b', "sglext": {"routed_experts": "ab", "cached_tokens_details": {"device": 1024}}',
                    b', "sglext": {"cached_tokens_details": {"device": 5, "host": 7}, "routed_experts": "ab"}',
                    b', "sglext": {"cached_tokens_details": null, "routed_experts": "ab"}',
                    b', "sglext": {"routed_experts": "ab"}',
                ),
                (b', "prompt_cache_hit_tokens": 7', b', "prompt_cache_hit_tokens": 1024'),
                (b', "x": {"num_cached_tokens": 7}', b', "x": {"num_cached_tokens": 1024}'),
            )
        ),
        (
            "responses",
            JSON,
            (b', "x": {"cached_tokens_per_turn": [7, 1024]}', b', "x": {"cached_tokens_per_turn": [0, 1]}'),
        ),
    ],
)
async def test_what_was_cached_is_hidden_by_each_name_that_engines_have(
    hiding: Gateway, path: str, kind: str, told: Sequence[bytes], size: int
) -> None:
    shown = set()
    hiding.engine.headers = {"content-type": kind}
    try:
        for more in told:
            answer = b'{"id": "1", "choices": [{"index": 0}]%b}' % more
            whole = answer if kind == JSON else b"data: " + answer + b"\n\n" + DONE
            pieces = [whole[at : at + size] for at in range(0, len(whole), size)]
            shown.add(await answer_to(hiding, pieces, path, stream=kind == SSE, input="x"))
    finally:
        hiding.engine.headers = {}
    assert len(shown) == 1
    assert b"1024" not in shown.pop()


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
@pytest.mark.parametrize("kind", [SSE, JSON])
async def test_an_encoded_answer_in_which_nothing_can_be_hidden_does_not_pass(
    hiding: Gateway, path: str, kind: str
) -> None:
    engine = hiding.engine
    engine.headers, engine.pieces = {"content-type": kind, "content-encoding": "br"}, [TOKEN, USAGE, DONE]
    body = {"model": "llama", "messages": [], "input": "x", "max_tokens": 7, "stream": kind == SSE}
    try:
        refused = await hiding.http.post(f"{hiding.url}/v1/{path}", json=body)
        # nothing was used by an error
        engine.status, engine.headers, engine.pieces = 400, {"content-encoding": "x", "content-type": JSON}, [b"{}"]
        passed = await hiding.http.post(f"{hiding.url}/v1/{path}", json=body)
    finally:
        engine.status, engine.headers = 200, {}
    assert (refused.status_code, refused.headers["content-type"]) == (502, JSON)
    assert not {"content-encoding", "content-length"} & set(refused.headers)
    assert (refused.json()["type"], refused.json()["error"]["code"]) == ("error", "encoded_answer")
    assert (passed.status_code, passed.content) == (400, b"{}")


async def test_an_event_that_comes_only_where_something_was_cached_is_dropped(hiding: Gateway) -> None:
    event = b'data: {"id": "1", "choices": [], "sglext": {"cached_tokens_details": {"device": 5, "host": 7}}}\n\n'
    assert await answer_to(hiding, [TOKEN + event, USAGE + DONE]) == TOKEN + DONE


@pytest.mark.parametrize("size", [1, 7, 10_000])
@pytest.mark.parametrize("kind", [SSE, JSON])
async def test_what_was_cached_cannot_be_seen_in_the_messages_api_either(hiding: Gateway, kind: str, size: int) -> None:
    shown = set()
    hiding.engine.headers = {"content-type": kind}
    try:
        for told in (
            b'"input_tokens":976,"output_tokens":7,"cache_creation_input_tokens":0,"cache_read_input_tokens":1024',
            b'"input_tokens":1900,"output_tokens":7,"cache_creation_input_tokens":84, "cache_read_input_tokens" : 16',
            b'"input_tokens":2000,"output_tokens":7,"cache_creation_input_tokens":null,"cache_read_input_tokens":null',
            b'"cache_read_input_tokens":1999,"input_tokens":1,"output_tokens":7',
            b'"input_tokens":2000,"output_tokens":7',
        ):
            usage = b'{"type":"message_delta","usage":{%b}}' % told
            whole = usage if kind == JSON else b"event: message_delta\ndata: " + usage + b"\n\n"
            hiding.engine.pieces = [whole[at : at + size] for at in range(0, len(whole), size)]
            body = {"model": "llama", "messages": [], "max_tokens": 7, "stream": kind == SSE}
            answer = await hiding.http.post(f"{hiding.url}/v1/messages", json=body)
            assert (answer.status_code, "content-length" in answer.headers) == (200, False)
            shown.add(answer.content)
    finally:
        hiding.engine.headers = {}
    assert len(shown) == 1
    assert b'"input_tokens":2000' in shown.pop()


async def test_hidden_counts_in_a_stream_longer_than_what_is_held_stay_hidden(hiding: Gateway) -> None:
    long = (
        b'data: {"text": "' + b"x" * 2 * MOST_HELD_BYTES + b'", "usage": {"prompt_tokens": 1, "cached_tokens": 16}}\n\n'
    )
    cut = len(long) - 6
    shown = await answer_to(hiding, [long[:70_000], long[70_000:cut], long[cut:]])
    assert shown == long.replace(b": 16", b": 0")


@pytest.mark.parametrize(
    ("kind", "whole", "counted"),
    [
        # neither the model's own objects nor an event of content say what was used
        (JSON, MESSAGE, {"prompt": 31, "completion": 7, "cached": 16}),
        (SSE, EVENTS, {"prompt": 31, "completion": 7, "cached": 16}),
        # a stream that ends early: what was written is not known, rather than nothing
        (SSE, EVENTS[: EVENTS.index(b"event: message_delta")], {"prompt": 31, "completion": None, "cached": None}),
    ],
    ids=["plain", "streamed", "cut off"],
)
async def test_usage_of_the_messages_api_is_read_wherever_it_is_cut(
    gateway: Gateway, kind: str, whole: bytes, counted: dict[str, int | None]
) -> None:
    before = len(gateway.outcomes())
    gateway.engine.headers = {"content-type": kind}
    cuts = [[whole[at : at + size] for at in range(0, len(whole), size)] for size in (1, 7, 10_000)]
    try:
        for pieces in cuts:
            assert await answer_to(gateway, pieces, "messages", stream=kind == SSE) == whole
    finally:
        gateway.engine.headers = {}
    assert await gateway.outcomes_since(before, len(cuts)) == [counted] * len(cuts)


async def test_without_a_usage_log_tokens_are_read_and_nothing_else(gateway: Gateway) -> None:
    log = gateway.decisions.parent / METADATA
    usage = {"prompt_tokens": 11, "completion_tokens": 7, "completion_tokens_details": {"reasoning_tokens": 5}}
    chunk = b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n"
    last = TOKEN.replace(b"}}]", b'}, "finish_reason": "stop"}]')
    assert await answer_to(gateway, [TOKEN, last, chunk, DONE]) == TOKEN + last + DONE
    counts = {"input_tokens": 12, "output_tokens": 7, "output_tokens_details": {"reasoning_tokens": 5}}
    done = json.dumps({"type": "response.completed", "response": {"status": "completed", "usage": counts}})
    delta = b'event: response.output_text.delta\ndata: {"delta": "hi"}\n\n'
    await answer_to(gateway, [delta, f"event: response.completed\ndata: {done}\n\n".encode()], "responses", input="x")
    written = {"input_tokens": 4, "cache_creation_input_tokens": 9, "output_tokens": 7}
    whole = json.dumps({"stop_reason": "end_turn", "usage": written}).encode()
    gateway.engine.headers = {"content-type": "application/json"}
    try:
        await answer_to(gateway, [whole], "messages", stream=False)
    finally:
        gateway.engine.headers = {}
    expected = [
        {"prompt_tokens": 11, "completion_tokens": 7, "reasoning_tokens": 5},
        {"prompt_tokens": 12, "completion_tokens": 7, "reasoning_tokens": 5},
        {"prompt_tokens": 13, "completion_tokens": 7, "created_tokens": 9},
    ]

    def found() -> list[object]:
        whole, _, _ = log.read_text().rpartition("\n")
        return [json.loads(line)["usage"] for line in whole.splitlines()]

    await eventually(lambda: all(one in found() for one in expected))
    # no event, end or time of any request here
    assert {name for one in found() for name in one or ()} <= {
        *("prompt_tokens", "completion_tokens", "cached_tokens", "created_tokens", "reasoning_tokens")
    }
