# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode engines against whole ones: every cell is played, and each decider's best ratio counts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from bench.lab.disaggregation import TraceInput, run_pairs_lab

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.slow
def test_every_decider_has_a_cell_over_the_goodput_of_whole_engines(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [
        {
            "timestamp": 700 * number,
            "input_length": 6000,
            "output_length": 30,
            "hash_ids": [12 * number + i for i in range(12)],
        }
        for number in range(5)
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tables = run_pairs_lab([TraceInput("conversation", str(trace), 0)], tmp_path, Console(quiet=True), jobs=1)
    assert [table.title for table in tables] == [
        f"Goodput with the first token within 5 s and each further one within {tpot}"
        for tpot in ("100 ms", "30 ms (strict)", "25 ms (strictest)")
    ]
    loose = tables[0]
    assert [row[0] for row in loose.rows] == [
        f"conversation, {load}, {network}" for load in ("30%", "56%", "85%") for network in ("nvlink", "100gb")
    ]
    for row in loose.rows:
        assert float(row[1]) > 0
        # so few requests meet a loose objective everywhere
        assert all(0.5 < float(cell.split(" ")[0]) < 2 and ":" in cell for cell in row[2:])
