# SPDX-License-Identifier: Apache-2.0
"""Some examples of each input of the fuzzers: ``python -m tests.fuzz all`` tries them for as long as is wanted."""

from __future__ import annotations

import itertools
import logging
import random

import pytest

from tests.examples import examples
from tests.fuzz import objects, readers
from tests.fuzz.loop import Attempt, InputReport, growth_of, report_text, try_inputs
from tests.fuzz.values import JSON_VALUES, spoiled

INPUTS = {**readers.INPUTS, **objects.INPUTS}


@pytest.mark.parametrize("name", INPUTS)
def test_broken_input_is_used_or_refused_and_harms_nothing(name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    report = try_inputs({name: INPUTS[name]}, iter(range(examples(250))))
    assert not report.faults, report_text(report)
    assert report.used[name], "some are broken in what does not matter, only"


def test_a_seed_is_always_the_same_input() -> None:
    for make in (readers.kv_payload, readers.peer_payload, readers.broken_page, readers.broken_json):
        assert [make(random.Random(seed)) for seed in range(50)] == [make(random.Random(seed)) for seed in range(50)]
    value = {"a": [{"b": 1}]}
    assert any(spoiled(value, random.Random(seed), JSON_VALUES) != value for seed in range(9))


def test_what_an_input_raises_is_told_with_its_seed_and_the_next_begin_anew() -> None:
    made = itertools.count(1)

    def make() -> Attempt:
        number = next(made)

        def attempt(rng: random.Random) -> bool:
            if number == 1 and rng.random() < 2:
                raise ValueError("odd")
            return True

        return attempt

    report = try_inputs({"one": make}, iter(range(7, 10)))
    (fault,) = report.faults
    assert (fault.name, fault.seed) == ("one", 7)
    assert report.used == {"one": 2}
    assert "WRONG, 1 times: one, first by seed 7: ValueError: odd" in report_text(report)


@pytest.mark.parametrize(
    ("sizes", "grows"),
    [([], False), ([100], False), ([100] * 9, False), ([10, 100, 100, 100, 120], False), ([100] * 8 + [400], True)],
)
def test_memory_that_grows_after_the_warm_up_is_told(sizes: list[int], *, grows: bool) -> None:
    assert bool(growth_of(sizes)) == grows
    assert ("WRONG" in report_text(InputReport(memory_mib=sizes))) == grows
