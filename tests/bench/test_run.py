"""The comparison as a command: what it prints, writes and returns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.load.client import Result
from bench.load.summary import summarize
from bench.report import Comparison, Run, rows, write_report
from bench.run import main


def test_a_comparison_in_virtual_time_ends_with_a_table_and_a_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    row = {"input_length": 1000, "output_length": 5, "hash_ids": [1, 2]}
    trace.write_text("\n".join(json.dumps({"timestamp": 500 * number, **row}) for number in range(40)))
    assert main(["--virtual", "--trace", str(trace), "--limit", "30", "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "trace.jsonl, rows 1 to 30" in said
    assert "PrefixAware" in said
    written = json.loads((tmp_path / "out" / "results.json").read_text())
    aware, round_robin = written["runs"]
    assert len(aware["results"]) == aware["summary"]["requests"] == 30
    # the same prompt 30 times: all but the first find its full blocks, less the one with the last token
    assert aware["summary"]["cached_token_ratio"] > round_robin["summary"]["cached_token_ratio"] > 0.8
    assert sum(aware["requests_by_engine"]) == 30
    assert (tmp_path / "out" / "latency.png").stat().st_size > 10_000
    assert "| TTFT mean, ms |" in (tmp_path / "out" / "report.md").read_text()


def test_what_no_engine_could_hold_fails_instead_of_being_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    row = {"timestamp": 0, "output_length": 50, "hash_ids": [1, 2]}
    trace.write_text("\n".join(json.dumps({**row, "input_length": length}) for length in (100, 1000)))
    asked = ["--virtual", "--trace", str(trace), "--kv-blocks", "20", "--out", str(tmp_path / "out")]
    assert main(asked) == 1
    assert "2 failed: longer than the KV cache" in capsys.readouterr().out


POLICIES = sorted((Path(__file__).parent.parent.parent / "bench" / "policies" / "configs").iterdir())


@pytest.mark.parametrize("policy", POLICIES, ids=lambda file: file.stem)
def test_a_policy_of_llm_ds_can_be_compared_with_ours(
    tmp_path: Path, policy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    # three long prefixes in turn over four engines: round robin brings every prefix to every engine
    rows = [
        {
            "timestamp": 300 * number,
            "input_length": 4000,
            "output_length": 5,
            "hash_ids": [10 * (number % 3) + part for part in range(8)],
        }
        for number in range(40)
    ]
    trace.write_text("\n".join(map(json.dumps, rows)))
    policies = f"{policy},RoundRobin"
    assert main(["--virtual", "--trace", str(trace), "--policies", policies, "--out", str(tmp_path / "out")]) == 0
    assert policy.stem in capsys.readouterr().out
    theirs, round_robin = json.loads((tmp_path / "out" / "results.json").read_text())["runs"]
    assert theirs["policy"] == policy.stem
    assert theirs["summary"]["cached_token_ratio"] > round_robin["summary"]["cached_token_ratio"] > 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--trace", "none.jsonl"], "No such file"),
        (["--policies", "Magic"], "name a file, or PrefixAware"),
        (["--virtual", "--policies", "none.yaml"], "none.yaml: cannot be read"),
        (["--virtual", "--policies", "pyproject.toml"], "pyproject.toml"),
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
    results = (Result(0, 0.5, 1.0, 10, 5, 3), Result(0, 0, 0, 0, 0, 0, error="503 no"))
    run = Run("PrefixAware", summarize(results, 1.0), (1, 0), 0.5, {"envoy": 1.5}, results)
    comparison = Comparison("w", "2 engines", 1.0, (run,))
    table = dict(rows(comparison))
    assert table["failed"] == ["1"]
    assert table["TTFT mean, ms"] == ["500.0"]
    assert "envoy 1.5" in write_report(comparison, tmp_path).read_text()
