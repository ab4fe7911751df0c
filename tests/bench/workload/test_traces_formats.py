# SPDX-License-Identifier: Apache-2.0
"""Formats of traces beyond Mooncake's and Azure's, and generated traffic."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING

import pytest

from bench.lab.workload_stats_command import statistics
from bench.workload.generators import GENERATORS, generate_workload
from bench.workload.sessions import join_pieces, text_of, with_rate_scale
from bench.workload.traces import Excerpt, TraceInvalid, consecutive_runs, read_trace
from extproc.wire_names import TENANT

if TYPE_CHECKING:
    from pathlib import Path

ALL = Excerpt(0, 0)


def test_any_place_of_a_text_is_the_same_from_wherever_it_is_read() -> None:
    whole = text_of("key", 5000)
    for first, count in ((0, 1), (31, 2), (32, 64), (1000, 3333), (4999, 1)):
        assert text_of("key", count, first) == whole[4 * first : 4 * (first + count)]
    assert text_of("key", 0, 7) == ""


def test_ids_that_follow_each_other_are_runs() -> None:
    assert list(consecutive_runs([5, 6, 7, 2, 9, 10])) == [(5, 3), (2, 1), (9, 2)]
    assert list(consecutive_runs([])) == []


def test_burstgpt_rows_without_an_answer_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "BurstGPT_1.csv"
    file.write_text(
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,,1.0,ChatGPT,472,18,490,Conversation log\n45,,1.0,ChatGPT,1087,0,1087,Conversation log\n"
        "118.5,,1.0,GPT-4,417,276,693,API log\n"
    )
    first, second = read_trace(file, ALL).sessions
    assert (first.begins_at_s, second.begins_at_s) == (0.0, 113.5)
    assert (second.label, len(second.turns[0].text), second.turns[0].output_tokens) == ("GPT-4", 4 * 417, 276)


def test_arena_clients_are_tenants(tmp_path: Path) -> None:
    file = tmp_path / "vtc_arena.csv"
    file.write_text(
        "req_time,adapter_dir,prompt_len,output_len,FCFS_first_token_latency,FCFS_request_latency,"
        "VTC_first_token_latency\n0.5,c-13,13,199,1.1,9.4,1.2\n0.75,c-2,36,137,1.5,6.7,1.5\n"
    )
    first, second = read_trace(file, ALL).sessions
    assert second.begins_at_s == 0.25
    assert dict(first.headers) == {TENANT: "c-13"}
    assert second.label == "c-2"


def agentic(tmp_path: Path) -> Path:
    def request(runs: list[list[int]], tokens: int, **more: object) -> dict[str, object]:
        return {
            "t": 0.0,
            "type": "s",
            "in": tokens,
            "out": 9,
            "think_time": 1.5,
            "hash_runs": runs,
            "model": "m",
            **more,
        }

    session = {
        "id": "one",
        "block_size": 64,
        "hash_id_scope": "local",
        "tool_tokens": 10,
        "system_tokens": 5,
        "requests": [
            request([[1, 10]], 640),
            {"type": "subagent", "requests": [request([[1, 4], [20, 2]], 384, type="n")]},
            request([[1, 10], [30, 1]], 700),
        ],
    }
    other = {**session, "id": "two", "requests": session["requests"][:1]}  # type: ignore[index]
    file = tmp_path / "agentic_sessions.jsonl"
    file.write_text("\n".join(map(json.dumps, (session, other))))
    return file


def test_an_agents_requests_follow_each_other_and_sub_agents_stand_in_their_place(tmp_path: Path) -> None:
    first, second = read_trace(agentic(tmp_path), ALL).sessions
    texts = [turn.text for turn in first.turns]
    assert [len(text) // 4 for text in texts] == [640, 384, 700]
    assert all(turn.is_whole for turn in first.turns)
    assert texts[1][: 4 * 256] == texts[0][: 4 * 256]
    assert texts[2].startswith(texts[0])
    assert first.turns[1].think_s == 1.5
    # local ids mean nothing in another session
    assert second.turns[0].text != texts[0]
    assert second.begins_at_s > 0


def test_what_is_missing_in_a_table_is_named(tmp_path: Path) -> None:
    file = tmp_path / "burst.csv"
    file.write_text("Timestamp,Model\n1,m\n")
    with pytest.raises(TraceInvalid, match="no column Request tokens, Response tokens"):
        read_trace(file, ALL)
    file.write_text("Timestamp,Model,Request tokens,Response tokens\n1,m,-5,1\n")
    with pytest.raises(TraceInvalid, match=r"burst.csv:2: .*>= 0"):
        read_trace(file, ALL)
    with pytest.raises(TraceInvalid, match="there is no format xml; there are mooncake"):
        read_trace(file, ALL, "xml")


@pytest.mark.parametrize("name", sorted(GENERATORS))
def test_equal_seeds_give_equal_traffic_in_the_order_of_time(name: str) -> None:
    one, same, other = (generate_workload(name, seed, Excerpt(0, 30)) for seed in (1, 1, 2))
    assert one == same
    assert one.sessions != other.sessions
    begins = [session.begins_at_s for session in one.sessions]
    assert begins == sorted(begins)
    assert all(
        turn.output_tokens > 0 and join_pieces(turn.pieces) for session in one.sessions for turn in session.turns
    )


def test_numbers_of_a_generator_can_be_set() -> None:
    made = generate_workload("shared-prefix:groups=3,prompts=4,prefix=128,question=64,concurrency=5", 0, ALL)
    assert [len(session.turns) for session in made.sessions] == [3, 3, 2, 2, 2]
    beginnings = {turn.text[: 4 * 128] for session in made.sessions for turn in session.turns}
    assert len(beginnings) == 3
    assert made.request_count == 12
    assert {session.begins_at_s for session in made.sessions} == {0.0}


def test_adapters_are_asked_for_and_named() -> None:
    made = generate_workload("lora:adapters=3", 0, Excerpt(0, 100))
    assert made.adapters == ("adapter-0", "adapter-1", "adapter-2")


def test_a_faster_rate_moves_beginnings_and_not_thoughts() -> None:
    made = generate_workload("chat", 0, Excerpt(0, 10))
    twice = with_rate_scale(made, 2.0)
    assert twice.sessions[5].begins_at_s == made.sessions[5].begins_at_s / 2
    assert twice.sessions[5].turns == made.sessions[5].turns


def test_reuse_is_what_one_cache_of_that_size_would_find() -> None:
    made = generate_workload("shared-prefix:groups=2,prompts=2,prefix=6400,question=64,output=1,rate=1", 0, ALL)
    found = statistics(made, random.Random(0), capacities=(100,))
    unbounded, tiny = found.reuse
    # two of four prompts find 100 blocks of 101 or 102; a cache of one block forgets
    assert unbounded.reusable == pytest.approx(0.5 * 100 / 101, abs=0.01)
    assert tiny.reusable < 0.02
    assert found.requests == 4
