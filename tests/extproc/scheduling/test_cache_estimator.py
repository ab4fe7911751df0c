# SPDX-License-Identifier: Apache-2.0
"""The expected content of caches: sent prefixes, ended turns, KV events."""

from __future__ import annotations

import pytest

from extproc.endpoints.table import EndpointTable
from extproc.engines.metrics import CacheConfig
from extproc.prefix.approximate_index import ConversationTurn, ConversationTurns
from extproc.prefix.kv_event_decoder import BlocksStored
from extproc.prefix.kv_index import EventSource, KvIndex
from extproc.scheduling.cache_estimator import CacheEstimator, Prompt


def table_of(count: int) -> EndpointTable:
    table = EndpointTable()
    table.replace_endpoints(f"e{number}:1" for number in range(count))
    return table


def cached(caches: CacheEstimator, table: EndpointTable, prompt: Prompt, now: float = 0.0) -> list[float]:
    return caches.estimate_prompt(prompt, table, now).demand.cached_tokens[: len(table)].tolist()


def test_a_sent_prefix_is_expected_in_whole_blocks_of_the_engine() -> None:
    caches, table = CacheEstimator(), table_of(2)
    for row in range(2):
        caches.set_cache_config(row, CacheConfig(32, 100_000))
    prompt = Prompt(b"a" * 1000, "m")
    caches.record_sent(1, caches.estimate_prompt(prompt, table, 0.0), 0.0)
    # 7 blocks of 128 bytes are 896 bytes, 224 tokens: 7 blocks of 32
    assert cached(caches, table, Prompt(b"a" * 900 + b"b" * 500, "m")) == [0.0, 224.0]
    # and never the whole prompt: the last token is always computed
    assert cached(caches, table, Prompt(b"a" * 896, "m")) == [0.0, 192.0]


def test_blocks_of_text_follow_the_engines_blocks_of_tokens() -> None:
    caches = CacheEstimator()
    caches.set_cache_config(0, CacheConfig(16, 1000))
    assert caches.index.first_block_bytes == 64
    index = caches.index
    caches.bytes_per_token = 3.5
    caches.fit_block_size()
    assert caches.index is index, "a little more or less does not begin anew"
    caches.bytes_per_token = 1.0
    caches.fit_block_size()
    assert caches.index.first_block_bytes == 32


def test_prompts_sent_before_a_change_of_block_size_are_still_known() -> None:
    caches, table = CacheEstimator(), table_of(2)
    prompt = Prompt(b"a" * 2000, "m")
    caches.record_sent(1, caches.estimate_prompt(prompt, table, 0.0), 0.0)
    caches.bytes_per_token = 1.0
    caches.set_cache_config(0, CacheConfig(32, 100_000))
    assert caches.index.first_block_bytes == 32
    assert cached(caches, table, Prompt(b"a" * 2000 + b"b" * 100, "m")) == [0.0, 1920.0]
    caches.forget_endpoint(1)
    assert cached(caches, table, Prompt(b"a" * 2000 + b"b" * 100, "m")) == [0.0, 0.0]


def test_what_an_old_block_size_has_is_kept_for_ten_minutes_and_nothing_if_it_is_empty() -> None:
    caches, table = CacheEstimator(), table_of(2)
    caches.set_cache_config(0, CacheConfig(16, 100_000))
    assert caches._previous is None
    caches, prompt = CacheEstimator(), Prompt(b"a" * 2000, "m")
    caches.record_sent(1, caches.estimate_prompt(prompt, table, 0.0), 0.0)
    caches.set_cache_config(0, CacheConfig(16, 100_000))
    longer = Prompt(b"a" * 2000 + b"b" * 100, "m")
    assert cached(caches, table, longer, now=50.0)[1] > 0
    assert cached(caches, table, longer, now=600.0)[1] > 0
    # the request that finds it too old is the last to use it
    assert cached(caches, table, longer, now=650.0)[1] > 0
    assert cached(caches, table, longer, now=651.0)[1] == 0


def test_capacity_is_what_the_engine_reports() -> None:
    caches, table = CacheEstimator(), table_of(1)
    caches.set_cache_config(0, CacheConfig(32, 16_384 // 4 * 10))
    for number in range(40):
        prompt = Prompt(f"{number:04}".encode() + bytes(16_380), "m")
        expectation = caches.estimate_prompt(prompt, table, 0.0)
        caches.index.unpin(0, caches.record_sent(0, expectation, float(number)), number + 0.5)
    found = [cached(caches, table, Prompt(f"{number:04}".encode() + bytes(16_380), "m"))[0] > 0 for number in range(40)]
    assert found == [False] * 30 + [True] * 10


def test_scopes_and_salts_separate_caches() -> None:
    caches, table = CacheEstimator(), table_of(1)
    text = b"a" * 1000
    caches.record_sent(0, caches.estimate_prompt(Prompt(text, "m", scope="acme"), table, 0.0), 0.0)
    assert cached(caches, table, Prompt(text, "m", scope="acme"))[0] > 0
    for other in (
        Prompt(text, "m"),
        Prompt(text, "m", scope="other"),
        Prompt(text, "m", salt="acme"),
        Prompt(text, "n"),
    ):
        assert cached(caches, table, other) == [0.0]


def test_the_next_turn_finds_prompt_and_answer() -> None:
    caches, table = CacheEstimator(), table_of(2)
    first = b'\nuser\n"' + b"q" * 1000 + b'"'
    expectation = caches.estimate_prompt(Prompt(first, "m"), table, 0.0)
    caches.record_sent(1, expectation, 0.0)
    caches.index.record_turn(1, expectation.chain, ConversationTurn(expectation.tail, 400.0))
    second = first + b'\nassistant\n"' + b"x" * 400 + b'"\nuser\n"more"'
    # 1008 bytes of prompt and 400 of answer, four bytes a token
    assert cached(caches, table, Prompt(second, "m")) == [0.0, 352.0]
    other = first[:-3] + b'z"' + b"\nassistant" + b"x" * 500
    assert cached(caches, table, Prompt(other, "m")) == [0.0, 224.0], "not the same prompt: whole blocks only"


def test_the_share_of_an_answer_in_the_next_prompt_is_learned() -> None:
    turns = ConversationTurns()
    for _ in range(60):
        turns.learn_answer_share(expected=1000, found=0)
    assert turns.answer_share < 0.15
    for _ in range(200):
        turns.learn_answer_share(expected=100, found=150)
    assert turns.answer_share > 0.9


def test_events_overrule_the_approximate_index_with_a_complete_feed() -> None:
    caches, table = CacheEstimator(), table_of(3)
    caches.kv_index = KvIndex()
    text, tokens = b"a" * 1024, list(range(256))
    for row in range(3):
        caches.record_sent(row, caches.estimate_prompt(Prompt(text, "m"), table, 0.0), 0.0)
    caches.set_feed_state(0, is_whole=True)
    caches.set_feed_state(1, is_whole=False)
    caches.kv_index.apply(EventSource(0), [BlocksStored((1,), None, tuple(tokens[:16]), 16)])
    caches.kv_index.apply(EventSource(1), [BlocksStored((1,), None, tuple(tokens[:16]), 16)])
    prompt = Prompt(text, "m", tokens=tokens)
    # by its own word 16; by the better of both 255; without a feed 255
    assert cached(caches, table, prompt, now=100.0) == [16.0, 255.0, 255.0]
    assert cached(caches, table, Prompt(text, "m"), now=100.0) == [255.0] * 3, "without tokens, memory serves"
    caches.set_feed_state(0, is_whole=None)
    assert cached(caches, table, prompt, now=100.0) == [255.0] * 3


def test_tokens_say_how_long_a_prompt_is() -> None:
    caches, table = CacheEstimator(), table_of(1)
    assert caches.estimate_prompt(Prompt(b"a" * 400, "m"), table, 0.0).input_tokens == pytest.approx(100)
    assert caches.estimate_prompt(Prompt(b"a" * 400, "m", tokens=range(300)), table, 0.0).input_tokens == 300
