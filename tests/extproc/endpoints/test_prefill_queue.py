# SPDX-License-Identifier: Apache-2.0
"""The requests that wait at an engine, by what was sent and what the engine counts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from extproc.endpoints.prefill_queue import PrefillQueue


def pending(*works: float, now: float = 0.0) -> PrefillQueue:
    made = PrefillQueue()
    for work in works:
        made.add(work, now)
    return made


def works(queue: PrefillQueue) -> list[float]:
    return [one.work for one in queue.requests]


def test_the_waiting_requests_are_the_last_ones_sent() -> None:
    queue = pending(9_000, 50_000, 2_000, 3_000)
    bounds = queue.reconcile(2, 1.0)
    # two wait; of the others the first is done, and the second may be computed just now
    assert works(queue) == [50_000, 2_000, 3_000]
    assert (bounds.least, bounds.most, bounds.known) == (5_000, 55_000, 2)


def test_all_prompts_of_one_step_may_be_unfinished() -> None:
    queue = pending(9_000, 4_000, 4_000, 1_000)
    bounds = queue.reconcile(1, 1.0)
    assert works(queue) == [4_000, 4_000, 1_000]
    assert (bounds.least, bounds.most) == (1_000, 9_000)


def test_requests_on_their_way_are_not_in_the_engines_count() -> None:
    queue = pending(5_000)
    queue.add(7_000, 1.0)
    bounds = queue.reconcile(0, 1.01)
    assert works(queue) == [5_000, 7_000]
    assert bounds.least == 7_000


def test_first_tokens_remove_the_head_of_the_queue() -> None:
    queue = pending(1_000, 1_000, 1_000, 1_000)
    queue.reconcile(1, 1.0, first_tokens=2)
    assert len(queue.requests) == 2


def test_a_request_found_done_is_not_removed_twice() -> None:
    queue = pending(1_000, 2_000, 3_000, 4_000)
    queue.on_first_token(2)
    queue.reconcile(2, 1.0, first_tokens=2)
    assert works(queue) == [3_000, 4_000]
    queue.reconcile(1, 1.2, first_tokens=1)
    assert works(queue) == [4_000]


def test_foreign_requests_do_not_remove_waiting_ones_of_ours() -> None:
    queue = pending(1_000, 2_000)
    bounds = queue.reconcile(5, 1.0, first_tokens=40)
    assert works(queue) == [1_000, 2_000]
    assert bounds.known == 2


def test_a_request_that_ends_while_waiting_leaves_those_before_it() -> None:
    queue = pending(1_000, 2_000, 3_000)
    queue.remove(2)
    assert works(queue) == [1_000, 3_000]
    assert queue.work == 4_000
    queue.remove(2)
    assert works(queue) == [1_000, 3_000]


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.integers(1, 20_000)),
            st.tuples(st.just("drop"), st.integers(0, 40)),
            st.tuples(st.just("passed"), st.integers(0, 40)),
            st.tuples(st.just("told"), st.tuples(st.integers(0, 12), st.one_of(st.none(), st.integers(0, 12)))),
        ),
        max_size=60,
    )
)
def test_whatever_is_reported_the_sum_is_that_of_the_queue_and_bounds_are_ordered(
    steps: list[tuple[str, object]],
) -> None:
    queue, now = PrefillQueue(), 0.0
    for verb, value in steps:
        now += 0.01
        if verb == "add":
            queue.add(float(value), now)  # type: ignore[arg-type]
        elif verb == "drop":
            queue.remove(value)  # type: ignore[arg-type]
        elif verb == "passed":
            queue.on_first_token(value)  # type: ignore[arg-type]
        else:
            waiting, first_tokens = value  # type: ignore[misc]
            before = len(queue.requests)
            bounds = queue.reconcile(waiting, now, first_tokens)
            assert 0 <= bounds.least <= bounds.most + 1e-6
            assert bounds.known <= waiting
            assert min(waiting, before) <= len(queue.requests) <= before
        assert abs(queue.work - sum(works(queue))) < 1e-6
        numbers = [one.number for one in queue.requests]
        assert numbers == sorted(set(numbers))
