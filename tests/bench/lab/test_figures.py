# SPDX-License-Identifier: Apache-2.0
"""Figures and tables for a paper."""

from __future__ import annotations

from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

import pytest

from bench.__main__ import main
from bench.lab.figures import sweeps_of, write_figures
from bench.lab.trial import Trial, TrialConditions, TrialReport, run_trial
from bench.reporting.report_elements import Table, figure
from bench.reporting.request_results import mean_interval

if TYPE_CHECKING:
    from pathlib import Path

CHAT = "chat:sessions=6,turns=2,system_tokens=600"


def play(policy: str, rate_scale: float, seed: int = 0) -> TrialReport:
    conditions = TrialConditions(CHAT, engines=2, hardware="h100", model="8b", rate_scale=rate_scale, seed=seed)
    return run_trial(Trial(policy, conditions), lambda: 0.0)


@pytest.fixture(scope="module")
def reports() -> list[TrialReport]:
    return [play(policy, rate, seed) for rate in (4.0, 1.0) for policy in ("attache", "random") for seed in (0, 1)]


def test_a_sweep_has_each_policy_at_each_rate_with_its_seeds_together(reports: list[TrialReport]) -> None:
    (sweep,) = sweeps_of(reports)
    assert sweep.title == f"{CHAT}, 2 seeds together; 2 engines of h100, 8b"
    low, high = sweep.rates
    assert 0 < low < high
    assert list(sweep.ttft_s) == ["attache", "random"]
    slow = [one for one in reports if one.trial.policy == "random" and one.trial.conditions.rate_scale == 1]
    found = sweep.ttft_s["random"][0]
    assert found is not None
    values = [row.ttft_s for one in slow for row in one.rows]
    assert found.value == pytest.approx(sum(values) / len(values))
    assert found.low <= found.value <= found.high
    table = sweep.table()
    assert table.headings == ["policy", f"{low:.3g}/s", f"{high:.3g}/s"]
    assert table.rows[1][1] == f"{found.value:.3g} ({found.low:.3g} to {found.high:.3g})"


def test_one_rate_is_no_sweep(reports: list[TrialReport]) -> None:
    assert sweeps_of(reports[:4]) == []


@pytest.mark.slow
def test_figures_are_pdf_and_svg_and_the_same_each_time(reports: list[TrialReport], tmp_path: Path) -> None:
    files = write_figures(reports, tmp_path / "a")
    # of the sweep, and of both rates
    assert [file.name.partition("-chat")[0] for file in files] == ["ttft-by-rate"] * 2 + ["ttft"] * 4
    again = write_figures(reports, tmp_path / "b")
    for file, other in zip(files, again, strict=True):
        content = file.read_bytes()
        assert content == other.read_bytes()
        if file.suffix == ".pdf":
            assert content.startswith(b"%PDF-")
            # publishers refuse fonts of type 3
            assert b"/Type3" not in content
        else:
            assert ET.fromstring(content).tag == "{http://www.w3.org/2000/svg}svg"  # noqa: S314 - our own
            assert b"<!-- attache -->" in content
            assert b"<!-- random -->" in content


def test_a_file_is_written_as_its_suffix_says(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a.png", "a.pdf", "a.svg")]
    with figure(*files, columns=1, size_inches=(2, 2)) as (axes,):
        axes.plot([0, 1], [0, 1], label="line")
    assert [file.read_bytes()[:5] for file in files] == [b"\x89PNG\r", b"%PDF-", b"<?xml"]


def test_a_table_is_what_booktabs_takes() -> None:
    rows = [["power-of-two", "0.5", "-3%"], [r"x\y", "1", "+2%"]]
    table = Table("50% of a_b & c", ["policy", "TTFT, s", "change"], rows)
    assert table.as_latex() == [
        r"\begin{table}",
        r"  \centering",
        r"  \caption{50\% of a\_b \& c}",
        r"  \begin{tabular}{lrr}",
        r"    \toprule",
        r"    policy & TTFT, s & change \\",
        r"    \midrule",
        r"    power-of-two & 0.5 & $-$3\% \\",
        r"    x\textbackslash{}y & 1 & +2\% \\",
        r"    \bottomrule",
        r"  \end{tabular}",
        r"\end{table}",
    ]


@pytest.mark.slow
def test_a_replay_writes_figures_and_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--trace", CHAT, "--engines", "2", "--hardware", "h100", "--model", "8b", "--jobs", "1"]
    rates = ["--rate-scale", "1", "--rate-scale", "4", "--policies", "attache"]
    assert main(["replay", *words, *rates, "--figures", "paper/figures", "--latex", "paper/tables.tex"]) == 0
    assert len(list((tmp_path / "paper/figures").iterdir())) == 6
    text = (tmp_path / "paper/tables.tex").read_text()
    assert text.startswith("% needs \\usepackage{booktabs}\n% attache replay --trace chat:")
    assert text.count("toprule") == 3
    assert "mean TTFT in seconds by requests per second" in text


def test_an_interval_of_nothing_is_none(reports: list[TrialReport]) -> None:
    (sweep,) = sweeps_of([one for one in reports if one.trial.conditions.seed == 0][:3])
    assert sweep.ttft_s["random"][0] is None
    assert sweep.table().rows[1][1] == "none"
    assert mean_interval([]).value == 0.0
