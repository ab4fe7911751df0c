# SPDX-License-Identifier: Apache-2.0
"""What joined requests gain, from rounds to figures; and a short measurement."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.micro.batching import CLIENTS, WAYS, BatchingMeasurement, Report, batch_figures, markdown, measure

if TYPE_CHECKING:
    from pathlib import Path

ROUNDS = [
    {"direct": BatchingMeasurement(100, 10, 20, 1.0, 0), "joined": BatchingMeasurement(400, 5, 8, 0.25, 300)},
    {"direct": BatchingMeasurement(200, 10, 20, 1.0, 0), "joined": BatchingMeasurement(400, 8, 8, 0.25, 100)},
    {"direct": BatchingMeasurement(100, 20, 20, 1.0, 0), "joined": BatchingMeasurement(1000, 5, 8, 0.1, 200)},
]


def test_ratios_are_of_one_round() -> None:
    found = batch_figures(8, ROUNDS)  # type: ignore[arg-type]
    # 4, 2, 10; 0.5, 0.8, 0.25; -5, -2, -15
    assert (found.rate.median, found.rate.low, found.rate.high) == (4, 2, 10)
    assert (found.p50.median, found.added_ms.median) == (0.5, -5)
    assert (found.joined.per_s, found.joined.calls, found.joined.cpu_us) == (400, 0.25, 200)


def test_the_table_has_a_line_for_each_number_of_clients() -> None:
    text = markdown(Report(0.5, 0.25, [batch_figures(8, ROUNDS)], {}))  # type: ignore[arg-type]
    assert "| 8 | 100 | 400 | 10.0 | 5.0 | 20.0 | 8.0 | 0.25 | 200 | 4.00 | 0.50 |" in text
    assert "busy for 25%" in text


async def test_both_ways_are_measured_for_each_number_of_clients(tmp_path: Path) -> None:
    found = await measure(tmp_path, rounds=1, phase_s=0.2)
    assert found.keys() == {*CLIENTS}
    for (loads,) in found.values():
        assert loads.keys() == {*WAYS}
        assert loads["direct"].calls == 1.0
        assert loads["joined"].cpu_us > 0
    # those that wait for a call of 5 ms are joined
    assert found[64][0]["joined"].calls < 1
