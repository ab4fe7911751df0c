# SPDX-License-Identifier: Apache-2.0
"""OpenAI bodies: what is read, what is refused and how, what is changed."""

from __future__ import annotations

import json
import struct
from base64 import b64encode
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.refusals import BadRequest, Refusal
from extproc.request.body_parser import parse_body
from extproc.request.inference_request import CHAT_TOKENS
from extproc.wire_names import BODY_APIS, Api

if TYPE_CHECKING:
    from extproc.request.inference_request import InferenceRequest

HELLO = {"role": "user", "content": "hello"}


def body(**fields: object) -> bytes:
    return json.dumps({"model": "m", **fields}).encode()


def test_a_chat_request_is_read() -> None:
    request = parse_body(
        Api.CHAT, body(messages=[HELLO], stream=True, max_tokens=7, temperature=0.5, unknown={"a": [1]})
    )

    assert (request.model, request.is_streamed, request.max_output_tokens) == ("m", True, 7)
    assert b"hello" in request.prompt


@pytest.mark.parametrize(
    ("limits", "most"),
    [
        ({"max_tokens": 7, "max_completion_tokens": 9}, 9),
        # SGLang takes max_tokens where vLLM takes the other
        ({"max_tokens": 9, "max_completion_tokens": 1}, 9),
        ({"max_tokens": None, "max_completion_tokens": 9}, 9),
        ({"max_tokens": 9, "max_completion_tokens": None}, 9),
        ({"max_tokens": None, "max_completion_tokens": None}, None),
        # no engine's field
        ({"max_tokens": 7, "MAX_TOKENS": 9, "max_new_tokens": 9}, 7),
    ],
)
def test_of_the_names_of_the_output_limit_the_largest_value_counts(limits: dict[str, object], most: int | None) -> None:
    assert parse_body(Api.CHAT, body(messages=[HELLO], **limits)).max_output_tokens == most


def test_of_a_field_that_is_given_twice_the_last_counts_as_at_engines_however_its_name_is_written() -> None:
    twice = body(messages=[HELLO], max_tokens=1).replace(
        b'"max_tokens"', rb'"max_tokens": 1, "max\u005ftokens": 9, "x"'
    )
    assert parse_body(Api.CHAT, twice).max_output_tokens == 9


@pytest.mark.parametrize(
    ("api", "fields"),
    [
        (Api.COMPLETIONS, {"prompt": "hello"}),
        (Api.COMPLETIONS, {"prompt": ["hello", "there"]}),
        (Api.COMPLETIONS, {"prompt": [1, 2, 3]}),
        (Api.EMBEDDINGS, {"input": "hello"}),
        (Api.EMBEDDINGS, {"input": ["hello"]}),
        (Api.RESPONSES, {"input": "hello", "instructions": "be kind"}),
        (Api.RESPONSES, {"input": [HELLO], "max_output_tokens": 3}),
        (Api.CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]}),
        (Api.CHAT, {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]}),
    ],
)
def test_all_forms_of_input_are_taken(api: Api, fields: dict[str, Any]) -> None:
    assert parse_body(api, body(**fields)).api is api


def test_a_longer_conversation_extends_the_prompt_of_the_shorter() -> None:
    turns = [HELLO, {"role": "assistant", "content": "hi"}, {"role": "user", "content": "bye"}]

    assert parse_body(Api.CHAT, body(messages=turns)).prompt.startswith(
        parse_body(Api.CHAT, body(messages=turns[:1])).prompt
    )


def test_a_longer_text_extends_the_prompt_of_the_shorter() -> None:
    for api, field in ((Api.COMPLETIONS, "prompt"), (Api.EMBEDDINGS, "input"), (Api.RESPONSES, "input")):
        short, long = (parse_body(api, body(**{field: text})).prompt for text in ("once", "once upon"))
        assert long.startswith(short)


LONG = "x" * 4_000
CHAT: dict[str, Any] = {"messages": [HELLO]}
TEXT: dict[str, Any] = {"input": "hello"}
PAIR: dict[str, Any] = {"query": "hello", "documents": ["one"]}


def said(**fields: object) -> dict[str, Any]:
    """A chat whose message has these fields, too."""
    return {"messages": [{"role": "assistant", "content": "hello", **fields}]}


@pytest.mark.parametrize(
    ("api", "plain", "longer"),
    [
        *((Api.CHAT, said(), said(**{name: LONG})) for name in ("name", "reasoning", "reasoning_content")),
        *((Api.CHAT, said(), said(**{name: [{"x": LONG}]})) for name in ("tool_calls", "function_call", "tools")),
        (Api.CHAT, said(), said(tool_call_id=LONG)),
        *(
            (api, plain, {**plain, **fields})
            for api, plain in ((Api.CHAT, CHAT), (Api.MESSAGES, CHAT), (Api.RESPONSES, TEXT), (Api.EMBEDDINGS, TEXT))
            for fields in (
                {"documents": [{"text": LONG}]},
                {"chat_template": LONG},
                {"chat_template_kwargs": {"enable_thinking": True, "rules": LONG}},
                # not what engines take
                {"chat_template_kwargs": LONG},
            )
        ),
        (Api.COMPLETIONS, {"prompt": "a"}, {"prompt": "a", "suffix": LONG}),
        (Api.EMBEDDINGS, TEXT, {**TEXT, "messages": [{"role": "user", "content": LONG}]}),
        *(
            (Api.RESPONSES, TEXT, {**TEXT, name: {"x": [LONG]}})
            for name in ("prompt", "previous_response_id", "previous_input_messages", "previous_response")
        ),
        *((Api.RERANK, PAIR, {**PAIR, name: LONG}) for name in ("instruct", "instruction")),
        (Api.SCORE, {"text_1": "a", "text_2": "b"}, {"text_1": "a", "text_2": "b", "instruction": LONG}),
        (Api.SPEECH, {**TEXT, "voice": "a"}, {**TEXT, "voice": "a", "instructions": LONG}),
    ],
)
def test_all_text_that_engines_read_counts_and_tells_prompts_apart(
    api: Api, plain: dict[str, Any], longer: dict[str, Any]
) -> None:
    short, long = parse_body(api, body(**plain)), parse_body(api, body(**longer))
    assert long.text_bytes >= short.text_bytes + len(LONG)
    other = parse_body(api, body(**longer).replace(LONG.encode(), b"y" * len(LONG)))
    assert long.prompt != other.prompt
    assert len(long.prompt) == len(other.prompt)


@pytest.mark.parametrize(
    "fields",
    [
        dict.fromkeys(("documents", "chat_template", "chat_template_kwargs", *CHAT_TOKENS)),
        {"chat_template_kwargs": {"enable_thinking": False, "budget": 7, "other": None}},
    ],
)
def test_what_is_null_and_switches_of_templates_change_no_prompt(fields: dict[str, object]) -> None:
    empty = dict.fromkeys(("name", "tool_calls", "reasoning", "reasoning_content", "function_call"))
    assert parse_body(Api.CHAT, body(messages=[{**HELLO, **empty}], **fields)).prompt == (
        parse_body(Api.CHAT, body(messages=[HELLO])).prompt
    )


def test_of_the_two_names_of_a_thought_engines_read_one() -> None:
    both = parse_body(Api.CHAT, body(**said(reasoning="a thought", reasoning_content="a thought")))
    assert both.prompt == parse_body(Api.CHAT, body(**said(reasoning_content="a thought"))).prompt


def test_tokens_and_embeddings_beside_the_text_count_by_their_number() -> None:
    plain, tokens = parse_body(Api.CHAT, body(messages=[HELLO])), list(range(5_000))
    in_base64 = b64encode(struct.pack("<5000i", *tokens)).decode()
    for name, value in (("input_ids", tokens), ("prompt_token_ids", tokens), ("prompt_token_ids_b64", in_base64)):
        chat = parse_body(Api.CHAT, body(messages=[HELLO], **{name: value}))
        assert 5_000 <= chat.media.tokens <= 5_002
        assert chat.text_bytes == plain.text_bytes
        assert chat.prompt != plain.prompt
        assert not chat.tokens_scale_with_bytes
    completion = parse_body(Api.COMPLETIONS, body(prompt="a", prompt_embeds="x" * 2_048_000))
    assert completion.media.tokens == 1_001
    assert completion.text_bytes < 100
    part = {"type": "prompt_embeds", "data": "x" * 2_048_000}
    chat = parse_body(Api.CHAT, body(messages=[{"role": "user", "content": [part]}]))
    assert chat.media.tokens == 1_001
    assert chat.text_bytes < 100
    text = parse_body(Api.CHAT, body(messages=[{"role": "user", "content": [{**part, "type": "text"}]}]))
    assert text.text_bytes > 2_048_000


IMAGE = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}


@pytest.mark.parametrize(
    ("api", "fields", "readable"),
    [
        (Api.CHAT, {"messages": [HELLO]}, True),
        (Api.CHAT, {"messages": [{"role": "user", "content": [IMAGE]}], "input_ids": None}, True),
        *((Api.CHAT, {"messages": [HELLO], name: [1]}, False) for name in CHAT_TOKENS),
        (Api.CHAT, {"messages": [HELLO], "prompt_token_ids_b64": "AQAAAA=="}, False),
        (Api.CHAT, {"messages": [{"role": "user", "content": [{"type": "prompt_embeds", "data": "AA"}]}]}, False),
        (Api.COMPLETIONS, {"prompt": "a", "prompt_embeds": None}, True),
        (Api.COMPLETIONS, {"prompt": "a", "prompt_embeds": "AA"}, False),
        (Api.COMPLETIONS, {"prompt": [1]}, False),
        (Api.COMPLETIONS, {"prompt": [[1], [2]]}, False),
        (Api.EMBEDDINGS, {"input": [1]}, False),
        (Api.GENERATE, {"token_ids": [1], "sampling_params": {}}, False),
        (Api.RESPONSES, {"input": [HELLO]}, True),
        (Api.MESSAGES, {"messages": [HELLO], "max_tokens": 1}, True),
    ],
)
def test_what_is_no_text_is_known(api: Api, fields: dict[str, Any], *, readable: bool) -> None:
    assert parse_body(api, body(**fields)).has_text_prompt is readable


def test_a_text_that_engines_repeat_counts_as_often() -> None:
    fields = {"prompt": ["a", "b", "c"], "suffix": LONG}
    assert parse_body(Api.COMPLETIONS, body(**fields)).text_bytes > 3 * len(LONG)
    fields = {"query": "q", "documents": ["a", "b", "c"], "instruct": LONG}
    assert parse_body(Api.RERANK, body(**fields)).text_bytes > 3 * len(LONG)


@pytest.mark.parametrize("name", ["previous_response_id", "conversation", "prompt"])
def test_a_prompt_that_an_engine_has_stored_is_not_known_by_its_bytes(name: str) -> None:
    assert parse_body(Api.RESPONSES, body(input="and then?", **{name: "resp_1"})).has_stored_prompt
    plain = parse_body(Api.RESPONSES, body(input="and then?", **{name: None}))
    assert not plain.has_stored_prompt
    assert plain.tokens_scale_with_bytes


@pytest.mark.parametrize(
    ("value", "in_background"),
    [
        (True, True),
        ("true", True),
        (1, True),
        ("on", True),
        (False, False),
        ("false", False),
        (0, False),
        (None, False),
    ],
)
def test_what_runs_in_the_background_reports_no_usage_at_once(value: object, *, in_background: bool) -> None:
    request = parse_body(Api.RESPONSES, body(input="hello", background=value))
    assert (request.runs_in_background, request.reports_usage_unchanged) == (in_background, not in_background)


def test_tools_stand_before_the_messages_as_in_chat_templates() -> None:
    request = parse_body(Api.CHAT, body(messages=[HELLO], tools=[{"type": "function"}]))

    assert request.prompt.index(b"function") < request.prompt.index(b"hello")


@pytest.mark.parametrize(
    ("content", "message", "param"),
    [
        (b"", "has no body", None),
        (b"{", "is not JSON", None),
        (b"hello", "is not JSON", None),
        (b"[]", "Expected 'object', got 'array' as the body", None),
        (b'{"messages":[]}', "The field 'model' is missing", "model"),
        (b'{"model":"m"}', "The field 'messages' is missing", "messages"),
        (b'{"model":"","messages":[]}', "'model' is empty", "model"),
        (b'{"model":1,"messages":[]}', "Expected 'str', got 'int' in model", "model"),
        (b'{"model":"m","messages":"hi"}', "Expected 'array', got 'str' in messages", "messages"),
        (b'{"model":"m","messages":["hi"]}', "in messages[0]", "messages[0]"),
        (b'{"model":"m","messages":[{"content":"hi"}]}', "'messages[0].role' is missing", "messages[0].role"),
        (b'{"model":"m","messages":[],"stream":"yes"}', "in stream", "stream"),
        (b'{"model":"m","messages":[],"x":' + b"[" * 50_000, "nested too deeply", None),
        (b'{"model":"m","messages":[{"role":"user","content":"\xff"}]}', "not UTF-8 at byte 51", None),
        (b'{"model":"m","x":"\xff","messages":[]}', "not UTF-8", None),
    ],
)
def test_what_cannot_be_read_is_refused_with_what_to_mend(content: bytes, message: str, param: str | None) -> None:
    with pytest.raises(BadRequest) as caught:
        parse_body(Api.CHAT, content)

    assert message in caught.value.message
    assert caught.value.param == param


@given(st.binary(max_size=300) | st.text(max_size=100).map(str.encode))
def test_no_bytes_raise_anything_but_a_refusal(content: bytes) -> None:
    for api in BODY_APIS:
        try:
            parse_body(api, content)
        except Refusal:
            continue


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=20,
    )
)
def test_no_json_raises_anything_but_a_refusal(value: object) -> None:
    for api in BODY_APIS:
        for field in ("model", "messages", "prompt", "input", "stream_options", "tools"):
            content = {"model": "m", "messages": [HELLO], "prompt": "p", "input": "i", field: value}
            try:
                parse_body(api, json.dumps(content).encode())
            except Refusal:
                continue


def test_usage_is_left_out_only_where_a_stream_was_not_asked_for_it() -> None:
    def streamed(api: Api = Api.CHAT, **fields: object) -> InferenceRequest:
        return parse_body(api, body(messages=[HELLO], input="i", **fields))

    def leaves_out(api: Api = Api.CHAT, **fields: object) -> bool:
        return streamed(api, **fields).lacks_stream_usage

    assert leaves_out(stream=True)
    assert leaves_out(stream=True, stream_options={})
    assert leaves_out(stream=True, stream_options=None)
    assert not leaves_out()
    assert not leaves_out(stream=True, stream_options={"include_usage": True})
    for declined in (False, None, 0, "no"):
        assert leaves_out(stream=True, stream_options={"include_usage": declined})
        assert streamed(stream=True, stream_options={"include_usage": declined}).declines_usage
    assert not streamed(stream=True).declines_usage
    assert not leaves_out(Api.RESPONSES, stream=True)


def test_a_large_body_says_where_its_contents_stand() -> None:
    text = "x" * 40_000
    turns = [HELLO, {"role": "assistant", "content": None}, {"role": "user", "content": text}]
    forms: list[tuple[Api, dict[str, Any], str]] = [
        (Api.CHAT, {"messages": turns, "tools": []}, json.dumps(turns)[len('[{"role": "user", "content": ') : -2]),
        (Api.COMPLETIONS, {"prompt": [text]}, json.dumps([text])),
        (Api.EMBEDDINGS, {"input": text}, json.dumps(text)),
        (Api.RESPONSES, {"input": text, "instructions": "be kind"}, json.dumps(text)),
    ]
    for api, fields, expected in forms:
        content = body(**fields)
        span = parse_body(api, content).contents
        assert span is not None
        assert content[slice(*span)].decode() == expected


@pytest.mark.parametrize("messages", [[], [HELLO]])
def test_a_body_without_long_contents_says_nothing_of_them(messages: list[object]) -> None:
    assert parse_body(Api.CHAT, body(messages=messages)).contents is None
    assert parse_body(Api.CHAT, body(messages=[], tools=["x" * 40_000])).contents is None


# a name, and what is too much for it
NUMBERS = [
    (Api.CHAT, "max_tokens", 10_000_001),
    (Api.CHAT, "max_completion_tokens", 10_000_001),
    (Api.CHAT, "n", 129),
    (Api.CHAT, "priority", 2**31),
    (Api.COMPLETIONS, "max_tokens", 10_000_001),
    (Api.COMPLETIONS, "n", 129),
    (Api.COMPLETIONS, "best_of", 129),
    (Api.RESPONSES, "max_output_tokens", 10_000_001),
]


@pytest.mark.parametrize(("api", "name", "too_much"), NUMBERS)
def test_numbers_that_are_none_are_refused_with_the_range(api: Api, name: str, too_much: int) -> None:
    for text in ("1.5", "1e308", "-1e308", "1e400", "9" * 400, "-" + "9" * 400, "true", '"7"', "[]", str(too_much)):
        content = b'{"model":"m","messages":[],"prompt":"p","input":"i","%s":%s}' % (name.encode(), text.encode())
        with pytest.raises(BadRequest) as caught:
            parse_body(api, content)
        assert caught.value.param == name
        assert "whole number from" in caught.value.message
    for number in (1, too_much - 1, None):
        parse_body(api, body(messages=[], prompt="p", input="i", **{name: number}))


def test_no_answer_of_no_tokens_but_where_a_completion_echoes_its_prompt() -> None:
    for api, name in ((Api.CHAT, "max_tokens"), (Api.RESPONSES, "max_output_tokens")):
        with pytest.raises(BadRequest):
            parse_body(api, body(messages=[], input="i", **{name: 0}))
    assert parse_body(Api.COMPLETIONS, body(prompt="p", max_tokens=0, echo=True)).max_output_tokens == 0


@pytest.mark.parametrize(
    ("api", "fields", "answers", "prompts", "token_ids"),
    [
        (Api.CHAT, {"messages": [HELLO]}, 1, 1, 0),
        (Api.CHAT, {"messages": [HELLO], "n": 5}, 5, 1, 0),
        (Api.COMPLETIONS, {"prompt": "a", "n": 2, "best_of": 7}, 7, 1, 0),
        (Api.COMPLETIONS, {"prompt": ["a,b", "[c", "d"], "n": 2}, 6, 3, 0),
        (Api.COMPLETIONS, {"prompt": [11, 12, 13]}, 1, 1, 3),
        (Api.COMPLETIONS, {"prompt": [[11, 12, 13], [14, 15]]}, 2, 2, 5),
        (Api.COMPLETIONS, {"prompt": []}, 1, 1, 1),
        (Api.EMBEDDINGS, {"input": ["a", "b"]}, 0, 2, 0),
        (Api.RESPONSES, {"input": "a"}, 1, 1, 0),
    ],
)
def test_answers_and_prompts_are_counted(
    api: Api, fields: dict[str, Any], answers: int, prompts: int, token_ids: int
) -> None:
    request = parse_body(api, body(**fields))
    assert (request.answers, request.prompts.count, request.prompts.token_ids) == (answers, prompts, token_ids)


@pytest.mark.parametrize(("prompt", "prompts", "token_ids"), [('["aaaa","b"]', 2, 0), ("[[1,2],[3]]", 2, 3)])
def test_white_space_before_the_first_prompt_changes_no_count(prompt: str, prompts: int, token_ids: int) -> None:
    for space in (" " * 100, "\n\t\r " * 50_000):
        spaced = f'{{"model": "m", "prompt": [{space}{prompt[1:]}}}'.encode()
        found = parse_body(Api.COMPLETIONS, spaced)
        assert (found.answers, found.prompts.count, found.prompts.token_ids) == (prompts, prompts, token_ids)


@pytest.mark.parametrize(
    ("parts", "tokens"),
    [
        ([{"type": "text", "text": 'an "image_url": {}'}], 0),
        ([{"type": "image_url", "image_url": {"url": "https://a/b.png"}}, {"type": "text", "text": "what?"}], 1_000),
        ([{"image_url": "https://a/b.png"}, {"image_url": {"url": "x"}}], 2_000),
        ([{"type": "input_audio", "input_audio": {"data": "x" * 400}}], 1_000),
        ([{"type": "video_url", "video_url": {"url": "x"}}], 10_000),
        ([{"type": "image_url", "image_url": None}], 0),
    ],
)
def test_media_count_by_an_estimate_and_not_by_their_bytes(parts: list[dict[str, Any]], tokens: int) -> None:
    request = parse_body(Api.CHAT, body(messages=[HELLO, {"role": "user", "content": parts}]))
    assert request.media.tokens == tokens
    assert request.tokens_scale_with_bytes == (tokens == 0)
    assert request.text_bytes + request.media.size_bytes == len(request.prompt)


def test_media_are_found_in_inputs_of_responses_and_behind_escapes() -> None:
    part = {"type": "input_image", "image_url": "https://a/b.png"}
    assert parse_body(Api.RESPONSES, body(input=[{"role": "user", "content": [part]}])).media.tokens == 1_000
    escaped = b'{"model":"m","messages":[{"role":"user","content":[{"image\\u005furl":"x"}]}]}'
    assert parse_body(Api.CHAT, escaped).media.tokens == 1_000


def test_media_are_looked_for_in_messages_and_their_parts_and_not_wherever_a_client_nests_them() -> None:
    # each level that is looked into is read anew: 400 of them held 4 MB up for a second
    part = {"type": "input_image", "image_url": "data:image/png;base64,aaaa"}
    within = [{"content": [{"content": [part]}]}]
    assert parse_body(Api.RESPONSES, body(input=within)).media.tokens == 0
    assert parse_body(Api.CHAT, body(messages=[{"role": "user", "content": within}])).media.tokens == 0


@pytest.mark.parametrize(
    ("api", "field"), [(Api.COMPLETIONS, "prompt"), (Api.EMBEDDINGS, "input"), (Api.GENERATE, "token_ids")]
)
@pytest.mark.parametrize("token", [-1, 2**32, 10**30, -(10**30), 1.5, 1e300, True, "a", None, {}])
@pytest.mark.parametrize("is_nested", [False, True])
def test_a_token_that_no_engine_knows_is_refused(api: Api, field: str, token: object, *, is_nested: bool) -> None:
    tokens: list[object] = [1, 2, token]
    more = {"sampling_params": {}} if api is Api.GENERATE else {}
    with pytest.raises(BadRequest, match=f"'{field}' must be text, or hold tokens from 0 to 4294967295") as refused:
        parse_body(api, body(**{field: [tokens] if is_nested else tokens}, **more))
    assert refused.value.param == field


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1))
def test_all_other_tokens_are_taken(tokens: list[int]) -> None:
    for prompt in (tokens, [tokens, tokens]):
        assert parse_body(Api.COMPLETIONS, body(prompt=prompt)).prompts.token_ids >= len(tokens)


def test_prompts_in_other_engines_forms_pass() -> None:
    for prompt in ([{"text": "a", "image": -1.5}], ["-1", "e"], []):
        assert parse_body(Api.EMBEDDINGS, body(input=prompt)).api is Api.EMBEDDINGS
