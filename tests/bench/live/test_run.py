# SPDX-License-Identifier: Apache-2.0
"""The comparison as a command: what it prints, writes and returns."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from bench.live.run import Comparison, PolicyRun, main, table, write_report
from bench.reporting.report_elements import Provenance
from bench.reporting.request_results import RequestResult, summarize

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--trace", "none.jsonl"], "No such file"),
        (["--policies", "Magic"], "name a file, or PrefixAware"),
        (["--policies", "none.yaml"], "none.yaml: cannot be read"),
        (["--policies", "pyproject.toml"], "pyproject.toml"),
        (["--hardware", "abacus"], "invalid choice"),
    ],
)
def test_what_it_cannot_do_it_says(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status: object = main(arguments)
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    captured = capsys.readouterr()
    assert said in captured.out + captured.err


def test_failed_requests_are_counted_and_kept_out_of_the_times(tmp_path: Path) -> None:
    results = (RequestResult(0, 0.5, 1.0, 10, 5, 3), RequestResult(0, 0, 0, 0, 0, 0, error="503 no"))
    run = PolicyRun("PrefixAware", summarize(results), (1, 0), 0.5, {"envoy": 1.5}, results)
    made = Provenance("attache run --limit 2", {"Python": "3.11"})
    comparison = Comparison("w", "2 engines", 1.0, (run,), made)
    rows = {name: values for name, *values in table(comparison).rows}
    assert rows["failed"] == ["1"]
    assert rows["TTFT mean, ms"] == ["500.0"]
    assert rows["TTFT mean, 95%, ms"] == ["500.0 to 500.0"]
    page = write_report(comparison, tmp_path)
    assert "envoy 1.5" in page.read_text()
    assert "| TTFT mean, ms | 500.0 |" in page.read_text()
    assert "Made by `attache run --limit 2`; Python 3.11." in page.read_text()
    assert (tmp_path / "latency.png").stat().st_size > 10_000
    written = json.loads((tmp_path / "results.json").read_text())
    assert len(written["runs"][0]["results"]) == written["runs"][0]["summary"]["requests"] == 2


@pytest.mark.parametrize("option", ["--limit", "--skip"])
def test_rows_of_no_trace_are_not_counted_silently(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([option, "200"])
    assert caught.value.code == 2
    assert "make run TRACE=FILE" in capsys.readouterr().err
