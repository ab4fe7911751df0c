# SPDX-License-Identifier: Apache-2.0
"""The command line as people use it: a replay, a comparison, what goes on after a stop, and what is said of
nonsense.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bench.__main__ import main
from bench.lab import engine_model_validation as check
from bench.lab import html_report, lab_command
from bench.lab import trial_runner as inputs
from bench.lab.policies import registry

SMALL = [
    "--trace",
    "chat:sessions=6,turns=2,system_tokens=600",
    "--engines",
    "2",
    "--hardware",
    "h100",
    "--model",
    "8b",
]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def measures(found: dict[str, Any]) -> dict[str, Any]:
    """By policy, of results with one set of conditions."""
    (group,) = found["groups"]
    policies: dict[str, Any] = group["policies"]
    return policies


def replay(*more: str) -> int:
    return main(["replay", *SMALL, "--jobs", "1", *more])


def test_a_replay_writes_what_is_asked_for_under_the_names_that_are_promised(tmp_path: Path) -> None:
    out, lines, page = tmp_path / "a/out.json", tmp_path / "b/out.csv", tmp_path / "c/out.html"
    flags = ["--policies", "attache,dynamo", "--seed", "0", "--seed", "1", "--rate-scale", "2"]
    assert replay(*flags, "--json", str(out), "--csv", str(lines), "--html", str(page)) == 0

    found = json.loads(out.read_text())
    assert measures(found).keys() == {"attache", "dynamo"}
    for one in measures(found).values():
        assert one["requests"] == 24
        assert one["errors"] == 0
        assert one["ttft_s"].keys() >= {"mean", "p50", "p90", "p99"}
        assert 0 < one["ttft_s"]["p50"] <= one["e2e_s"]["p50"]
        assert 0 < one["tpot_s"]["mean"] < 1
        assert 0 < one["cached_token_ratio"] < 1
        assert one["goodput"] > 0
    assert len(found["trials"]) == 4
    table = list(csv.DictReader(lines.read_text().splitlines()))
    assert {(line["policy"], line["seed"], line["rate_scale"]) for line in table} == {
        (policy, seed, "2.0") for policy in ("attache", "dynamo") for seed in "01"
    }
    # a section with its plots for each set of conditions, both seeds together; and how it was made
    assert page.read_text().count("<img") == 1
    assert page.read_text().count("<h2>") == 2
    assert "2 seeds together" in page.read_text()
    assert all(f"<td>{policy}</td>" in page.read_text() for policy in ("attache", "dynamo"))


def written_trace(file: Path, rows: list[dict[str, object]]) -> str:
    file.write_text("\n".join(map(json.dumps, rows)))
    return str(file)


def play_rows(directory: Path, rows: list[dict[str, object]], *more: str) -> dict[str, Any]:
    """The measures of the policies on four small engines."""
    out = directory / "out.json"
    trace = written_trace(directory / "trace.jsonl", rows)
    engines = ["--engines", "4", "--hardware", "h100", "--model", "8b", "--block-size", "16", "--jobs", "1"]
    assert main(["replay", "--trace", trace, *engines, "--json", str(out), *more]) == 0
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def test_a_replay_finds_a_repeated_prompt_in_the_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"input_length": 1000, "output_length": 5, "hash_ids": [1, 2]}
    rows = [{"timestamp": 500 * number, **row} for number in range(40)]
    found = play_rows(tmp_path, rows, "--limit", "30", "--policies", "attache,round-robin")
    said = capsys.readouterr().out
    assert "attache" in said
    assert found["trials"][0]["workload"] == "trace.jsonl, rows 1 to 30"
    aware, round_robin = measures(found)["attache"], measures(found)["round-robin"]
    assert aware["requests"] == len(found["trials"][0]["requests"]["ttft_s"]) == 30
    # the same prompt 30 times: all but the first find its full blocks, less the one with the last token
    assert aware["cached_token_ratio"] > round_robin["cached_token_ratio"] > 0.8


def test_what_no_engine_could_hold_fails_instead_of_being_lost(tmp_path: Path) -> None:
    row = {"timestamp": 0, "output_length": 50}
    rows = [{**row, "input_length": length, "hash_ids": ids} for length, ids in ((100, [1]), (1000, [1, 2]))]
    found = play_rows(tmp_path, rows, "--kv-blocks", "20", "--policies", "attache,round-robin")
    assert [one["errors"] for one in measures(found).values()] == [1, 1]
    assert all(trial["requests"]["errors"] == ["", "longer than the KV cache"] for trial in found["trials"])


CONFIGS = sorted((Path(registry.__file__).parent / "configs").iterdir())


@pytest.mark.parametrize("config", CONFIGS, ids=lambda file: file.stem)
def test_a_policy_of_llm_ds_can_be_compared_with_ours(tmp_path: Path, config: Path) -> None:
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
    found = measures(play_rows(tmp_path, rows, "--policies", f"{config},round-robin"))
    assert found[str(config)]["cached_token_ratio"] > found["round-robin"]["cached_token_ratio"] > 0


def test_the_same_command_gives_the_same_numbers(tmp_path: Path) -> None:
    first, second = tmp_path / "1.json", tmp_path / "2.json"
    assert replay("--policies", "attache", "--json", str(first)) == 0
    assert replay("--policies", "attache", "--json", str(second), "--fresh") == 0
    one, other = (json.loads(file.read_text()) for file in (first, second))
    assert measures(one) == measures(other)


def test_what_was_run_is_not_run_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert replay("--policies", "attache") == 0
    kept = sorted((tmp_path / "bench/out/lab").iterdir())
    times = [file.stat().st_mtime_ns for file in kept]
    assert replay("--policies", "attache,random") == 0
    assert [file.stat().st_mtime_ns for file in kept] == times
    assert len(list((tmp_path / "bench/out/lab").iterdir())) == 2 * len(kept)
    # other code may come to other results
    monkeypatch.setattr(inputs, "code_digest", lambda: "other")
    assert replay("--policies", "attache") == 0
    assert len(list((tmp_path / "bench/out/lab").iterdir())) == 3 * len(kept)


def test_two_policies_of_one_replay_are_compared_request_by_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    assert replay("--policies", "attache,round-robin", "--json", str(out)) == 0
    assert main(["compare", f"{out}:round-robin", str(out)]) == 0
    said = capsys.readouterr().out
    assert "round-robin" in said
    assert "TTFT" in said
    (tmp_path / "later.json").write_bytes(out.read_bytes())
    assert main(["compare", "out.json:round-robin", "later.json:round-robin"]) == 0
    # one policy before and after a change: its files tell which is which
    assert "out.json:round-robin" in (said := capsys.readouterr().out)
    assert "later.json:round-robin" in said
    assert main(["compare", str(out), str(out)]) == 0
    assert "+0.0%" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["replay", "--trace", "none.jsonl"], "No such file"),
        (["replay", "--trace", "none.bin"], "none.bin: cannot be read: No such file"),
        (["replay", "--trace", "chat:turn=3"], "it takes sessions,"),
        (["replay", "--trace", "chat:turns=many"], "Expected `int`"),
        (["replay", "--trace", "chat", "--skip", "9999"], "skip fewer"),
        (["replay", *SMALL, "--policies", "best"], "or one of attache,"),
        (["replay", *SMALL, "--policies", "none.yaml"], "none.yaml: cannot be read"),
        (["replay", "--trace", "chat", "--hardware", "h101"], "with one of h100,"),
        (["replay", "--trace", "chat", "--hardware", "l40s"], "70b does not fit"),
        (["replay", "--trace", "chat", "--model", "9b"], "there are 7b,"),
        (["replay", "--trace", "chat", "--scrape", "soon"], "soon"),
        (["replay", "--trace", "chat", "--flow-control", "{"], "JSON"),
        (["replay", "--trace", "chat", "--prefill", "2"], "give both"),
        (["replay", "--trace", "chat", "--prefill", "2", "--decode", "1", "--engines", "3"], "remove it"),
        (["replay", "--trace", "chat", "--policies", "pd-attache"], "--prefill N and --decode N"),
        (["compare", "none.json", "none.json"], "cannot be read as the JSON of a replay"),
        (["validate", "--traces", "none"], "none is not a directory"),
        (["autoscale", "--quick", "--traces", "none"], "none is not a directory"),
    ],
)
def test_nonsense_is_said_in_a_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err.replace("\n", " ")


def test_results_without_a_common_ground_are_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = tmp_path / "1.json", tmp_path / "2.json"
    assert replay("--policies", "attache", "--json", str(one)) == 0
    assert replay("--policies", "attache", "--seed", "7", "--json", str(other)) == 0
    assert main(["compare", str(one), str(other)]) == 2
    assert main(["compare", f"{one}:sglang", str(other)]) == 2
    said = capsys.readouterr().err
    assert "no trial under the same conditions" in said
    assert "has no policy sglang" in said


def test_a_workload_says_how_much_of_it_could_be_cached(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["workload", "--trace", "shared-prefix:groups=4,prompts=10,prefix=6400,question=640,output=10"]) == 0
    said = capsys.readouterr().out
    # nine of ten prompts find 6,400 of some 7,044 tokens
    assert "without a bound" in said
    assert any(f"{share}%" in said for share in ("81.7", "81.8", "81.6"))


def test_the_table_of_the_lab_has_a_line_for_each_policy_and_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # to draw takes ten times as long as the rest, and is tested with the replay
    monkeypatch.setattr(html_report, "_plots", lambda *_: "")
    monkeypatch.setattr(lab_command, "write_figures", lambda *_: [])

    def row(number: int) -> str:
        return json.dumps(
            {
                "timestamp": 900 * number,
                "input_length": 1500,
                "output_length": 5,
                "hash_ids": [number % 5, 90 + number, 7],
            }
        )

    for name, count in (("conversation_trace.jsonl", 2530), ("synthetic_trace.jsonl", 1230)):
        (tmp_path / name).write_text("\n".join(map(row, range(count))))
    flags = ["--policies", "attache,random", "--jobs", "1", "--out", str(tmp_path / "out")]
    assert main(["lab", "--traces", str(tmp_path), *flags]) == 0
    page = (tmp_path / "out" / "lab.md").read_text()
    # three loads of two traces, and how the TTFT of each trace grows with the load
    assert page.count("\n## ") == 8
    assert page.count("\n| attache |") == page.count("\n| random |") == 8
    assert "Made by `attache lab --traces " in page
    groups = json.loads((tmp_path / "out" / "lab.json").read_text())["groups"]
    assert [one["policies"]["attache"]["requests"] for one in groups] == [30] * 6
    assert "## conversation, high (98%)" in page
    # of other engines nobody has measured the capacity
    assert main(["lab", "--traces", str(tmp_path), *flags, "--rate-factor", "0.8"]) == 0
    assert "## conversation, high\n" in (tmp_path / "out" / "lab.md").read_text()


def test_in_a_clone_without_traces_the_lab_plays_generators_and_says_how_to_give_traces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(html_report, "_plots", lambda *_: "")
    monkeypatch.setattr(lab_command, "write_figures", lambda *_: [])
    small = {"chat": "chat:sessions=4,turns=2", "shared-prefix": "shared-prefix:groups=2,prompts=2,prefix=600,output=5"}
    generated = [msgspec.structs.replace(one, name=small[one.name]) for one in lab_command._GENERATED]
    monkeypatch.setattr(lab_command, "_GENERATED", generated)
    flags = ["--policies", "attache", "--jobs", "1", "--hardware", "h100", "--model", "8b"]
    assert main(["lab", *flags]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "There is no directory of traces" in said
    assert "kvcache-ai/Mooncake" in said
    assert "--traces" in said
    # three loads of two traces, and how the TTFT of each grows with the load
    assert (tmp_path / "bench/out/lab/lab.md").read_text().count("\n## ") == 8


@pytest.mark.slow
def test_the_lab_plays_the_rates_that_it_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(html_report, "_plots", lambda *_: "")
    (chat, _) = lab_command._GENERATED
    monkeypatch.setattr(lab_command, "_GENERATED", [msgspec.structs.replace(chat, name="chat:sessions=4,turns=2")])
    flags = ["--policies", "attache,random", "--jobs", "1", "--hardware", "h100", "--model", "8b"]
    assert main(["lab", *flags, "--rates", "0.5,1,4"]) == 0
    out = tmp_path / "bench/out/lab"
    assert [line for line in (out / "lab.md").read_text().splitlines() if line.startswith("## chat")][:3] == [
        "## chat:sessions=4,turns=2, x0.5",
        "## chat:sessions=4,turns=2, x1",
        "## chat:sessions=4,turns=2, x4",
    ]
    assert (out / "lab.tex").read_text().count("toprule") == 4
    assert len(list((out / "figures").glob("ttft-by-rate-*.pdf"))) == 1
    for wrong in ("0", "1,-1", "nan", "fast"):
        with pytest.raises(SystemExit):
            main(["lab", "--rates", wrong])


@pytest.mark.slow
def test_a_grid_over_rates_has_a_table_for_each_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--policies", "attache", "--rate-scale", "1", "--rate-scale", "2", "--seed", "0", "--seed", "1"]
    assert replay(*flags, "--json", "out.json", "--html", "out.html") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("rate x1,") == said.count("rate x2,") == 1
    # and one of both rates
    assert said.count("2 seeds together") == 3
    page = (tmp_path / "out.html").read_text()
    assert page.count("<img") == 2
    # a report says what made it
    assert "<code>attache replay --trace chat:" in page
    assert "numpy " in page
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["made_by"]["versions"]["code"]
    # nothing pools rates without a word
    assert ["rate x1," in one["conditions"] for one in written["groups"]] == [True, False]
    assert [one["policies"]["attache"]["requests"] for one in written["groups"]] == [24, 24]
    assert main(["compare", "out.json", "out.json"]) == 0
    compared = " ".join(capsys.readouterr().out.split())
    assert "2 sets of conditions together, rates x1, x2" in compared
    # and each alone
    assert compared.count("paired by request") == 3
    assert compared.count("rate x1,") == compared.count("rate x2,") == 1


def test_traces_of_one_name_in_two_directories_have_a_table_each(tmp_path: Path) -> None:
    flags = ["--policies", "attache", "--engines", "2", "--hardware", "h100", "--model", "8b", "--json", "out.json"]
    for directory in ("one", "other"):
        (tmp_path / directory).mkdir()
        rows = [{"timestamp": at, "input_length": 9, "output_length": 2, "hash_ids": [1]} for at in range(3)]
        flags += ["--trace", written_trace(Path(directory) / "trace.jsonl", rows)]
    assert main(["replay", *flags, "--jobs", "1"]) == 0
    first, second = json.loads((tmp_path / "out.json").read_text())["groups"]
    assert first["conditions"].startswith("one/trace.jsonl after 0: ")
    assert second["conditions"].startswith("other/trace.jsonl after 0: ")


def test_two_parts_of_what_a_generator_makes_have_a_table_each() -> None:
    assert replay("--policies", "attache", "--skip", "0", "--skip", "3", "--limit", "3", "--json", "out.json") == 0
    groups = json.loads(Path("out.json").read_text())["groups"]
    assert [one["policies"]["attache"]["requests"] for one in groups] == [6, 6]


def test_the_lab_says_where_its_traces_are_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", "--traces", str(tmp_path)]) == 2
    assert "kvcache-ai/Mooncake" in capsys.readouterr().err.replace("\n", "")


def test_without_recorded_runs_the_check_of_the_engine_model_says_loudly_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["validate", "--traces", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "NOT COMPARED WITH REAL RUNS" in said
    assert "LLMServingSim" in said
    assert "70B, 8 x A100" in said
    # what was never compared is named, and what was is not
    never = said.replace("\n", " ").partition("never held against a measurement:")[2]
    assert "h200" in never
    assert "pcie4" in never
    assert "hardware from files" in never
    assert "h100," not in never
    assert "pcie5" not in never


def test_an_engine_model_out_of_its_band_fails_the_check(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "_STEP_BAND", 0.01)
    assert main(["validate", "--traces", str(tmp_path)]) == 1
    assert "is beyond 1%" in capsys.readouterr().out
