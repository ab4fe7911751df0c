# SPDX-License-Identifier: Apache-2.0
"""Policies, hardware and models of one's own, and results that an edit makes stale."""

from __future__ import annotations

import json
import os
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bench.__main__ import main
from bench.lab.hardware_spec_parser import engine_profiles, hardware_files, read_gpu, read_model
from bench.lab.trial import Trial, TrialConditions
from bench.lab.trial_runner import condition_files, trial_cache_key
from extproc.api.config_errors import ConfigInvalid
from tests.plugin_package import HEAD, install_plugin

NUMPY = """\
import numpy as np
from bench.lab.policies.routers import least_cost
class Mine:
    def __init__(self):
        self.picks = 0
    def pick(self, view, *, rng):
        self.picks += 1
        # the cost by row
        return least_cost(view, {cost}, rng)
"""
FIRST = """
from bench.lab.policies.routers import least_cost

class First:
    def pick(self, view, *, rng):
        rows = view.table.in_flight * 0.0
        rows[{row}] = -1.0
        return least_cost(view, rows, rng)
"""
GPU = """\
flops: 209e12
bandwidth: 1.792e12
memory: 32e9
"""


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


def replay(*more: str, trace: str = "chat:sessions=4,turns=2") -> int:
    engines = ["--engines", "2", "--hardware", "h100", "--model", "8b", "--jobs", "1"]
    return main(["replay", "--trace", trace, *engines, *more])


def imbalances(*policies: str) -> list[float]:
    """The busiest engine over the mean, of two engines: 2 if one has everything."""
    assert replay("--policies", ",".join(policies), "--json", "out.json") == 0
    found: dict[str, Any] = json.loads(Path("out.json").read_text())
    return [found["groups"][0]["policies"][one]["imbalance"] for one in policies]


def kept() -> int:
    return len(list(Path("bench/out/lab").iterdir()))


def test_an_edited_policy_is_run_again_and_an_unchanged_one_is_not() -> None:
    file = Path("my.py")
    file.write_text(FIRST.format(row=0))
    assert imbalances("my.py:First") == [2.0]
    assert imbalances("my.py:First") == [2.0]
    assert kept() == 1
    # of the same length, within the same second
    file.write_text(FIRST.format(row=0).replace("-1.0", "+0.0"))
    assert imbalances("my.py:First")[0] < 2.0
    assert kept() == 2


def test_what_a_policy_imports_from_beside_it_counts_too() -> None:
    Path("helpers.py").write_text("from bench.lab.policies.routers import least_cost\nSHARE = -1.0\n")
    Path("my.py").write_text(
        FIRST.format(row=0)
        .replace("bench.lab.policies.routers", "helpers")
        .replace("-1.0", "__import__('helpers').SHARE")
    )
    assert imbalances("my.py:First") == [2.0]
    Path("helpers.py").write_text("from bench.lab.policies.routers import least_cost\nSHARE = +0.0\n")
    assert imbalances("my.py:First")[0] < 2.0


def test_what_a_policy_reads_by_itself_counts_too() -> None:
    Path("weights.json").write_text("[-1.0]")
    reads = (
        FIRST.format(row=0).replace("-1.0", "WEIGHT")
        + "\nimport json, pathlib\nWEIGHT = json.loads(pathlib.Path('weights.json').read_text())[0]\n"
    )
    Path("my.py").write_text(reads)
    assert imbalances("my.py:First") == [2.0]
    assert imbalances("my.py:First") == [2.0]
    assert kept() == 1
    Path("weights.json").write_text("[+0.0]".replace("+", " "))
    assert imbalances("my.py:First")[0] < 2.0


def test_two_policies_with_neighbours_of_the_same_name_do_not_mix() -> None:
    for folder, weight in (("a", "-1.0"), ("b", "0.0")):
        Path(folder).mkdir()
        Path(folder, "helpers.py").write_text(f"WEIGHT = {weight}\n")
        Path(folder, "my.py").write_text("from helpers import WEIGHT\n" + FIRST.format(row=0).replace("-1.0", "WEIGHT"))
    one, other = imbalances("a/my.py:First", "b/my.py:First")
    assert (one, other < 2.0) == (2.0, True)


def trial(policy: str = "attache", **conditions: str) -> Trial:
    return Trial(
        policy, msgspec.convert({"trace": "chat", "hardware": "h100", "model": "8b", **conditions}, TrialConditions)
    )


@pytest.mark.parametrize(
    ("name", "policy", "conditions"),
    [
        ("trace.jsonl", "attache", {"trace": "trace.jsonl"}),
        ("rig.yaml", "attache", {"hardware": "h100*1+rig.yamlx2*1"}),
        ("shape.yaml", "attache", {"model": "shape.yaml"}),
        ("picker.yaml", "picker.yaml", {}),
        ("my.py", "my.py:Mine", {}),
    ],
)
def test_contents_of_files_make_the_key(name: str, policy: str, conditions: dict[str, str]) -> None:
    keys = []
    for text in ("a = 1", "a = 2", "a = 1"):
        Path(name).write_text(text)
        # neither the size nor the time of the change tells them apart
        os.utime(name, (1, 1))
        keys.append(trial_cache_key(trial(policy, **conditions)))
    assert keys[0] == keys[2] != keys[1]


def test_the_files_of_hardware_and_models_are_known_by_their_words() -> None:
    for name in ("rig.yaml", "shape.yaml"):
        Path(name).write_text("a: 1")
    assert set(condition_files(trial(hardware="rig.yaml", model="shape.yaml").conditions)) == {"rig.yaml", "shape.yaml"}
    assert hardware_files("h100x4+a/b.yml*2", "8b") == ["a/b.yml"]


def test_installed_plugins_make_the_key_of_what_may_use_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[attache.scheduling]\nours = their_plugin:PLUGIN\n")
    # as of an editable installation: the module is not among the files
    (info / "RECORD").write_text("theirs-1.0.dist-info/METADATA,,\n")
    (tmp_path / "their_plugin.py").write_text("WEIGHT = 1\n")
    Path("picker.yaml").write_text("a: 1")
    plain, ours = trial_cache_key(trial("picker.yaml")), trial_cache_key(trial())
    monkeypatch.syspath_prepend(str(tmp_path))
    assert [one.name for one in metadata.entry_points(group="attache.scheduling")] == ["ours"]
    first = trial_cache_key(trial("picker.yaml"))
    (tmp_path / "their_plugin.py").write_text("WEIGHT = 2\n")
    second = trial_cache_key(trial("picker.yaml"))
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.1\n")
    assert len({plain, first, second, trial_cache_key(trial("picker.yaml"))}) == 4
    # a policy of ours takes no plugins
    assert trial_cache_key(trial()) == ours


@pytest.mark.parametrize(
    ("source", "name", "messages"),
    [
        (
            "import nothing_of_that_name\n",
            "my.py:Mine",
            ["my.py: cannot be loaded", 'File "my.py", line 1', "No module named"],
        ),
        ("class Mine\n", "my.py:Mine", ["cannot be loaded", "line 1", "expected ':'"]),
        ("class Mine:\n    pass\n", "my.py:Mine", ["has no method pick; write def pick(self, view: View, *, rng"]),
        (
            "class Mine:\n    def pick(self, view):\n        pass\n",
            "my.py:Mine",
            ["its pick is pick(view)", "*, rng: random.Random"],
        ),
        ("class Mine:\n    def __init__(self, alpha):\n        pass\n", "my.py:Mine", ["takes alpha", "tracker"]),
        (
            "class Mine:\n    def __init__(self):\n        1 / 0\n",
            "my.py:Mine",
            ["cannot be made", "line 3", "ZeroDivisionError"],
        ),
        (FIRST.format(row=0), "my.py:Mine", ["has no class or function 'Mine'", "write my.py:First"]),
        ("A = 1\n", "my.py", ["does not say which policy", "my.py:Mine"]),
        (FIRST.format(row="'x'"), "my.py", ["its pick failed at", 'File "my.py", line 7, in pick', "IndexError"]),
        ("class Mine:\n    def pick(self, view, *, rng):\n        return 3\n", "my.py", ["returned 3; return a Pick"]),
        (
            "from extproc.scheduling.picker import Pick\n"
            "class Mine:\n    def pick(self, view, *, rng):\n        return Pick([7], 0.0)\n",
            "my.py:Mine",
            ["returned the rows [7]; return one or more of 0, 1"],
        ),
        (
            "class Odd(Exception):\n    def __init__(self, one, two):\n        pass\n"
            "class Mine:\n    def pick(self, view, *, rng):\n        raise Odd(1, 2)\n",
            "my.py:Mine",
            ['File "my.py", line 6, in pick', "Odd"],
        ),
        (
            "class Leaves:\n    def pick(self, view, *, rng):\n        raise SystemExit('enough')\n",
            "my.py:Leaves",
            ["my.py:Leaves: its pick failed at", "SystemExit: enough"],
        ),
        (
            NUMPY.format(cost="np.full(2, np.nan)"),
            "my.py",
            ["at 0.", "the cost of row 0 is not a number (nan)"],
        ),
        (NUMPY.format(cost="np.zeros(1)"), "my.py", ["the shape (1,)", "each row of view.table, here to row 1"]),
        # with state: a bug that only a later pick meets
        (NUMPY.format(cost="np.ones(2) / (self.picks < 5 or 1 // 0)"), "my.py", ["line 9, in pick", "ZeroDivision"]),
        (
            "import os\nclass Mine:\n    def pick(self, view, *, rng):\n        os._exit(3)\n",
            "my.py:Mine",
            ["a process of the lab ended"],
        ),
    ],
)  # fmt: skip
def test_a_mistake_in_a_policys_file_comes_whole(
    source: str, name: str, messages: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("my.py").write_text(source)
    assert replay("--policies", f"{name},attache") == 2
    said = capsys.readouterr().err
    assert all(message in said for message in messages), said
    # frames of the lab do not help
    assert "policy_file.py" not in said


def test_a_policy_may_ask_for_what_a_router_sees() -> None:
    Path("my.py").write_text(
        "from bench.lab.policies.routers import least_cost\n"
        "class Mine:\n"
        "    def __init__(self, tracker, calibration, alpha=2.0):\n"
        "        self.tracker, self.rate = tracker, calibration.prefill_tokens_per_s\n"
        "    def pick(self, view, *, rng):\n"
        "        return least_cost(view, self.tracker.prefill_tokens / self.rate, rng)\n"
    )
    assert imbalances("my.py:Mine")[0] < 2.0


def test_a_gpu_and_a_model_from_files() -> None:
    Path("rig.yaml").write_text(GPU + "link: pcie4\nperLayer: 0s\n")
    gpu = read_gpu("rig.yaml")
    assert (gpu.flops, gpu.memory, gpu.link.bandwidth, gpu.per_layer_s) == (209e12, 32e9, 15e9, 0.0)
    Path("linked.yml").write_text(GPU + "ownLink: {bandwidth: 40e9, latency: 9us}\n")
    assert read_gpu("linked.yml").link.latency_s == pytest.approx(9e-6)
    Path("shape.yaml").write_text("parameters: 8e9\nlayers: 32\nhidden: 4096\nheads: 32\nkvHeads: 8\nheadDim: 128\n")
    assert read_model("shape.yaml").kv_bytes_per_token == 131_072
    kinds = engine_profiles("rig.yaml*1+linked.ymlx2*2", "shape.yaml", count=3, block_size=16)
    # (0.9 * 32e9 - 2 GiB - 16e9) bytes at 131,072 * 16 a block, and of two GPUs
    assert [kind.limits.num_gpu_blocks for kind in kinds] == [5079, 17_788, 17_788]


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        (GPU + "link: nvlink9\n", ["rig.yaml:4: link", "nvlink9", "nvlink5"]),
        (GPU + "bandwith: 1\n", ["rig.yaml:4: bandwith", "did you mean 'bandwidth'?"]),
        (GPU.replace("32e9", "much"), ["rig.yaml:3: memory", "'much' is text; write a number"]),
        (GPU.replace("209e12", "-1"), ["rig.yaml:1: flops: -1 is too small; write more than 0"]),
        ("flops: 1e12\n", ["the field 'memory' is missing", "the field 'bandwidth' is missing"]),
        (GPU + "perLayer: 32\n", ["rig.yaml:4: perLayer: 32 has no unit; write 32s"]),
        (GPU + "ownLink: {bandwidth: 1e9}\n", ["rig.yaml:4: ownLink", "'latency' is missing"]),
        ("", ["rig.yaml: has 0 documents"]),
        ("a: [\n", ["rig.yaml:2"]),
    ],
)
def test_a_mistake_in_hardware_is_told_on_its_line(text: str, messages: list[str]) -> None:
    Path("rig.yaml").write_text(text)
    with pytest.raises(ConfigInvalid) as caught:
        read_gpu("rig.yaml")
    assert all(message in str(caught.value) for message in messages), str(caught.value)


def test_an_edited_rig_is_run_again_and_not_compared_with_what_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    def play(out: str) -> float:
        hardware = ["--hardware", "rig.yaml", "--model", "8b", "--engines", "2", "--jobs", "1"]
        assert (
            main(["replay", "--trace", "chat:sessions=4,turns=2", *hardware, "--policies", "attache", "--json", out])
            == 0
        )
        mean: float = json.loads(Path(out).read_text())["groups"][0]["policies"]["attache"]["ttft_s"]["mean"]
        return mean

    Path("rig.yaml").write_text(GPU)
    slow = play("1.json")
    Path("rig.yaml").write_text(GPU.replace("209", "409"))
    assert play("2.json") < slow
    capsys.readouterr()
    assert main(["compare", "1.json", "2.json"]) == 2
    assert "rig.yaml was another file" in capsys.readouterr().err


def test_a_replay_says_for_what_hardware_the_model_was_never_held_against_anything(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def said(hardware: str, model: str = "8b") -> str:
        engines = ["--engines", "2", "--hardware", hardware, "--model", model, "--jobs", "1"]
        assert main(["replay", "--trace", "chat:sessions=2,turns=1", *engines, "--policies", "attache"]) == 0
        return " ".join(capsys.readouterr().out.split())

    Path("rig.yaml").write_text(GPU)
    assert "never held against a measurement: GPU rig.yaml; " in said("rig.yaml")
    assert "never held against a measurement: GPU l40s; " in said("h100*1+l40s*1")
    assert "never held against a measurement: GPU h200, model 7b; " in said("h200", "7b")
    assert "never held against a measurement: links of a100x2; " in said("a100x2")
    assert "never held" not in said("h100")


def test_a_plugin_that_fails_ends_the_lab_where_serving_would_go_on_without_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = f"{HEAD}class Mine(msgspec.Struct):\n    def score(self, view, among):\n        return 1 / 0\n"
    install_plugin(Path("site"), f"{source}MINE = PluginType('scorer', Mine)\n", {"mine": "of_lab:MINE"}, "of_lab")
    monkeypatch.syspath_prepend(Path("site").absolute())
    Path("epp.yaml").write_text("apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nplugins: [{type: mine}]\n")
    assert replay("--policies", "epp.yaml") == 2
    said = capsys.readouterr().err
    assert "epp.yaml: the plugin 'mine' fails: ZeroDivisionError: division by zero" in said
    assert "of_lab.py:8" in said
    assert kept() == 0
