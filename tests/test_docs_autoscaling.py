# SPDX-License-Identifier: Apache-2.0
"""Objects on the pages about autoscaling are read as the controller and extproc read them."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import msgspec
import pytest
import yaml

from controller.api.autoscaling_binding import AutoscalingPolicyBindingSpec
from controller.api.autoscaling_policy import AutoscalingPolicySpec
from controller.api.model import ModelSpec
from controller.autoscaler.decision.decision import Rule
from controller.autoscaler.reconciler.status import LIMITING
from extproc.api.load import load
from extproc.api.quantities import decode_quantity
from tests.scaling_scenes import engine, report, situation, target

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
# What makes a step of a decision, and has the rule as its first argument.
MAKERS = {"Step", "changed", "at_least", "at_most"}
# A part of an object without its kind is of a policy.
SPECS: dict[str | None, type[msgspec.Struct]] = {
    None: AutoscalingPolicySpec,
    "AutoscalingPolicy": AutoscalingPolicySpec,
    "AutoscalingPolicyBinding": AutoscalingPolicyBindingSpec,
    "Model": ModelSpec,
}


def documents(page: str, section: str = "") -> list[dict[str, Any]]:
    """All YAML of the page, or of its section with this heading."""
    text = (DOCS / page).read_text()
    if section:
        text = text.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    return [document for block in blocks for document in yaml.safe_load_all(block)]


@pytest.mark.parametrize("page", ["autoscaling.md", "autoscaling-export.md"])
def test_policies_bindings_and_models_are_valid(page: str) -> None:
    ours = [one for one in documents(page) if one.get("kind") in SPECS and "spec" in one]
    assert ours
    for document in ours:
        msgspec.convert(document["spec"], SPECS[document.get("kind")], dec_hook=decode_quantity)


def test_models_without_engines_are_a_valid_directory() -> None:
    snapshot = load({"zero.yaml": yaml.safe_dump_all(documents("on-demand.md", "Models without engines")).encode()})
    assert snapshot.servers[0].spec.activation is not None


def test_the_strategy_on_the_page_recommends() -> None:
    (source,) = re.findall(r"```python\n(.*?)```", (DOCS / "autoscaling.md").read_text(), re.DOTALL)
    module: dict[str, Any] = {}
    exec(source, module)  # noqa: S102 - it is ours
    theirs = module["PER_REQUEST"]
    made = theirs.make(msgspec.convert({"requests": 4}, type(theirs.defaults)), AutoscalingPolicySpec())
    recommended, _ = made.recommend(situation(target([engine("a", report(in_flight=9))])), None)
    assert (recommended.replicas, recommended.reason) == (3, "9 requests in flight")
    unsure, _ = made.recommend(situation(target([engine(name) for name in "abcd"])), None)
    assert unsure.replicas == 4


def rules_in_code() -> Iterator[str]:
    """The first argument of all that makes steps."""
    for file in (ROOT / "controller" / "autoscaler" / "decision").rglob("*.py"):
        if file.name == "decision.py":
            # it hands on what it is given
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and _name_of(node.func) in MAKERS:
                rule = node.args[0]
                assert isinstance(rule, ast.Constant), f"{file.name}:{node.lineno}: write the rule's name here"
                yield str(rule.value)


def _name_of(called: ast.expr) -> str:
    return called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""


def test_each_rule_of_a_step_is_one_of_the_list() -> None:
    assert set(rules_in_code()) == set(get_args(Rule))


def test_the_page_says_of_each_rule_when_it_changes_the_answer() -> None:
    (table,) = re.findall(r"\| step \| when \|\n\|---\|---\|\n((?:\|.*\n)+)", (DOCS / "autoscaling.md").read_text())
    named = [name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(named) == sorted(get_args(Rule))


def test_the_page_says_which_rules_the_condition_scaling_limited_names() -> None:
    (row,) = re.findall(r"\| `ScalingLimited` \| (.*): the step", (DOCS / "autoscaling.md").read_text())
    assert set(re.findall(r"`(\w+)`", row)) == LIMITING
