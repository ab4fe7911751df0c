# SPDX-License-Identifier: Apache-2.0
"""Workloads: the same seed the same text, traces read as they are meant, broken rows named."""

from __future__ import annotations

import gzip
import json
import re
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.workload.generators import Conversations, conversation_workload
from bench.workload.sessions import text_of
from bench.workload.traces import Excerpt, TraceInvalid, read_trace
from tests.examples import examples

if TYPE_CHECKING:
    from pathlib import Path


@settings(max_examples=examples(100))
@given(st.text(max_size=10), st.text(max_size=10), st.integers(1, 300))
def test_text_has_its_length_and_depends_on_its_key_alone(key: str, other: str, tokens: int) -> None:
    assert len(text_of(key, tokens)) == 4 * tokens
    assert text_of(key, tokens) == text_of(key, tokens)
    if key != other and tokens > 3:
        assert text_of(key, tokens) != text_of(other, tokens)


def test_equal_seeds_give_equal_conversations_and_arrivals_keep_their_rate() -> None:
    shape = Conversations(sessions=400, sessions_per_s=5.0)
    one = conversation_workload(shape)
    assert one == conversation_workload(shape)
    assert one != conversation_workload(shape, seed=1)
    begins = [session.begins_at_s for session in one.sessions]
    assert begins == sorted(begins)
    assert begins[-1] == pytest.approx(400 / 5.0, rel=0.2)
    assert len({session.system for session in one.sessions}) == shape.system_prompts
    assert one.request_count == 1600
    thinks = {turn.think_s > 0 for session in one.sessions for turn in session.turns[1:]}
    assert thinks == {True}


def mooncake(directory: Path, *rows: dict[str, object]) -> Path:
    file = directory / "trace.jsonl.gz"
    file.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    return file


def row(timestamp: int, length: int, *hash_ids: int) -> dict[str, object]:
    return {"timestamp": timestamp, "input_length": length, "output_length": 7, "hash_ids": list(hash_ids)}


def test_equal_hash_ids_are_equal_text_and_the_last_block_is_partial(tmp_path: Path) -> None:
    trace = mooncake(tmp_path, row(0, 1, 9), row(1000, 1100, 1, 2, 3), row(3500, 1200, 1, 2, 4))
    workload = read_trace(trace, Excerpt(skip=1, limit=2))
    first, second = (session.turns[0].text for session in workload.sessions)
    assert [session.begins_at_s for session in workload.sessions] == [0.0, 2.5]
    assert len(first) == 4 * 1100
    assert first[: 4 * 1024] == second[: 4 * 1024]
    assert first[4 * 1024 :] != second[4 * 1024 : 4 * 1100]
    assert workload.sessions[0].turns[0].output_tokens == 7
    assert workload.name == "trace.jsonl.gz, rows 2 to 3"


def test_rows_of_qwens_usage_traces_have_seconds_and_blocks_of_16_tokens(tmp_path: Path) -> None:
    file = tmp_path / "qwen_traceA_blksz_16.jsonl"
    chat = {"chat_id": 159, "parent_chat_id": -1, "type": "text", "turn": 1, "output_length": 7}
    rows = [{**chat, "timestamp": 61.0, "input_length": 40, "hash_ids": [1, 2, 3]}]
    rows.append({**chat, "timestamp": 62.5, "input_length": 48, "hash_ids": [1, 2, 4]})
    file.write_text("\n".join(map(json.dumps, rows)))
    one, other = read_trace(file, Excerpt()).sessions
    assert (one.begins_at_s, other.begins_at_s) == (0.0, 1.5)
    first, second = one.turns[0].text, other.turns[0].text
    assert (len(first), len(second)) == (4 * 40, 4 * 48)
    assert first[: 4 * 32] == second[: 4 * 32]
    assert first[4 * 32 :] != second[4 * 32 : 4 * 40]


@pytest.mark.parametrize("ids", [(1, 2), range(69), ()])
def test_blocks_of_another_size_are_not_read_as_if_they_had_512_tokens(tmp_path: Path, ids: tuple[int, ...]) -> None:
    trace = mooncake(tmp_path, row(0, 1, 9), row(0, 1100, *ids))
    with pytest.raises(
        TraceInvalid, match=rf":2: has {len(ids)} hash_ids for 1100 tokens; blocks of 512 tokens make 3"
    ):
        read_trace(trace, Excerpt())


def test_azure_rows_are_read_with_their_times(tmp_path: Path) -> None:
    file = tmp_path / "azure.csv"
    file.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
    )
    one, two = read_trace(file, Excerpt()).sessions
    assert (one.begins_at_s, len(one.turns[0].text), one.turns[0].output_tokens) == (0.0, 4 * 374, 44)
    assert two.begins_at_s == pytest.approx(4.314579)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"timestamp": 0}', "a.jsonl:1: "),
        ("a.jsonl", json.dumps(row(0, 5, 1)) + "\n{", "a.jsonl:2: "),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,1\n", "a.csv:2: "),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,1\n", "a.csv:2: "),
        (
            "a.csv",
            "time,in,out\n",
            "a.csv:1: there is no column TIMESTAMP, ContextTokens, GeneratedTokens among time, in, out",
        ),
        ("a.txt", "", "its name does not say what it is"),
        ("a.jsonl.gz", "not gzip", "cannot be read"),
        ("a.jsonl", "", "has no rows after the first 0"),
    ],
)
def test_a_trace_that_cannot_be_read_says_where(tmp_path: Path, name: str, content: str, message: str) -> None:
    file = tmp_path / name
    file.write_text(content)
    with pytest.raises(TraceInvalid, match=re.escape(message)):
        read_trace(file, Excerpt())


def test_a_trace_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(TraceInvalid, match="No such file"):
        read_trace(tmp_path / "none.jsonl", Excerpt())
