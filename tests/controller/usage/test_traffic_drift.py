# SPDX-License-Identifier: Apache-2.0
"""Whether requests of late are other than those before."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.commands.usage import main
from controller.usage.log_follower import LogPosition
from controller.usage.rows import parse_usage_line
from controller.usage.store import SqlStore, open_engine
from controller.usage.traffic_drift import CHANGED, ComparedPeriods, find_drift, psi
from tests.usage_lines import NOON_S, context, counts, line, text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

DAY_S = 86_400
EACH = 600
PERIODS = ComparedPeriods(NOON_S - 8 * DAY_S, NOON_S - DAY_S, NOON_S)
HISTOGRAMS = st.dictionaries(st.integers(0, 9), st.integers(0, 10_000), max_size=8)


def written(model: str, prefix: str, days: float, *, seed: int, longer: float = 1.0, cut: float = 0.0) -> list[bytes]:
    """Requests that began so many days ago. ``longer``: their prompts. ``cut``: share of answers that are cut off."""
    rng, lines = random.Random(seed), []
    for number in range(EACH):
        used = counts(
            prompt_tokens=float(round(longer * rng.lognormvariate(6, 0.5))),
            completion_tokens=float(round(rng.lognormvariate(5, 0.5))),
            finish="length" if rng.random() < cut else "stop",
        )
        at = NOON_S - days * DAY_S + number
        lines.append(text(line(f"{prefix}{model}{number}", of=context(model=model), at=at, usage=used)))
    return lines


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqlStore]:
    """Prompts of ``grows`` have become twice as long, answers of ``cuts`` are cut off, ``same`` has not changed, and
    ``new`` had no requests before.
    """
    made = SqlStore(open_engine(f"sqlite:///{tmp_path}/usage.db"), "log")
    made.prepare()
    lines = [
        *(one for model in ("same", "grows", "cuts") for one in written(model, "a", 3, seed=1, cut=0.02)),
        *written("same", "b", 0.5, seed=2, cut=0.02),
        *written("grows", "b", 0.5, seed=2, longer=2.0, cut=0.02),
        *written("cuts", "b", 0.5, seed=2, cut=0.4),
        *written("new", "b", 0.5, seed=2),
    ]
    made.write([parse_usage_line(one, NOON_S) for one in lines], LogPosition(), LogPosition(1, 1, "x"))
    yield made
    made.close()


def test_the_index_is_the_sum_over_buckets() -> None:
    # shares with half a request more in each of two buckets
    p, q = (90.5 / 101, 10.5 / 101), (50.5 / 101, 50.5 / 101)
    expected = sum((a - b) * math.log(a / b) for a, b in zip(p, q, strict=True))
    assert psi({0: 50, 1: 50}, {0: 90, 1: 10}) == pytest.approx(expected)
    assert expected > CHANGED


@given(HISTOGRAMS, HISTOGRAMS)
def test_the_index_is_finite_and_the_same_both_ways(one: Mapping[int, int], other: Mapping[int, int]) -> None:
    found = psi(one, other)
    assert 0 <= found < math.inf
    assert found == pytest.approx(psi(other, one), abs=1e-9)
    assert psi(one, one) == 0


def test_what_has_changed_comes_first_and_the_rest_stays_the_same(store: SqlStore) -> None:
    with store.engine.connect() as connection:
        found, small = find_drift(connection, PERIODS, ("model",), least=500)
    changed = {(one.names["model"], one.column) for one in found if one.verdict == "changed"}
    assert changed == {("grows", "input"), ("cuts", "finish")}
    assert {(one.names["model"], one.column) for one in found[:2]} == changed
    assert {one.requests for one in found} == {one.requests_before for one in found} == {EACH}
    (cut,) = (one for one in found if (one.names["model"], one.column) == ("cuts", "finish"))
    assert (cut.usual_before, cut.usual) == ("stop", "stop")
    (grown,) = (one for one in found if (one.names["model"], one.column) == ("grows", "input"))
    # medians of 403 and 807 tokens, as the upper bounds of their buckets
    assert (grown.usual_before, grown.usual) == ("512", "1024")
    # the new model has no past
    assert small == 1


def test_the_command_says_what_has_changed_and_ends_with_1(
    store: SqlStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    del store
    words = ["drift", "--store", f"sqlite:///{tmp_path}/usage.db", "--end", str(NOON_S)]
    assert main(words) == 1
    said = capsys.readouterr()
    header, first, *_ = said.out.splitlines()
    assert header.split() == [
        "model",
        "column",
        "requests_before",
        "requests",
        "usual_before",
        "usual",
        "psi",
        "verdict",
    ]
    assert first.split()[:2] == ["grows", "input"]
    assert "left out: 1\n2 of " in said.err
    # everything together, where twice as long prompts of one model of four are a shift
    assert main([*words, "--group-by", "tenant", "--start", str(NOON_S - DAY_S), "--before", "1d"]) == 0
    assert "0 of 0 have changed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--group-by", "colour"), "'colour' is unknown; write some of"),
        (("--start", "2027-01-01"), "is not before --end"),
        (("--end", "yesterday"), "'yesterday' is no time"),
        (("--before", "week"), "'week'"),
    ],
)
def test_a_mistake_in_the_options_is_named(
    words: tuple[str, ...], message: str, store: SqlStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    del store
    assert main(["drift", "--store", f"sqlite:///{tmp_path}/usage.db", *words]) == 2
    assert message in capsys.readouterr().err
