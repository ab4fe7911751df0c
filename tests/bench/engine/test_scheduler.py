# SPDX-License-Identifier: Apache-2.0
"""Continuous batching as stories: who runs, who waits, who gives way."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.engine.fake_tokenizer import Message, answer_text, render_chat
from bench.engine.hardware import PRESETS
from bench.engine.request import Request, Token
from bench.engine.scheduler import EngineLimits, Scheduler
from bench.engine.step_time import RooflineStepTime
from bench.virtual.engines import EngineProfile, VirtualEngine
from bench.virtual.event_queue import EventQueue
from tests.examples import examples

if TYPE_CHECKING:
    from collections.abc import Iterable

HARDWARE = PRESETS["h100-llama-3.1-8b"]


def prompt(tokens: int, key: str = "a") -> bytes:
    return b"".join(f"{key}{number:03d}"[:4].encode() for number in range(tokens))


class Engine:
    """A scheduler driven to its end, with all that came of it."""

    def __init__(self, **limits: int) -> None:
        self.limits = EngineLimits(**limits)
        self.scheduler = Scheduler(RooflineStepTime(HARDWARE), self.limits)
        self.now = 0.0
        self.keys = 0

    def add(self, text: bytes, output: int, model: str = "m") -> Request:
        self.keys += 1
        answer = answer_text(random.Random(self.keys), output)
        request = Request(self.keys, text, answer, model=model, block_size=self.limits.block_size)
        self.scheduler.add(request)
        return request

    def step(self) -> list[Token] | None:
        step = self.scheduler.begin_step()
        if step is None:
            return None
        assert sum(count for _, count in step.parts) <= self.limits.max_num_batched_tokens
        assert len(step.parts) <= self.limits.max_num_seqs
        self.now += step.duration_s
        tokens = self.scheduler.end_step(step)
        pool = self.scheduler.pool
        assert pool.blocks_in_use + pool.free_blocks == pool.total
        return tokens

    def run(self) -> list[Token]:
        said: list[Token] = []
        for _ in range(10_000):
            tokens = self.step()
            if tokens is None:
                return said
            said += tokens
        raise AssertionError("never ends")


def test_an_answer_has_all_its_tokens_in_order_and_the_last_says_so() -> None:
    engine = Engine()
    request = engine.add(prompt(40), 5)
    tokens = engine.run()
    assert "".join(token.text for token in tokens) == request.answer.decode()
    assert [token.is_last for token in tokens] == [False] * 4 + [True]
    assert engine.scheduler.pool.blocks_in_use == 0


def test_a_long_prompt_is_computed_in_chunks_beside_running_answers() -> None:
    engine = Engine(max_num_batched_tokens=100)
    short = engine.add(prompt(10), 50)
    engine.step()
    engine.add(prompt(1000, "b"), 1)
    produced = short.produced
    for _ in range(5):
        engine.step()
    assert short.produced == produced + 5


def test_the_next_turn_finds_prompt_and_answer_cached_but_for_the_last_block() -> None:
    engine = Engine()
    history = [Message("user", "x " * 400)]
    first = engine.add(render_chat(history), 100)
    engine.run()
    assert first.cached_tokens == 0

    history += [Message("assistant", first.answer.decode()), Message("user", "go on")]
    second = engine.add(render_chat(history), 1)
    engine.run()
    # the last token of an answer is never computed, so its block is not known
    known = (first.prompt_tokens + 100 - 1) // 16 * 16
    assert second.cached_tokens == known


def test_equal_prompts_share_all_but_the_block_with_the_last_token() -> None:
    engine = Engine()
    engine.add(prompt(64), 1)
    engine.run()
    again = engine.add(prompt(64), 1)
    engine.run()
    assert again.cached_tokens == 48


def test_adapters_share_nothing() -> None:
    engine = Engine()
    engine.add(prompt(64), 1, model="m")
    engine.run()
    other = engine.add(prompt(64), 1, model="adapter")
    engine.run()
    assert other.cached_tokens == 0


def test_without_blocks_the_last_to_begin_gives_way_and_is_served_later() -> None:
    engine = Engine(num_gpu_blocks=8, block_size=16)
    first, second = engine.add(prompt(48), 40), engine.add(prompt(48, "b"), 40)
    tokens = engine.run()
    assert engine.scheduler.counters.preemptions > 0
    ends = [token.request for token in tokens if token.is_last]
    assert ends == [first, second]
    assert second.cached_tokens == 0, "cached tokens are those of the first time it ran"


def test_a_request_that_is_aborted_frees_its_blocks_wherever_it_was() -> None:
    engine = Engine(max_num_seqs=1)
    running, waiting = engine.add(prompt(40), 100), engine.add(prompt(40, "b"), 1)
    engine.step()
    step = engine.scheduler.begin_step()
    assert step is not None
    engine.scheduler.abort(running)
    engine.scheduler.abort(waiting)
    assert engine.scheduler.end_step(step) == []
    assert engine.scheduler.pool.blocks_in_use == 0
    assert engine.run() == []


@settings(max_examples=examples(60))
@given(
    jobs=st.lists(
        st.tuples(st.floats(0.0, 0.5), st.integers(1, 200), st.integers(1, 60), st.sampled_from("abc")),
        min_size=1,
        max_size=12,
    ),
    blocks=st.integers(18, 60),
    budget=st.integers(16, 200),
)
def test_many_steps_at_once_come_to_the_same_as_one_after_the_other(
    jobs: list[tuple[float, int, int, str]], blocks: int, budget: int
) -> None:
    limits = EngineLimits(num_gpu_blocks=blocks, block_size=16, max_num_batched_tokens=budget, max_num_seqs=4)

    def play(*, leaps: bool) -> list[tuple[float, int, int | None]]:
        events, ends = EventQueue(), []

        def note(tokens: Iterable[Token], now: float) -> None:
            ends.extend((now, one.request.key, one.request.cached_tokens) for one in tokens if one.is_last)

        machine = VirtualEngine(EngineProfile(RooflineStepTime(HARDWARE), limits), events, note, leaps=leaps)
        now = 0.0
        for key, (pause, tokens, output, text) in enumerate(jobs):
            now += pause
            answer = answer_text(random.Random(key), output)
            request = Request(key, prompt(tokens, text), answer, model="m", block_size=16)
            events.schedule_at(now, lambda later, request=request: machine.add(request, later))
        events.run()
        assert machine.scheduler.pool.blocks_in_use == 0
        return ends

    slow, fast = play(leaps=False), play(leaps=True)
    assert [one[1:] for one in slow] == [one[1:] for one in fast]
    assert [one[0] for one in slow] == pytest.approx([one[0] for one in fast])
    assert len(slow) == len(jobs)


@settings(max_examples=examples(60))
@given(
    jobs=st.lists(st.tuples(st.integers(1, 120), st.integers(1, 40), st.sampled_from("abc")), min_size=1, max_size=12),
    blocks=st.integers(12, 40),
    budget=st.integers(16, 200),
    aborts=st.sets(st.integers(0, 11)),
    data=st.data(),
)
def test_whatever_comes_every_request_is_served_whole_and_no_block_is_lost(
    jobs: list[tuple[int, int, str]], blocks: int, budget: int, aborts: set[int], data: st.DataObject
) -> None:
    engine = Engine(num_gpu_blocks=blocks, block_size=16, max_num_batched_tokens=budget, max_num_seqs=4)
    requests = []
    for tokens, output, key in jobs:
        requests.append(engine.add(prompt(tokens, key), output))
        for _ in range(data.draw(st.integers(0, 3))):
            engine.step()
    gone = [request for number, request in enumerate(requests) if number in aborts]
    for request in gone:
        engine.scheduler.abort(request)
    engine.run()
    for request in requests:
        assert request in gone or request.is_done
    assert engine.scheduler.pool.blocks_in_use == 0


def test_requests_of_more_adapters_than_a_batch_may_use_wait_and_those_behind_them_do_not() -> None:
    limits = EngineLimits(num_gpu_blocks=64, max_loras=1)
    scheduler = Scheduler(RooflineStepTime(PRESETS["h100-llama-3.1-8b"]), limits)
    for key, adapter in enumerate(["sql", "law", "sql", ""]):
        scheduler.add(Request(key, b"word" * 20, b"word", model="m", block_size=16, adapter=adapter))
    step = scheduler.begin_step()
    assert step is not None
    assert [request.key for request, _ in step.parts] == [0, 2, 3]
    assert [request.key for request in scheduler.waiting] == [1]
    scheduler.end_step(step)
    step = scheduler.begin_step()
    assert step is not None
    assert [request.key for request, _ in step.parts] == [1]
