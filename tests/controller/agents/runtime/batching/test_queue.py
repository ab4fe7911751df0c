# SPDX-License-Identifier: Apache-2.0
"""When requests leave together: by delay, by size, and when the engine has nothing to do."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from controller.agents.runtime.batching.queue import BatchLimits, BatchQueue


def busy(**limits: float) -> BatchQueue[str]:
    """A queue before an engine that computes something."""
    queue = BatchQueue[str](BatchLimits(**{"max_rows": 4, "max_delay_s": 1.0, **limits}))  # type: ignore[arg-type]
    queue.on_call_started()
    return queue


def test_without_load_a_request_leaves_at_once() -> None:
    queue = BatchQueue[str](BatchLimits())
    assert queue.add("k", "a", 1, 0.0) == [["a"]]
    assert queue.add("k", "b", 1, 0.0) == []
    assert queue.on_call_ended() == [["b"]]


def test_a_batch_leaves_when_its_first_request_has_waited_for_the_delay() -> None:
    queue = busy()
    assert queue.add("k", "a", 1, 10.0) == queue.add("k", "b", 1, 10.9) == queue.add("l", "c", 1, 10.95) == []
    assert queue.next_due_at_s == 11.0
    assert queue.pop_due_batches(10.99) == []
    assert queue.pop_due_batches(11.0) == [["a", "b"]]
    assert queue.next_due_at_s == 11.95


def test_a_full_batch_leaves_at_once() -> None:
    queue = busy()
    assert queue.add("k", "a", 3, 0.0) == []
    assert queue.add("k", "b", 1, 0.0) == [["a", "b"]]
    assert queue.next_due_at_s is None


def test_a_request_that_does_not_fit_begins_the_next_batch() -> None:
    queue = busy()
    assert queue.add("k", "a", 3, 0.0) == []
    assert queue.add("k", "b", 2, 0.5) == [["a"]]
    assert queue.pop_due_batches(1.5) == [["b"]]


def test_a_large_request_lets_those_before_it_leave_and_leaves_itself() -> None:
    queue = busy()
    queue.add("k", "a", 1, 0.0)
    assert queue.add("k", "b", 4, 0.0) == [["a"], ["b"]]


def test_a_client_that_leaves_is_not_in_the_batch_and_takes_no_row() -> None:
    queue = busy()
    queue.add("k", "a", 3, 0.0)
    queue.add("l", "c", 1, 0.0)
    queue.remove("k", "a", 3)
    assert queue.waiting_count == 1
    assert queue.add("k", "b", 3, 0.5) == []
    assert queue.pop_due_batches(1.5) == [["c"], ["b"]]
    queue.remove("k", "b", 3)


def test_what_is_held_is_bounded_in_number_and_bytes() -> None:
    queue = busy(max_held=2, max_bytes=100)
    assert queue.try_reserve(60)
    assert not queue.try_reserve(41)
    assert queue.try_reserve(40)
    assert not queue.try_reserve(0)
    queue.release_reserved(60)
    assert queue.try_reserve(60)


EVENTS = st.one_of(
    st.tuples(st.just("add"), st.sampled_from("kl"), st.integers(1, 4)),
    st.tuples(st.just("pass"), st.floats(0, 2), st.none()),
    st.tuples(st.sampled_from(["end", "leave"]), st.none(), st.none()),
)


@given(st.lists(EVENTS, max_size=40))
def test_each_request_leaves_once_in_time_and_in_a_batch_that_is_not_too_large(
    events: list[tuple[str, object, object]],
) -> None:
    queue = BatchQueue[int](BatchLimits(max_rows=4, max_delay_s=1.0))
    now_s, rows, began, waiting = 0.0, dict[int, int](), dict[int, float](), dict[int, str]()
    for number, (event, what, size) in enumerate(events):
        leaving: list[list[int]] = []
        if event == "add":
            assert isinstance(size, int)
            rows[number], began[number], waiting[number] = size, now_s, str(what)
            leaving = queue.add(what, number, size, now_s)
        elif event == "pass":
            assert isinstance(what, float)
            now_s += what
            leaving = queue.pop_due_batches(now_s)
            assert all(now_s - began[one] < 1.0 for one in waiting if not any(one in each for each in leaving))
        elif event == "end" and queue.under_way:
            leaving = queue.on_call_ended()
        elif event == "leave" and waiting:
            one, key = waiting.popitem()
            queue.remove(key, one, rows[one])
        for batch in leaving:
            assert sum(rows[one] for one in batch) <= 4
            assert len({waiting.pop(one) for one in batch}) == 1
        assert queue.waiting_count == len(waiting)
        assert queue.under_way or not waiting
