# SPDX-License-Identifier: Apache-2.0
"""Series are found by their labels, and a screen of many engines costs no more for each of them."""

from __future__ import annotations

from extproc.cli.top_sample import Sample
from extproc.cli.top_view import UNBOUNDED, render

LLAMA_A = {"server": "llama", "endpoint": "a"}
LLAMA_B = {"server": "llama", "endpoint": "b"}
QWEN_A = {"server": "qwen", "endpoint": "a"}


def test_labels_that_are_not_named_may_have_any_value() -> None:
    now = Sample()
    for labels, value in ((LLAMA_A, 1), (LLAMA_B, 2), (QWEN_A, 4)):
        now.add("attache_prompt_tokens_total", labels, value)
    assert now.sum("attache_prompt_tokens_total") == 7
    assert now.sum("attache_prompt_tokens_total", server="llama") == 3
    assert now.sum("attache_prompt_tokens_total", endpoint="a", server="llama") == 1
    assert now.values_of("attache_prompt_tokens_total", "server", endpoint="a") == [("llama",), ("qwen",)]


def test_a_series_without_a_named_label_does_not_count() -> None:
    now = Sample()
    now.add("attache_picks_total", {}, 5)
    assert now.get("attache_picks_total", server="") is None
    assert now.get("attache_picks_total") == 5
    assert now.values_of("attache_picks_total", "server") == [("",)]


def test_what_is_added_after_a_question_counts_in_the_next() -> None:
    now = Sample()
    assert now.get("attache_picks_total", server="llama") is None
    now.add("attache_picks_total", {"server": "llama"}, 5)
    assert now.get("attache_picks_total", server="llama") == 5
    now.add("attache_picks_total", {"server": "llama"}, 2)
    assert now.get("attache_picks_total", server="llama") == 7


class Counted(str):
    """A label's value that counts how often it is looked at."""

    __slots__ = ()
    looks = 0

    def __hash__(self) -> int:
        Counted.looks += 1
        return super().__hash__()

    def __eq__(self, other: object) -> bool:
        Counted.looks += 1
        return super().__eq__(other)


def looks_for(engines: int) -> int:
    now = Sample()
    for index in range(engines):
        labels = {"server": "default/llama", "endpoint": Counted(f"10.0.0.{index}:8000")}
        for name in ("in_flight", "engine_running", "engine_report_age_seconds", "prompt_tokens_total"):
            now.add(f"attache_{name}", labels, 1)
    Counted.looks = 0
    render(Sample(), now, seconds=1.0, tenants=0, width=UNBOUNDED)
    return Counted.looks


def test_each_engine_is_looked_at_as_often_however_many_there_are() -> None:
    assert looks_for(200) <= 2.2 * looks_for(100)
