# SPDX-License-Identifier: Apache-2.0
"""The soak's options, and what it reads of logs and pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from bench.soak import __main__ as report
from bench.soak.__main__ import choose_hostile_engines
from bench.soak.hostile_engines import HOSTILE, hostile_host
from bench.soak.soak_loops import find_log_errors, sum_series
from bench.soak.verdict import Latency, ProcessSample, Sample, SoakLimits, SoakRecord, judge

if TYPE_CHECKING:
    from pathlib import Path


def test_hostile_engines_are_chosen_by_group_and_by_name() -> None:
    assert choose_hostile_engines("none") == ()
    assert choose_hostile_engines("all") == tuple(HOSTILE)
    assert choose_hostile_engines("answers,labels") == ("labels", "dies", "resets", "interim")
    with pytest.raises(ValueError, match="no hostile engine is called labelz"):
        choose_hostile_engines("labelz")


def test_every_hostile_engine_has_an_address_of_its_own() -> None:
    assert len({hostile_host(name) for name in HOSTILE}) == len(HOSTILE)


def test_a_traceback_is_told_by_its_error_with_a_count(tmp_path: Path) -> None:
    trace = 'Traceback (most recent call last):\n  File "x", line 1, in y\nKeyError: 7\nINFO all is well\n'
    for name in ("extproc", "bundle", "envoy"):
        (tmp_path / f"{name}.log").write_text(2 * trace if name == "extproc" else "KeyError: in a sentence\n")

    assert find_log_errors(tmp_path) == ["extproc.log: KeyError: 7 (2 times)"]


def test_series_are_summed_up() -> None:
    page = '# TYPE a counter\na{x="1"} 2.0\na{x="2"} 3.0\nb 7\n'

    assert sum_series(page, "a{") == 5
    assert sum_series("cluster.x.update_rejected: 2\ncluster.x.update_success: 9\n", "", "update_rejected:") == 2


def test_the_report_has_the_verdict_and_a_picture(tmp_path: Path) -> None:
    process = ProcessSample(1, 0.1, 1, 1)
    samples = [
        Sample(at_s, {"extproc": process}, {"honest": {"ok": 1}}, Latency(0.1, 0.1, 0.1), {}, 0.1)
        for at_s in (10.0, 20.0)
    ]
    record = SoakRecord(1, 20.0, (), samples=samples)
    checks = judge(record, SoakLimits())

    report.write_results(record, checks, tmp_path)

    assert b'"verdict"' in (tmp_path / "soak.json").read_bytes()
    assert (tmp_path / "soak.png").stat().st_size > 1000
    assert "not judged memory of extproc: too short to tell" in report.check_lines(checks)
