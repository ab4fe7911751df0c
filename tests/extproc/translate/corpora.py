# SPDX-License-Identifier: Apache-2.0
"""Requests and answers of all three APIs, drawn by hypothesis: those that clients and engines really send."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

Json = dict[str, Any]

TEXTS = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=12)
NAMES = st.from_regex(r"[a-z]{1,8}", fullmatch=True)
ARGUMENTS = st.dictionaries(NAMES, st.one_of(st.integers(-5, 5), TEXTS, st.booleans(), st.none()), max_size=3)
COUNTS = st.integers(0, 10_000)
_URLS = st.sampled_from(["https://example.com/cat.png", "data:image/png;base64,aGVsbG8="])
_IMAGES = _URLS.map(lambda url: {"type": "image_url", "image_url": {"url": url}})
_TEXT_PARTS = TEXTS.map(lambda text: {"type": "text", "text": text})
_FILE = {"type": "file", "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64,aGVsbG8="}}
_PARTS = st.lists(st.one_of(_TEXT_PARTS, _IMAGES, st.just(_FILE)), min_size=1, max_size=3)
EFFORTS = st.sampled_from(["none", "low", "medium", "high", "xhigh", "max"])
_SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}


def call(identifier: str, name: str, arguments: Json) -> Json:
    function = {"name": name, "arguments": json.dumps(arguments, separators=(",", ":"), ensure_ascii=False)}
    return {"id": identifier, "type": "function", "function": function}


@st.composite
def _turns(draw: st.DrawFn) -> list[Json]:
    """A user's message, and the assistant's, whose calls are all answered."""
    out: list[Json] = [{"role": "user", "content": draw(st.one_of(TEXTS, _PARTS))}]
    at = draw(st.integers(0, 999))
    calls = [call(f"call_{at}_{n}", draw(NAMES), draw(ARGUMENTS)) for n in range(draw(st.integers(0, 3)))]
    assistant: Json = {"role": "assistant", "content": draw(TEXTS)}
    if calls:
        assistant |= {"tool_calls": calls, "content": draw(st.one_of(st.none(), TEXTS))}
    if draw(st.booleans()):
        details = [{"index": 0, "type": "reasoning.text", "text": draw(TEXTS), "signature": "c2ln", "id": "rs_1"}]
        assistant |= {"reasoning_content": details[0]["text"], "reasoning_details": details}
    out.append(assistant)
    contents = st.one_of(TEXTS, st.lists(_TEXT_PARTS, min_size=1, max_size=2))
    out += [{"role": "tool", "tool_call_id": one["id"], "content": draw(contents)} for one in calls]
    return out


@st.composite
def chat_requests(draw: st.DrawFn) -> Json:
    """Requests for chat."""
    messages: list[Json] = []
    if draw(st.booleans()):
        messages.append({"role": draw(st.sampled_from(["system", "developer"])), "content": draw(TEXTS)})
    for _ in range(draw(st.integers(0, 2))):
        messages += draw(_turns())
    messages.append({"role": "user", "content": draw(st.one_of(TEXTS, _PARTS))})
    out: Json = {"model": "m", "messages": messages}
    names = draw(st.lists(NAMES, max_size=2, unique=True))
    if names:
        out["tools"] = [
            {"type": "function", "function": {"name": name, "description": draw(TEXTS), "parameters": _SCHEMA}}
            for name in names
        ]
        named = {"type": "function", "function": {"name": names[0]}}
        out |= draw(st.sampled_from([{}, *({"tool_choice": one} for one in ("auto", "required", "none", named))]))
        out |= draw(st.sampled_from([{}, {"parallel_tool_calls": False}]))
    schema = {"type": "json_schema", "json_schema": {"name": "answer", "schema": _SCHEMA, "strict": True}}
    optional: dict[str, st.SearchStrategy[Any]] = {
        "max_tokens": st.integers(1, 100),
        "temperature": st.sampled_from([0, 0.5, 1]),
        "top_p": st.sampled_from([0.1, 1]),
        "stop": st.lists(TEXTS, min_size=1, max_size=2),
        "user": NAMES,
        "service_tier": st.sampled_from(["auto", "default", "flex"]),
        "reasoning_effort": EFFORTS,
        "response_format": st.just(schema),
        "seed": st.integers(0, 9),
        "verbosity": st.just("low"),
        "metadata": st.just({"a": "b"}),
        "stream": st.booleans(),
    }
    for name, values in optional.items():
        if draw(st.booleans()):
            out[name] = draw(values)
    return out


@st.composite
def usages(draw: st.DrawFn) -> Json:
    prompt, completion = draw(COUNTS), draw(COUNTS)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": draw(st.integers(0, prompt))},
        "completion_tokens_details": {"reasoning_tokens": draw(st.integers(0, completion))},
    }


@st.composite
def completions(draw: st.DrawFn, *, signed: bool = False) -> Json:
    """Answers of chat; ``signed``: their reasoning has a signature."""
    message: Json = {"role": "assistant", "content": draw(st.one_of(st.none(), TEXTS))}
    if draw(st.booleans()):
        message["reasoning_content"] = draw(TEXTS)
        if signed:
            message["reasoning_details"] = [
                {"index": 0, "type": "reasoning.text", "text": message["reasoning_content"], "signature": "c2ln"}
            ]
    calls = [call(f"call_{n}", draw(NAMES), draw(ARGUMENTS)) for n in range(draw(st.integers(0, 3)))]
    if calls:
        message["tool_calls"] = calls
    finish = "tool_calls" if calls else draw(st.sampled_from(["stop", "length", "content_filter", "refusal"]))
    if finish == "refusal":
        finish = "stop"
        message |= {"content": None, "refusal": draw(TEXTS)}
    return {
        "id": "chatcmpl-1f",
        "object": "chat.completion",
        "created": 1700000000,
        "model": "m",
        "choices": [{"index": 0, "message": message, "finish_reason": finish, "logprobs": None}],
        "usage": draw(usages()),
        **draw(st.sampled_from([{}, {"service_tier": "default"}])),
    }


@st.composite
def pieces(draw: st.DrawFn, text: str) -> list[str]:
    """``text`` in one to three pieces."""
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=2)))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@st.composite
def chunks(draw: st.DrawFn, completion: Json, *, interleaved: bool = True) -> list[Json]:
    """The completion as chunks; the pieces of its calls interleaved."""
    message, choice = completion["choices"][0]["message"], completion["choices"][0]
    deltas: list[Json] = [{"role": "assistant", "content": ""}]
    details = message.get("reasoning_details")
    for one in draw(pieces(message.get("reasoning_content") or "")):
        piece = {"index": 0, "type": "reasoning.text", "text": one}
        deltas.append({"reasoning_content": one} | ({"reasoning_details": [piece]} if details else {}))
    if details:
        proof = {"index": 0, "type": "reasoning.text", "signature": details[0]["signature"]}
        deltas.append({"reasoning_details": [proof]})
    for name in ("content", "refusal"):
        deltas += [{name: one} for one in draw(pieces(message.get(name) or ""))]
    rows = []
    for at, one in enumerate(message.get("tool_calls", ())):
        head = {**one, "index": at, "function": {"name": one["function"]["name"], "arguments": ""}}
        deltas.append({"tool_calls": [head]})
        written = draw(pieces(one["function"]["arguments"]))
        rows.append([{"index": at, "function": {"arguments": piece}} for piece in written])
    while any(rows):
        row = draw(st.sampled_from([one for one in rows if one])) if interleaved else next(filter(None, rows))
        deltas.append({"tool_calls": [row.pop(0)]})
    first = {name: completion[name] for name in ("id", "created", "model", "service_tier") if name in completion}
    first["object"] = "chat.completion.chunk"
    out = [{**first, "choices": [{"index": 0, "delta": one, "finish_reason": None}]} for one in deltas]
    out.append({**first, "choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]})
    return [*out, {**first, "choices": [], "usage": completion["usage"]}]


def sse(events: list[Json], *, done: bool) -> bytes:
    """Events as an engine sends them."""
    out = []
    for one in events:
        name = f"event: {one['type']}\n" if "type" in one else ""
        out.append(f"{name}data: {json.dumps(one, ensure_ascii=False)}\n\n".encode())
    return b"".join(out) + (b"data: [DONE]\n\n" if done else b"")


# Messages


@st.composite
def answered_messages(draw: st.DrawFn) -> Json:
    """Answers of messages."""
    content: list[Json] = []
    if draw(st.booleans()):
        content.append({"type": "thinking", "thinking": draw(TEXTS), "signature": draw(st.sampled_from(["c2ln", ""]))})
    if draw(st.booleans()):
        content.append({"type": "redacted_thinking", "data": "eA=="})
    if draw(st.booleans()):
        content.append({"type": "text", "text": draw(TEXTS)})
    calls = [
        {"type": "tool_use", "id": f"toolu_{at}", "name": draw(NAMES), "input": draw(ARGUMENTS)}
        for at in range(draw(st.integers(0, 3)))
    ]
    stop = "tool_use" if calls else draw(st.sampled_from(["end_turn", "max_tokens", "stop_sequence", "refusal"]))
    return {
        "id": "msg_1f",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": content + calls,
        "stop_reason": stop,
        "stop_sequence": "END" if stop == "stop_sequence" else None,
        "usage": {
            "input_tokens": draw(COUNTS),
            "cache_creation_input_tokens": draw(COUNTS),
            "cache_read_input_tokens": draw(COUNTS),
            "output_tokens": draw(COUNTS),
            "output_tokens_details": {"thinking_tokens": draw(COUNTS)},
        },
    }


@st.composite
def message_events(draw: st.DrawFn, message: Json) -> list[Json]:
    """The message as the events of its stream, with pings."""
    usage = {**message["usage"], "output_tokens": 1}
    start = {**message, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
    out: list[Json] = [{"type": "message_start", "message": start}, {"type": "ping"}]
    for at, block in enumerate(message["content"]):
        kind = block["type"]
        deltas: list[Json] = []
        opened = dict(block)
        if kind == "text":
            opened = {"type": "text", "text": ""}
            deltas = [{"type": "text_delta", "text": one} for one in draw(pieces(block["text"]))]
        elif kind == "thinking":
            opened = {"type": "thinking", "thinking": "", "signature": ""}
            deltas = [{"type": "thinking_delta", "thinking": one} for one in draw(pieces(block["thinking"]))]
            deltas.append({"type": "signature_delta", "signature": block["signature"]})
        elif kind == "tool_use" and block["input"]:
            opened = {**block, "input": {}}
            written = json.dumps(block["input"], separators=(",", ":"), ensure_ascii=False)
            deltas = [{"type": "input_json_delta", "partial_json": one} for one in draw(pieces(written))]
        out.append({"type": "content_block_start", "index": at, "content_block": opened})
        out += [{"type": "content_block_delta", "index": at, "delta": one} for one in deltas]
        out.append({"type": "content_block_stop", "index": at})
    delta = {"stop_reason": message["stop_reason"], "stop_sequence": message["stop_sequence"]}
    end = {"output_tokens": message["usage"]["output_tokens"]}
    return [*out, {"type": "message_delta", "delta": delta, "usage": end}, {"type": "message_stop"}]
